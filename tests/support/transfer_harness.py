"""What the transfer conformance suite needs of a backend: nodes of this process, and victims that can be killed or frozen.

Every backend of kvtransfer.factory.BACKENDS is in HARNESSES by existing; its victims are processes of their own. What a backend
legitimately cannot do is said in LACKS, and nowhere else.
"""

import base64
import enum
import hashlib
import json
import mmap
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from common import memfd
from kvtransfer.auto import AutoBackend
from kvtransfer.backend import Fence, Op, PageIds, PeerId, Region, Ticket, TransferBackend, TransferError
from kvtransfer.factory import BACKENDS
from kvtransfer.memory import MemoryBackend, MemoryFabric
from kvtransfer.settings import TransferOptions

COMPLETION_TIMEOUT_S = 20.0
FENCE_TIMEOUT_S = 20.0  # beyond the fence's own delay
FENCE_ASK_S = 0.05  # as the sessions ask
PORTS = range(20_000, 32_000)  # below what the kernel gives to connections, which could take a victim's port before its restart
SHARED_MEMORY = ("shm", "auto")  # backends whose region is a memfd
SUPPORT_DIR = Path(__file__).parent


class Node:
    """A backend over a pool of its own, in this process."""

    def __init__(self, name: str, backend: TransferBackend, num_pages: int, page_nbytes: int) -> None:
        self.peer, self.pid = PeerId(name), os.getpid()
        self.backend = backend
        nbytes = num_pages * page_nbytes
        self._shared_fd = memfd.create(name, nbytes) if backend.name in SHARED_MEMORY else -1
        memory = memfd.mapped(self._shared_fd, nbytes) if self._shared_fd >= 0 else mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.pool = np.frombuffer(memory, dtype=np.uint8).reshape(num_pages, page_nbytes)  # it holds `memory`
        self.completed: dict[Ticket, TransferError | None] = {}
        try:
            backend.register(Region(self.pool.ctypes.data, num_pages, page_nbytes, "cpu", self.pool, self._shared_fd))
        except BaseException:
            self.close()
            raise

    @property
    def description(self) -> bytes:
        return self.backend.describe()

    def fill(self, seed: int) -> None:
        self.pool[:] = contents(seed, *self.pool.shape)

    def digest(self, pages: Iterable[int]) -> str:
        return digest(self.pool[page_ids(pages)])

    def meet(self, other: "Node | Victim") -> None:
        """Let `other` in, and become able to post to it."""
        self.meet_as(other.peer, other.description)

    def meet_as(self, peer: PeerId, description: bytes) -> None:
        self.backend.accept(peer, description)
        self.backend.connect(peer, description)

    def part(self, peer: PeerId) -> None:
        """Disconnect `peer`; returns when its fence has passed."""
        wait_passed(self.backend.disconnect(peer))

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
        while left := [ticket for ticket in tickets if ticket not in self.completed]:
            readable, _, _ = select.select([self.backend.completion_fd()], [], [], max(0.0, deadline_s - time.monotonic()))
            self.collect()
            assert readable, f"{len(left)} tickets did not complete in {COMPLETION_TIMEOUT_S} s"
        return [self.completed[ticket] for ticket in tickets]

    def close(self) -> None:
        self.backend.close()
        self.collect()
        if self._shared_fd >= 0:
            os.close(self._shared_fd)
            self._shared_fd = -1


class Victim(Protocol):
    """A node whose process can end at any time."""

    peer: PeerId
    description: bytes
    pid: int

    def meet(self, other: "Node | Victim") -> None: ...

    def digest(self, pages: Iterable[int]) -> str: ...

    def kill(self) -> None: ...

    def restarted(self, name: str) -> "Victim":
        """Another process behind the same address, as far as the backend has addresses."""

    def stop(self) -> None: ...


class Harness(Protocol):
    def backend(self, options: TransferOptions = ...) -> TransferBackend: ...

    def victim(self, name: str, num_pages: int, page_nbytes: int) -> Victim: ...


def page_ids(ids: Iterable[int]) -> PageIds:
    return np.fromiter(ids, dtype=np.int32)


def contents(seed: int, num_pages: int, page_nbytes: int) -> np.ndarray:
    """uint8[num_pages, page_nbytes], random."""
    return np.random.default_rng(seed).integers(0, 256, (num_pages, page_nbytes), dtype=np.uint8)


def digest(pages: np.ndarray) -> str:
    return hashlib.sha256(pages.tobytes()).hexdigest()


def wait_passed(fence: Fence) -> None:
    """Returns when `fence` has passed, as the sessions wait for one."""
    time.sleep(fence.delay_s)
    deadline_s = time.monotonic() + FENCE_TIMEOUT_S
    while not fence.passed():
        assert time.monotonic() < deadline_s, f"the fence did not pass within {FENCE_TIMEOUT_S} s of its delay"
        time.sleep(FENCE_ASK_S)


# ---- memory ------------------------------------------------------------------------------------------------------------------


