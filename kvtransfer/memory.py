"""The `memory` backend: a fake for tests, in one process, that passes the conformance suite of the real ones.

A MemoryFabric joins the backends it made; nobody else can be reached. Transfers complete inside post() until a test takes
control:

    hold() / release(n) / resume()    keep transfers in flight, finish the n oldest, finish all and stop holding
    finish(transfer, error)           finish one of `in_flight`, in any order, with or without an error
    fail_posts(n) / fail_completions(n)   the next n transfers fail before any byte, or after half their pages
    kill(backend)                     its process died: peers' tickets fail, it reaches nobody and nobody reaches it
    land_late()                       with fence_delay_s > 0: writes cut off by a disconnect land after all, as they may until
                                      the fence delay has passed

Bytes move when a transfer finishes (copy_at="completion"), so that a page reused too early on either side shows as a wrong byte;
or inside post() (copy_at="post"), so that a reader who does not wait for the completion is not caught out by the fake alone.
Backends of one fabric may live on different threads: one lock guards the fabric.
"""

import secrets
import threading
from collections import deque
from dataclasses import dataclass
from typing import Literal

import msgspec

from kvtransfer.backend import NO_FENCE, Completion, Fence, Op, PageIds, PeerId, PeerUnknown, Region, Ticket, TransferError
from kvtransfer.description import Description, read_description
from kvtransfer.pages import PageMemory, check_local, check_remote
from kvtransfer.tickets import Tickets


