"""The `mooncake` backend: pages through Mooncake's transfer engine, over RDMA where there is a device, else over TCP.

One engine a peer and direction. Mooncake cannot revoke: whoever knows an engine's address may write to what it registered, a batch that
timed out may go on, and nothing names the writer. So a peer never shares an engine: the writer calls the owner's door, both prove who
they are (tcp_wire.py), and the owner makes an engine for this caller alone and says its name. The connection stays open and carries
nothing more; its end, for whatever reason, destroys both engines, and with them sockets, queue pairs and registrations. That is
the fence: disconnect() returns a Fence that has passed when the peer's engine is gone, a few milliseconds later; a stopped or
partitioned peer cannot hold it up. A process restarted behind an old address, even behind the same Mooncake ports, is another one: its
door refuses who called its predecessor, and nothing cached from the old engine outlives it.

Who may write: Mooncake's ports, two per engine, ask nobody for a secret, and listen on all addresses unless --host is loopback (then:
on the loopback device). An accepted peer's engine is there for everybody who reaches those ports, as long as that peer is connected.
Use this backend only where the network between nodes is trusted, and let nobody else reach MC_MIN_PRC_PORT .. MC_MAX_PRC_PORT.

The price: every peer costs a registration of the pool on either side (with RDMA that pins it, gigabytes a second, once per
connection), two listening sockets and two or three threads. Over TCP the `tcp` backend does the same without it.

Environment of the library that matters (https://kvcache-ai.github.io/Mooncake/): MC_MIN_PRC_PORT and MC_MAX_PRC_PORT (15000, 17000),
MC_LOG_LEVEL (here ERROR), MC_TCP_LANES_PER_PEER (here --transfer-lanes, when that is above 1),
MC_TCP_SLICE_SIZE, MC_GID_INDEX, MC_IB_TC, MC_MTU, MC_NUM_QP_PER_EP,
MC_SLICE_SIZE, MC_RETRY_CNT, MC_HANDSHAKE_CONNECT_TIMEOUT. Set by this backend unless they are set: MC_FORCE_TCP (protocol tcp),
MC_USE_IPV6 (--host is an IPv6 address). They are the process's: of two backends in one process the first decides.
"""

import secrets
import time

import msgspec

from common.errors import StartupError
from kvtransfer.backend import NO_FENCE, Completion, Fence, Op, PageIds, PeerId, PeerUnknown, Region, Ticket, TransferError
from kvtransfer.description import Description, read_description
from kvtransfer.mooncake_engine import Resolved, load, prepare
from kvtransfer.mooncake_lane import Door, MooncakeLane
from kvtransfer.pages import check_local, check_remote
from kvtransfer.settings import TransferOptions
from kvtransfer.tcp import WILDCARDS, numeric_host
from kvtransfer.tcp_sender import Message, Target
from kvtransfer.tcp_wire import INCARNATION_NBYTES, MAX_PAGES_PER_MESSAGE, SECRET_NBYTES, Identity
from kvtransfer.tickets import Tickets

CLOSE_TIMEOUT_S = 3.0  # within endpoint.JOIN_TIMEOUT_S
CLOSE_POLL_S = 0.005


class MooncakeDescription(Description, frozen=True, kw_only=True, tag="mooncake"):
    host: str | None  # of the door; None: bound to all addresses; the address the peer is seen at
    port: int
    protocol: Resolved
    identity: Identity


class Peer:
    """A connected peer: whom it said it was, and the lane to it."""

    def __init__(self, known_as: tuple[bytes, str | None], num_pages: int, lane: MooncakeLane) -> None:
        self.known_as = known_as
        self.num_pages = num_pages
        self.lane = lane


