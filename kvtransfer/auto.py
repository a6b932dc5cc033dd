"""The backends of one node as one: with each peer the best that both have.

Hello carries a description of every backend of a node. The writer picks: the first of RANK that both name and that can connect
(shm cannot to another host). The other side lets the peer in by each backend that both have, so it need not know the pick.
`--transfer-backend NAME` is the same thing with a single backend.
"""

import logging
import select
from collections.abc import Mapping

import msgspec

from kvtransfer.backend import NO_FENCE, Completion, Fence, Op, PageIds, PeerId, PeerUnknown, Region, Ticket, TransferBackend, TransferError

logger = logging.getLogger(__name__)

RANK = ("shm", "nixl", "mooncake", "tcp", "memory")  # best first

_descriptions = msgspec.msgpack.Decoder(dict[str, bytes])


class AutoBackend:
    name = "auto"

    def __init__(self, backends: Mapping[str, TransferBackend]) -> None:
        """`backends`: by name, at least one, registered or not yet."""
        assert backends
        self._backends = {name: backends[name] for name in RANK if name in backends}
        self._picked: dict[PeerId, tuple[bytes, TransferBackend]] = {}  # by connect(), with the description
        self._accepted: dict[PeerId, tuple[bytes, list[TransferBackend]]] = {}
        self._next_ticket = 1
        self._tickets: dict[tuple[str, Ticket], Ticket] = {}  # of a backend -> ours
        self._epoll = select.epoll()  # readable when one of the backends' descriptors is
        for backend in self._backends.values():
            self._epoll.register(backend.completion_fd(), select.EPOLLIN)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._backends)

    def register(self, region: Region) -> None:
        for backend in self._backends.values():
            backend.register(region)

    def describe(self) -> bytes:
        return msgspec.msgpack.encode({name: backend.describe() for name, backend in self._backends.items()})

    def connect(self, peer: PeerId, description: bytes, observed_host: str | None = None) -> None:
        if peer in self._picked:
            known, backend = self._picked[peer]
            if known != description:
                raise TransferError(f"peer {peer} is connected under another description; disconnect it first")
            backend.connect(peer, self._read(description)[backend.name], observed_host)
            return
        reasons = []
        for name, theirs in self._common(description).items():
            try:
                self._backends[name].connect(peer, theirs, observed_host)
            except TransferError as error:
                reasons.append(f"{name}: {error}")
                continue
            self._picked[peer] = description, self._backends[name]
            logger.info("KV pages go to peer %s over %s", peer[:8], name)
            return
        raise TransferError("; ".join(reasons))

    def accept(self, peer: PeerId, description: bytes) -> None:
        if peer in self._accepted and self._accepted[peer][0] != description:
            raise TransferError(f"peer {peer} is accepted under another description; disconnect it first")
        let_in: list[TransferBackend] = []
        reasons = []
        for name, theirs in self._common(description).items():
            try:
                self._backends[name].accept(peer, theirs)
            except TransferError as error:
                reasons.append(f"{name}: {error}")
            else:
                let_in.append(self._backends[name])
        if not let_in:
            raise TransferError("; ".join(reasons))
        self._accepted[peer] = description, let_in

    def post(self, op: Op, peer: PeerId, local_pages: PageIds, remote_pages: PageIds) -> Ticket:
        if peer not in self._picked:
            raise PeerUnknown(f"peer {peer} is not connected")
        backend = self._picked[peer][1]
        theirs = backend.post(op, peer, local_pages, remote_pages)
        ticket = Ticket(self._next_ticket)
        self._next_ticket += 1
        self._tickets[backend.name, theirs] = ticket
        return ticket

    def poll(self) -> list[Completion]:
        return [
            Completion(self._tickets.pop((name, done.ticket)), done.error) for name, backend in self._backends.items() for done in backend.poll()
        ]

    def completion_fd(self) -> int:
        return self._epoll.fileno()

    def disconnect(self, peer: PeerId) -> Fence:
        used = [self._picked.pop(peer)[1]] if peer in self._picked else []
        used += [backend for backend in self._accepted.pop(peer, (b"", []))[1] if backend not in used]
        fences = [fence for backend in used if (fence := backend.disconnect(peer)) is not NO_FENCE]
        if not fences:
            return NO_FENCE
        return Fence(max(fence.delay_s for fence in fences), lambda: all(fence.passed() for fence in fences))

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()
        self._picked.clear()
        self._accepted.clear()
        if not self._epoll.closed:
            self._epoll.close()

    def _common(self, description: bytes) -> dict[str, bytes]:
        """Descriptions of the backends both nodes have, best first."""
        theirs = self._read(description)
        common = {name: theirs[name] for name in self._backends if name in theirs}
        if not common:
            one, other = ", ".join(self._backends), ", ".join(theirs)
            raise TransferError(f"no transfer backend in common: one node has {one}, the other {other}; start both with the same, or auto")
        return common

    @staticmethod
    def _read(description: bytes) -> dict[str, bytes]:
        try:
            return _descriptions.decode(description)
        except msgspec.DecodeError as error:
            raise TransferError(f"the peer's description cannot be read: {error}") from error