class MemoryVictim:
    def __init__(self, fabric: MemoryFabric, name: str, num_pages: int, page_nbytes: int) -> None:
        self._fabric = fabric
        self._backend: MemoryBackend = fabric.backend()
        self._node = Node(name, self._backend, num_pages, page_nbytes)
        self.peer, self.description, self.pid = self._node.peer, self._node.description, os.getpid()

    def meet(self, other: "Node | Victim") -> None:
        self._node.meet(other)

    def digest(self, pages: Iterable[int]) -> str:
        return self._node.digest(pages)

    def kill(self) -> None:
        self._fabric.kill(self._backend)

    def restarted(self, name: str) -> "MemoryVictim":
        return MemoryVictim(self._fabric, name, *self._node.pool.shape)

    def stop(self) -> None:
        self._node.close()


class MemoryHarness:
    def __init__(self) -> None:
        self._fabric = MemoryFabric()

    def backend(self, options: TransferOptions = TransferOptions()) -> MemoryBackend:  # noqa: B008 - frozen
        return self._fabric.backend()

    def victim(self, name: str, num_pages: int, page_nbytes: int) -> MemoryVictim:
        return MemoryVictim(self._fabric, name, num_pages, page_nbytes)


# ---- every other backend -----------------------------------------------------------------------------------------------------


class ProcessVictim:
    """transfer_child.py in a process of its own; commands and answers are JSON lines."""

    def __init__(self, backend: str, name: str, num_pages: int, page_nbytes: int, port: int = 0) -> None:
        """`port`: 0 takes a free one, which a restarted() victim has again."""
        self.peer = PeerId(name)
        self._backend = backend
        self._shape = (num_pages, page_nbytes)
        self.port = port or free_port()
        argv = [sys.executable, str(SUPPORT_DIR / "transfer_child.py"), backend, str(num_pages), str(page_nbytes), str(self.port), name]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self.process.pid
        try:
            started = self._answer()
            assert isinstance(started, dict)
            self.description = base64.b64decode(started["description"])
        except BaseException:
            self.stop()
            raise

    def meet(self, other: Node | Victim) -> None:
        self._call("meet", other.peer, base64.b64encode(other.description).decode())

    def part(self, other: Node | Victim) -> None:
        """Disconnect `other`; returns when its fence has passed."""
        self._call("part", other.peer)

    def fill(self, seed: int) -> None:
        self._call("fill", seed)

    def digest(self, pages: Iterable[int]) -> str:
        return str(self._call("digest", [*map(int, pages)]))

    def post(self, op: Op, other: Node | Victim, local: Iterable[int], remote: Iterable[int], times: int = 1) -> None:
        """`times` tickets; see wait()."""
        self._call("post", op, other.peer, [*map(int, local)], [*map(int, remote)], times)

    def wait(self) -> list[str | None]:
        """The errors of all tickets posted since the last call, once they have completed."""
        errors = self._call("wait")
        assert isinstance(errors, list)
        return errors

    def close(self) -> None:
        """Close the backend; the process goes on, and wait() still answers."""
        self._call("close")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP; returns when every thread of it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def restarted(self, name: str) -> "ProcessVictim":
        return ProcessVictim(self._backend, name, *self._shape, port=self.port)

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()

    def _call(self, *command: object) -> object:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> object:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the child ended"
        return json.loads(line)


class ProcessHarness:
    name: str

    def backend(self, options: TransferOptions = TransferOptions()) -> TransferBackend:  # noqa: B008 - frozen
        return BACKENDS[self.name](options)

    def victim(self, name: str, num_pages: int, page_nbytes: int) -> ProcessVictim:
        return ProcessVictim(self.name, name, num_pages, page_nbytes)


def free_port() -> int:
    """A port that nobody has now, and no connection takes later."""
    while True:
        port = random.choice(PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class AutoHarness(ProcessHarness):
    """What nodes of one host get by default: the choice is made for each peer."""

    name = "auto"

    def backend(self, options: TransferOptions = TransferOptions()) -> AutoBackend:  # noqa: B008 - frozen
        return AutoBackend({name: BACKENDS[name](options) for name in ("shm", "tcp")})


HARNESSES: dict[str, type[Harness]] = {
    "auto": AutoHarness,
    "memory": MemoryHarness,
    **{name: type(f"{name.title()}Harness", (ProcessHarness,), {"name": name}) for name in BACKENDS},
}


# ---- what not every backend can do ---------------------------------------------------------------------------------------------


class Trait(enum.Enum):
    """Part of the contract that a backend may lack, for a reason that LACKS and the contract in kvtransfer/backend.py give."""

    JOINS_PROCESSES = enum.auto()


LACKS: dict[str, dict[Trait, str]] = {
    "memory": {Trait.JOINS_PROCESSES: "a fake within one process"},
}


def backends_with(trait: Trait) -> list[str]:
    return [name for name in sorted(HARNESSES) if trait not in LACKS.get(name, {})]
