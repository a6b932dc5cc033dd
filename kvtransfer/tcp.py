"""The `tcp` backend: pages over plain TCP, one process or host to another, no special hardware.

Every backend listens on a port of its own (tcp_receiver.py) and calls its peers (tcp_sender.py); tcp_wire.py has the bytes.
A WRITE completes when the peer has acknowledged that all bytes are in its memory. System calls move page runs between the
socket and the pool's memory directly, with the GIL free: a scheduler computes meanwhile.

Threads: one that accepts, one per connection a peer made to us, two per lane that sent something. Sockets: at most `lanes` per
peer and direction. There is no fence to wait for: disconnect() returns when no thread of that peer's connections is left.
"""

import secrets
import socket

import msgspec

from common.errors import StartupError
from kvtransfer.backend import NO_FENCE, Completion, Fence, Op, PageIds, PeerId, PeerUnknown, Region, Ticket, TransferError
from kvtransfer.description import Description, read_description
from kvtransfer.pages import PageMemory, check_local, check_remote
from kvtransfer.tcp_receiver import Listener
from kvtransfer.tcp_sender import Lane, Message, Target
from kvtransfer.tcp_wire import INCARNATION_NBYTES, MAX_LANES, MAX_PAGES_PER_MESSAGE, SECRET_NBYTES, Identity
from kvtransfer.tickets import Tickets

LANES_PER_PEER = 1  # one stream fills loopback and 10 Gbit/s; more only help where one core cannot drive the link
WILDCARDS = ("", "0.0.0.0", "::")


class TcpDescription(Description, frozen=True, kw_only=True, tag="tcp"):
    host: str | None  # None: bound to all addresses; the address the peer is seen at
    port: int
    identity: Identity


class Peer:
    """A connected peer: whom it said it was, and the lanes to it."""

    def __init__(self, known_as: tuple[bytes, str | None], num_pages: int, lanes: list[Lane]) -> None:
        self.known_as = known_as
        self.num_pages = num_pages
        self.lanes = lanes

    def submit(self, message: Message) -> None:
        min(self.lanes, key=lambda lane: lane.num_messages).submit(message)

    def stop(self) -> None:
        for lane in self.lanes:
            lane.interrupt()
        for lane in self.lanes:
            lane.stop()


class TcpBackend:
    name = "tcp"

    def __init__(self, host: str = "127.0.0.1", port: int = 0, advertise_host: str | None = None, lanes: int = LANES_PER_PEER) -> None:
        """`host`, `port`: where register() listens; 0 is a free port. `advertise_host`: where peers reach us, if not at `host`.
        Raises StartupError for an advertise_host that does not resolve."""
        if not 1 <= lanes <= MAX_LANES:
            raise ValueError(f"{lanes} lanes; a peer can be given 1 to {MAX_LANES}")
        self._bind = (host, port)
        self._host = numeric_host(advertise_host or host) if advertise_host or host not in WILDCARDS else None
        self._num_lanes = lanes
        self._identity = Identity(secrets.token_bytes(INCARNATION_NBYTES), secrets.token_bytes(SECRET_NBYTES))
        self._tickets = Tickets()
        self._memory: PageMemory | None = None
        self._listener: Listener | None = None
        self._peers: dict[PeerId, Peer] = {}
        self._accepted: dict[PeerId, bytes] = {}

    def register(self, region: Region) -> None:
        """Raises StartupError when the address cannot be bound, ValueError for a region that is not host memory."""
        assert self._listener is None, "a backend has one region"
        self._memory = PageMemory(region)
        self._listener = Listener(*self._bind, self._memory, self._identity)

    def describe(self) -> bytes:
        memory, listener = self._registered()
        return msgspec.json.encode(
            TcpDescription(
                num_pages=memory.num_pages, page_nbytes=memory.page_nbytes, host=self._host, port=listener.port, identity=self._identity
            )
        )

    def connect(self, peer: PeerId, description: bytes, observed_host: str | None = None) -> None:
        known_as = (description, observed_host)
        if peer in self._peers:
            if self._peers[peer].known_as != known_as:
                raise TransferError(f"peer {peer} is connected under another description; disconnect it first")
            return
        memory, _ = self._registered()
        theirs = self._decode(description)
        host = theirs.host or observed_host
        if host is None:
            raise TransferError(f"peer {peer} listens on all its addresses and says none; start it with --advertise-host")
        target = Target(peer, host, theirs.port, theirs.identity, self._identity)
        lanes = [Lane(target, number, memory, self._tickets.part_done) for number in range(self._num_lanes)]
        self._peers[peer] = Peer(known_as, theirs.num_pages, lanes)

    def accept(self, peer: PeerId, description: bytes) -> None:
        identity = self._decode(description).identity
        if self._accepted.setdefault(peer, description) != description:
            raise TransferError(f"peer {peer} is accepted under another description; disconnect it first")
        _, listener = self._registered()
        listener.allow(peer, identity)

    def post(self, op: Op, peer: PeerId, local_pages: PageIds, remote_pages: PageIds) -> Ticket:
        if peer not in self._peers:
            raise PeerUnknown(f"peer {peer} is not connected")
        memory, _ = self._registered()
        check_local(local_pages, remote_pages, memory.num_pages)
        target = self._peers[peer]
        error = check_remote(remote_pages, target.num_pages)
        if error is not None:
            return self._tickets.failed(error)
        starts = range(0, len(local_pages), MAX_PAGES_PER_MESSAGE)
        ticket = self._tickets.open(len(starts))
        for start in starts:
            part = slice(start, start + MAX_PAGES_PER_MESSAGE)
            target.submit(Message(op, ticket, local_pages[part].copy(), remote_pages[part].copy()))
        return ticket

    def poll(self) -> list[Completion]:
        return self._tickets.drain()

    def completion_fd(self) -> int:
        return self._tickets.fileno()

    def disconnect(self, peer: PeerId) -> Fence:
        if peer in self._peers:
            self._peers.pop(peer).stop()
        if self._accepted.pop(peer, None) is not None and self._listener is not None:
            self._listener.forget(peer)
        return NO_FENCE

    def close(self) -> None:
        for peer in {*self._peers, *self._accepted}:
            self.disconnect(peer)
        if self._listener is not None:
            self._listener.close()
        self._tickets.close()

    def _registered(self) -> tuple[PageMemory, Listener]:
        assert self._memory is not None, "register() comes first"
        assert self._listener is not None
        return self._memory, self._listener

    def _decode(self, description: bytes) -> TcpDescription:
        memory, _ = self._registered()
        return read_description(description, TcpDescription, memory.page_nbytes)


def numeric_host(host: str) -> str:
    """What peers are told. Raises StartupError for a name that does not resolve."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise StartupError(f"the address {host!r} for KV transfer does not resolve: {error}; choose another --advertise-host") from error
