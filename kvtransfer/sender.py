"""P's side of a transfer: rooms in which a request and an offer meet (sender_room.py has their states), and what is owed to both.

What is owed. To D: exactly one Closed per Offer, when no write of the room is outstanding (R3); none to a D that is lost: it knows,
and fences. To the scheduler, for a room it expected: Delivered, or RoomFailed (unless it gave the room up itself) and PagesReturned.
The first cause is kept and goes both ways (R6). Every state has a timer; a room that cannot drain costs its peer the link, because
completions are certain after a disconnect.

An offer that nobody has asked for parks and creates nothing else. Messages about offers that are not held are answered REFUSED.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable

import numpy as np

from common.errors import Failure, deadline_exceeded
from kvtransfer.backend import PageIds, PeerId, PeerUnknown, Ticket, TransferBackend
from kvtransfer.events import Delivered, Event, OfferJoined, PagesReturned, RoomFailed
from kvtransfer.link import AcceptWire, PeerLost, peer_lost
from kvtransfer.link_accept import AcceptedLinks
from kvtransfer.machine import IllegalTransition
from kvtransfer.protocol import Cancel, Closed, ClosedStatus, FirstToken, Offer, num_pages_of, unpack_pages
from kvtransfer.sender_room import (
    SENDER_TABLE,
    STAGE,
    Ended,
    HeldOffer,
    OfferId,
    Prompt,
    Room,
    SenderEvent,
    duplicate_room,
    prompt_mismatch,
    write_failed,
)
from kvtransfer.sender_room import SenderEvent as E
from kvtransfer.sender_room import SenderState as S
from kvtransfer.settings import TransferSettings
from kvtransfer.timers import Timers

MAX_ENDED = 8192  # rooms remembered after their end: minutes of them at tens of requests a second


class Sender:
    """The whole of P's side, sans-IO: frames, completions, commands and the time come in; `events` and frames go out."""

    def __init__(
        self, settings: TransferSettings, incarnation: PeerId, wire: AcceptWire, backend: TransferBackend, to_local_s: Callable[[float], float]
    ) -> None:
        """`to_local_s`: a unix time on this node's monotonic clock."""
        self.links = AcceptedLinks(settings, incarnation, wire, backend)
        self.events: list[Event] = []
        self._settings = settings
        self.incarnation = incarnation
        self._backend = backend
        self._to_local_s = to_local_s
        self._rooms: dict[int, Room] = {}
        self._tickets: dict[Ticket, tuple[Room, int]] = {}  # with the number of pages
        self._ended: OrderedDict[int, Ended] = OrderedDict()
        self._timers: Timers[int] = Timers()
        self._totals: Counter[str] = Counter(offers=0, delivered=0, failed=0, bytes_written=0)

    # ---- the scheduler's commands ---------------------------------------------------------------------------------------------

    def expect(self, room_id: int, num_prompt_tokens: int, prompt_digest: bytes, deadline_s: float, now_s: float) -> None:
        if ended := self._ended.get(room_id):
            failure, ended.failure = ended.failure or duplicate_room(room_id), None
            self.events += [RoomFailed(room_id, failure), PagesReturned(room_id)]
            return
        room = self._rooms.get(room_id) or Room(room_id)
        room.machine.fire(E.EXPECT)
        self._rooms[room_id] = room
        room.request, room.request_deadline_s = Prompt(num_prompt_tokens, prompt_digest), deadline_s
        if room.offer is None:
            self._timers.set(room_id, deadline_s)  # its decode node may rightly be waiting for pages: only the deadline ends this
        else:
            self._join(room, room.offer, now_s)

    def send_pages(self, room_id: int, first_page: int, local_pages: PageIds, now_s: float) -> None:
        room = self._under_way(room_id, E.PAGES)
        if room is None:
            return
        assert room.offer is not None
        skip = max(room.offer.decode_prefix_pages - first_page, 0)
        wanted = local_pages[skip:]
        start = first_page + skip - room.offer.decode_prefix_pages
        slots = slice(start, start + len(wanted))
        if slots.stop > len(room.handed_over) or room.handed_over[slots].any():
            raise IllegalTransition(f"room {room_id}: pages [{first_page}, {first_page + len(local_pages)}) are not the prompt's, or are sent again")
        room.machine.fire(E.PAGES)
        if len(wanted):
            room.handed_over[slots] = True
            self._write(room, room.offer, wanted, slots, now_s)

    def send_first_token(self, room_id: int, token_id: int, num_cached_tokens: int, now_s: float) -> None:
        room = self._under_way(room_id, E.TOKEN)
        if room is None:
            return
        if room.token_sent:
            raise IllegalTransition(f"room {room_id}: token 1 is sent again")
        assert room.offer is not None
        room.machine.fire(E.TOKEN)
        room.token_sent = True
        peer, attempt = room.offer.id
        self.links.send(
            peer,
            FirstToken(room=room_id, attempt=attempt, sender=self.incarnation, receiver=peer, token_id=token_id, num_cached_tokens=num_cached_tokens),
        )

    def finish(self, room_id: int, now_s: float) -> None:
        room = self._under_way(room_id, E.FINISH)
        if room is None:
            return
        if not room.token_sent or not room.handed_over.all():
            raise IllegalTransition(f"room {room_id}: finished without token 1, or without pages {np.flatnonzero(~room.handed_over).tolist()[:8]}")
        room.machine.fire(E.FINISH)
        self._close_if_drained(room)

    def abort(self, room_id: int, failure: Failure, now_s: float) -> None:
        """The scheduler gives the room up. One that it never expected is answered so too, now or when its offer comes."""
        room = self._rooms.get(room_id)
        if room is not None:
            self._fail(room, failure, now_s, status="ABORTED", tell_scheduler=False)
        elif room_id not in self._ended:
            self._remember(room_id, Ended(None, failure))

    def fail(self, room_id: int, failure: Failure, now_s: float) -> None:
        """End the room for both sides."""
        if room := self._rooms.get(room_id):
            self._fail(room, failure, now_s)

    def close(self, failure: Failure, now_s: float) -> None:
        """End every room. Rooms with writes outstanding are closed to nobody: the link's end makes D fence them."""
        for room in list(self._rooms.values()):
            room.peer_gone = room.peer_gone or room.num_outstanding > 0
            self._fail(room, failure, now_s)

    # ---- inputs from outside -----------------------------------------------------------------------------------------------

    def on_frame(self, route: bytes, frame: bytes, observed_host: str | None, now_s: float) -> None:
        inbound = self.links.on_frame(route, frame, observed_host, now_s)
        if inbound is not None:
            peer, message = inbound
            if isinstance(message, Offer):
                self._on_offer(peer, message, now_s)
            else:
                self._on_cancel(peer, message, now_s)

    def poll_backend(self, now_s: float) -> None:
        self._take_news(now_s)  # a lost peer is the cause, its tickets' errors the echo
        for completion in self._backend.poll():
            room, num_pages = self._tickets.pop(completion.ticket)
            room.num_outstanding -= 1
            if completion.error is None:
                self._totals["bytes_written"] += num_pages * self._settings.compat.page_nbytes
                self._close_if_drained(room)
            else:
                self._fail(room, write_failed(completion.error), now_s)

    def tick(self, now_s: float) -> None:
        """Timers, then what they and the inputs did to the links."""
        for room_id in self._timers.expired(now_s):
            self._on_timer(self._rooms[room_id], now_s)
        self.links.tick(now_s)
        self._take_news(now_s)

    def next_due_s(self) -> float:
        return min(self._timers.next_due_s(), self.links.next_due_s())

    def stats(self) -> dict[str, float]:
        states = Counter(room.machine.state for room in list(self._rooms.values()))
        return {
            **{f"transfer_rooms_{state.name.lower()}": states[state] for state in S if state not in (S.NEW, S.CLOSED)},
            **{f"transfer_{name}_total": total for name, total in self._totals.items()},
        }

    # ---- D's messages --------------------------------------------------------------------------------------------------------

    def _on_offer(self, peer: PeerId, message: Offer, now_s: float) -> None:
        offer_id = peer, message.attempt
        room, ended = self._rooms.get(message.room), self._ended.get(message.room)
        if (room and room.offer and room.offer.id == offer_id) or (ended and ended.offer_id == offer_id):
            return None  # the same message again: its Closed is owed or was sent
        self._totals["offers"] += 1
        if ended is not None:
            failure = duplicate_room(message.room) if ended.offer_id or not ended.failure else ended.failure
            ended.offer_id = ended.offer_id or offer_id
            return self._answer(offer_id, message.room, "FAILED", failure)
        if room is not None and room.offer is not None:
            return self._answer(offer_id, message.room, "FAILED", duplicate_room(message.room))
        try:
            held = self._read(offer_id, message)
        except ValueError as error:
            return self._answer(offer_id, message.room, "FAILED", Failure(400, f"bad offer: {error}", code="bad_offer", stage="transfer"))
        if room is None and self._num_parked() >= self._settings.max_rooms:
            full = f"{self._num_parked()} offers wait for their requests already"
            return self._answer(offer_id, message.room, "REFUSED", Failure(503, full, code="overloaded", stage="transfer", retry_after_s=1.0))
        room = room or Room(message.room)
        room.machine.fire(E.OFFER)
        self._rooms[message.room] = room
        room.offer, room.handed_over = held, np.zeros(len(held.dst_pages), np.bool_)
        if room.request is None:
            self._timers.set(message.room, min(held.deadline_s, now_s + self._settings.offer_timeout_s))
        else:
            self._join(room, held, now_s)
        return None

    def _read(self, offer_id: OfferId, message: Offer) -> HeldOffer:
        """Raises ValueError for an offer that does not hold together."""
        pages = unpack_pages(message.dst_pages)
        num_wanted = num_pages_of(message.num_prompt_tokens, self._settings.compat.page_size) - message.decode_prefix_pages
        if len(pages) != num_wanted:
            raise ValueError(f"{len(pages)} pages for {num_wanted}")
        prompt = Prompt(message.num_prompt_tokens, message.prompt_digest)
        return HeldOffer(offer_id, prompt, message.decode_prefix_pages, pages, self._to_local_s(message.deadline_unix_s))

    def _on_cancel(self, peer: PeerId, message: Cancel, now_s: float) -> None:
        room = self._rooms.get(message.room)
        if room is not None and room.offer is not None and room.offer.id == (peer, message.attempt):
            self._fail(room, message.failure, now_s, status="ABORTED")
        else:
            unknown = Failure(503, "the prefill node holds no such offer", code="unknown_offer", stage="transfer")
            self._answer((peer, message.attempt), message.room, "REFUSED", unknown)

    def _take_news(self, now_s: float) -> None:
        while self.links.news:
            news = self.links.news.pop(0)
            if isinstance(news, PeerLost):
                self._on_peer_lost(news, now_s)

    def _on_peer_lost(self, lost: PeerLost, now_s: float) -> None:
        for room in [room for room in self._rooms.values() if room.offer is not None and room.offer.id[0] == lost.peer]:
            room.peer_gone = True
            self._fail(room, peer_lost("decode", lost.reason), now_s)

    # ---- a room's way ---------------------------------------------------------------------------------------------------------

    def _join(self, room: Room, offer: HeldOffer, now_s: float) -> None:
        assert room.request is not None
        if room.request != offer.prompt:
            self._fail(room, prompt_mismatch(room.request, offer.prompt), now_s)
        else:
            self._timers.set(room.room, min(room.request_deadline_s, offer.deadline_s))
            self.events.append(OfferJoined(room.room, offer.decode_prefix_pages))

    def _under_way(self, room_id: int, event: SenderEvent) -> Room | None:
        """The room, if it still goes on. Raises IllegalTransition when `event` may not happen in it."""
        room = self._rooms.get(room_id)
        return room if room is not None and SENDER_TABLE.after(room.machine.state, event) is not S.DRAINING else None

    def _write(self, room: Room, offer: HeldOffer, local_pages: PageIds, slots: slice, now_s: float) -> None:
        try:
            ticket = self._backend.post("WRITE", offer.id[0], local_pages, offer.dst_pages[slots])
        except PeerUnknown as error:  # lost in this very step: the news is on its way
            self._fail(room, peer_lost("decode", str(error)), now_s)
            return
        self._tickets[ticket] = room, len(local_pages)
        room.num_outstanding += 1

    def _on_timer(self, room: Room, now_s: float) -> None:
        state = room.machine.state
        if state is S.DRAINING:
            assert room.offer is not None
            self.links.lose(room.offer.id[0], f"a write to it did not end within {self._settings.stuck_timeout_s:g} s", now_s)
        elif state is S.PARKED and room.offer is not None and now_s < room.offer.deadline_s:
            sentence = f"the request of this offer has not come within {self._settings.offer_timeout_s:g} s"
            self._fail(room, Failure(503, sentence, code="offer_expired", stage="transfer"), now_s)
        else:
            self._fail(room, deadline_exceeded(STAGE.get(state, "transfer")), now_s)

    def _fail(self, room: Room, failure: Failure, now_s: float, *, status: ClosedStatus = "FAILED", tell_scheduler: bool = True) -> None:
        room.machine.fire(E.FAIL)
        if room.failure is None:
            room.failure, room.status = failure, status
            if room.request is not None and tell_scheduler:
                self.events.append(RoomFailed(room.room, failure))
            self._timers.set(room.room, now_s + self._settings.stuck_timeout_s)
        self._close_if_drained(room)

    def _close_if_drained(self, room: Room) -> None:
        if room.num_outstanding or room.machine.state not in (S.SENDING, S.DRAINING):
            return
        room.machine.fire(E.DRAINED)
        del self._rooms[room.room]
        self._timers.cancel(room.room)
        if room.offer is not None and not room.peer_gone:
            self._answer(room.offer.id, room.room, room.status, room.failure)
        if room.request is not None:
            self.events.append(PagesReturned(room.room) if room.failure else Delivered(room.room))
        self._totals["failed" if room.failure else "delivered"] += 1
        met = room.request is not None and room.offer is not None
        self._remember(room.room, Ended(room.offer.id if room.offer else None, None if met else room.failure))

    def _remember(self, room_id: int, ended: Ended) -> None:
        self._ended[room_id] = ended
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _answer(self, offer_id: OfferId, room_id: int, status: ClosedStatus, failure: Failure | None) -> None:
        peer, attempt = offer_id
        self.links.send(peer, Closed(room=room_id, attempt=attempt, sender=self.incarnation, receiver=peer, status=status, failure=failure))

    def _num_parked(self) -> int:
        return sum(room.machine.state is S.PARKED for room in self._rooms.values())