class MemoryDescription(Description, frozen=True, kw_only=True, tag="memory"):
    backend_id: str  # random per backend: a restarted one is another


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One posted ticket of a fabric. `owner` posted it; `remote` is the other backend, which may be gone."""

    owner: "MemoryBackend"
    ticket: Ticket
    op: Op
    remote: "MemoryBackend"
    local_pages: PageIds
    remote_pages: PageIds

    def copy(self, num_pages: int) -> None:
        """Copy the first `num_pages` pages."""
        local, remote = self.owner.memory.rows(), self.remote.memory.rows()
        mine, theirs = self.local_pages[:num_pages], self.remote_pages[:num_pages]
        if self.op == "WRITE":
            remote[theirs] = local[mine]
        else:
            local[mine] = remote[theirs]


class MemoryFabric:
    def __init__(self, *, copy_at: Literal["post", "completion"] = "completion", fence_delay_s: float = 0.0) -> None:
        self.fence_delay_s = fence_delay_s
        self.lock = threading.RLock()
        self.backends: dict[str, MemoryBackend] = {}  # by backend_id; the living ones
        self._copies_at_post = copy_at == "post"
        self._in_flight: list[Transfer] = []
        self._late: list[Transfer] = []
        self._holding = False
        self._failing_posts: deque[str] = deque()
        self._failing_completions: deque[str] = deque()

    def backend(self) -> "MemoryBackend":
        return MemoryBackend(self)

    # ---- a test's controls ----------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> list[Transfer]:
        with self.lock:
            return list(self._in_flight)

    def hold(self) -> None:
        self._holding = True

    def release(self, count: int = 1) -> None:
        """Finish the `count` oldest transfers in flight."""
        for transfer in self.in_flight[:count]:
            self.finish(transfer)

    def resume(self) -> None:
        self._holding = False
        self.release(len(self.in_flight))

    def fail_posts(self, count: int, message: str = "injected: the post failed") -> None:
        self._failing_posts.extend([message] * count)

    def fail_completions(self, count: int, message: str = "injected: the transfer failed midway") -> None:
        self._failing_completions.extend([message] * count)

    def finish(self, transfer: Transfer, error: TransferError | None = None) -> None:
        """Move the bytes (not when `error` is given) and complete the ticket. Nothing happens if it has completed."""
        with self.lock:
            if transfer not in self._in_flight:
                return
            self._in_flight.remove(transfer)
            num_pages = len(transfer.local_pages)
            if error is None and self._failing_completions:
                error = TransferError(self._failing_completions.popleft())
                num_pages //= 2
                transfer.copy(num_pages)
            elif error is None and not self._copies_at_post:
                transfer.copy(num_pages)
            transfer.owner.tickets.part_done(transfer.ticket, error)

    def kill(self, backend: "MemoryBackend") -> None:
        """As kill -9 of its process: nobody is told but through failing tickets; its own tickets complete with errors too."""
        with self.lock:
            self.backends.pop(backend.backend_id, None)
            for transfer in self.in_flight:
                if backend in (transfer.owner, transfer.remote):
                    self.finish(transfer, TransferError("the peer's process is gone"))

    def land_late(self) -> int:
        """Land the writes cut off by disconnects so far; returns how many there were."""
        with self.lock:
            late, self._late = self._late, []
            for transfer in late:
                transfer.copy(len(transfer.local_pages))
            return len(late)

    # ---- for the backends -----------------------------------------------------------------------------------------------

    def start(self, transfer: Transfer) -> None:
        with self.lock:
            self._in_flight.append(transfer)
            if self._failing_posts:
                self.finish(transfer, TransferError(self._failing_posts.popleft()))
            elif not transfer.remote.lets_in(transfer.owner):
                self.finish(transfer, TransferError("the peer is gone or refuses this backend"))
            else:
                if self._copies_at_post:
                    transfer.copy(len(transfer.local_pages))
                if not self._holding:
                    self.finish(transfer)

    def cut(self, one: "MemoryBackend", other: "MemoryBackend") -> None:
        """Fail what is in flight between the two."""
        with self.lock:
            for transfer in self.in_flight:
                if {transfer.owner, transfer.remote} == {one, other}:
                    if self.fence_delay_s > 0 and transfer.op == "WRITE":
                        self._late.append(transfer)
                    self.finish(transfer, TransferError("disconnected"))


class MemoryBackend:
    name = "memory"

    def __init__(self, fabric: MemoryFabric) -> None:
        self.fabric = fabric
        self.backend_id = secrets.token_hex(16)
        self.tickets = Tickets()
        self._memory: PageMemory | None = None
        self._connected: dict[PeerId, tuple[bytes, MemoryDescription, MemoryBackend | None]] = {}
        self._accepted: dict[PeerId, tuple[bytes, str]] = {}  # description, backend_id

    @property
    def memory(self) -> PageMemory:
        assert self._memory is not None, "register() comes first"
        return self._memory

    def register(self, region: Region) -> None:
        assert self._memory is None, "a backend has one region"
        self._memory = PageMemory(region)
        self.fabric.backends[self.backend_id] = self

    def describe(self) -> bytes:
        return msgspec.json.encode(
            MemoryDescription(num_pages=self.memory.num_pages, page_nbytes=self.memory.page_nbytes, backend_id=self.backend_id)
        )

    def connect(self, peer: PeerId, description: bytes, observed_host: str | None = None) -> None:
        with self.fabric.lock:
            known = self._connected.get(peer)
            if known is not None and known[0] != description:
                raise TransferError(f"peer {peer} is connected under another description; disconnect it first")
            decoded = self._decode(description)
            self._connected[peer] = (description, decoded, self.fabric.backends.get(decoded.backend_id))

    def accept(self, peer: PeerId, description: bytes) -> None:
        with self.fabric.lock:
            decoded = self._decode(description)
            if self._accepted.setdefault(peer, (description, decoded.backend_id))[0] != description:
                raise TransferError(f"peer {peer} is accepted under another description; disconnect it first")

    def post(self, op: Op, peer: PeerId, local_pages: PageIds, remote_pages: PageIds) -> Ticket:
        if peer not in self._connected:
            raise PeerUnknown(f"peer {peer} is not connected")
        check_local(local_pages, remote_pages, self.memory.num_pages)
        if not len(local_pages):
            return self.tickets.open(0)
        _, description, remote = self._connected[peer]
        ticket = self.tickets.open(1)
        error = check_remote(remote_pages, description.num_pages)
        if remote is None or error is not None:
            self.tickets.part_done(ticket, error or TransferError(f"peer {peer} is gone"))
        else:
            self.fabric.start(Transfer(self, ticket, op, remote, local_pages.copy(), remote_pages.copy()))
        return ticket

    def poll(self) -> list[Completion]:
        return self.tickets.drain()

    def completion_fd(self) -> int:
        return self.tickets.fileno()

    def disconnect(self, peer: PeerId) -> Fence:
        with self.fabric.lock:
            _, _, remote = self._connected.pop(peer, (b"", None, None))
            accepted = self.fabric.backends.get(self._accepted.pop(peer, (b"", ""))[1])
            for other in {remote, accepted} - {None}:
                assert other is not None
                self.fabric.cut(self, other)
        return Fence(self.fabric.fence_delay_s, lambda: True) if self.fabric.fence_delay_s else NO_FENCE

    def close(self) -> None:
        for peer in {*self._connected, *self._accepted}:
            self.disconnect(peer)
        self.fabric.backends.pop(self.backend_id, None)
        self.tickets.close()

    def lets_in(self, other: "MemoryBackend") -> bool:
        """Both live, and `other` is accepted here."""
        living = self.fabric.backends
        accepted = any(backend_id == other.backend_id for _, backend_id in self._accepted.values())
        return accepted and self.backend_id in living and other.backend_id in living

    def _decode(self, description: bytes) -> MemoryDescription:
        return read_description(description, MemoryDescription, self.memory.page_nbytes)
