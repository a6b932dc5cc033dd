"""Processes that live and die together.

A parent starts a child with two pipes and knows everything about it from them:
- `stdin` carries the payload (length-prefixed) and then stays open: its end means the parent is gone, and the child exits.
- the status pipe carries one JSON line per report (progress, ready, failed); its end means the child is gone.

So a child that dies is noticed at once by whoever polls the status pipe, and kill -9 of a parent takes its children, without
signals, pid files or polling. Children ignore SIGINT: a terminal sends it to the whole group, and the parent decides.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from common.errors import StartupError

STATUS_FD_VARIABLE = "PDSERVE_STATUS_FD"
LENGTH_BYTES = 8
PARENT_GONE_STATUS = 1


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
            with suppress(BrokenPipeError):
                os.write(self._fd, json.dumps(report).encode() + b"\n")


def child_pipes() -> tuple[bytes, Reporter]:
    """In a child: the payload, and the reporter. Starts the watch on the parent. Outside a child: empty payload, no watch."""
    variable = os.environ.pop(STATUS_FD_VARIABLE, None)
    if variable is None:
        return b"", Reporter(None)
    os.set_inheritable(int(variable), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stdin = os.fdopen(os.dup(0), "rb", buffering=0)
    payload = _read_exactly(stdin.read, int.from_bytes(_read_exactly(stdin.read, LENGTH_BYTES), "big"))

    def watch_parent() -> None:
        while stdin.read(1):
            pass
        os._exit(PARENT_GONE_STATUS)

    threading.Thread(target=watch_parent, name="watch-parent", daemon=True).start()
    return payload, Reporter(int(variable))


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
    """A started process, seen from its parent's event loop."""

    def __init__(self, name: str, argv: Sequence[str], payload: bytes = b"", on_progress: Callable[[str], None] | None = None) -> None:
        self.name = name
        self._on_progress = on_progress
        status_read, status_write = os.pipe()
        environment = {**os.environ, STATUS_FD_VARIABLE: str(status_write)}
        self.process = subprocess.Popen(list(argv), stdin=subprocess.PIPE, pass_fds=(status_write,), env=environment)
        os.close(status_write)
        self._status_fd = status_read
        self._payload = payload
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[dict[str, object]] = loop.create_future()
        self._dead: asyncio.Future[int] = loop.create_future()
        self._reader = asyncio.ensure_future(self._read_status())

    @classmethod
    def module(cls, name: str, module: str, payload: bytes = b"", on_progress: Callable[[str], None] | None = None) -> "Child":
        """Start `python -m module`, whose body is run_child()."""
        return cls(name, [sys.executable, "-m", module], payload, on_progress)

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
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 22)
        pipe = os.fdopen(self._status_fd, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        await asyncio.to_thread(self._send_payload)
        failure: Exception | None = None
        async for line in reader:
            report = json.loads(line)
            if "progress" in report and self._on_progress is not None:
                self._on_progress(report["progress"])
            if "ready" in report and not self._ready.done():
                self._ready.set_result(report["ready"])
            if "failed" in report:
                sentence = report["failed"] if report["startup"] else f"{self.name} failed: {report['failed']}"
                failure = StartupError(sentence) if report["startup"] else ChildDied(sentence)
        transport.close()
        status = await asyncio.to_thread(self.process.wait)
        if self.process.stdin is not None:
            self.process.stdin.close()
        if not self._ready.done():
            self._ready.set_exception(failure or ChildDied(f"{self.name} (pid {self.process.pid}) ended with status {status} before it was ready"))
            self._ready.exception()  # retrieved: a parent that never waits for it is not warned at exit
        self._dead.set_result(status)

    def _send_payload(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died already: the status pipe says so
            self.process.stdin.write(len(self._payload).to_bytes(LENGTH_BYTES, "big") + self._payload)
            self.process.stdin.flush()


def _read_exactly(read: Callable[[int], bytes | None], num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        part = read(num_bytes - len(received))
        if not part:
            os._exit(PARENT_GONE_STATUS)
        received += part
    return received
