"""D's links: prefill nodes that offers were made to. They are dialled by the first offer for an address, and again by the first
one after a loss.

    DOWN        no connection: the next offer dials
    CONNECTING  Hello sent; offers wait, for peer_timeout_s at most
    UP          acknowledged; P may write to the pages it is offered
    ALIAS       the address leads to a process this node has a link to already: that link is used
    REFUSED     the nodes do not fit together; offers fail with the reason until refused_retry_s have passed, or the connection ends.
                It is kept so long, to tell P of the rooms that will have no offer
"""

import enum
import logging

from common.errors import Failure
from kvtransfer.backend import NO_FENCE, Fence, PeerId, TransferBackend, TransferError
from kvtransfer.link import Address, DialFailed, DialWire, LinkNews, PeerLost, PeerUp, RareWarning
from kvtransfer.machine import Machine, Table
from kvtransfer.protocol import (
    Closed,
    FirstToken,
    Heartbeat,
    HelloAck,
    HelloBody,
    Message,
    Undecodable,
    Withdraw,
    decode_to_decode,
    encode,
    hello,
    read_hello,
)
from kvtransfer.settings import TransferSettings
from kvtransfer.timers import Timers

logger = logging.getLogger(__name__)


class DialState(enum.Enum):
    DOWN = enum.auto()
    CONNECTING = enum.auto()
    UP = enum.auto()
    ALIAS = enum.auto()
    REFUSED = enum.auto()


class DialEvent(enum.Enum):
    DIAL = enum.auto()
    ACK = enum.auto()
    ACK_ALIAS = enum.auto()
    REFUSE = enum.auto()
    LOSE = enum.auto()


DIAL_TABLE = Table(
    "dialled link",
    {
        (DialState.DOWN, DialEvent.DIAL): DialState.CONNECTING,
        (DialState.REFUSED, DialEvent.DIAL): DialState.CONNECTING,
        (DialState.CONNECTING, DialEvent.ACK): DialState.UP,
        (DialState.CONNECTING, DialEvent.ACK_ALIAS): DialState.ALIAS,
        (DialState.CONNECTING, DialEvent.REFUSE): DialState.REFUSED,
        (DialState.CONNECTING, DialEvent.LOSE): DialState.DOWN,
        (DialState.UP, DialEvent.LOSE): DialState.DOWN,
        (DialState.REFUSED, DialEvent.LOSE): DialState.DOWN,
        (DialState.ALIAS, DialEvent.LOSE): DialState.DOWN,
    },
)


class DialledLink:
    """What is known of one address. `link` numbers the connection while there is one."""

    def __init__(self, address: Address) -> None:
        self.machine = Machine(DIAL_TABLE, DialState.DOWN)
        self.address = address
        self.link: int | None = None
        self.peer: PeerId | None = None  # UP, ALIAS, REFUSED
        self.live_at_hello: frozenset[PeerId] = frozenset()
        self.beat_s = 0.0
        self.heard_s = 0.0
        self.newest_sent_s = 0.0  # of its HelloAck and heartbeats, for the echo
        self.retry_at_s = 0.0
        self.reason = ""  # why DOWN or REFUSED


class Timer(enum.Enum):
    HELLO = enum.auto()
    BEAT = enum.auto()
    SILENT = enum.auto()
    RETRY = enum.auto()


