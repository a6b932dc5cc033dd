"""`pdserve up` as a person uses it: one line says ready, a request works, the dead come back, and nothing is left in the end."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from tiny_models import cached_checkpoint

pytestmark = pytest.mark.system

WITHIN_S = 60.0


class Up:
    """A running `pdserve up`, its lines, and its process tree. Its temporary files lie in a folder of its own."""

    def __init__(self, temporary: Path, *flags: str) -> None:
        self.temporary = temporary
        command = [sys.executable, "-P", "-m", "pdserve", "up", "--port", "0", *flags]
        environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in self.popen.stdout)

    def until(self, true: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WITHIN_S
        while not true():
            assert time.monotonic() < end_s, "\n".join(self.lines)
            assert self.popen.poll() is None, "\n".join(self.lines)
            time.sleep(0.02)

    @property
    def url(self) -> str:
        self.until(lambda: any(line.startswith("ready: ") for line in self.lines))
        [line] = [line for line in self.lines if line.startswith("ready: ")]
        return line.removeprefix("ready: ")

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.popen.pid).children(recursive=True)

    def child(self, command: str) -> psutil.Process:
        [found] = [process for process in psutil.Process(self.popen.pid).children() if process.cmdline()[4:5] == [command]]
        return found

    def end(self, number: signal.Signals) -> int:
        self.popen.send_signal(number)
        return self.popen.wait(WITHIN_S)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._reader.join(WITHIN_S)
        assert self.popen.stdout is not None
        self.popen.stdout.close()


@contextmanager
def running(*flags: str) -> Iterator[Up]:
    with tempfile.TemporaryDirectory(prefix="pd-") as temporary:  # pytest's own are too long for socket paths
        up = Up(Path(temporary), *flags)
        try:
            yield up
        finally:
            up.close()


def ask(url: str, **fields: object) -> httpx.Response:
    body = {"model": "tiny", "prompt": list(range(5, 60)), "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=30)


def test_up_serves_heals_and_leaves_nothing() -> None:
    model = cached_checkpoint("llama")
    with running("--model", str(model), "--served-model-name", "tiny", "--dtype", "float32", "--max-total-tokens", "4096") as up:
        url = up.url
        answer = ask(url).json()
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["usage"]["prefill_site"] == "remote"
        text = answer["choices"][0]["text"]

        # the line to try is a request that works
        [line] = [line for line in up.lines if line.strip().startswith("curl ")]
        words = shlex.split(line)
        assert [words[0], words[2], words[4]] == ["curl", "-H", "-d"]
        chat = httpx.post(words[1], content=words[5], headers=dict([words[3].split(": ")]), timeout=30)
        assert chat.json()["object"] == "chat.completion"

        # a killed decode node comes back where it was; the router is told nothing
        dead = up.child("decode")
        dead.kill()
        up.until(lambda: "decode 0 is back" in up.lines)
        assert any(re.match(rf"decode 0 \(pid {dead.pid}\) was killed by SIGKILL", line) for line in up.lines)
        up.until(lambda: httpx.get(f"{url}/ready", timeout=5).status_code == 200)
        assert ask(url).json()["choices"][0]["text"] == text

        processes = up.processes()
        assert len(processes) == 7  # two nodes of three processes, and the router
        started_s = time.monotonic()
        assert up.end(signal.SIGINT) == 0
        assert time.monotonic() - started_s < 10
        assert not [process for process in processes if process.is_running()]
        assert list(up.temporary.iterdir()) == []


def test_kill_of_up_takes_everything_with_it() -> None:
    with running("--model", str(cached_checkpoint("llama"))) as up:
        up.until(lambda: len(up.processes()) >= 6)  # both nodes are loading
        processes = up.processes()
        up.end(signal.SIGKILL)
        _, alive = psutil.wait_procs(processes, timeout=30)  # a child that still imports finds out when it has: on a busy machine not at once
        assert not alive


def test_signal_while_loading_stops_at_once() -> None:
    with running("--model", str(cached_checkpoint("llama"))) as up:
        up.until(lambda: len(up.processes()) >= 6)
        processes = up.processes()
        started_s = time.monotonic()
        assert up.end(signal.SIGTERM) == 0
        assert time.monotonic() - started_s < 10
        assert not [process for process in processes if process.is_running()]
        assert list(up.temporary.iterdir()) == []
        assert not any("Traceback" in line or line.startswith("ready:") for line in up.lines)
