"""The `shm` backend: pages between two processes of one host, by memcpy.

A node's pool is a memfd. Peers that were accepted get its descriptor over a unix socket (shm_receiver.py), map it, and copy pages
straight between the two pools on threads of their own (shm_sender.py). A WRITE has landed when the copy has returned: it is the same
region. The receiver spends no time on it, and cannot stop it either; how its pages are fenced all the same is in shm_gate.py.

Threads: one that answers callers; `lanes` per peer that something was sent to. Descriptors: per peer that may write to us its gate,
and a socket once it has mapped our pool; per peer that we write to a socket and one per lane. Nodes on different hosts refuse each other.
"""

import os
import secrets
from pathlib import Path

import msgspec
import numpy as np

from common.errors import StartupError
from kvtransfer.backend import NO_FENCE, Completion, Fence, Op, PageIds, PeerId, PeerUnknown, Region, Ticket, TransferError
from kvtransfer.description import Description, read_description
from kvtransfer.pages import check_local, check_remote
from kvtransfer.shm_copy import PIECE_NBYTES
from kvtransfer.shm_receiver import Listener
from kvtransfer.shm_sender import Part, Peer, Target
from kvtransfer.tcp_wire import INCARNATION_NBYTES, SECRET_NBYTES, Identity
from kvtransfer.tickets import Tickets

MAX_LANES = 16


class ShmDescription(Description, frozen=True, kw_only=True, tag="shm"):
    host_id: str
    address: str  # of an abstract unix socket
    identity: Identity


def host_id() -> str:
    """Equal for two processes that run under one kernel and reach each other's abstract sockets. Raises OSError without /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


class ShmBackend:
    name = "shm"

    def __init__(self, lanes: int = 1) -> None:
        if not 1 <= lanes <= MAX_LANES:
            raise ValueError(f"{lanes} lanes; a peer can be given 1 to {MAX_LANES}")
        self._num_lanes = lanes
        try:
            self._host_id = host_id()
        except OSError as error:
            raise StartupError(f"shared memory between nodes needs /proc: {error}; choose another --transfer-backend") from error
        self._identity = Identity(secrets.token_bytes(INCARNATION_NBYTES), secrets.token_bytes(SECRET_NBYTES))
        self._tickets = Tickets()
        self._region: Region | None = None
        self._listener: Listener | None = None
        self._peers: dict[PeerId, tuple[bytes, Peer]] = {}  # with their descriptions
        self._accepted: dict[PeerId, bytes] = {}

    def register(self, region: Region) -> None:
        """Raises ValueError for a region that no memfd backs, StartupError when no socket can be opened."""
        assert self._listener is None, "a backend has one region"
        if region.shared_fd < 0:
            raise ValueError(f"the region on {region.device} is no memory that other processes can map")
        nbytes = region.num_pages * region.page_nbytes
        if os.fstat(region.shared_fd).st_size < nbytes:
            raise ValueError(f"the region's file has {os.fstat(region.shared_fd).st_size} bytes, its pages {nbytes}")
        self._region = region
        self._listener = Listener(region, self._identity)

    def describe(self) -> bytes:
        region, listener = self._registered()
        return msgspec.json.encode(
            ShmDescription(
                num_pages=region.num_pages,
                page_nbytes=region.page_nbytes,
                host_id=self._host_id,
                address=listener.address,
                identity=self._identity,
            )
        )

    def connect(self, peer: PeerId, description: bytes, observed_host: str | None = None) -> None:
        if peer in self._peers:
            if self._peers[peer][0] != description:
                raise TransferError(f"peer {peer} is connected under another description; disconnect it first")
            return
        region, _ = self._registered()
        theirs = self._decode(description)
        target = Target(peer, theirs.address, theirs.num_pages, theirs.page_nbytes, theirs.identity, self._identity)
        self._peers[peer] = description, Peer(target, self._num_lanes, region, self._tickets.part_done)

    def accept(self, peer: PeerId, description: bytes) -> None:
        identity = self._decode(description).identity
        if self._accepted.get(peer, description) != description:
            raise TransferError(f"peer {peer} is accepted under another description; disconnect it first")
        _, listener = self._registered()
        try:
            listener.allow(peer, identity)
        except OSError as error:
            raise TransferError(f"peer {peer} cannot be let in: {error}") from error
        self._accepted[peer] = description

    def post(self, op: Op, peer: PeerId, local_pages: PageIds, remote_pages: PageIds) -> Ticket:
        if peer not in self._peers:
            raise PeerUnknown(f"peer {peer} is not connected")
        region, _ = self._registered()
        check_local(local_pages, remote_pages, region.num_pages)
        target = self._peers[peer][1]
        error = check_remote(remote_pages, target.target.num_pages)
        if error is not None:
            return self._tickets.failed(error)
        num_parts = min(self._num_lanes, -(-len(local_pages) * region.page_nbytes // PIECE_NBYTES))
        ticket = self._tickets.open(num_parts)
        if num_parts:
            sides = (np.array_split(pages.copy(), num_parts) for pages in (local_pages, remote_pages))
            target.submit([Part(op, ticket, local, remote) for local, remote in zip(*sides, strict=True)])
        return ticket

    def poll(self) -> list[Completion]:
        return self._tickets.drain()

    def completion_fd(self) -> int:
        return self._tickets.fileno()

    def disconnect(self, peer: PeerId) -> Fence:
        if peer in self._peers:
            self._peers.pop(peer)[1].stop()
        if self._accepted.pop(peer, None) is None or self._listener is None:
            return NO_FENCE
        return self._listener.forget(peer)

    def close(self) -> None:
        for _, peer in self._peers.values():
            peer.interrupt()
        for peer_id in {*self._peers, *self._accepted}:
            self.disconnect(peer_id)
        if self._listener is not None:
            self._listener.close()
        self._tickets.close()

    def _registered(self) -> tuple[Region, Listener]:
        assert self._region is not None, "register() comes first"
        assert self._listener is not None
        return self._region, self._listener

    def _decode(self, description: bytes) -> ShmDescription:
        region, _ = self._registered()
        theirs = read_description(description, ShmDescription, region.page_nbytes)
        if theirs.host_id != self._host_id:
            raise TransferError("the peer is on another host, or in another network namespace of this one; --transfer-backend tcp reaches it")
        return theirs
