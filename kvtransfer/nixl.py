"""The `nixl` backend: pages through NIXL over UCX: RDMA, NVLink, shared memory, TCP, whichever UCX finds between two nodes.

post() queues; a thread of the backend makes requests of what is queued, posts them and asks for their state, as NIXL has nothing to wait
on: every POLL_MIN_S while something moves, less often the longer nothing ends, and every IDLE_S when nothing is under way. A request
has at most MAX_PART_NBYTES and MAX_PART_PAGES, and a peer at most MAX_PARTS_IN_FLIGHT of them: that bounds how long one call holds the
thread, and what may still land after a peer was cut off. Pages that follow each other on both sides are one descriptor.

Who may write: a peer that was accepted has the keys of our memory, until disconnect() takes them back by agreement (nixl_peer.py). Nothing
enforces that against a peer that keeps them: UCX checks no more than the keys, and for copies within one host the kernel's rules for
process_vm_writev. Descriptions and their secrets travel in Hello alone: give the cluster a key, and Hello is encrypted.

The fence of a disconnected peer passes when the peer has said that nothing is under way, or is gone, or by time: FENCE_DELAY_S for another
host (UCX lets a card retry UCX_RC_RETRY_COUNT = 7 times with UCX_RC_TIMEOUT = 1 s between; see src/uct/ib/rc/base/rc_iface.c), and
SAME_HOST_FENCE_S of running for a process of this one. Over TCP, what a stopped process of another host had posted is sent when it
is continued: nothing on our side can tell, so such a process has to be killed, not stopped.

UCX's own variables are the user's and never overridden. Those that matter: UCX_TLS (transports; a GPU's memory needs cuda in it),
UCX_NET_DEVICES (which --transfer-ib-device sets when it is unset), UCX_RC_TIMEOUT and UCX_RC_RETRY_COUNT (raise FENCE_DELAY_S along with them),
UCX_KEEPALIVE_INTERVAL, UCX_RCACHE_MAX_UNRELEASED, UCX_LOG_LEVEL, NIXL_LOG_LEVEL.
"""

import atexit
import itertools
import logging
import secrets
import threading
import time
import weakref

import msgspec

from kvtransfer.backend import NO_FENCE, Completion, Fence, Op, PageIds, PeerId, PeerUnknown, Region, Ticket, TransferError
from kvtransfer.description import read_description
from kvtransfer.host_process import fence_of, is_here, this_process
from kvtransfer.nixl_library import NixlAgent
from kvtransfer.nixl_peer import Grant, NixlDescription, Part, Peer
from kvtransfer.pages import check_local, check_remote
from kvtransfer.settings import TransferOptions
from kvtransfer.tickets import Tickets

logger = logging.getLogger(__name__)

MAX_PART_NBYTES = 64 << 20
MAX_PART_PAGES = 8192
POLL_MIN_S, POLL_MAX_S = 20e-6, 500e-6
GREET_S = 1e-3  # between looks for messages when some begin to be expected; grows to IDLE_S while none comes
FAILED_STEP_PAUSE_S = 0.5
IDLE_S = 0.05  # a peer's message waits so long at most
FENCE_DELAY_S = 10.0
SAME_HOST_FENCE_S = 2.0  # to copy what MAX_PARTS_IN_FLIGHT holds, on a busy host
DRAIN_S = 0.2  # for what a dead process of this host had sent over TCP: it lies in a socket of ours, which UCX's thread empties
CLOSE_TIMEOUT_S = 1.0  # for peers to say OVER
SECRET_NBYTES = 16


