"""Real transfer endpoints for tests: over the memory or the tcp backend in this process, or over tcp in a child that can be killed.

Run as a script this file is the child: `endpoint_harness.py prefill|decode PORT PEER_TIMEOUT_S`. It answers every JSON line on stdin
with one on stdout: ["method", arguments...] calls the endpoint, ["event"] waits for one.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from common.cluster_key import ClusterKey
from common.errors import Failure
from kvtransfer.backend import Region, TransferBackend
from kvtransfer.endpoint import DecodeEndpoint, Endpoint, Event, PrefillEndpoint
from kvtransfer.protocol import Compat
from kvtransfer.settings import TransferSettings
from kvtransfer.tcp import TcpBackend

PAGE_SIZE, PAGE_NBYTES, NUM_PAGES = 4, 256, 32
EVENT_TIMEOUT_S = 20.0


def compat(**changes: Any) -> Compat:
    fields = {
        "model": "model-a", "dtype": "float32", "kv_cache_dtype": "float32", "page_size": PAGE_SIZE, "num_layers": 2, "num_kv_heads": 1,
        "head_dim": 8,
        "page_nbytes": PAGE_NBYTES, "context_length": 128, "vocab_size": 1000,
    }  # fmt: skip
    return Compat(**{**fields, **changes})


def page_ids(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


class Node:
    """An endpoint with its pool: uint8[NUM_PAGES, PAGE_NBYTES]. Pages leave as they are handed over, if not told otherwise."""

    def __init__(
        self, backend: TransferBackend, role: str, port: int = 0, *, host: str = "127.0.0.1", key: ClusterKey | None = None,
        compat_changes: Any = None, **settings: Any,
    ) -> None:  # fmt: skip
        self.pool = np.zeros((NUM_PAGES, PAGE_NBYTES), np.uint8)
        region = Region(self.pool.ctypes.data, NUM_PAGES, PAGE_NBYTES, "cpu", self.pool)
        backend.register(region)
        fixed = TransferSettings(compat=compat(**(compat_changes or {})), region=region, **{"post_tokens": 1, **settings})
        self.endpoint: Any = PrefillEndpoint(fixed, backend, host, port, key) if role == "prefill" else DecodeEndpoint(fixed, backend, key)
        self.backend = backend
        self._pending: list[Event] = []

    def event(self, timeout_s: float = EVENT_TIMEOUT_S) -> Event:
        """The next one. Fails when none comes in time."""
        event = self.maybe_event(timeout_s)
        assert event is not None, f"no event within {timeout_s} s; {self.endpoint.stats()}"
        return event

    def maybe_event(self, timeout_s: float) -> Event | None:
        deadline_s = time.monotonic() + timeout_s
        while not self._pending:
            endpoint: Endpoint = self.endpoint
            readable, _, _ = select.select([endpoint.wake_fd], [], [], max(deadline_s - time.monotonic(), 0.0))
            self._pending = endpoint.poll()
            if not readable and not self._pending:
                return None
        return self._pending.pop(0)

    def rooms(self) -> dict[str, float]:
        prefix = "transfer_rooms_"
        return {name.removeprefix(prefix): count for name, count in self.endpoint.stats().items() if name.startswith(prefix) and count}


class Child:
    """The same in a process of its own, over tcp."""

    def __init__(self, role: str, port: int = 0, peer_timeout_s: float = 3.0) -> None:
        argv = [sys.executable, str(Path(__file__)), role, str(port), str(peer_timeout_s)]
        root = str(Path(__file__).parents[2])
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root})
        self.port: int = self._answer()

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.tell(method, *arguments)
            return self.told()

        return call

    def tell(self, method: str, *arguments: Any) -> None:
        """Ask without waiting: told() has the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def told(self) -> Any:
        return self._answer()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the child ended"
        return json.loads(line)


def serve(role: str, port: int, peer_timeout_s: float) -> None:
    node = Node(TcpBackend(), role, port, peer_timeout_s=peer_timeout_s)
    node.pool[:] = np.arange(NUM_PAGES)[:, None]
    print(json.dumps(getattr(node.endpoint, "port", 0)), flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        if method == "event":
            answer: Any = type(node.event()).__name__
        else:
            values = [page_ids(*value) if isinstance(value, list) else value.encode() if value == "digest" else value for value in arguments]
            if method == "abort":
                values[1] = Failure(503, str(values[1]))
            returned = getattr(node.endpoint, method)(*values)
            answer = returned.message if isinstance(returned, Failure) else returned
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
