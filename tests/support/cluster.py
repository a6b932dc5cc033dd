"""Real processes for system tests: router, prefill and decode nodes on ephemeral loopback ports, killed and restarted at will."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

START_TIMEOUT_S = 60.0


class Process:
    """One `pdserve` sub-command, seen as a supervisor sees it: facts on its status pipe, death as the pipe's end."""

    def __init__(self, *arguments: str, log: Path) -> None:
        self.arguments = arguments
        self.log_path = log
        status_read, status_write = os.pipe()
        self._log = log.open("ab")
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "pdserve", *arguments], stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, pass_fds=(status_write,),
            env={**os.environ, "PDSERVE_STATUS_FD": str(status_write), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        os.close(status_write)
        self._status_fd = status_read
        assert self.popen.stdin is not None
        self.popen.stdin.write((0).to_bytes(8, "big"))
        self.popen.stdin.flush()
        self._buffer = b""
        self.facts: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.facts['port']}"

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> "Process":
        end_s = time.monotonic() + timeout_s
        while not self.is_ready(max(0.0, end_s - time.monotonic())):
            assert time.monotonic() < end_s, f"{self.arguments} not ready in {timeout_s} s\n{self.log()}"
        return self

    def is_ready(self, wait_s: float = 0.0) -> bool:
        """Reads what it has reported; waits for a report for so long."""
        while "port" not in self.facts:
            while b"\n" not in self._buffer:
                readable, _, _ = select.select([self._status_fd], [], [], wait_s)
                if not readable:
                    return False
                part = os.read(self._status_fd, 65536)
                assert part, f"{self.arguments} ended while starting, status {self.popen.wait()}\n{self.log()}"
                self._buffer += part
            line, self._buffer = self._buffer.split(b"\n", 1)
            report = json.loads(line)
            assert "failed" not in report, f"{report}\n{self.log()}"
            self.facts = report.get("ready", {})
        return True

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def child(self, word: str) -> psutil.Process:
        """The child whose command line has `word` ("detokenizer", "prefill_node", "decode_node")."""
        (found,) = [child for child in self.children() if any(word in part for part in child.cmdline())]
        return found

    def kill(self) -> None:
        """kill -9, of the node's parent process: its children notice and go."""
        children = self.children()
        self.popen.kill()
        self.popen.wait()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, f"left behind by {self.arguments}: {alive}"

    def stop(self, timeout_s: float = 10.0) -> int:
        """SIGTERM; returns the exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                print(self.log())
                raise
        return self.popen.returncode

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-6000:]

    def close(self) -> None:
        with suppress(subprocess.TimeoutExpired, psutil.NoSuchProcess):
            if self.popen.poll() is None:
                for child in self.children():
                    with suppress(psutil.NoSuchProcess):
                        child.send_signal(signal.SIGCONT)
                self.popen.kill()
            self.popen.wait(10)
        os.close(self._status_fd)
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self._log.close()


class Cluster:
    """Nodes and a router of one model. `flags` go to every node."""

    def __init__(self, model: Path, directory: Path, *flags: str) -> None:
        self.model = model
        self.directory = directory
        self.flags = flags
        self.processes: list[Process] = []
        self.prefills: list[Process] = []
        self.decodes: list[Process] = []
        self.router: Process

    def start(self, num_prefill: int = 1, num_decode: int = 1, *router_flags: str) -> "Cluster":
        self.prefills = [self.launch_node("prefill") for _ in range(num_prefill)]
        self.decodes = [self.launch_node("decode") for _ in range(num_decode)]
        for node in (*self.prefills, *self.decodes):
            node.wait_ready()
        self.router = self.launch_router(*router_flags)
        self.wait_until(lambda: httpx.get(f"{self.router.url}/ready").status_code == 200, "router ready")
        return self

    def launch_node(self, role: str, *, like: Process | None = None, flags: tuple[str, ...] = ()) -> Process:
        """Start a node; `like`: on the address another had."""
        port = like.facts["port"] if like else 0
        ports = ["--port", str(port)]
        if role == "prefill":
            ports += ["--bootstrap-port", str(like.facts["bootstrap_port"] if like else 0)]
        name = f"{role}{len(self.processes)}"
        common = ["--model", str(self.model), "--served-model-name", "tiny", "--request-timeout", "60"]
        process = Process(role, *common, *ports, *self.flags, *flags, log=self.directory / f"{name}.log")
        self.processes.append(process)
        return process

    def launch_router(self, *flags: str, port: int = 0, bootstrap_ports: Sequence[int] = ()) -> Process:
        """`bootstrap_ports`: where decode nodes are sent to reach the prefill nodes, if not straight there."""
        nodes: list[str] = []
        for place, node in enumerate(self.prefills):
            nodes += ["--prefill", f"{node.url},{bootstrap_ports[place]}" if bootstrap_ports else node.url]
        for node in self.decodes:
            nodes += ["--decode", node.url]
        log = self.directory / f"router{len(self.processes)}.log"
        process = Process("router", *nodes, "--port", str(port), "--health-check-interval", "0.2", *flags, log=log)
        self.processes.append(process)
        return process.wait_ready()

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
        end_s = time.monotonic() + timeout_s
        while True:
            with suppress(httpx.TransportError):
                if condition():
                    return
            assert time.monotonic() < end_s, f"never: {what}\n" + "\n".join(f"--- {p.arguments}\n{p.log()[-2500:]}" for p in self.processes)
            time.sleep(0.02)

    def info(self, node: Process) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{node.url}/server_info", timeout=10).json()
        return answer

    def idle_pages(self, node: Process) -> bool:
        pages = self.info(node)["pages"]
        return bool(pages["free"] + pages["cached"] == pages["total"])

    def wait_idle(self, *nodes: Process) -> None:
        """Until every page of the given nodes (default: all that live) is free or cached."""
        for node in nodes or (*self.prefills, *self.decodes):
            self.wait_until(lambda node=node: self.idle_pages(node), f"pages of {node.arguments[0]} idle: {self.info(node)['pages']}")  # type: ignore[misc]

    def close(self) -> None:
        for process in self.processes:
            process.close()


@contextmanager
def running_cluster(model: Path, directory: Path, *flags: str, num_prefill: int = 1, num_decode: int = 1) -> Iterator[Cluster]:
    cluster = Cluster(model, directory, *flags)
    try:
        yield cluster.start(num_prefill, num_decode)
    finally:
        cluster.close()
