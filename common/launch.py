"""Processes that live and die together.

A parent starts a child with two pipes and knows everything about it from them:
- `stdin` carries the payload (length-prefixed) and then stays open: its end means the parent is gone, and the child exits.
- the status pipe carries one JSON line per report (progress, ready, failed); its end means the child is gone.

So a child that dies is noticed at once by whoever polls the status pipe, and kill -9 of a parent takes its children, without
pid files or polling. On Linux the kernel does it too (PR_SET_PDEATHSIG): it also reaches a child that is stopped, or stuck in
native code, and would keep its ports. Its condition, that the thread which starts children lives on, is met: it is the parent's
main one. SIGINT never reaches a child: a terminal sends it to the whole group, and the parent decides. It is
blocked from the child's first instruction on (the mask is inherited), so that no handler installed later, and no import, meets it.
"""

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from common.errors import StartupError

STATUS_FD_VARIABLE = "PDSERVE_STATUS_FD"
LENGTH_BYTES = 8
PARENT_GONE_STATUS = 1
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_REPORT_BYTES = 1 << 22  # a traceback is some KiB


class ChildDied(Exception):
    """A child ended that should have gone on. The message says which and how."""


class Reporter:
    """A child's way to tell its parent how starting goes. Without a parent (status_fd None) reports go nowhere."""

    def __init__(self, status_fd: int | None) -> None:
        self._fd = status_fd

    def progress(self, text: str) -> None:
        self._write({"progress": text})

    def ready(self, **facts: object) -> None:
        self._write({"ready": facts})

    def failed(self, sentence: str, *, startup: bool) -> None:
        self._write({"failed": sentence, "startup": startup})

    def _write(self, report: Mapping[str, object]) -> None:
        if self._fd is not None:
            line = json.dumps(report).encode() + b"\n"
            with suppress(BrokenPipeError):  # the parent is gone: the watch on it ends this process
                while line:
                    line = line[os.write(self._fd, line) :]


def child_pipes() -> tuple[bytes, Reporter]:
    """In a child: the payload, and the reporter. Starts the watch on the parent. Outside a child: empty payload, no watch."""
    variable = os.environ.pop(STATUS_FD_VARIABLE, None)
    if variable is None:
        return b"", Reporter(None)
    os.set_inheritable(int(variable), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    stdin = os.fdopen(os.dup(0), "rb", buffering=0)
    payload = _read_exactly(stdin.read, int.from_bytes(_read_exactly(stdin.read, LENGTH_BYTES), "big"))

    def watch_parent() -> None:
        while stdin.read(1):
            pass
        os._exit(PARENT_GONE_STATUS)

    threading.Thread(target=watch_parent, name="watch-parent", daemon=True).start()
    return payload, Reporter(int(variable))


@contextmanager
def reported_to_parent() -> Iterator[None]:
    """A StartupError from before child_pipes() is called reaches the parent too."""
    try:
        yield
    except StartupError as error:
        status_fd = os.environ.get(STATUS_FD_VARIABLE)
        Reporter(None if status_fd is None else int(status_fd)).failed(str(error), startup=True)
        raise


def run_child(main: Callable[[bytes, Reporter], None]) -> None:
    """Body of a child module: run `main(payload, reporter)`, turn its errors into reports and exit codes (2: StartupError)."""
    payload, reporter = child_pipes()
    try:
        main(payload, reporter)
    except StartupError as error:
        reporter.failed(str(error), startup=True)
        sys.exit(2)
    except Exception:
        traceback.print_exc()
        reporter.failed(traceback.format_exc(), startup=False)
        sys.exit(1)


class Child:
    """A started process, seen from its parent's event loop. `environment` is added to the parent's own; `pass_fds` it inherits open."""

    def __init__(self, name: str, argv: Sequence[str], payload: bytes = b"", on_progress: Callable[[str], None] | None = None,
                 environment: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()) -> None:
        self.name = name
        self._on_progress = on_progress
        self.process, self._status_fd = _spawn(argv, environment or {}, pass_fds)
        self._payload = payload
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[dict[str, object]] = loop.create_future()
        self._dead: asyncio.Future[int] = loop.create_future()
        self._reader = asyncio.ensure_future(self._read_status())

    @classmethod
    def module(cls, name: str, module: str, payload: bytes = b"", on_progress: Callable[[str], None] | None = None) -> "Child":
        """Start `python -m module`, whose body is run_child()."""
        return cls(name, python_argv(module), payload, on_progress)

    async def wait_ready(self) -> dict[str, object]:
        """The facts it reported. Raises StartupError with its sentence, or ChildDied."""
        return await asyncio.shield(self._ready)

    async def wait_death(self) -> int:
        """Its exit status, once it has ended (negative: killed by that signal)."""
        return await asyncio.shield(self._dead)

    async def stop(self, timeout_s: float) -> None:
        """Ask with SIGTERM, wait, then kill; returns when it is gone."""
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            await asyncio.wait_for(self.wait_death(), timeout_s)
        except TimeoutError:
            self.process.kill()
            await self.wait_death()

    async def _read_status(self) -> None:
        reader = asyncio.StreamReader(limit=MAX_REPORT_BYTES)
        pipe = os.fdopen(self._status_fd, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        failure: Exception | None = None
        try:
            await asyncio.to_thread(self._send_payload)
            async for line in reader:
                if line.endswith(b"\n"):  # else it was killed while writing
                    failure = self._take(json.loads(line)) or failure
        finally:
            transport.close()
            status = await asyncio.to_thread(self.process.wait)
            assert self.process.stdin is not None
            with suppress(BrokenPipeError):  # it died with a part of the payload still in the buffer, which close() writes
                self.process.stdin.close()
            if not self._ready.done():
                self._ready.set_exception(failure or ChildDied(f"{self.name} (pid {self.process.pid}) {ending(status)} before it was ready"))
                self._ready.exception()  # retrieved: a parent that never waits for it is not warned at exit
            self._dead.set_result(status)

    def _take(self, report: dict[str, Any]) -> Exception | None:
        """Act on one report; the error in it, if it says that starting failed."""
        if "progress" in report and self._on_progress is not None:
            self._on_progress(report["progress"])
        if "ready" in report and not self._ready.done():
            self._ready.set_result(report["ready"])
        if "failed" not in report:
            return None
        return StartupError(report["failed"]) if report["startup"] else ChildDied(f"{self.name} failed: {report['failed']}")

    def _send_payload(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died already: the status pipe says so
            self.process.stdin.write(len(self._payload).to_bytes(LENGTH_BYTES, "big") + self._payload)
            self.process.stdin.flush()


def python_argv(module: str, *arguments: str) -> list[str]:
    """Command that runs `module` as a program. -P: a folder called `router` or `common` where the user stands is not imported."""
    return [sys.executable, "-P", "-m", module, *arguments]


def ending(status: int) -> str:
    """An exit status in words, to follow a process's name."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _spawn(argv: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int]) -> tuple["subprocess.Popen[bytes]", int]:
    """The started process, and the read end of its status pipe."""
    status_read, status_write = os.pipe()
    variables = {**os.environ, **environment, STATUS_FD_VARIABLE: str(status_write)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(list(argv), stdin=subprocess.PIPE, pass_fds=(status_write, *pass_fds), env=variables), status_read
    except OSError:
        os.close(status_read)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(status_write)


def _read_exactly(read: Callable[[int], bytes | None], num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        part = read(num_bytes - len(received))
        if not part:
            os._exit(PARENT_GONE_STATUS)
        received += part
    return received
