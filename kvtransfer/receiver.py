"""D's side of a transfer: what was offered, and when the offered pages are D's again.

    PENDING     the link to P is not up yet; P has not seen the offer
    OFFERED     P may write
    READY       delivered: token 1 and every page are here. The transfer is over
    QUARANTINE  given up, or P was lost; P may still write until it says Closed, or until the backend's fence after a disconnect has passed
    CLOSED      over without delivery: pages returned

A client's answer never waits for pages, and pages never follow a client's answer (R2): RoomFailed is sent at once, PagesReturned when
P cannot write any more. A P that goes on without ever answering a Cancel costs its link; then the fence ends the wait.

A room that was never offered is withdrawn, if there is a connection to P or one can be made: P's request would wait for its offer until
its deadline.
"""

import enum
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from common.errors import Failure, deadline_exceeded
from kvtransfer.backend import Fence, PageIds, PeerId, TransferBackend
from kvtransfer.digest import PageDigests, unpack_digests
from kvtransfer.events import Delivered, Event, FirstToken, PagesReturned, RoomFailed
from kvtransfer.failures import corrupt_page, log_failed_room, peer_lost, protocol_error
from kvtransfer.figures import RoomFigures, Stats, peer_stats
from kvtransfer.link import FENCE_POLL_S, Address, DialFailed, DialWire, PeerLost, PeerUp
from kvtransfer.link_dial import DialledLinks, DialState
from kvtransfer.machine import Machine, Table
from kvtransfer.protocol import Cancel, Closed, Offer, pack_pages
from kvtransfer.protocol import FirstToken as FirstTokenMessage
from kvtransfer.settings import TransferSettings
from kvtransfer.timers import Timers

logger = logging.getLogger(__name__)


class ReceiverState(enum.Enum):
    PENDING = enum.auto()
    OFFERED = enum.auto()
    READY = enum.auto()
    QUARANTINE = enum.auto()
    CLOSED = enum.auto()


class ReceiverEvent(enum.Enum):
    SEND = enum.auto()
    TOKEN = enum.auto()
    DELIVER = enum.auto()
    CLOSE = enum.auto()
    GIVE_UP = enum.auto()
    FENCED = enum.auto()


S, E = ReceiverState, ReceiverEvent
RECEIVER_TABLE = Table(
    "room on the decode node",
    {
        (S.PENDING, E.SEND): S.OFFERED,
        (S.PENDING, E.GIVE_UP): S.CLOSED,
        (S.OFFERED, E.TOKEN): S.OFFERED,
        (S.OFFERED, E.DELIVER): S.READY,
        (S.OFFERED, E.CLOSE): S.CLOSED,
        (S.OFFERED, E.GIVE_UP): S.QUARANTINE,
        (S.QUARANTINE, E.TOKEN): S.QUARANTINE,
        (S.QUARANTINE, E.DELIVER): S.CLOSED,
        (S.QUARANTINE, E.CLOSE): S.CLOSED,
        (S.QUARANTINE, E.GIVE_UP): S.QUARANTINE,
        (S.QUARANTINE, E.FENCED): S.CLOSED,
    },
)


@dataclass(slots=True)
class Room:
    room: int
    attempt: int
    address: Address
    num_prompt_tokens: int
    prompt_digest: bytes
    decode_prefix_pages: int
    dst_pages: PageIds
    deadline_unix_s: float
    rid: str
    machine: Machine[ReceiverState, ReceiverEvent] = field(default_factory=lambda: Machine(RECEIVER_TABLE, S.PENDING))
    peer: PeerId | None = None  # once offered
    offered_s: float = 0.0
    token_s: float | None = None  # when token 1 came
    fence: Fence | None = None  # P is lost; only this counts now