class NixlBackend:
    name = "nixl"

    def __init__(self, options: TransferOptions) -> None:
        """Raises StartupError."""
        self._secret = secrets.token_bytes(SECRET_NBYTES)
        self._tickets = Tickets()
        self._region: Region | None = None
        self._connected: dict[PeerId, tuple[bytes, Peer]] = {}
        self._accepted: dict[PeerId, tuple[bytes, Peer]] = {}
        self._peers: dict[str, Peer] = {}  # by agent; those that left too, for REMEMBER_S
        self._revocations: weakref.WeakSet[Revocation] = weakref.WeakSet()  # those whose fence somebody still holds
        self._grant_numbers = itertools.count(1)
        self._lock = threading.Lock()  # for every call of the agent and all above, but post()
        self._wake = threading.Event()
        self._closing = False
        self._agent = NixlAgent(options)
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        atexit.register(self.close)  # an agent left to the interpreter's end crashes it

    def register(self, region: Region) -> None:
        """Raises StartupError when UCX cannot use such memory."""
        assert self._region is None, "a backend has one region"
        self._agent.register(region)
        self._region = region
        self._description = msgspec.json.encode(
            NixlDescription(
                agent=self._agent.name,
                contact=self._agent.contact(),
                secret=self._secret,
                base=region.base,
                num_pages=region.num_pages,
                page_nbytes=region.page_nbytes,
                device=region.device,
                process=this_process(),
            )
        )
        self._thread.start()

    def describe(self) -> bytes:
        assert self._region is not None, "register() comes first"
        return self._description

    def connect(self, peer: PeerId, description: bytes, observed_host: str | None = None) -> None:
        theirs = self._decode(description)
        if self._is_known(self._connected, peer, description):
            return
        with self._lock:
            target = self._peer_of(theirs)
            if target.connected_as is not None:
                raise TransferError(f"peer {peer} is connected already, as {target.connected_as}")
            target.connected_as = peer
            target.meet(time.monotonic())
            self._connected[peer] = description, target
        self._wake.set()

    def accept(self, peer: PeerId, description: bytes) -> None:
        theirs = self._decode(description)
        if self._is_known(self._accepted, peer, description):
            return
        with self._lock:
            target = self._peer_of(theirs)
            target.given, target.has_told = Grant(next(self._grant_numbers)), False
            target.meet(time.monotonic())
            self._accepted[peer] = description, target
        self._wake.set()

    def post(self, op: Op, peer: PeerId, local_pages: PageIds, remote_pages: PageIds) -> Ticket:
        if peer not in self._connected:
            raise PeerUnknown(f"peer {peer} is not connected")
        assert self._region is not None
        check_local(local_pages, remote_pages, self._region.num_pages)
        target = self._connected[peer][1]
        error = check_remote(remote_pages, target.description.num_pages)
        if error is not None:
            return self._tickets.failed(error)
        pages_each = max(1, min(MAX_PART_PAGES, MAX_PART_NBYTES // self._region.page_nbytes))
        starts = range(0, len(local_pages), pages_each)
        ticket = self._tickets.open(len(starts))
        for start in starts:
            share = slice(start, start + pages_each)
            target.submit(Part(op, ticket, local_pages[share].copy(), remote_pages[share].copy()))
        self._wake.set()
        return ticket

    def poll(self) -> list[Completion]:
        return self._tickets.drain()

    def completion_fd(self) -> int:
        return self._tickets.fileno()

    def disconnect(self, peer: PeerId) -> Fence:
        known = {table.pop(peer)[1] for table in (self._connected, self._accepted) if peer in table}
        if not known:
            return NO_FENCE
        (target,) = known  # one process has one description, and one Peer
        with self._lock:
            revocation = Revocation(target)
            self._revocations.add(revocation)
            target.part_with(time.monotonic())
        self._wake.set()
        return Fence(0.0, revocation.passed)

    def close(self) -> None:
        if self._closing:
            return
        fences = [self.disconnect(peer) for peer in {*self._connected, *self._accepted}]
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        while not all(fence.passed() for fence in fences) and time.monotonic() < deadline_s:
            time.sleep(GREET_S)
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        for target in self._peers.values():
            target.abandon()
        try:
            self._agent.close()
        finally:
            self._tickets.close()
            atexit.unregister(self.close)

    # ---- the backend's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = IDLE_S
        while not self._closing:
            woken = self._wake.wait(pause_s)
            self._wake.clear()
            with self._lock:
                pause_s = self._turn(time.monotonic(), pause_s, woken)

    def _turn(self, now_s: float, pause_s: float, woken: bool) -> float:
        """One step, after a pause of `pause_s`, and the pause that is to follow. Raises nothing: a thread that ended would leave every ticket open;
        the sessions give up what makes no progress."""
        try:
            moved = self._step(now_s)
            if any(target.is_moving for target in self._peers.values()):
                return POLL_MIN_S if moved else min(1.5 * pause_s, POLL_MAX_S)
            if self._revocations or any(target.is_waiting for target in self._peers.values()):
                return GREET_S if moved or woken else min(max(1.5 * pause_s, GREET_S), IDLE_S)
            return IDLE_S
        except Exception:
            logger.exception("a step of the nixl backend failed")
            return FAILED_STEP_PAUSE_S

    def _step(self, now_s: float) -> bool:
        """Whether something was heard or posted, or has ended."""
        messages = self._agent.messages()
        for agent, raw in messages:
            self._hear(agent, raw, now_s)
        moved = [self._step_peer(target, now_s) for target in self._peers.values()]
        for agent in [agent for agent, target in self._peers.items() if target.may_be_forgotten(now_s)]:
            del self._peers[agent]
        for revocation in [revocation for revocation in self._revocations if revocation.is_over()]:
            self._revocations.discard(revocation)
        return bool(messages) or any(moved)

    def _step_peer(self, target: Peer, now_s: float) -> bool:
        """One peer's trouble is not the others'."""
        if now_s < target.rests_until_s:
            return False
        try:
            return target.step(now_s)
        except Exception:
            logger.exception("a step of agent %s failed", target.description.agent)
            target.rests_until_s = now_s + FAILED_STEP_PAUSE_S
            return False

    def _hear(self, agent: str, raw: bytes, now_s: float) -> None:
        revocations = [revocation for revocation in self._revocations if revocation.peer.description.agent == agent]
        peers = [self._peers[agent]] if agent in self._peers else []
        peers += [revocation.peer for revocation in revocations]
        message = peers[0].hear(raw, now_s) if peers else None
        if message is None:
            logger.debug("a message that claims to be of %s was dropped", agent)
        elif message.kind == "ASK" and (given := peers[0].given) is not None:
            peers[0].given = Grant(next(self._grant_numbers)) if given.over or given.number <= message.grant else given
            peers[0].has_told = False
        elif message.kind == "OVER":
            for grant in [peers[0].given, *(revocation.grant for revocation in revocations)]:
                if grant is not None and grant.number <= message.grant:
                    grant.over = True

    # ---- descriptions ---------------------------------------------------------------------------------------------------

    def _peer_of(self, theirs: NixlDescription) -> Peer:
        known = self._peers.get(theirs.agent)
        if known is None:
            known = self._peers[theirs.agent] = Peer(self._agent, self._secret, theirs, self._tickets.part_done)
        elif known.description != theirs:
            raise TransferError(f"agent {theirs.agent} is known under another description; disconnect it first")
        return known

    def _is_known(self, peers: dict[PeerId, tuple[bytes, Peer]], peer: PeerId, description: bytes) -> bool:
        for known, _ in (table[peer] for table in (self._connected, self._accepted) if peer in table):
            if known != description:
                raise TransferError(f"peer {peer} is known under another description; disconnect it first")
        return peer in peers

    def _decode(self, description: bytes) -> NixlDescription:
        assert self._region is not None, "register() comes first"
        return read_description(description, NixlDescription, self._region.page_nbytes)


class Revocation:
    """The fence of one disconnect()."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.grant = peer.given
        self._outstanding = peer.outstanding
        self._host_fence = fence_of(peer.description.process, SAME_HOST_FENCE_S if is_here(peer.description.process) else FENCE_DELAY_S)
        self._since_s = time.monotonic()
        self._has_passed = False

    def is_over(self) -> bool:
        """It has passed already, or the peer has said so and nothing of ours is left. Does not ask the host fence: the first question to that one
        starts its time, and is the session's to ask."""
        return self._has_passed or ((self.grant is None or self.grant.over) and not any(map(self.peer.awaits, self._outstanding)))

    def passed(self) -> bool:
        if not self._has_passed:
            self._has_passed = self.is_over() or self._is_over_in_time()
        return self._has_passed

    def _is_over_in_time(self) -> bool:
        return time.monotonic() - self._since_s >= max(DRAIN_S, self._host_fence.delay_s) and self._host_fence.passed()
