"""What the transfer conformance suite needs of a backend: nodes of this process, and a victim that can be killed.

A new backend joins the suite by one class with the methods of Harness and one entry in HARNESSES.
"""

import base64
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from kvtransfer.backend import Op, PageIds, PeerId, Region, Ticket, TransferBackend, TransferError
from kvtransfer.memory import MemoryBackend, MemoryFabric
from kvtransfer.tcp import TcpBackend

COMPLETION_TIMEOUT_S = 20.0
SUPPORT_DIR = Path(__file__).parent


class Node:
    """A backend over a pool of its own, in this process."""

    def __init__(self, name: str, backend: TransferBackend, num_pages: int, page_nbytes: int) -> None:
        self.peer = PeerId(name)
        self.backend = backend
        self.pool = np.zeros((num_pages, page_nbytes), dtype=np.uint8)
        self.completed: dict[Ticket, TransferError | None] = {}
        backend.register(Region(self.pool.ctypes.data, num_pages, page_nbytes, "cpu", self.pool))

    @property
    def description(self) -> bytes:
        return self.backend.describe()

    def fill(self, seed: int) -> None:
        self.pool[:] = contents(seed, *self.pool.shape)

    def meet(self, other: "Node | Victim") -> None:
        """Let `other` in, and become able to post to it."""
        self.backend.accept(other.peer, other.description)
        self.backend.connect(other.peer, other.description)

    def post(self, op: Op, peer: PeerId, local: Iterable[int], remote: Iterable[int]) -> Ticket:
        return self.backend.post(op, peer, page_ids(local), page_ids(remote))

    def collect(self) -> None:
        """Take what poll() has; a ticket that completes twice fails the test."""
        for completion in self.backend.poll():
            assert completion.ticket not in self.completed, f"ticket {completion.ticket} completed twice"
            self.completed[completion.ticket] = completion.error

    def wait(self, *tickets: Ticket) -> list[TransferError | None]:
        """The tickets' errors, once all have completed."""
        deadline_s = time.monotonic() + COMPLETION_TIMEOUT_S
        self.collect()
        while not set(tickets) <= set(self.completed):
            readable, _, _ = select.select([self.backend.completion_fd()], [], [], max(0.0, deadline_s - time.monotonic()))
            self.collect()
            assert readable, f"{len(set(tickets) - set(self.completed))} tickets did not complete in {COMPLETION_TIMEOUT_S} s"
        return [self.completed[ticket] for ticket in tickets]


class Victim(Protocol):
    """A node whose process can end at any time."""

    peer: PeerId
    description: bytes

    def meet(self, other: Node) -> None: ...

    def digest(self, pages: Iterable[int]) -> str: ...

    def kill(self) -> None: ...

    def restarted(self, name: str) -> "Victim":
        """Another process behind the same address, as far as the backend has addresses."""

    def stop(self) -> None: ...


class Harness(Protocol):
    def backend(self) -> TransferBackend: ...

    def victim(self, name: str, num_pages: int, page_nbytes: int) -> Victim: ...


def page_ids(ids: Iterable[int]) -> PageIds:
    return np.fromiter(ids, dtype=np.int32)


def contents(seed: int, num_pages: int, page_nbytes: int) -> np.ndarray:
    """uint8[num_pages, page_nbytes], random."""
    return np.random.default_rng(seed).integers(0, 256, (num_pages, page_nbytes), dtype=np.uint8)


def digest(pages: np.ndarray) -> str:
    return hashlib.sha256(pages.tobytes()).hexdigest()


# ---- memory ------------------------------------------------------------------------------------------------------------------


class MemoryVictim:
    def __init__(self, fabric: MemoryFabric, name: str, num_pages: int, page_nbytes: int) -> None:
        self._fabric = fabric
        self._backend: MemoryBackend = fabric.backend()
        self._node = Node(name, self._backend, num_pages, page_nbytes)
        self.peer, self.description = self._node.peer, self._node.description

    def meet(self, other: Node) -> None:
        self._node.meet(other)

    def digest(self, pages: Iterable[int]) -> str:
        return digest(self._node.pool[page_ids(pages)])

    def kill(self) -> None:
        self._fabric.kill(self._backend)

    def restarted(self, name: str) -> "MemoryVictim":
        return MemoryVictim(self._fabric, name, *self._node.pool.shape)

    def stop(self) -> None:
        self._backend.close()


class MemoryHarness:
    def __init__(self) -> None:
        self._fabric = MemoryFabric()

    def backend(self) -> MemoryBackend:
        return self._fabric.backend()

    def victim(self, name: str, num_pages: int, page_nbytes: int) -> MemoryVictim:
        return MemoryVictim(self._fabric, name, num_pages, page_nbytes)


# ---- tcp ---------------------------------------------------------------------------------------------------------------------


class TcpVictim:
    """transfer_child.py in a process of its own; commands and answers are JSON lines."""

    def __init__(self, name: str, num_pages: int, page_nbytes: int, port: int = 0) -> None:
        self.peer = PeerId(name)
        self._shape = (num_pages, page_nbytes)
        argv = [sys.executable, str(SUPPORT_DIR / "transfer_child.py"), str(num_pages), str(page_nbytes), str(port)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.description = base64.b64decode(self._answer())
        self.port: int = json.loads(self.description)["port"]

    def meet(self, other: Node) -> None:
        self._call("meet", other.peer, base64.b64encode(other.description).decode())

    def digest(self, pages: Iterable[int]) -> str:
        return self._call("digest", [*pages])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP; returns when every thread of it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def restarted(self, name: str) -> "TcpVictim":
        return TcpVictim(name, *self._shape, port=self.port)

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()

    def _call(self, *command: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the child ended"
        return str(json.loads(line))


class TcpHarness:
    def backend(self) -> TcpBackend:
        return TcpBackend()

    def victim(self, name: str, num_pages: int, page_nbytes: int) -> TcpVictim:
        return TcpVictim(name, num_pages, page_nbytes)


HARNESSES: dict[str, type[Harness]] = {"memory": MemoryHarness, "tcp": TcpHarness}
