"""P's links: decode nodes that said Hello.

    FENCED  D came back under the same incarnation before the fence of its former link was over: writes of that link may still
            land until then, and D lets this node in as soon as it has the HelloAck. So the HelloAck waits.
    UP      acknowledged; the backend can write to it
    DOWN    forgotten

A Hello on another connection replaces the incarnation's link, unless D says that it still holds one to this process: then D has
only met this node under a second name, gets its HelloAck, and goes on by its first link. A message on a connection without a link
is answered with a refusal: D dropped by a timeout learns so, and says Hello again with its next offer. Only a Withdraw passes without
one: it takes nothing but a room that waits for its offer, and a D that was refused has no other way to say it.
"""

import enum
import logging

import msgspec

from kvtransfer.backend import Fence, PeerId, TransferBackend, TransferError
from kvtransfer.lease import Lease
from kvtransfer.link import FENCE_POLL_S, AcceptWire, LinkNews, PeerLost, RareWarning
from kvtransfer.machine import Machine, Table
from kvtransfer.protocol import (
    Cancel,
    Heartbeat,
    Hello,
    HelloBody,
    Message,
    Offer,
    Undecodable,
    Withdraw,
    decode_to_prefill,
    encode,
    hello_ack,
    hello_refusal,
    read_hello,
)
from kvtransfer.settings import TransferSettings
from kvtransfer.timers import Timers

logger = logging.getLogger(__name__)


class AcceptState(enum.Enum):
    FENCED = enum.auto()
    UP = enum.auto()
    DOWN = enum.auto()


class AcceptEvent(enum.Enum):
    ADMIT = enum.auto()
    REFUSE = enum.auto()
    LOSE = enum.auto()


ACCEPT_TABLE = Table(
    "accepted link",
    {
        (AcceptState.FENCED, AcceptEvent.ADMIT): AcceptState.UP,
        (AcceptState.FENCED, AcceptEvent.REFUSE): AcceptState.DOWN,
        (AcceptState.FENCED, AcceptEvent.LOSE): AcceptState.DOWN,
        (AcceptState.UP, AcceptEvent.LOSE): AcceptState.DOWN,
    },
)


class AcceptedLink:
    def __init__(self, peer: PeerId, route: bytes, body: HelloBody, observed_host: str | None, now_s: float) -> None:
        self.machine = Machine(ACCEPT_TABLE, AcceptState.FENCED)
        self.peer = peer
        self.route = route
        self.body = body
        self.observed_host = observed_host
        self.heard_s = now_s
        self.lease = Lease(body.peer_timeout_s)


class Timer(enum.Enum):
    BEAT = enum.auto()
    SILENT = enum.auto()
    FENCE = enum.auto()