class DialledLinks:
    def __init__(self, settings: TransferSettings, incarnation: PeerId, wire: DialWire, backend: TransferBackend) -> None:
        self.news: list[LinkNews] = []
        self._settings = settings
        self._incarnation = incarnation
        self._wire = wire
        self._backend = backend
        self._description = backend.describe()
        self._by_address: dict[Address, DialledLink] = {}
        self._by_link: dict[int, DialledLink] = {}  # CONNECTING, UP, REFUSED for a while
        self._by_peer: dict[PeerId, DialledLink] = {}  # UP
        self._broken: dict[int, None] = {}  # a send failed: lost at the next tick, never in the middle of a session's step
        self._timers: Timers[tuple[Timer, int]] = Timers()
        self._warn = RareWarning(logger)

    def reach(self, address: Address, now_s: float) -> PeerId | Failure | None:
        """The process at `address`; None while it is being dialled: PeerUp or DialFailed follows."""
        at = self._by_address.get(address)
        if at is None:
            if len(self._by_address) >= self._settings.max_links and not self._evict():
                full = f"this node has links to {len(self._by_address)} prefill nodes already"
                return Failure(503, full, code="overloaded", stage="transfer", retry_after_s=1.0)
            at = self._by_address[address] = DialledLink(address)
        match at.machine.state:
            case DialState.UP | DialState.ALIAS:
                return at.peer
            case DialState.CONNECTING:
                return None
            case DialState.REFUSED if now_s < at.retry_at_s:
                return _incompatible(at)
            case _:
                return self._dial(at, now_s)

    def is_dialling(self, address: Address) -> bool:
        """PeerUp or DialFailed will follow."""
        at = self._by_address.get(address)
        return at is not None and at.machine.state is DialState.CONNECTING

    def send(self, peer: PeerId, message: Message) -> None:
        """To a peer that is up; a lost one is passed over."""
        at = self._by_peer.get(peer)
        if at is not None and at.link is not None and not self._wire.send(at.link, encode(message)):
            self._broken[at.link] = None

    def withdraw(self, address: Address, room: int, failure: Failure) -> bool:
        """Tell the process at `address` that no offer will come for `room`. False: there is no connection to it."""
        at = self._by_address.get(address)
        if at is None or at.peer is None:
            return False
        at = self._by_peer.get(at.peer, at)
        if at.peer is None or at.link is None:
            return False
        if not self._wire.send(at.link, encode(Withdraw(room=room, sender=self._incarnation, receiver=at.peer, failure=failure))):
            self._broken[at.link] = None
        return True

    def on_frame(self, link: int, frame: bytes, now_s: float) -> tuple[PeerId, FirstToken | Closed] | None:
        """The message, if it is for the room sessions: from the process this link leads to, meant for this one. `now_s`: not before
        its arrival, or the lease of P would outlive the link."""
        at = self._by_link.get(link)
        if at is None or at.machine.state is DialState.REFUSED:
            return None
        try:
            message = decode_to_decode(frame)
        except Undecodable as error:
            self._warn(now_s, f"control message from prefill node {at.address} dropped: {error}")
            return None
        if isinstance(message, HelloAck):
            self._on_ack(at, message, now_s)
        elif at.machine.state is not DialState.UP or message.sender != at.peer or message.receiver != self._incarnation:
            self._warn(now_s, f"{type(message).__name__} from prefill node {at.address} dropped: it names {message.sender} -> {message.receiver}")
        else:
            at.heard_s = now_s
            if not isinstance(message, Heartbeat):
                return at.peer, message
            at.newest_sent_s = max(at.newest_sent_s, message.sent_s)
        return None

    def on_disconnected(self, link: int, reason: str, now_s: float) -> None:
        if at := self._by_link.get(link):
            self._drop(at, reason, now_s)

    def lose(self, peer: PeerId, reason: str, now_s: float) -> None:
        """Forget the peer and keep it from writing to this node. Unknown peers are ignored."""
        if at := self._by_peer.get(peer):
            self._drop(at, reason, now_s)

    def tick(self, now_s: float) -> None:
        for link in list(self._broken):
            self.on_disconnected(link, "its connection ended", now_s)
        self._broken.clear()
        for timer, link in self._timers.expired(now_s):
            at = self._by_link.get(link)
            if at is None:
                continue
            if timer is Timer.BEAT:
                self._beat(at)
                self._timers.set((timer, link), now_s + at.beat_s)
            elif timer is Timer.RETRY:
                self._hang_up(at)
            elif timer is Timer.HELLO:
                self._drop(at, f"no answer to Hello within {self._settings.peer_timeout_s:g} s", now_s)
            else:
                self._check_silence(at, link, now_s)

    def next_due_s(self) -> float:
        return -1.0 if self._broken else self._timers.next_due_s()

    def snapshot(self) -> list[dict[str, str]]:
        return [{"endpoint": str(at.address), "state": at.machine.state.name.lower(), "reason": at.reason} for at in list(self._by_address.values())]

    def heard_s(self) -> list[float]:
        """When each peer was heard last."""
        return [at.heard_s for at in list(self._by_peer.values())]

    # ---- dial ---------------------------------------------------------------------------------------------------------------

    def _dial(self, at: DialledLink, now_s: float) -> Failure | None:
        if at.link is not None:  # refused
            self._hang_up(at)
        try:
            link = self._wire.open(at.address)
        except ValueError as error:
            at.reason = str(error)
            return _unreachable(at)
        at.machine.fire(DialEvent.DIAL)
        at.link, at.peer, at.reason = link, None, ""
        at.live_at_hello = frozenset(self._by_peer)
        self._by_link[link] = at
        live = [str(peer) for peer in self._by_peer]
        body = HelloBody(self._settings.compat, self._description, self._settings.beat_s, self._settings.silent_s, live=live)
        self._wire.send(link, encode(hello(self._incarnation, body)))
        self._timers.set((Timer.HELLO, link), now_s + self._settings.peer_timeout_s)
        return None

    def _on_ack(self, at: DialledLink, ack: HelloAck, now_s: float) -> None:
        if at.machine.state is DialState.UP:
            if not ack.ok:
                self._drop(at, "it does not know this node any more", now_s)
            return
        peer = PeerId(ack.incarnation)
        body: HelloBody | str = read_hello(ack, self._settings.compat) if ack.ok else ack.reason
        if isinstance(body, str):
            self._refused(at, peer, body, now_s)
        elif peer in self._by_peer:
            self._hang_up(at)
            at.machine.fire(DialEvent.ACK_ALIAS)
            at.peer = peer
            self.news.append(PeerUp(at.address, peer))
        elif peer in at.live_at_hello:  # lost since: P took this connection for a second name of that link
            self._hang_up(at)
            at.machine.fire(DialEvent.LOSE)
            at.reason = "its former link has just ended"
            if failure := self._dial(at, now_s):
                self.news.append(DialFailed(at.address, failure))
        else:
            self._up(at, peer, body, now_s)

    def _up(self, at: DialledLink, peer: PeerId, body: HelloBody, now_s: float) -> None:
        try:
            self._backend.accept(peer, body.description)
        except TransferError as error:
            return self._refused(at, peer, f"KV transfer: {error}", now_s)
        assert at.link is not None
        at.machine.fire(DialEvent.ACK)
        at.peer, at.heard_s, at.beat_s = peer, now_s, min(self._settings.beat_s, body.heartbeat_s)
        at.newest_sent_s = body.sent_s
        self._by_peer[peer] = at
        self._timers.cancel((Timer.HELLO, at.link))
        self._timers.set((Timer.BEAT, at.link), now_s + at.beat_s)
        self._timers.set((Timer.SILENT, at.link), now_s + self._settings.silent_s)
        self._beat(at)  # before any offer: P may post once it has this echo
        self.news.append(PeerUp(at.address, peer))
        logger.info("prefill node %s is up", at.address)
        return None

    def _refused(self, at: DialledLink, peer: PeerId, reason: str, now_s: float) -> None:
        assert at.link is not None
        at.machine.fire(DialEvent.REFUSE)
        at.peer, at.reason = peer, reason
        at.retry_at_s = now_s + self._settings.refused_retry_s
        self._timers.cancel((Timer.HELLO, at.link))
        self._timers.set((Timer.RETRY, at.link), at.retry_at_s)
        logger.warning("prefill node %s refused: %s", at.address, reason)
        self.news.append(DialFailed(at.address, _incompatible(at)))

    # ---- end ----------------------------------------------------------------------------------------------------------------

    def _drop(self, at: DialledLink, reason: str, now_s: float) -> None:
        """A connection is over."""
        peer = at.peer
        was_refused = at.machine.state is DialState.REFUSED
        self._hang_up(at)
        at.machine.fire(DialEvent.LOSE)
        if was_refused:
            return
        at.reason = reason
        if peer is None:
            self._warn(now_s, f"prefill node {at.address} cannot be reached: {reason}")
            self.news.append(DialFailed(at.address, _unreachable(at)))
            return
        logger.warning("prefill node %s lost: %s", at.address, reason)
        del self._by_peer[peer]
        fence = self._fence(at, self._backend.disconnect(peer), now_s)
        for other in self._by_address.values():
            if other.machine.state is DialState.ALIAS and other.peer == peer:
                other.machine.fire(DialEvent.LOSE)
                other.reason, other.peer = reason, None
        self.news.append(PeerLost(peer, reason, fence))

    def _fence(self, at: DialledLink, fence: Fence, now_s: float) -> Fence:
        """The backend's, which is asked when P posts no more: now, if the backend bars P by itself, else when P's lease is over."""
        if fence is NO_FENCE:
            return fence
        lease_left_s = max(at.heard_s + self._settings.silent_s - now_s, 0.0)
        return Fence(lease_left_s + fence.delay_s, fence.passed)

    def _check_silence(self, at: DialledLink, link: int, now_s: float) -> None:
        silent_at_s = at.heard_s + self._settings.silent_s
        if silent_at_s <= now_s:
            self._drop(at, f"nothing heard of it for {self._settings.peer_timeout_s:g} s", now_s)
        else:
            self._timers.set((Timer.SILENT, link), silent_at_s)

    def _beat(self, at: DialledLink) -> None:
        assert at.peer is not None
        self.send(at.peer, Heartbeat(self._incarnation, at.peer, echo_s=at.newest_sent_s))

    def _hang_up(self, at: DialledLink) -> None:
        assert at.link is not None
        for timer in Timer:
            self._timers.cancel((timer, at.link))
        self._broken.pop(at.link, None)
        del self._by_link[at.link]
        self._wire.close(at.link)
        at.link = at.peer = None

    def _evict(self) -> bool:
        """Forget one address that no offer waits for."""
        for address, at in self._by_address.items():
            if at.machine.state in (DialState.DOWN, DialState.REFUSED, DialState.ALIAS):
                if at.link is not None:
                    self._hang_up(at)
                del self._by_address[address]
                return True
        return False


def _unreachable(at: DialledLink) -> Failure:
    return Failure(503, f"prefill node {at.address} cannot be reached: {at.reason}", code="peer_unreachable", stage="transfer")


def _incompatible(at: DialledLink) -> Failure:
    return Failure(503, f"prefill node {at.address} does not fit this decode node: {at.reason}", code="incompatible_peer", stage="transfer")
