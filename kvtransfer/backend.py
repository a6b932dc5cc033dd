"""The transfer backend: how bytes of KV pages move from one node's pool to another's.

A backend owns connections, never pages: who may reuse a page is decided by the sessions (sender.py, receiver.py) from
completions. Every backend passes tests/kvtransfer/test_conformance.py, the in-memory fake included.

Contract
- A region is registered once. Pages are addressed by index: page i lies at base + i * page_nbytes.
- `describe()` is opaque and travels in Hello; it holds what a peer needs to reach this region and a secret without which
  nobody may write to it.
- `post()` returns at once. Every ticket completes exactly once in poll(), also after disconnect() or close(), with None or
  an error. A WRITE that completed with None is visible in the remote region before the completion is returned.
- Pages of a posted ticket belong to the transfer until its completion; the page lists are the caller's again when post() returns.
- A ticket that completed with an error touches neither side's pages any more either, unless disconnect() or close() ended it.
- Completion order: tickets of one peer may complete in any order; bytes of two tickets are ordered by nothing but a completion
  that was seen before the other one was posted.
- After `disconnect(peer)` has returned, its outstanding tickets have completed, with an error if need be; once its Fence has
  passed, nothing that the peer writes, or that we were reading from it, lands in our region any more. What we had already sent
  may still reach its memory: only its own fence, or its end, ends that.
- A peer restarted behind the same address is another peer: it has another description and needs another connect().
- All methods are called from one thread (the transfer endpoint's); a backend may run threads of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NewType, Protocol

import numpy as np
from numpy.typing import NDArray

Ticket = NewType("Ticket", int)
PeerId = NewType("PeerId", str)  # incarnation of the peer process, unique per process start
Op = Literal["WRITE", "READ"]
PageIds = NDArray[np.int32]


class TransferError(Exception):
    """A ticket failed; the message is the first cause."""


class PeerUnknown(TransferError):
    """post() or disconnect() named a peer that is not connected. Nothing was posted."""


@dataclass(frozen=True, slots=True)
class Region:
    """The pool's memory. `base`: address; `keepalive` holds the owner of the memory. `shared_fd`: the memfd whose bytes the region
    is, from offset 0 on; -1: private memory, or a device's."""

    base: int
    num_pages: int
    page_nbytes: int
    device: str  # "cpu" or "cuda:N"
    keepalive: object
    shared_fd: int = -1


@dataclass(frozen=True, slots=True)
class Completion:
    """`error` is None when every byte of the ticket has landed."""

    ticket: Ticket
    error: TransferError | None


@dataclass(frozen=True, slots=True)
class Fence:
    """When a disconnected peer's writes are over: `delay_s` after the disconnect at the earliest, and not before `passed()` says so.
    passed() never blocks, and once true stays true. A backend that can cut a peer off by itself returns NO_FENCE."""

    delay_s: float
    passed: Callable[[], bool]


NO_FENCE = Fence(0.0, lambda: True)


class TransferBackend(Protocol):
    name: str

    def register(self, region: Region) -> None:
        """Make the region reachable. Once, before describe()."""

    def describe(self) -> bytes:
        """What a peer needs for connect(); at most 64 KiB."""

    def connect(self, peer: PeerId, description: bytes, observed_host: str | None = None) -> None:
        """Make `peer` known; returns at once, an unreachable peer shows in the tickets. Idempotent for equal arguments.
        observed_host: numeric address at which the peer's control connection is seen; used by backends whose peer listens on
        all its addresses and advertises none.
        Raises TransferError when the description is not this backend's, its page size differs, or it leaves the host open
        and observed_host is None; also for a peer that is connected under another description."""

    def accept(self, peer: PeerId, description: bytes) -> None:
        """Let `peer`, whose describe() this is, reach our region. disconnect(peer) takes it back. Raises as connect()."""

    def post(self, op: Op, peer: PeerId, local_pages: PageIds, remote_pages: PageIds) -> Ticket:
        """Start copying local[i] to remote[i] (WRITE) or remote[i] to local[i] (READ); returns at once.
        local_pages, remote_pages: int32[n], same length, no destination twice. n = 0 completes at once.
        Raises PeerUnknown, or ValueError for bad local page ids, before anything is posted; later failure arrives in poll()."""

    def poll(self) -> list[Completion]:
        """Completions since the last call; never blocks."""

    def completion_fd(self) -> int:
        """A file descriptor that is readable while completions may be waiting."""

    def disconnect(self, peer: PeerId) -> Fence:
        """Forget `peer`, both ways. See the contract for its tickets and the fence. Of an unknown peer: NO_FENCE."""

    def close(self) -> None:
        """Disconnect everybody, release sockets and threads. Idempotent. Tickets left still come out of poll()."""