class MooncakeBackend:
    name = "mooncake"

    def __init__(self, options: TransferOptions) -> None:
        """Raises StartupError when the library is missing or cannot be loaded, or there is no RDMA device where one is asked for."""
        self._engine_options = prepare(options)
        self._bind = (options.host, options.port)
        self._advertise_host = numeric_host(options.advertise_host) if options.advertise_host else None
        self._host = self._advertise_host or (None if options.host in WILDCARDS else numeric_host(options.host))
        self._identity = Identity(secrets.token_bytes(INCARNATION_NBYTES), secrets.token_bytes(SECRET_NBYTES))
        self._tickets = Tickets()
        self._region: Region | None = None
        self._door: Door | None = None
        self._peers: dict[PeerId, Peer] = {}
        self._accepted: dict[PeerId, bytes] = {}

    def register(self, region: Region) -> None:
        """Raises StartupError when the address cannot be bound, or the library moves host memory only and the region is a device's."""
        assert self._door is None, "a backend has one region"
        if region.device != "cpu" and not load().SUPPORT_CUDA:
            raise StartupError(
                f"transfer backend mooncake: the KV pool lies on {region.device}, and the transfer engine installed here knows no CUDA: "
                "pip uninstall mooncake-transfer-engine-non-cuda; pip install mooncake-transfer-engine"
            )
        self._region = region
        self._door = Door(*self._bind, region, self._identity, self._engine_options, self._advertise_host)

    def describe(self) -> bytes:
        region, door = self._registered()
        return msgspec.json.encode(
            MooncakeDescription(
                num_pages=region.num_pages,
                page_nbytes=region.page_nbytes,
                host=self._host,
                port=door.port,
                protocol=self._engine_options.protocol,
                identity=self._identity,
            )
        )

    def connect(self, peer: PeerId, description: bytes, observed_host: str | None = None) -> None:
        known_as = (description, observed_host)
        if peer in self._peers:
            if self._peers[peer].known_as != known_as:
                raise TransferError(f"peer {peer} is connected under another description; disconnect it first")
            return
        region, _ = self._registered()
        theirs = self._decode(description)
        host = theirs.host or observed_host
        if host is None:
            raise TransferError(f"peer {peer} listens on all its addresses and says none; start it with --advertise-host")
        target = Target(peer, host, theirs.port, theirs.identity, self._identity)
        lane = MooncakeLane(target, region, self._engine_options, self._tickets.part_done)
        self._peers[peer] = Peer(known_as, theirs.num_pages, lane)

    def accept(self, peer: PeerId, description: bytes) -> None:
        """See the module about who else reaches the region then."""
        identity = self._decode(description).identity
        if self._accepted.setdefault(peer, description) != description:
            raise TransferError(f"peer {peer} is accepted under another description; disconnect it first")
        _, door = self._registered()
        door.allow(peer, identity)

    def post(self, op: Op, peer: PeerId, local_pages: PageIds, remote_pages: PageIds) -> Ticket:
        if peer not in self._peers:
            raise PeerUnknown(f"peer {peer} is not connected")
        region, _ = self._registered()
        check_local(local_pages, remote_pages, region.num_pages)
        target = self._peers[peer]
        error = check_remote(remote_pages, target.num_pages)
        if error is not None:
            return self._tickets.failed(error)
        starts = range(0, len(local_pages), MAX_PAGES_PER_MESSAGE)
        ticket = self._tickets.open(len(starts))
        for start in starts:
            part = slice(start, start + MAX_PAGES_PER_MESSAGE)
            target.lane.submit(Message(op, ticket, local_pages[part].copy(), remote_pages[part].copy()))
        return ticket

    def poll(self) -> list[Completion]:
        return self._tickets.drain()

    def completion_fd(self) -> int:
        return self._tickets.fileno()

    def disconnect(self, peer: PeerId) -> Fence:
        ended = []
        if peer in self._peers:
            ended.append(self._peers.pop(peer).lane.dismiss())
        if self._accepted.pop(peer, None) is not None and self._door is not None:
            ended.append(self._door.dismiss(peer))
        return Fence(0.0, lambda: all(passed() for passed in ended)) if ended else NO_FENCE

    def close(self) -> None:
        """Returns when every engine has ended, or CLOSE_TIMEOUT_S later: the library may wait for a peer that is gone without a word."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        fences = [self.disconnect(peer) for peer in {*self._peers, *self._accepted}]
        while time.monotonic() < deadline_s:
            fences = [fence for fence in fences if not fence.passed()]
            if not fences:
                break
            time.sleep(CLOSE_POLL_S)
        if self._door is not None:
            self._door.close()
        self._tickets.close()

    def _registered(self) -> tuple[Region, Door]:
        assert self._region is not None, "register() comes first"
        assert self._door is not None
        return self._region, self._door

    def _decode(self, description: bytes) -> MooncakeDescription:
        region, _ = self._registered()
        theirs = read_description(description, MooncakeDescription, region.page_nbytes)
        if theirs.protocol != self._engine_options.protocol:
            raise TransferError(f"the peer's Mooncake uses {theirs.protocol}, ours {self._engine_options.protocol}; set --mooncake-protocol alike")
        return theirs
