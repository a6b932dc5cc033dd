"""P's side of a transfer: rooms in which a request and an offer meet (sender_room.py has their states), and what is owed to both.

What is owed. To D: exactly one Closed per Offer, when no write of the room is outstanding (R3); none to a D that is lost: it knows,
and fences. To the scheduler, for a room it expected: Delivered, or RoomFailed (unless it gave the room up itself) and PagesReturned.
The first cause is kept and goes both ways (R6). Every state has a timer; a room that cannot drain costs its peer the link, because
completions are certain after a disconnect.

Pages that were handed over leave in batches, not always at once (writes.py): what may not leave yet waits in its room, which goes on
being timed.

An offer that nobody has asked for parks and creates nothing else. Messages about offers that are not held are answered REFUSED, and
the offer is never held afterwards, in whatever order its messages come: D has been told that its pages are its own again.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable

import numpy as np

from common.errors import Failure, deadline_exceeded
from kvtransfer.backend import PageIds, PeerId, TransferBackend
from kvtransfer.digest import pack_digests
from kvtransfer.events import Delivered, Event, OfferJoined, PagesReturned, RoomFailed
from kvtransfer.failures import duplicate_room, log_failed_room, peer_lost, prompt_mismatch, unknown_offer
from kvtransfer.figures import RoomFigures, Stats, peer_stats
from kvtransfer.link import AcceptWire, PeerLost
from kvtransfer.link_accept import AcceptedLinks, AcceptState
from kvtransfer.machine import IllegalTransition
from kvtransfer.outgoing import Outgoing, Ready
from kvtransfer.protocol import Cancel, Closed, ClosedStatus, FirstToken, Offer, Withdraw, num_pages_of, unpack_pages
from kvtransfer.sender_room import SENDER_TABLE, STAGE, Ended, HeldOffer, OfferId, Prompt, Room, SenderEvent
from kvtransfer.sender_room import SenderEvent as E
from kvtransfer.sender_room import SenderState as S
from kvtransfer.settings import TransferSettings
from kvtransfer.timers import Timers
from kvtransfer.writes import Writes

MAX_ENDED = 8192  # rooms and refused offers remembered after their end: minutes of them at tens of requests a second


class Sender:
    """The whole of P's side, sans-IO: frames, completions, commands and the time come in; `events` and frames go out."""

    def __init__(
        self,
        settings: TransferSettings,
        incarnation: PeerId,
        wire: AcceptWire,
        backend: TransferBackend,
        to_local_s: Callable[[float], float],
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`to_local_s`: a unix time on this node's monotonic clock. `clock`: that clock itself, looked at right before each post;
        without one, the time that a method was called with counts."""
        self.links = AcceptedLinks(settings, incarnation, wire, backend)
        self.events: list[Event] = []
        self._settings = settings
        self.incarnation = incarnation
        self._to_local_s = to_local_s
        self._clock = clock
        self._now_s = 0.0  # of the last tick
        self._pages_per_post = num_pages_of(settings.post_tokens, settings.compat.page_size)
        self._rooms: dict[int, Room] = {}
        self._parked: set[int] = set()  # of the rooms those in PARKED
        self._ended: OrderedDict[int, Ended] = OrderedDict()
        self._refused: OrderedDict[OfferId, None] = OrderedDict()  # answered without being held
        self._timers: Timers[int] = Timers()
        self._figures = RoomFigures("offer_wait", "wait")
        self._writes = Writes(settings, self.links, backend, clock)

    # ---- the scheduler's commands ---------------------------------------------------------------------------------------------

    def expect(self, room_id: int, num_prompt_tokens: int, prompt_digest: bytes, deadline_s: float, now_s: float, rid: str = "") -> None:
        if ended := self._ended.get(room_id):
            failure, ended.failure = ended.failure or duplicate_room(room_id), None
            self._note_failed(room_id, rid, ended.offer_id, failure)
            self._figures.count("failed")
            self.events += [RoomFailed(room_id, failure), PagesReturned(room_id)]
            return
        room = self._rooms.get(room_id) or self._new_room(room_id)
        room.machine.fire(E.EXPECT)
        self._rooms[room_id] = room
        self._parked.discard(room_id)
        room.request, room.request_deadline_s = Prompt(num_prompt_tokens, prompt_digest), deadline_s
        room.rid, room.expected_s = rid, now_s
        if room.offer is None:
            self._timers.set(room_id, deadline_s)  # its decode node may rightly be waiting for pages: only the deadline ends this
        else:
            self._join(room, room.offer, now_s)

    def send_pages(self, room_id: int, first_page: int, local_pages: PageIds, now_s: float, ready: Ready | None = None) -> None:
        """`ready`: the pages are complete once it has passed; None: they are."""
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
            room.outgoing.add(wanted, start, ready)
            self._post_due(room, now_s)

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
        room.finished_s = now_s
        room.outgoing.seal()
        self._post_due(room, now_s)
        self._close_if_drained(room, now_s)

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
        """`now_s`: not before the frame's arrival."""
        inbound = self.links.on_frame(route, frame, observed_host, now_s)
        self._take_news(now_s)  # a new link of a peer: the rooms of its former one are over before it is written to again
        match inbound:
            case (peer, Offer() as message):
                self._on_offer(peer, message, now_s)
            case (peer, Cancel() as message):
                self._on_cancel(peer, message, now_s)
            case (_, Withdraw() as message):
                self._on_withdraw(message, now_s)

    def poll_backend(self, now_s: float) -> None:
        self._take_news(now_s)  # a lost peer is the cause, its tickets' errors the echo
        for room, failure in self._writes.completed(now_s):
            if failure is None:
                self._close_if_drained(room, now_s)
            else:
                self._fail(room, failure, now_s)

    def tick(self, now_s: float) -> None:
        """Timers, what they and the inputs did to the links, then what may be written by now."""
        self._now_s = now_s
        for room_id in self._timers.expired(now_s):
            self._on_timer(self._rooms[room_id], now_s)
        self.links.tick(now_s)
        self._take_news(now_s)
        for room, failure in self._writes.tick(now_s):
            self._fail(room, failure, now_s)

    def next_due_s(self) -> float:
        return min(self._timers.next_due_s(), self.links.next_due_s(), self._writes.next_due_s())

    def stats(self) -> Stats:
        states = Counter(room.machine.state for room in list(self._rooms.values()))
        now_s = self._now_s if self._clock is None else self._clock()
        return {
            **{f"transfer_rooms_{state.name.lower()}": states[state] for state in S if state not in (S.NEW, S.CLOSED)},
            **self._figures.stats(),
            **self._writes.stats(now_s),
            **peer_stats(AcceptState, (peer["state"] for peer in self.links.snapshot()), self.links.heard_s(), now_s),
        }

    # ---- D's messages --------------------------------------------------------------------------------------------------------

    def _on_offer(self, peer: PeerId, message: Offer, now_s: float) -> None:
        offer_id = peer, message.attempt
        room, ended = self._rooms.get(message.room), self._ended.get(message.room)
        if (room and room.offer and room.offer.id == offer_id) or (ended and ended.offer_id == offer_id):
            return None  # the same message again: its Closed is owed or was sent
        if offer_id in self._refused:  # its Cancel was faster, or it comes twice
            return self._refuse(offer_id, message.room, "REFUSED", unknown_offer())
        self._figures.count("offers")
        if ended is not None:
            failure = duplicate_room(message.room) if ended.offer_id or not ended.failure else ended.failure
            ended.offer_id = ended.offer_id or offer_id
            return self._refuse(offer_id, message.room, "FAILED", failure)
        if room is not None and room.offer is not None:
            return self._refuse(offer_id, message.room, "FAILED", duplicate_room(message.room))
        try:
            held = self._read(offer_id, message)
        except ValueError as error:
            return self._refuse(offer_id, message.room, "FAILED", Failure(400, f"bad offer: {error}", code="bad_offer", stage="transfer"))
        if room is None and len(self._parked) >= self._settings.max_rooms:
            full = f"{len(self._parked)} offers wait for their requests already"
            return self._refuse(offer_id, message.room, "REFUSED", Failure(503, full, code="overloaded", stage="transfer", retry_after_s=1.0))
        room = room or self._new_room(message.room)
        room.machine.fire(E.OFFER)
        self._rooms[message.room] = room
        room.offer, room.handed_over = held, np.zeros(len(held.dst_pages), np.bool_)
        room.digests = np.zeros(len(held.dst_pages) if held.digest else 0, np.uint32)
        if room.request is None:
            self._parked.add(message.room)
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
        if message.digest and not self._writes.can_digest:
            raise ValueError("it asks for checksums of pages, which this node cannot read")
        prompt = Prompt(message.num_prompt_tokens, message.prompt_digest)
        deadline_s = self._to_local_s(message.deadline_unix_s)
        return HeldOffer(offer_id, prompt, message.decode_prefix_pages, pages, deadline_s, message.digest)

    def _on_cancel(self, peer: PeerId, message: Cancel, now_s: float) -> None:
        room = self._rooms.get(message.room)
        if room is not None and room.offer is not None and room.offer.id == (peer, message.attempt):
            self._fail(room, message.failure, now_s, status="ABORTED")
        else:
            self._refuse((peer, message.attempt), message.room, "REFUSED", unknown_offer())

    def _on_withdraw(self, message: Withdraw, now_s: float) -> None:
        room = self._rooms.get(message.room)
        if room is not None and room.machine.state is S.AWAIT_OFFER:
            self._fail(room, message.failure, now_s, status="ABORTED")
        elif room is None and message.room not in self._ended:  # D was faster than this node's own request
            self._remember(message.room, Ended(None, message.failure))

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

    def _new_room(self, room_id: int) -> Room:
        return Room(room_id, Outgoing(self._pages_per_post))

    def _join(self, room: Room, offer: HeldOffer, now_s: float) -> None:
        assert room.request is not None
        self._figures.waited("offer_wait", now_s - room.expected_s)
        if room.request != offer.prompt:
            self._fail(room, prompt_mismatch(room.request.num_tokens, offer.prompt.num_tokens), now_s)
        else:
            self._timers.set(room.room, min(room.request_deadline_s, offer.deadline_s))
            self.events.append(OfferJoined(room.room, offer.decode_prefix_pages))

    def _under_way(self, room_id: int, event: SenderEvent) -> Room | None:
        """The room, if it still goes on. Raises IllegalTransition when `event` may not happen in it."""
        room = self._rooms.get(room_id)
        return room if room is not None and SENDER_TABLE.after(room.machine.state, event) is not S.DRAINING else None

    def _post_due(self, room: Room, now_s: float) -> None:
        if failure := self._writes.post_due(room, now_s):
            self._fail(room, failure, now_s)

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
        room.outgoing.drop()
        self._writes.forget(room)
        if room.failure is None:
            room.failure, room.status = failure, status
            self._note_failed(room.room, room.rid, room.offer.id if room.offer else None, failure)
            if room.request is not None and tell_scheduler:
                self.events.append(RoomFailed(room.room, failure))
            self._timers.set(room.room, now_s + self._settings.stuck_timeout_s)
        self._close_if_drained(room, now_s)

    def _note_failed(self, room_id: int, rid: str, offer_id: OfferId | None, failure: Failure) -> None:
        log_failed_room(room_id, rid, offer_id[0] if offer_id else None, failure)
        self._figures.failed(failure.code)

    def _close_if_drained(self, room: Room, now_s: float) -> None:
        if room.num_outstanding or not room.outgoing.is_empty or room.machine.state not in (S.SENDING, S.DRAINING):
            return
        room.machine.fire(E.DRAINED)
        del self._rooms[room.room]
        self._parked.discard(room.room)
        self._timers.cancel(room.room)
        if room.offer is not None and not room.peer_gone:
            self._answer(room.offer.id, room.room, room.status, room.failure, b"" if room.failure else pack_digests(room.digests))
        if room.request is not None:
            self.events.append(PagesReturned(room.room) if room.failure else Delivered(room.room))
        self._figures.count("failed" if room.failure else "delivered")
        if not room.failure:
            self._figures.waited("wait", now_s - room.finished_s)
        met = room.request is not None and room.offer is not None
        self._remember(room.room, Ended(room.offer.id if room.offer else None, None if met else room.failure))

    def _remember(self, room_id: int, ended: Ended) -> None:
        self._ended[room_id] = ended
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _refuse(self, offer_id: OfferId, room_id: int, status: ClosedStatus, failure: Failure) -> None:
        """Answer an offer, or its Cancel, that is not held, and will never be."""
        self._refused[offer_id] = None
        if len(self._refused) > MAX_ENDED:
            self._refused.popitem(last=False)
        self._answer(offer_id, room_id, status, failure)

    def _answer(self, offer_id: OfferId, room_id: int, status: ClosedStatus, failure: Failure | None, page_digests: bytes = b"") -> None:
        peer, attempt = offer_id
        closed = Closed(
            room=room_id, attempt=attempt, sender=self.incarnation, receiver=peer, status=status, failure=failure, page_digests=page_digests
        )
        self.links.send(peer, closed)