class AcceptedLinks:
    def __init__(self, settings: TransferSettings, incarnation: PeerId, wire: AcceptWire, backend: TransferBackend) -> None:
        self.news: list[LinkNews] = []
        self._settings = settings
        self._incarnation = incarnation
        self._wire = wire
        self._backend = backend
        self._body = HelloBody(settings.compat, backend.describe(), settings.beat_s, settings.silent_s)
        self._by_peer: dict[PeerId, AcceptedLink] = {}
        self._by_route: dict[bytes, AcceptedLink] = {}
        self._fences: dict[PeerId, Fence] = {}  # of lost peers
        self._broken: dict[PeerId, None] = {}  # a send failed: lost at the next tick, never in the middle of a session's step
        self._timers: Timers[tuple[Timer, PeerId]] = Timers()
        self._warn = RareWarning(logger)

    def on_frame(self, route: bytes, frame: bytes, observed_host: str | None, now_s: float) -> tuple[PeerId, Offer | Cancel | Withdraw] | None:
        """The message, if it is for the room sessions: from an admitted peer, meant for this process. `now_s`: not before its arrival."""
        try:
            message = decode_to_prefill(frame)
        except Undecodable as error:
            self._warn(now_s, f"control message from {observed_host} dropped: {error}")
            return None
        if isinstance(message, Hello):
            self._on_hello(route, message, observed_host, now_s)
            return None
        link = self._by_route.get(route)
        if link is None or link.machine.state is not AcceptState.UP:
            if isinstance(message, Withdraw):
                return (PeerId(message.sender), message) if message.receiver == self._incarnation else None
            self._refuse(route, "no link: say Hello first")
            return None
        if message.sender != link.peer or message.receiver != self._incarnation:
            self._warn(now_s, f"{type(message).__name__} from {observed_host} dropped: it names {message.sender} -> {message.receiver}")
            return None
        link.heard_s = now_s
        if not isinstance(message, Heartbeat):
            return link.peer, message
        link.lease.echoed(message.echo_s)
        return None

    def send(self, peer: PeerId, message: Message) -> None:
        """To an admitted peer; a lost one is passed over."""
        link = self._by_peer.get(peer)
        if link is not None and link.machine.state is AcceptState.UP and not self._wire.send(link.route, encode(message)):
            self._broken[peer] = None

    def may_post(self, peer: PeerId, now_s: float) -> bool:
        """The peer is up and has not dropped this node (lease.py). `now_s`: the clock as it is this moment."""
        link = self._by_peer.get(peer)
        return link is not None and link.machine.state is AcceptState.UP and link.lease.holds(now_s)

    def lose(self, peer: PeerId, reason: str, now_s: float) -> None:
        """Forget the peer and stop its transfers. Unknown peers are ignored."""
        link = self._by_peer.get(peer)
        if link is None:
            return
        was_up = link.machine.state is AcceptState.UP
        self._forget(link, AcceptEvent.LOSE)
        if was_up:
            logger.warning("decode node %s lost: %s", self._name(link), reason)
            fence = self._fences[peer] = self._backend.disconnect(peer)
            self._timers.set((Timer.FENCE, peer), now_s + fence.delay_s)
            self.news.append(PeerLost(peer, reason, fence))

    def probe(self, now_s: float) -> None:
        """Some connection has ended: find out whose. Routes that are gone are lost at the next tick."""
        for link in list(self._by_peer.values()):
            self._beat(link, now_s)

    def tick(self, now_s: float) -> None:
        for peer in list(self._broken):
            self.lose(peer, "its connection ended", now_s)
        for timer, peer in self._timers.expired(now_s):
            link = self._by_peer.get(peer)
            if timer is Timer.FENCE and not self._fences[peer].passed():
                self._timers.set((timer, peer), now_s + FENCE_POLL_S)
            elif timer is Timer.FENCE:
                del self._fences[peer]
                if link is not None:
                    self._admit(link, now_s)
            elif link is not None and timer is Timer.BEAT:
                self._beat(link, now_s)
                self._timers.set((Timer.BEAT, peer), now_s + self._beat_s(link))
            elif link is not None:
                self._check_silence(link, now_s)

    def next_due_s(self) -> float:
        return -1.0 if self._broken else self._timers.next_due_s()

    def snapshot(self) -> list[dict[str, str]]:
        return [{"endpoint": self._name(link), "state": link.machine.state.name.lower(), "reason": ""} for link in list(self._by_peer.values())]

    def heard_s(self) -> list[float]:
        """When each peer was heard last."""
        return [link.heard_s for link in list(self._by_peer.values())]

    # ---- Hello ------------------------------------------------------------------------------------------------------------

    def _on_hello(self, route: bytes, message: Hello, observed_host: str | None, now_s: float) -> None:
        body = read_hello(message, self._settings.compat)
        if isinstance(body, str):
            self._warn(now_s, f"decode node at {observed_host} refused: {body}")
            return self._refuse(route, body)
        peer = PeerId(message.incarnation)
        known = self._by_peer.get(peer)
        if known is not None and known.route == route:
            return self._acknowledge(known, now_s) if known.machine.state is AcceptState.UP else None
        if known is not None and self._incarnation in body.live:
            return self._send_ack(route, now_s)
        self.lose(peer, "it came back by another connection", now_s)
        if former := self._by_route.get(route):
            self.lose(former.peer, "its connection serves another process", now_s)
        if len(self._by_peer) >= self._settings.max_links:
            return self._refuse(route, f"this node serves {len(self._by_peer)} decode nodes already; start more prefill nodes")
        link = AcceptedLink(peer, route, body, observed_host, now_s)
        self._by_peer[peer] = self._by_route[route] = link
        return None if peer in self._fences else self._admit(link, now_s)

    def _admit(self, link: AcceptedLink, now_s: float) -> None:
        try:
            self._backend.connect(link.peer, link.body.description, link.observed_host)
        except TransferError as error:
            self._forget(link, AcceptEvent.REFUSE)
            self._warn(now_s, f"decode node {self._name(link)} refused: {error}")
            return self._refuse(link.route, f"KV transfer: {error}")
        link.machine.fire(AcceptEvent.ADMIT)
        link.heard_s = now_s
        self._timers.set((Timer.BEAT, link.peer), now_s + self._beat_s(link))
        self._timers.set((Timer.SILENT, link.peer), now_s + self._settings.silent_s)
        logger.info("decode node %s joined", self._name(link))
        return self._acknowledge(link, now_s)

    def _acknowledge(self, link: AcceptedLink, now_s: float) -> None:
        link.lease.sent(now_s)
        self._send_ack(link.route, now_s)

    def _send_ack(self, route: bytes, now_s: float) -> None:
        self._wire.send(route, encode(hello_ack(self._incarnation, msgspec.structs.replace(self._body, sent_s=now_s))))

    def _refuse(self, route: bytes, reason: str) -> None:
        self._wire.send(route, encode(hello_refusal(self._incarnation, reason)))

    # ---- life -------------------------------------------------------------------------------------------------------------

    def _check_silence(self, link: AcceptedLink, now_s: float) -> None:
        silent_at_s = link.heard_s + self._settings.silent_s
        if silent_at_s <= now_s:
            self.lose(link.peer, f"nothing heard of it for {self._settings.peer_timeout_s:g} s", now_s)
        else:
            self._timers.set((Timer.SILENT, link.peer), silent_at_s)

    def _forget(self, link: AcceptedLink, event: AcceptEvent) -> None:
        link.machine.fire(event)
        del self._by_peer[link.peer]
        del self._by_route[link.route]
        self._broken.pop(link.peer, None)
        self._timers.cancel((Timer.BEAT, link.peer))
        self._timers.cancel((Timer.SILENT, link.peer))

    def _beat(self, link: AcceptedLink, now_s: float) -> None:
        link.lease.sent(now_s)
        self.send(link.peer, Heartbeat(self._incarnation, link.peer, sent_s=now_s))

    def _beat_s(self, link: AcceptedLink) -> float:
        return min(self._settings.beat_s, link.body.heartbeat_s)

    @staticmethod
    def _name(link: AcceptedLink) -> str:
        return f"{link.observed_host or 'local'}/{link.peer[:8]}"
