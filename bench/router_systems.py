"""The routers of router_overhead.py, each a process on a core of its own, and the mock nodes behind them."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import psutil
from compare_systems import Program, RunningProgram, SystemFailed, free_ports
from router_load import Request, call_often

OURS, SGLANG, VLLM = "pdserve", "sglang-router", "vllm-router"
READY_TIMEOUT_S = 60.0
POLL_S = 0.1
Command = Callable[[Sequence[int], Sequence[int], int, int, bool], list[str]]


class Nodes:
    """Mock nodes in one process. Use as a context manager."""

    def __init__(self, num_prefill: int, num_decode: int, core: int) -> None:
        argv = [sys.executable, str(Path(__file__).with_name("router_mock.py")), *["prefill"] * num_prefill, *["decode"] * num_decode]
        self._process = subprocess.Popen(["taskset", "-c", str(core), *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        ports: list[int] = msgspec.json.decode(self._process.stdout.readline())
        self.prefill, self.decode = ports[:num_prefill], ports[num_prefill:]
        self.names = frozenset(f"n{port}".encode() for port in ports)  # in their streams

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class RouterKind:
    """command(prefill ports, decode ports, port, metrics port, plain): plain, without what watches nodes, where it can be without."""

    name: str
    command: Command
    ready_path: str = "/health"


def ours(name: str, *flags: str) -> RouterKind:
    def command(prefill: Sequence[int], decode: Sequence[int], port: int, _: int, plain: bool) -> list[str]:
        argv = [sys.executable, "-P", "-m", "pdserve", "router", "--port", str(port), "--log-level", "error", *flags]
        return [*argv, *_flags("--prefill", prefill), *_flags("--decode", decode)]

    return RouterKind(name, command, "/ready")


def rust(name: str, python: Path, module: str, *flags: str, prefill_suffix: Sequence[str] = ()) -> RouterKind:
    """sglang-router or vllm-router, which is made from it."""

    def command(prefill: Sequence[int], decode: Sequence[int], port: int, metrics_port: int, plain: bool) -> list[str]:
        argv = [str(python), "-m", module, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port), "--log-level", "error"]
        argv += ["--policy", "round_robin", *flags, *_flags("--prefill", prefill, prefill_suffix), *_flags("--decode", decode)]
        watching = ["--disable-retries", "--disable-circuit-breaker"] if plain else []
        return [*argv, *watching, "--health-check-interval-secs", "3600" if plain else "1"]

    return RouterKind(name, command)


def _flags(name: str, ports: Sequence[int], suffix: Sequence[str] = ()) -> list[str]:
    return [word for port in ports for word in (name, f"http://127.0.0.1:{port}", *suffix)]


@dataclass(frozen=True, slots=True)
class RunningRouter:
    name: str
    port: int
    processes: Sequence[psutil.Process]

    def cpu_s(self) -> float:
        """User and system time of all its processes so far."""
        return sum((float(times.user + times.system) for times in (process.cpu_times() for process in self.processes)), 0.0)

    def rss_mib(self) -> float:
        return sum(int(process.memory_info().rss) for process in self.processes) / 2**20


@asynccontextmanager
async def running(kind: RouterKind, nodes: Sequence[Nodes], core: int, log_dir: Path, *, plain: bool = True) -> AsyncIterator[RunningRouter]:
    """Raises SystemFailed when it does not serve."""
    port, metrics_port = free_ports(2)
    prefill, decode = [port for one in nodes for port in one.prefill], [port for one in nodes for port in one.decode]
    argv = kind.command(prefill, decode, port, metrics_port, plain)
    program = Program(kind.name, frozenset({core}), argv, f"http://127.0.0.1:{port}{kind.ready_path}", {"TOKIO_WORKER_THREADS": "1"})
    started = RunningProgram(program, log_dir / f"{kind.name}-{port}.log")
    try:
        async with aiohttp.ClientSession() as session:
            await started.wait_ready(session)
        await _answers(kind.name, port)
        yield RunningRouter(kind.name, port, list(started.processes()))
    finally:
        await started.stop()


async def _answers(name: str, port: int) -> None:
    """sglang-router and vllm-router say that they are healthy before they have met their nodes."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while errors := (await call_often(port, Request(1024), 1, 1)).errors:
        if time.monotonic() > deadline_s:
            raise SystemFailed(f"{name} does not serve after {READY_TIMEOUT_S:.0f} s: {errors[0]}")
        await asyncio.sleep(POLL_S)