class Receiver:
    """The whole of D's side, sans-IO: frames, disconnections, commands and the time come in; `events` and frames go out."""

    def __init__(
        self, settings: TransferSettings, incarnation: PeerId, wire: DialWire, backend: TransferBackend, clock: Callable[[], float] | None = None
    ) -> None:
        """`clock`: for figures; without one, the time of the last tick counts."""
        self.links = DialledLinks(settings, incarnation, wire, backend)
        self.events: list[Event] = []
        self._settings = settings
        self.incarnation = incarnation
        self._backend = backend
        self._next_attempt = 1
        self._clock = clock
        self._now_s = 0.0
        self._digests: PageDigests | None = None
        if settings.digest:
            assert settings.region is not None, "checksums need the pool"
            self._digests = PageDigests(settings.region)
        self._rooms: dict[int, Room] = {}
        self._withdrawals: list[tuple[Address, int, Failure]] = []  # that wait for their link
        self._timers: Timers[int] = Timers()
        self._figures = RoomFigures("offer_wait", "wait")
        self._figures.count("corrupt_pages", 0)

    # ---- the scheduler's commands ---------------------------------------------------------------------------------------------

    def offer(
        self,
        room_id: int,
        address: Address,
        num_prompt_tokens: int,
        prompt_digest: bytes,
        decode_prefix_pages: int,
        dst_pages: PageIds,
        deadline_s: float,
        deadline_unix_s: float,
        now_s: float,
        rid: str = "",
    ) -> None:
        assert room_id not in self._rooms, "a room is offered once"
        room = Room(room_id, self._next_attempt, address, num_prompt_tokens, prompt_digest, decode_prefix_pages, dst_pages, deadline_unix_s, rid)
        self._next_attempt += 1
        self._rooms[room_id] = room
        self._figures.count("offers")
        self._timers.set(room_id, deadline_s)
        reached = self.links.reach(address, now_s)
        if isinstance(reached, Failure):
            self._give_up(room, reached, now_s)
        elif reached is not None:
            self._send(room, reached, now_s)

    def withdraw(self, room_id: int, address: Address, failure: Failure, now_s: float) -> None:
        """Tell the prefill node that no offer will come, dialling it if need be. Nobody waits for this: if it cannot be told, it is not."""
        if not self.links.withdraw(address, room_id, failure):
            self.links.reach(address, now_s)
            self._withdraw_later(address, room_id, failure)

    def abort(self, room_id: int, failure: Failure, now_s: float) -> None:
        if room := self._rooms.get(room_id):
            self._give_up(room, failure, now_s, tell_scheduler=False)

    def fail(self, room_id: int, failure: Failure, now_s: float) -> None:
        """End the room for both sides."""
        if room := self._rooms.get(room_id):
            self._give_up(room, failure, now_s)

    def close(self, failure: Failure, now_s: float) -> None:
        """Give every room up."""
        for room in list(self._rooms.values()):
            self._give_up(room, failure, now_s)

    # ---- inputs from outside -----------------------------------------------------------------------------------------------

    def on_frame(self, link: int, frame: bytes, now_s: float) -> None:
        inbound = self.links.on_frame(link, frame, now_s)
        if inbound is None:
            return
        peer, message = inbound
        room = self._rooms.get(message.room)
        if room is None or room.fence is not None or (room.peer, room.attempt) != (peer, message.attempt):
            return  # an offer that is over: it crossed our Cancel, or came twice
        if isinstance(message, FirstTokenMessage):
            self._on_token(room, message, now_s)
        else:
            self._on_closed(room, message, now_s)

    def on_disconnected(self, link: int, reason: str, now_s: float) -> None:
        self.links.on_disconnected(link, reason, now_s)

    def poll_backend(self, now_s: float) -> None:
        """D posts nothing: P writes."""
        completions = self._backend.poll()
        assert not completions, f"completions of tickets nobody posted: {completions}"

    def tick(self, now_s: float) -> None:
        """Timers, then what they and the inputs did to the links."""
        self._now_s = now_s
        for room_id in self._timers.expired(now_s):
            self._on_timer(self._rooms[room_id], now_s)
        self.links.tick(now_s)
        while self.links.news:
            match self.links.news.pop(0):
                case PeerUp(address, peer):
                    for room in self._pending_for(address):
                        self._send(room, peer, now_s)
                    self._flush_withdrawals(address)
                case DialFailed(address, failure):
                    for room in self._pending_for(address):
                        self._give_up(room, failure, now_s)
                    self._flush_withdrawals(address)
                case PeerLost() as lost:
                    self._on_peer_lost(lost, now_s)

    def next_due_s(self) -> float:
        return min(self._timers.next_due_s(), self.links.next_due_s())

    def stats(self) -> Stats:
        states = Counter(room.machine.state for room in list(self._rooms.values()))
        now_s = self._now_s if self._clock is None else self._clock()
        return {
            **{f"transfer_rooms_{state.name.lower()}": states[state] for state in (S.PENDING, S.OFFERED, S.QUARANTINE)},
            **self._figures.stats(),
            **peer_stats(DialState, (peer["state"] for peer in self.links.snapshot()), self.links.heard_s(), now_s),
        }

    # ---- P's messages -----------------------------------------------------------------------------------------------------------

    def _on_token(self, room: Room, message: FirstTokenMessage, now_s: float) -> None:
        if room.machine.state is S.OFFERED and (wrong := self._wrong_token(room, message)):
            self._give_up(room, protocol_error(wrong), now_s)
        elif room.machine.fire(E.TOKEN) is S.OFFERED and room.token_s is None:
            room.token_s = now_s
            self._figures.waited("offer_wait", now_s - room.offered_s)
            self.events.append(FirstToken(room.room, message.token_id, message.num_cached_tokens))

    def _wrong_token(self, room: Room, message: FirstTokenMessage) -> str:
        """What no node that serves this model would send; "" when it may be."""
        if message.token_id >= self._settings.compat.vocab_size:
            return f"sent token {message.token_id} of a vocabulary of {self._settings.compat.vocab_size}"
        if message.num_cached_tokens > room.num_prompt_tokens:
            return f"says that {message.num_cached_tokens} of {room.num_prompt_tokens} prompt tokens were cached"
        return ""

    def _on_closed(self, room: Room, message: Closed, now_s: float) -> None:
        if room.machine.state is S.QUARANTINE:
            room.machine.fire(E.DELIVER if message.status == "DELIVERED" else E.CLOSE)
            self._end(room, PagesReturned(room.room))
        elif failure := self._failure_of(room, message):
            room.machine.fire(E.CLOSE)
            self._note_failed(room, failure)
            self.events.append(RoomFailed(room.room, failure))
            self._end(room, PagesReturned(room.room))
        else:
            room.machine.fire(E.DELIVER)
            self._figures.waited("wait", now_s - (room.token_s or now_s))
            self._end(room, Delivered(room.room))

    def _failure_of(self, room: Room, message: Closed) -> Failure | None:
        """Why the room is not delivered, if it is not."""
        if message.status != "DELIVERED":
            return message.failure or Failure(503, f"the prefill node closed the room: {message.status}", code="transfer_failed", stage="transfer")
        if room.token_s is None:
            return protocol_error("closed the room without token 1")
        if self._digests is None:
            return None
        sent = unpack_digests(message.page_digests, len(room.dst_pages))
        if sent is None:
            return protocol_error(f"sent {len(message.page_digests)} bytes of checksums for {len(room.dst_pages)} pages; 4 a page were asked for")
        arrived = self._digests.of(room.dst_pages)
        damaged = np.flatnonzero(arrived != sent)
        self._figures.count("corrupt_pages", len(damaged))
        if not len(damaged):
            return None
        at = int(damaged[0])
        return corrupt_page(room.decode_prefix_pages + at, int(room.dst_pages[at]), int(sent[at]), int(arrived[at]))

    def _on_peer_lost(self, lost: PeerLost, now_s: float) -> None:
        for room in [room for room in self._rooms.values() if room.peer == lost.peer and room.fence is None]:
            self._give_up(room, peer_lost("prefill", lost.reason), now_s)
            room.fence = lost.fence
            self._timers.set(room.room, now_s + lost.fence.delay_s)

    # ---- a room's way ---------------------------------------------------------------------------------------------------------

    def _send(self, room: Room, peer: PeerId, now_s: float) -> None:
        room.machine.fire(E.SEND)
        room.peer, room.offered_s = peer, now_s
        self.links.send(
            peer,
            Offer(
                room=room.room,
                attempt=room.attempt,
                sender=self.incarnation,
                receiver=peer,
                num_prompt_tokens=room.num_prompt_tokens,
                prompt_digest=room.prompt_digest,
                decode_prefix_pages=room.decode_prefix_pages,
                dst_pages=pack_pages(room.dst_pages),
                deadline_unix_s=room.deadline_unix_s,
                digest=self._digests is not None,
            ),
        )

    def _give_up(self, room: Room, failure: Failure, now_s: float, *, tell_scheduler: bool = True) -> None:
        """Tell the scheduler and P, once; the first cause counts."""
        was = room.machine.state
        now = room.machine.fire(E.GIVE_UP)
        if was is now:
            return
        self._note_failed(room, failure)
        if tell_scheduler:
            self.events.append(RoomFailed(room.room, failure))
        if now is S.CLOSED:
            self._end(room, PagesReturned(room.room))
            if not self.links.withdraw(room.address, room.room, failure):
                self._withdraw_later(room.address, room.room, failure)
            return
        assert room.peer is not None
        self.links.send(room.peer, Cancel(room=room.room, attempt=room.attempt, sender=self.incarnation, receiver=room.peer, failure=failure))
        self._timers.set(room.room, now_s + self._settings.stuck_timeout_s)

    def _on_timer(self, room: Room, now_s: float) -> None:
        if room.fence is not None and not room.fence.passed():
            self._timers.set(room.room, now_s + FENCE_POLL_S)
        elif room.fence is not None:
            room.machine.fire(E.FENCED)
            self._end(room, PagesReturned(room.room))
        elif room.machine.state is S.QUARANTINE:
            assert room.peer is not None
            self.links.lose(room.peer, f"a Cancel was not answered within {self._settings.stuck_timeout_s:g} s", now_s)
        else:
            self._give_up(room, deadline_exceeded("transfer"), now_s)

    def _end(self, room: Room, terminal: Delivered | PagesReturned) -> None:
        del self._rooms[room.room]
        self._timers.cancel(room.room)
        self._figures.count("delivered" if isinstance(terminal, Delivered) else "failed")
        self.events.append(terminal)

    def _note_failed(self, room: Room, failure: Failure) -> None:
        log_failed_room(room.room, room.rid, str(room.address), failure)
        self._figures.failed(failure.code)

    def _withdraw_later(self, address: Address, room_id: int, failure: Failure) -> None:
        """When the link is up, if it is being dialled."""
        if self.links.is_dialling(address) and len(self._withdrawals) < self._settings.max_rooms:
            self._withdrawals.append((address, room_id, failure))
        else:
            logger.debug("room %d is not withdrawn from prefill node %s: it cannot be reached, or too many wait for it", room_id, address)

    def _flush_withdrawals(self, address: Address) -> None:
        """The address was dialled: tell it what there is to tell, if it answered, were it with a refusal."""
        waiting, self._withdrawals = self._withdrawals, []
        for due in waiting:
            if due[0] != address:
                self._withdrawals.append(due)
            elif not self.links.withdraw(*due):
                logger.debug("room %d is not withdrawn from prefill node %s: it cannot be reached", due[1], address)

    def _pending_for(self, address: Address) -> list[Room]:
        return [room for room in self._rooms.values() if room.machine.state is S.PENDING and room.address == address]
