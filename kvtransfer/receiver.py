"""D's side of a transfer: what was offered, and when the offered pages are D's again.

    PENDING     the link to P is not up yet; P has not seen the offer
    OFFERED     P may write
    READY       delivered: token 1 and every page are here. The transfer is over
    QUARANTINE  given up, or P was lost; P may still write until it says Closed, or until the backend's fence after a disconnect has passed
    CLOSED      over without delivery: pages returned

A client's answer never waits for pages, and pages never follow a client's answer (R2): RoomFailed is sent at once, PagesReturned when
P cannot write any more. A P that goes on without ever answering a Cancel costs its link; then the fence ends the wait.
"""

import enum
from collections import Counter
from dataclasses import dataclass, field

from common.errors import Failure, deadline_exceeded
from kvtransfer.backend import Fence, PageIds, PeerId, TransferBackend
from kvtransfer.events import Delivered, Event, FirstToken, PagesReturned, RoomFailed
from kvtransfer.link import FENCE_POLL_S, Address, DialFailed, DialWire, PeerLost, PeerUp, peer_lost
from kvtransfer.link_dial import DialledLinks
from kvtransfer.machine import Machine, Table
from kvtransfer.protocol import Cancel, Closed, Offer, pack_pages
from kvtransfer.protocol import FirstToken as FirstTokenMessage
from kvtransfer.settings import TransferSettings
from kvtransfer.timers import Timers


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
    machine: Machine[ReceiverState, ReceiverEvent] = field(default_factory=lambda: Machine(RECEIVER_TABLE, S.PENDING))
    peer: PeerId | None = None  # once offered
    token_here: bool = False
    fence: Fence | None = None  # P is lost; only this counts now


class Receiver:
    """The whole of D's side, sans-IO: frames, disconnections, commands and the time come in; `events` and frames go out."""

    def __init__(self, settings: TransferSettings, incarnation: PeerId, wire: DialWire, backend: TransferBackend) -> None:
        self.links = DialledLinks(settings, incarnation, wire, backend)
        self.events: list[Event] = []
        self._settings = settings
        self.incarnation = incarnation
        self._backend = backend
        self._next_attempt = 1
        self._rooms: dict[int, Room] = {}
        self._timers: Timers[int] = Timers()
        self._totals: Counter[str] = Counter(offers=0, delivered=0, failed=0)

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
    ) -> None:
        assert room_id not in self._rooms, "a room is offered once"
        room = Room(room_id, self._next_attempt, address, num_prompt_tokens, prompt_digest, decode_prefix_pages, dst_pages, deadline_unix_s)
        self._next_attempt += 1
        self._rooms[room_id] = room
        self._totals["offers"] += 1
        self._timers.set(room_id, deadline_s)
        reached = self.links.reach(address, now_s)
        if isinstance(reached, Failure):
            self._give_up(room, reached, now_s)
        elif reached is not None:
            self._send(room, reached)

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
            self._on_token(room, message)
        else:
            self._on_closed(room, message)

    def on_disconnected(self, link: int, reason: str, now_s: float) -> None:
        self.links.on_disconnected(link, reason, now_s)

    def poll_backend(self, now_s: float) -> None:
        """D posts nothing: P writes."""
        completions = self._backend.poll()
        assert not completions, f"completions of tickets nobody posted: {completions}"

    def tick(self, now_s: float) -> None:
        """Timers, then what they and the inputs did to the links."""
        for room_id in self._timers.expired(now_s):
            self._on_timer(self._rooms[room_id], now_s)
        self.links.tick(now_s)
        while self.links.news:
            match self.links.news.pop(0):
                case PeerUp(address, peer):
                    for room in self._pending_for(address):
                        self._send(room, peer)
                case DialFailed(address, failure):
                    for room in self._pending_for(address):
                        self._give_up(room, failure, now_s)
                case PeerLost() as lost:
                    self._on_peer_lost(lost, now_s)

    def next_due_s(self) -> float:
        return min(self._timers.next_due_s(), self.links.next_due_s())

    def stats(self) -> dict[str, float]:
        states = Counter(room.machine.state for room in list(self._rooms.values()))
        return {
            **{f"transfer_rooms_{state.name.lower()}": states[state] for state in (S.PENDING, S.OFFERED, S.QUARANTINE)},
            **{f"transfer_{name}_total": total for name, total in self._totals.items()},
        }

    # ---- P's messages -----------------------------------------------------------------------------------------------------------

    def _on_token(self, room: Room, message: FirstTokenMessage) -> None:
        if room.machine.fire(E.TOKEN) is S.OFFERED and not room.token_here:
            room.token_here = True
            self.events.append(FirstToken(room.room, message.token_id, message.num_cached_tokens))

    def _on_closed(self, room: Room, message: Closed) -> None:
        given_up = room.machine.state is S.QUARANTINE
        if message.status == "DELIVERED" and (room.token_here or given_up):
            room.machine.fire(E.DELIVER)
            self._end(room, PagesReturned(room.room) if given_up else Delivered(room.room))
            return
        room.machine.fire(E.CLOSE)
        if not given_up:
            self.events.append(RoomFailed(room.room, _failure_of(message)))
        self._end(room, PagesReturned(room.room))

    def _on_peer_lost(self, lost: PeerLost, now_s: float) -> None:
        for room in [room for room in self._rooms.values() if room.peer == lost.peer and room.fence is None]:
            self._give_up(room, peer_lost("prefill", lost.reason), now_s)
            room.fence = lost.fence
            self._timers.set(room.room, now_s + lost.fence.delay_s)

    # ---- a room's way ---------------------------------------------------------------------------------------------------------

    def _send(self, room: Room, peer: PeerId) -> None:
        room.machine.fire(E.SEND)
        room.peer = peer
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
            ),
        )

    def _give_up(self, room: Room, failure: Failure, now_s: float, *, tell_scheduler: bool = True) -> None:
        """Tell the scheduler and P, once; the first cause counts."""
        was = room.machine.state
        now = room.machine.fire(E.GIVE_UP)
        if was is now:
            return
        if tell_scheduler:
            self.events.append(RoomFailed(room.room, failure))
        if now is S.CLOSED:
            self._end(room, PagesReturned(room.room))
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
        self._totals["delivered" if isinstance(terminal, Delivered) else "failed"] += 1
        self.events.append(terminal)

    def _pending_for(self, address: Address) -> list[Room]:
        return [room for room in self._rooms.values() if room.machine.state is S.PENDING and room.address == address]


def _failure_of(message: Closed) -> Failure:
    if message.status == "DELIVERED":
        return Failure(503, "the prefill node closed the room without token 1", code="protocol_error", stage="transfer")
    return message.failure or Failure(503, f"the prefill node closed the room: {message.status}", code="transfer_failed", stage="transfer")
