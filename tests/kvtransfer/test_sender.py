"""P's rooms: the test plays the scheduler, one or two decode nodes, and the backend's pace."""

import itertools
import logging
import zlib
from typing import Any

import numpy as np
import pytest
from transfer_sim import PAGE_NBYTES, UNIX_OFFSET_S, EventLog, RecordingAcceptWire, frame, pages, registered_backend, settings

from common.errors import Failure
from kvtransfer.backend import PeerId, PeerUnknown, Region, TransferError
from kvtransfer.events import Delivered, OfferJoined, PagesReturned, RoomFailed
from kvtransfer.figures import RATE_WINDOW_S
from kvtransfer.machine import IllegalTransition
from kvtransfer.memory import MemoryBackend, MemoryFabric
from kvtransfer.protocol import Cancel, Closed, FirstToken, Heartbeat, HelloAck, HelloBody, Offer, Withdraw, hello, pack_pages
from kvtransfer.sender import MAX_ENDED, Sender
from kvtransfer.writes import LEAST_POLL_S

P, D, D2 = PeerId("p-process"), PeerId("d-process"), PeerId("d-other")
ROUTES = {D: b"route-d", D2: b"route-d2"}
GONE = Failure(499, "the client is gone", code="cancelled", stage="decode")
NO_MEMORY = Failure(503, "out of pages", code="overloaded", stage="prefill")
NO_PAGES = Failure(504, "no pages in time", code="deadline_exceeded", stage="decode")
PROMPT_PAGES = pages(10, 11, 12)  # 9 tokens, 4 a page


class Node:
    def __init__(self, **changes: Any) -> None:
        self.now_s = 100.0
        self.fabric = MemoryFabric()
        self.wire = RecordingAcceptWire()
        self.backend, self.pool = registered_backend(self.fabric)
        self.pool[:] = np.arange(len(self.pool))[:, None]
        region = Region(self.pool.ctypes.data, len(self.pool), PAGE_NBYTES, "cpu", self.pool)
        fixed = settings(**{"post_tokens": 1, "region": region, **changes})
        self.peer_timeout_s = fixed.peer_timeout_s
        self.sender = Sender(fixed, P, self.wire, self.backend, lambda unix_s: unix_s - UNIX_OFFSET_S, lambda: self.now_s)
        self.log = EventLog()
        self.peers: dict[PeerId, MemoryBackend] = {}
        self.peer_pools: dict[PeerId, np.ndarray] = {}
        for peer in (D, D2):
            self.join(peer)

    def join(self, peer: PeerId) -> None:
        self.peers[peer], self.peer_pools[peer] = registered_backend(self.fabric)
        self.peers[peer].accept(P, self.backend.describe())
        self.receive(peer, hello(peer, HelloBody(settings().compat, self.peers[peer].describe(), 0.5, self.peer_timeout_s)))
        [ack] = self.wire.take(ROUTES[peer])
        assert isinstance(ack, HelloAck)
        assert ack.ok
        self.echo(peer)

    def echo(self, peer: PeerId = D) -> None:
        """D has heard what this node says now."""
        self.sender.links.probe(self.now_s)
        self.receive(peer, Heartbeat(peer, P, echo_s=self.now_s))

    def receive(self, peer: PeerId, message: Any) -> None:
        self.sender.on_frame(ROUTES[peer], frame(message), "10.0.0.9", self.now_s)
        self.step()

    def step(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        self.sender.poll_backend(self.now_s)
        self.sender.tick(self.now_s)
        for event in self.sender.events:
            self.log.add(event)
        self.sender.events.clear()

    # ---- the scheduler

    def expect(self, room: int = 1, num_tokens: int = 9, digest: bytes = b"digest", timeout_s: float = 60.0) -> None:
        if room not in self.log.by_room:
            self.log.open(room)
        self.sender.expect(room, num_tokens, digest, self.now_s + timeout_s, self.now_s)
        self.step()

    def send_pages(self, room: int = 1, first_page: int = 0, local: np.ndarray = PROMPT_PAGES, ready: Any = None) -> None:
        self.sender.send_pages(room, first_page, local, self.now_s, ready)
        self.step()

    def token(self, room: int = 1) -> None:
        self.sender.send_first_token(room, 42, 0, self.now_s)

    def finish(self, room: int = 1) -> None:
        self.sender.finish(room, self.now_s)
        self.step()

    def abort(self, room: int = 1, failure: Failure = NO_MEMORY) -> None:
        self.log.aborted.add(room)
        self.sender.abort(room, failure, self.now_s)
        self.step()

    # ---- the decode node

    def offer(self, room: int = 1, peer: PeerId = D, attempt: int = 1, timeout_s: float = 60.0, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "num_prompt_tokens": 9,
            "prompt_digest": b"digest",
            "decode_prefix_pages": 0,
            "dst_pages": pack_pages(pages(20, 21, 22)),
            "deadline_unix_s": self.now_s + UNIX_OFFSET_S + timeout_s,
        }
        self.receive(peer, Offer(room=room, attempt=attempt, sender=peer, receiver=P, **{**fields, **changes}))

    def withdraw(self, room: int = 1, peer: PeerId = D) -> None:
        self.receive(peer, Withdraw(room=room, sender=peer, receiver=P, failure=NO_PAGES))

    def cancel(self, room: int = 1, peer: PeerId = D, attempt: int = 1) -> None:
        self.receive(peer, Cancel(room=room, attempt=attempt, sender=peer, receiver=P, failure=GONE))

    # ---- what came of it

    def events(self, room: int = 1) -> list[Any]:
        return self.log.by_room[room]

    def to(self, peer: PeerId = D) -> list[FirstToken | Closed]:
        return [message for message in self.wire.take(ROUTES[peer]) if isinstance(message, FirstToken | Closed)]

    def closed(self, peer: PeerId = D) -> Closed:
        [message] = self.to(peer)
        assert isinstance(message, Closed)
        return message

    def rooms(self) -> dict[str, float]:
        prefix = "transfer_rooms_"
        return {name.removeprefix(prefix): count for name, count in self.sender.stats().items() if name.startswith(prefix) and count}

    def meet(self, **offer: Any) -> None:
        self.expect()
        self.offer(**offer)
        assert self.rooms() == {"waiting": 1}

    def reach(self, state: str) -> None:
        """Bring room 1 to `state`; in the states with writes, two are in flight."""
        if state == "parked":
            self.offer()
        elif state == "await_offer":
            self.expect()
        else:
            self.meet()
            self.fabric.hold()
            if state in ("computing", "sending", "draining"):
                self.send_pages(local=PROMPT_PAGES[:2])
            if state in ("sending", "draining"):
                self.send_pages(first_page=2, local=PROMPT_PAGES[2:])
                self.token()
                self.finish()
            if state == "draining":
                self.cancel()
        self.wire.sent.clear()
        assert self.rooms() == {state: 1}


HELD = ["await_offer", "parked", "waiting", "computing", "sending", "draining"]


@pytest.mark.parametrize("offer_first", [False, True])
def test_a_room_from_offer_to_delivery(offer_first: bool) -> None:
    node = Node()
    if offer_first:
        node.offer()
        node.expect()
    else:
        node.expect()
        node.offer()
    assert node.events() == [OfferJoined(1, 0)]
    node.send_pages(local=PROMPT_PAGES[:2])
    assert node.rooms() == {"computing": 1}
    node.send_pages(first_page=2, local=PROMPT_PAGES[2:])
    node.token()
    node.finish()
    assert node.to() == [
        FirstToken(room=1, attempt=1, sender=P, receiver=D, token_id=42, num_cached_tokens=0),
        Closed(room=1, attempt=1, sender=P, receiver=D, status="DELIVERED"),
    ]
    assert node.events() == [OfferJoined(1, 0), Delivered(1)]
    assert node.peer_pools[D][20:23, 0].tolist() == [10, 11, 12]
    assert node.rooms() == {}
    totals = {name.removeprefix("transfer_").removesuffix("_total"): count for name, count in node.sender.stats().items() if name.endswith("_total")}
    assert totals == {
        "offers": 1, "delivered": 1, "failed": 0, "offer_waits": 1, "offer_wait_seconds": 0, "waits": 1, "wait_seconds": 0,
        "posts": 2, "pages": 3, "descriptors": 2, "bytes_written": 3 * PAGE_NBYTES, "seconds": 0,
    }  # fmt: skip


def test_closed_and_delivered_wait_for_the_last_write() -> None:
    node = Node()
    node.reach("sending")
    assert node.to() == []
    node.fabric.release(1)
    node.step()
    assert node.to() == []
    assert node.events() == [OfferJoined(1, 0)]
    node.fabric.release(1)
    node.step()
    assert node.closed().status == "DELIVERED"
    assert node.events()[-1] == Delivered(1)


def test_writes_may_end_in_any_order() -> None:
    node = Node()
    node.reach("sending")
    for transfer in reversed(node.fabric.in_flight):
        assert node.to() == []
        node.fabric.finish(transfer)
        node.step()
    assert node.closed().status == "DELIVERED"


def test_pages_that_d_has_already_are_not_written() -> None:
    node = Node()
    node.meet(decode_prefix_pages=2, dst_pages=pack_pages(pages(22)))
    assert node.events() == [OfferJoined(1, 2)]
    node.fabric.hold()
    node.send_pages(first_page=0, local=PROMPT_PAGES[:1])
    assert node.fabric.in_flight == []
    node.send_pages(first_page=1, local=PROMPT_PAGES[1:])
    [transfer] = node.fabric.in_flight
    assert (transfer.local_pages.tolist(), transfer.remote_pages.tolist()) == ([12], [22])


def test_an_offer_that_wants_nothing_is_delivered_all_the_same() -> None:
    node = Node()
    node.meet(decode_prefix_pages=3, dst_pages=b"")
    node.send_pages()
    node.token()
    node.finish()
    assert [type(message) for message in node.to()] == [FirstToken, Closed]
    assert node.events()[-1] == Delivered(1)


def test_one_write_a_call() -> None:
    node = Node()
    node.meet()
    node.fabric.hold()
    node.send_pages()
    assert [transfer.remote_pages.tolist() for transfer in node.fabric.in_flight] == [[20, 21, 22]]


# ---- ends in every state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", HELD)
def test_cancel_ends_the_room_once_its_writes_are_over(state: str) -> None:
    node = Node()
    node.reach(state)
    if state == "await_offer":
        node.cancel()
        assert node.closed().status == "REFUSED"
        assert node.rooms() == {state: 1}
        return
    node.cancel()
    if state in ("computing", "sending", "draining"):
        assert node.rooms() == {"draining": 1}
        assert node.to() == []
        assert PagesReturned(1) not in node.events()
        node.fabric.resume()
        node.step()
    closed = node.closed()
    assert (closed.status, closed.failure) == ("ABORTED", GONE)
    assert node.rooms() == {}
    if state != "parked":
        assert node.events() == [OfferJoined(1, 0), RoomFailed(1, GONE), PagesReturned(1)]


@pytest.mark.parametrize("state", [state for state in HELD if state != "parked"])
def test_abort_returns_pages_once_writes_are_over_and_tells_d_why(state: str) -> None:
    node = Node()
    node.reach(state)
    node.abort()
    if state in ("computing", "sending", "draining"):
        assert PagesReturned(1) not in node.events()
        node.fabric.resume()
        node.step()
    first = GONE if state == "draining" else NO_MEMORY
    assert node.events()[-1] == PagesReturned(1)
    assert (RoomFailed(1, GONE) in node.events()) == (state == "draining")
    if state == "await_offer":
        assert node.to() == []
        node.offer()
        assert (node.closed().failure, node.rooms()) == (first, {})
    else:
        assert (closed := node.closed()).status == "ABORTED"
        assert closed.failure == first


@pytest.mark.parametrize("state", HELD)
def test_a_lost_peer_ends_its_rooms_without_a_word_to_it(state: str) -> None:
    node = Node()
    node.reach(state)
    node.sender.links.lose(D, "test", node.now_s)
    node.step()
    if state == "await_offer":
        assert node.rooms() == {"await_offer": 1}
        return
    node.step()  # completions of the tickets that the disconnect ended
    assert node.rooms() == {}
    assert node.to() == []
    if state != "parked":
        [failed, returned] = node.events()[1:]
        assert isinstance(failed, RoomFailed)
        assert failed.failure.code == ("cancelled" if state == "draining" else "peer_lost")
        assert returned == PagesReturned(1)


DEADLINE_STAGE = {"await_offer": "transfer", "parked": "transfer", "waiting": "queue", "computing": "prefill", "sending": "transfer"}


@pytest.mark.parametrize("state", DEADLINE_STAGE)
def test_the_deadline_ends_a_room_in_every_state(state: str) -> None:
    node = Node(offer_timeout_s=1000.0, peer_timeout_s=1000.0)
    node.reach(state)
    node.step(59.9)
    assert node.rooms() == {state: 1}
    node.step(0.2)
    node.fabric.resume()
    node.step()
    assert node.rooms() == {}
    if state != "await_offer":
        assert (closed := node.closed()).status == "FAILED"
        assert closed.failure is not None
        assert (closed.failure.status, closed.failure.code, closed.failure.stage) == (504, "deadline_exceeded", DEADLINE_STAGE[state])
    if state != "parked":
        failed = node.events()[-2]
        assert isinstance(failed, RoomFailed)
        assert (failed.failure.status, failed.failure.stage) == (504, DEADLINE_STAGE[state])


def test_the_earlier_of_both_deadlines_counts() -> None:
    node = Node(peer_timeout_s=1000.0)
    node.expect(timeout_s=60.0)
    node.offer(timeout_s=5.0)
    node.step(5.1)
    assert node.closed().status == "FAILED"


def test_an_offer_without_its_request_expires() -> None:
    node = Node(offer_timeout_s=7.0, peer_timeout_s=1000.0)
    node.reach("parked")
    node.step(6.9)
    assert node.rooms() == {"parked": 1}
    node.step(0.2)
    assert node.rooms() == {}
    closed = node.closed()
    assert closed.failure is not None
    assert (closed.status, closed.failure.status, closed.failure.code) == ("FAILED", 503, "offer_expired")


def test_a_request_waits_for_its_offer_until_its_deadline() -> None:
    """The decode node may be waiting for pages all that time."""
    node = Node(offer_timeout_s=7.0, peer_timeout_s=1000.0)
    node.expect(timeout_s=60.0)
    node.step(59.0)
    assert node.rooms() == {"await_offer": 1}
    node.step(1.1)
    [failed, returned] = node.events()
    assert (failed.failure.status, returned) == (504, PagesReturned(1))


@pytest.mark.parametrize("state", ["computing", "sending"])
def test_a_failed_write_fails_the_room_once_the_others_are_over(state: str) -> None:
    node = Node()
    node.meet()
    node.fabric.hold()
    node.send_pages(local=PROMPT_PAGES[:2])
    node.send_pages(first_page=2, local=PROMPT_PAGES[2:])
    if state == "sending":
        node.token()
        node.finish()
    node.to()
    node.fabric.fail_completions(1, "link flapped")
    node.fabric.release(1)
    node.step()
    failed = node.events()[-1]
    assert isinstance(failed, RoomFailed)
    assert (failed.failure.status, failed.failure.code) == (503, "transfer_failed")
    assert "link flapped" in failed.failure.message
    assert node.to() == []
    node.fabric.resume()
    node.step()
    assert (closed := node.closed()).status == "FAILED"
    assert closed.failure == failed.failure


def test_a_write_that_cannot_be_posted_to_a_peer_lost_this_moment_fails_the_room() -> None:
    node = Node()
    node.meet()
    node.backend.disconnect(D)
    node.send_pages()
    assert [type(event) for event in node.events()] == [OfferJoined, RoomFailed, PagesReturned]


def test_a_room_that_cannot_drain_costs_its_peer_the_link() -> None:
    node = Node(peer_timeout_s=3.0)
    node.reach("draining")
    for _ in range(29):
        node.offer(room=2)  # D lives
        node.step(1.0)
    assert node.rooms() == {"draining": 1, "parked": 1}
    node.step(1.1)
    node.step()
    assert node.rooms() == {}
    assert node.events()[-1] == PagesReturned(1)


def test_the_first_cause_is_kept() -> None:
    node = Node()
    node.reach("sending")
    node.abort(failure=NO_MEMORY)
    node.cancel()
    node.fabric.resume()
    node.step()
    assert node.closed().failure == NO_MEMORY
    assert node.events()[1:] == [PagesReturned(1)]


@pytest.mark.parametrize("state", ["draining"])
def test_what_the_scheduler_says_before_it_knows_of_the_end_is_passed_over(state: str) -> None:
    node = Node()
    node.meet()
    node.fabric.hold()
    node.send_pages(local=PROMPT_PAGES[:1])
    node.to()
    node.cancel()
    assert node.rooms() == {state: 1}
    node.send_pages(first_page=1, local=PROMPT_PAGES[1:])
    node.token()
    node.finish()
    assert len(node.fabric.in_flight) == 1
    node.fabric.resume()
    node.step()
    assert node.closed().status == "ABORTED"
    for late in (node.send_pages, node.token, node.finish, node.abort):
        late()
    assert node.to() == []
    assert node.events() == [OfferJoined(1, 0), RoomFailed(1, GONE), PagesReturned(1)]


# ---- when pages leave ----------------------------------------------------------------------------------------------------------


class Event:
    passed = False

    def query(self) -> bool:
        return self.passed


def test_pages_gather_until_they_are_worth_a_post_or_all_are_here() -> None:
    node = Node(post_tokens=8)
    node.meet()
    node.fabric.hold()
    node.send_pages(local=PROMPT_PAGES[:1])
    assert node.fabric.in_flight == []
    node.send_pages(first_page=1, local=PROMPT_PAGES[1:2])
    assert [transfer.local_pages.tolist() for transfer in node.fabric.in_flight] == [[10, 11]]
    node.send_pages(first_page=2, local=PROMPT_PAGES[2:])
    node.token()
    node.fabric.resume()
    node.finish()
    assert [type(message) for message in node.to()] == [FirstToken, Closed]
    assert node.peer_pools[D][20:23, 0].tolist() == [10, 11, 12]
    stats = node.sender.stats()
    assert (stats["transfer_posts_total"], stats["transfer_descriptors_total"], stats["transfer_pages_total"]) == (2, 2, 3)


def test_a_room_that_fails_drops_what_it_gathered() -> None:
    node = Node(post_tokens=1000)
    node.meet()
    node.send_pages()
    node.cancel()
    assert node.closed().status == "ABORTED"
    assert node.events()[-1] == PagesReturned(1)
    assert node.sender.stats()["transfer_posts_total"] == 0


def test_pages_are_posted_when_their_event_has_passed_and_not_before() -> None:
    node = Node()
    node.meet()
    node.fabric.hold()
    event = Event()
    node.send_pages(local=PROMPT_PAGES[:2], ready=event)
    node.send_pages(first_page=2, local=PROMPT_PAGES[2:])
    node.token()
    node.finish()
    assert node.fabric.in_flight == []
    assert node.rooms() == {"sending": 1}
    assert node.sender.next_due_s() == pytest.approx(node.now_s + LEAST_POLL_S)
    node.step(0.02)
    assert node.now_s + LEAST_POLL_S < node.sender.next_due_s() <= node.now_s + 0.002  # the longer it takes, the less often it is asked
    event.passed = True
    node.step()
    assert [transfer.local_pages.tolist() for transfer in node.fabric.in_flight] == [[10, 11], [12]]
    assert node.sender.next_due_s() > node.now_s + 0.01
    node.fabric.resume()
    node.step()
    assert node.events()[-1] == Delivered(1)


def test_a_room_whose_event_never_passes_ends_by_its_deadline_without_a_post() -> None:
    node = Node(peer_timeout_s=1000.0)
    node.meet()
    event = Event()
    node.send_pages(ready=event)
    node.step(60.1)
    assert node.closed().status == "FAILED"
    assert node.events()[-1] == PagesReturned(1)
    event.passed = True
    node.step()
    assert node.sender.stats()["transfer_posts_total"] == 0


# ---- the lease -----------------------------------------------------------------------------------------------------------------


def test_a_node_that_stood_still_posts_nothing_on_old_heartbeats() -> None:
    """D has dropped it long ago. Heartbeats from before wait in its socket, and it was stopped in the middle of a step."""
    node = Node()
    node.meet()
    waiting = []
    for _ in range(6):
        node.now_s += 0.5
        node.sender.links.probe(node.now_s)
        waiting.append(Heartbeat(D, P, echo_s=node.now_s))
    time_of_the_step_s = node.now_s
    node.now_s += 10.0
    node.sender.send_pages(1, 0, PROMPT_PAGES, time_of_the_step_s)
    for beat in waiting:
        node.sender.on_frame(ROUTES[D], frame(beat), "10.0.0.9", node.now_s)
        node.sender.tick(time_of_the_step_s)
        assert node.sender.stats()["transfer_posts_total"] == 0
    node.sender.links.lose(D, "it came back by another connection", node.now_s)
    node.step()
    assert [type(event) for event in node.events()] == [OfferJoined, RoomFailed, PagesReturned]
    assert node.sender.stats()["transfer_posts_total"] == 0


def test_pages_wait_for_an_echo_that_renews_the_lease() -> None:
    node = Node()
    node.meet()
    for _ in range(7):  # D lives, but hears nothing
        node.receive(D, Heartbeat(D, P, echo_s=100.0))
        node.step(0.5)
    node.send_pages()
    node.token()
    node.finish()
    assert node.rooms() == {"sending": 1}
    assert node.sender.stats()["transfer_posts_total"] == 0
    node.echo()
    node.step()
    assert node.events()[-1] == Delivered(1)


def test_a_peer_that_never_echoes_is_never_written_to() -> None:
    node = Node()
    stranger = PeerId("d-mute")
    backend, _ = registered_backend(node.fabric)
    body = HelloBody(settings().compat, backend.describe(), 0.5, 3.0)
    node.sender.on_frame(b"route-mute", frame(hello(stranger, body)), None, node.now_s)
    assert not node.sender.links.may_post(stranger, node.now_s)
    assert node.sender.links.may_post(D, node.now_s)


def test_a_new_link_of_the_same_process_starts_without_a_lease_and_its_old_rooms_are_over() -> None:
    node = Node()
    node.meet()
    node.send_pages(local=PROMPT_PAGES[:1])
    node.sender.on_frame(b"route-2", frame(hello(D, HelloBody(settings().compat, node.peers[D].describe(), 0.5, 3.0))), None, node.now_s)
    node.send_pages(first_page=1, local=PROMPT_PAGES[1:])
    assert [type(event) for event in node.events()] == [OfferJoined, RoomFailed, PagesReturned]
    assert not node.sender.links.may_post(D, node.now_s)
    assert node.sender.stats()["transfer_posts_total"] == 1


# ---- posts that fail -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "code", "status"), [
    (TransferError("queue pair in error state"), "transfer_failed", 503),
    (PeerUnknown("not connected"), "peer_lost", 503),
    (ValueError("page 99 is outside the region"), "internal_error", 500),
])  # fmt: skip
def test_a_post_that_raises_fails_its_room_alone(monkeypatch: pytest.MonkeyPatch, error: Exception, code: str, status: int) -> None:
    node = Node()
    node.meet()
    node.expect(room=2)
    node.offer(room=2, dst_pages=pack_pages(pages(30, 31, 32)))
    with monkeypatch.context() as patched:
        patched.setattr(node.backend, "post", raising(error))
        node.send_pages(room=1)
    [_, failed, returned] = node.events()
    assert (failed.failure.code, failed.failure.status, returned) == (code, status, PagesReturned(1))
    assert str(error) in failed.failure.message
    assert node.closed().failure == failed.failure
    node.send_pages(room=2)
    node.token(room=2)
    node.finish(room=2)
    assert node.events(2)[-1] == Delivered(2)


def test_a_held_back_post_that_raises_fails_its_room_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.meet()
    event = Event()
    node.send_pages(ready=event)
    event.passed = True
    monkeypatch.setattr(node.backend, "post", raising(TransferError("no memory handles")))
    node.step()
    assert [type(event) for event in node.events()] == [OfferJoined, RoomFailed, PagesReturned]


def raising(error: Exception) -> Any:
    def post(*_: Any) -> None:
        raise error

    return post


def test_a_pair_whose_write_failed_delivers_the_next_room() -> None:
    node = Node()
    node.fabric.fail_posts(1)
    for room in (1, 2):
        node.expect(room=room)
        node.offer(room=room, attempt=room)
        node.send_pages(room=room)
        node.token(room=room)
        node.finish(room=room)
    assert [type(node.events(room)[-1]) for room in (1, 2)] == [PagesReturned, Delivered]


# ---- checksums -----------------------------------------------------------------------------------------------------------------


def test_delivered_carries_the_checksums_that_an_offer_asked_for() -> None:
    node = Node()
    node.meet(digest=True)
    event = Event()
    node.send_pages(local=PROMPT_PAGES[:2], ready=event)
    node.pool[10] = 77  # the kernel goes on writing until the event has passed
    event.passed = True
    node.step()
    node.send_pages(first_page=2, local=PROMPT_PAGES[2:])
    node.token()
    node.finish()
    closed = node.to()[-1]
    assert isinstance(closed, Closed)
    sent = [zlib.crc32(node.pool[page].tobytes()) for page in (10, 11, 12)]
    assert np.frombuffer(closed.page_digests, "<u4").tolist() == sent


def test_an_offer_that_asks_for_checksums_of_pages_nobody_can_read_is_refused() -> None:
    node = Node(region=None)
    node.expect()
    node.offer(digest=True)
    assert (failure := node.closed().failure) is not None
    assert failure.code == "bad_offer"


def test_pages_that_are_none_fail_the_room_when_checksums_are_asked_for() -> None:
    node = Node()
    node.meet(digest=True)
    node.send_pages(local=pages(10, 11, 10_000))
    failed = node.events()[1]
    assert (failed.failure.status, failed.failure.code) == (500, "internal_error")


# ---- withdrawn rooms -----------------------------------------------------------------------------------------------------------


def test_a_request_whose_offer_will_not_come_ends_at_once_with_ds_cause() -> None:
    node = Node()
    node.expect()
    node.withdraw()
    assert node.events() == [RoomFailed(1, NO_PAGES), PagesReturned(1)]
    assert node.rooms() == {}
    assert node.to() == []


def test_a_request_that_comes_after_its_withdrawal_ends_at_once() -> None:
    node = Node()
    node.withdraw()
    assert node.rooms() == {}
    node.expect()
    assert node.events() == [RoomFailed(1, NO_PAGES), PagesReturned(1)]


@pytest.mark.parametrize("state", [state for state in HELD if state != "await_offer"])
def test_a_withdrawal_does_not_touch_a_room_that_has_its_offer(state: str) -> None:
    node = Node()
    node.reach(state)
    node.withdraw()
    node.withdraw(peer=D2)
    assert node.rooms() == {state: 1}


def test_a_withdrawal_needs_no_link_but_this_process() -> None:
    node = Node()
    node.expect()
    for receiver in ("former-p", P):
        message = Withdraw(room=1, sender="d-refused", receiver=receiver, failure=NO_PAGES)
        node.sender.on_frame(b"route-of-nobody", frame(message), "10.0.0.7", node.now_s)
        node.step()
        assert node.wire.take(b"route-of-nobody") == []
        assert (node.events() == []) == (receiver != P)


def test_withdrawn_rooms_are_remembered_within_bounds() -> None:
    node = Node()
    for room in range(MAX_ENDED + 10):
        node.sender.on_frame(ROUTES[D], frame(Withdraw(room=room, sender=D, receiver=P, failure=NO_PAGES)), None, node.now_s)
    assert len(node.sender._ended) == MAX_ENDED


# ---- messages in any order -----------------------------------------------------------------------------------------------------


def test_an_offer_that_comes_after_its_cancel_is_refused_and_never_written() -> None:
    node = Node()
    node.expect()
    node.cancel()
    assert node.closed().status == "REFUSED"
    for _ in range(2):
        node.offer()
        assert (closed := node.closed()).status == "REFUSED"
        assert closed.attempt == 1
    assert node.rooms() == {"await_offer": 1}
    node.offer(attempt=2)
    assert node.rooms() == {"waiting": 1}


def test_an_offer_that_was_refused_is_refused_when_it_comes_again_though_there_is_room_now() -> None:
    """D has its pages back."""
    node = Node(max_rooms=1)
    node.offer(room=1)
    node.offer(room=2)
    assert node.closed().status == "REFUSED"
    node.cancel(room=1)
    node.to()
    node.offer(room=2)
    assert node.closed().status == "REFUSED"
    assert node.rooms() == {}


def test_the_memory_of_refused_offers_is_bounded() -> None:
    node = Node()
    for attempt in range(MAX_ENDED + 10):
        node.cancel(room=7, attempt=attempt)
    assert len(node.sender._refused) == MAX_ENDED


@pytest.mark.parametrize("order", list(itertools.permutations(["expect", "offer", "offer", "cancel"])), ids="-".join)
def test_request_offer_and_cancel_in_any_order_end_the_offer_without_a_write(order: tuple[str, ...]) -> None:
    node = Node()
    for step in order:
        getattr(node, step)()
    answers = [message for message in node.to() if isinstance(message, Closed)]
    assert {answer.attempt for answer in answers} == {1}
    assert node.rooms() in ({}, {"await_offer": 1})
    assert node.sender.stats()["transfer_posts_total"] == 0


# ---- what is said and counted --------------------------------------------------------------------------------------------------


def test_a_failed_room_is_one_line_with_room_request_peer_stage_and_cause(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    node.log.open(1)
    node.sender.expect(1, 9, b"digest", node.now_s + 60, node.now_s, rid="cmpl-17")
    node.offer()
    node.abort()
    node.cancel()
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line == "room 1, request cmpl-17, peer d-process: failed in prefill: out of pages (overloaded)"


def test_a_room_that_its_client_gave_up_is_said_at_debug_only(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    with caplog.at_level(logging.DEBUG):
        node.meet()
        node.cancel()
    assert [record.levelname for record in caplog.records if "room 1" in record.getMessage()] == ["DEBUG"]


def test_waits_failures_and_peers_are_counted() -> None:
    node = Node()
    node.fabric.hold()
    node.expect()
    node.step(1.5)
    node.offer()
    node.send_pages()
    node.token()
    node.finish()
    node.step(0.5)
    node.fabric.resume()
    node.step()
    node.expect(room=2)
    node.abort(room=2)
    stats = node.sender.stats()
    assert (stats["transfer_offer_wait_seconds_total"], stats["transfer_offer_waits_total"]) == (1.5, 1)
    assert (stats["transfer_wait_seconds_total"], stats["transfer_waits_total"]) == (0.5, 1)
    assert (stats["transfer_seconds_total"], stats["transfer_gigabytes_per_second"]) == (0.5, pytest.approx(3 * PAGE_NBYTES / 0.5 / 1e9))
    assert stats['transfer_failures_total{cause="overloaded"}'] == 1
    assert (stats['transfer_peers{state="up"}'], stats['transfer_peers{state="fenced"}']) == (2, 0)
    assert stats["transfer_heartbeat_age_seconds"] == 2.0  # the other node's
    node.step(RATE_WINDOW_S)
    assert node.sender.stats()["transfer_gigabytes_per_second"] == 0.0  # it has written nothing since


# ---- what does not fit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offer_first", [False, True])
@pytest.mark.parametrize("other", [{"num_tokens": 12}, {"digest": b"another"}], ids=str)
def test_different_prompts_fail_on_both_sides(other: dict[str, Any], offer_first: bool) -> None:
    node = Node()
    if offer_first:
        node.offer()
        node.expect(**other)
    else:
        node.expect(**other)
        node.offer()
    closed = node.closed()
    assert closed.failure is not None
    assert (closed.status, closed.failure.status, closed.failure.code) == ("FAILED", 400, "prompt_mismatch")
    assert node.events() == [RoomFailed(1, closed.failure), PagesReturned(1)]


@pytest.mark.parametrize("state", [state for state in HELD if state != "await_offer"])
def test_a_second_offer_for_a_room_is_refused_and_does_not_disturb_the_first(state: str) -> None:
    node = Node()
    node.reach(state)
    before = list(node.log.by_room.get(1, []))
    for peer, attempt in ((D2, 1), (D, 2)):
        node.offer(peer=peer, attempt=attempt)
        closed = node.closed(peer)
        assert closed.failure is not None
        assert (closed.attempt, closed.status, closed.failure.status, closed.failure.code) == (attempt, "FAILED", 400, "duplicate_room")
    assert node.rooms() == {state: 1}
    assert node.log.by_room.get(1, []) == before


@pytest.mark.parametrize("state", [*[state for state in HELD if state != "await_offer"], "closed"])
def test_the_same_offer_twice_is_one(state: str) -> None:
    node = Node()
    if state == "closed":
        node.meet()
        node.abort()
        node.wire.sent.clear()
    else:
        node.reach(state)
    node.offer()
    assert node.to() == []
    assert node.rooms() == ({} if state == "closed" else {state: 1})


def test_a_cancel_of_another_offer_does_not_touch_the_room() -> None:
    node = Node()
    node.meet()
    for peer, attempt in ((D2, 1), (D, 2)):
        node.cancel(peer=peer, attempt=attempt)
        assert node.closed(peer).status == "REFUSED"
    assert node.rooms() == {"waiting": 1}


def test_a_cancel_of_an_unknown_room_is_answered_and_creates_nothing() -> None:
    node = Node()
    node.cancel(room=77)
    closed = node.closed()
    assert (closed.room, closed.status) == (77, "REFUSED")
    node.offer(room=77, attempt=2)
    assert node.rooms() == {"parked": 1}


def test_rooms_that_are_over_are_refused_to_both_sides() -> None:
    node = Node()
    node.meet()
    node.send_pages()
    node.token()
    node.finish()
    node.to()
    node.offer(attempt=2)
    assert (failure := node.closed().failure) is not None
    assert failure.code == "duplicate_room"
    node.log.by_room.clear()
    node.expect()
    [failed, returned] = node.events()
    assert (failed.failure.code, returned) == ("duplicate_room", PagesReturned(1))


def test_a_request_whose_offer_was_given_up_before_it_came_fails_at_once() -> None:
    node = Node()
    node.offer()
    node.cancel()
    node.to()
    node.expect()
    assert node.events() == [RoomFailed(1, GONE), PagesReturned(1)]


@pytest.mark.parametrize("offer_first", [False, True])
def test_a_request_refused_at_intake_is_answered_to_its_offer(offer_first: bool) -> None:
    node = Node()
    if offer_first:
        node.offer()
        node.abort()
    else:
        node.abort()
        node.offer()
    assert node.closed().failure == NO_MEMORY
    assert node.rooms() == {}
    assert node.log.by_room == {}
    node.offer()
    assert node.to() == []


BAD_OFFERS: list[dict[str, Any]] = [
    {"dst_pages": pack_pages(pages(1, 2))},
    {"dst_pages": pack_pages(pages(1, 2, 3, 4))},
    {"dst_pages": pack_pages(pages(1, 2, 2))},
    {"dst_pages": pack_pages(pages(1, -2, 3))},
    {"dst_pages": b"\0\0\0\0\0"},
    {"decode_prefix_pages": 4},
    {"decode_prefix_pages": 2**31 - 1, "dst_pages": b""},
]


@pytest.mark.parametrize("bad", BAD_OFFERS, ids=str)
def test_an_offer_that_does_not_hold_together_is_refused_and_leaves_the_room_waiting(bad: dict[str, Any]) -> None:
    node = Node()
    node.expect()
    node.offer(**bad)
    closed = node.closed()
    assert closed.failure is not None
    assert (closed.status, closed.failure.status, closed.failure.code) == ("FAILED", 400, "bad_offer")
    assert node.rooms() == {"await_offer": 1}
    node.offer(attempt=2)
    assert node.rooms() == {"waiting": 1}


def test_pages_outside_ds_pool_fail_the_room() -> None:
    node = Node()
    node.meet(dst_pages=pack_pages(pages(1, 2, 10_000)))
    node.send_pages()
    assert [type(event) for event in node.events()] == [OfferJoined, RoomFailed, PagesReturned]
    assert (failure := node.closed().failure) is not None
    assert "10000" in failure.message


def test_parked_offers_are_bounded() -> None:
    node = Node(max_rooms=3)
    for room in range(1, 5):
        node.offer(room=room)
    closed = node.closed()
    assert closed.failure is not None
    assert (closed.room, closed.status, closed.failure.status, closed.failure.code) == (4, "REFUSED", 503, "overloaded")
    assert closed.failure.retry_after_s
    node.expect(room=3)
    node.offer(room=4, attempt=2)
    assert node.rooms() == {"parked": 3, "waiting": 1}


def test_the_memory_of_ended_rooms_is_bounded() -> None:
    node = Node()
    for room in range(MAX_ENDED + 10):
        node.sender.abort(room, NO_MEMORY, node.now_s)
    node.offer(room=0)
    assert node.rooms() == {"parked": 1}
    node.offer(room=20)
    assert node.closed().failure == NO_MEMORY


# ---- defects of the scheduler --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["await_offer", "parked"])
@pytest.mark.parametrize("command", ["send_pages", "token", "finish"])
def test_commands_before_the_offer_has_joined_are_illegal(state: str, command: str) -> None:
    node = Node()
    node.reach(state)
    with pytest.raises(IllegalTransition):
        getattr(node, command)()
    assert node.rooms() == {state: 1}


def test_pages_sent_twice_or_beyond_the_prompt_are_illegal_and_change_nothing() -> None:
    node = Node()
    node.meet()
    node.fabric.hold()
    with pytest.raises(IllegalTransition, match=r"pages \[1, 4\)"):
        node.send_pages(first_page=1)
    assert node.rooms() == {"waiting": 1}
    node.send_pages(first_page=1, local=PROMPT_PAGES[1:2])
    with pytest.raises(IllegalTransition, match="sent again"):
        node.send_pages()
    assert len(node.fabric.in_flight) == 1


def test_finish_without_all_pages_or_without_token_1_is_illegal() -> None:
    node = Node()
    node.meet()
    node.send_pages(local=PROMPT_PAGES[:2])
    with pytest.raises(IllegalTransition, match="without token 1"):
        node.finish()
    node.token()
    with pytest.raises(IllegalTransition, match=r"without pages \[2\]"):
        node.finish()
    with pytest.raises(IllegalTransition, match="token 1 is sent again"):
        node.token()
    assert node.rooms() == {"computing": 1}
    node.send_pages(first_page=2, local=PROMPT_PAGES[2:])
    node.finish()
    assert node.events()[-1] == Delivered(1)


def test_fail_ends_a_room_for_both_sides() -> None:
    node = Node()
    node.meet()
    node.sender.fail(1, NO_MEMORY, node.now_s)
    node.sender.fail(99, NO_MEMORY, node.now_s)
    node.step()
    assert node.events()[1:] == [RoomFailed(1, NO_MEMORY), PagesReturned(1)]
    assert node.closed().status == "FAILED"


@pytest.mark.parametrize("state", HELD)
def test_close_says_closed_only_where_no_write_is_outstanding(state: str) -> None:
    node = Node()
    node.reach(state)
    node.sender.close(NO_MEMORY, node.now_s)
    node.backend.close()
    node.step()
    assert node.rooms() == {}
    told = node.to()
    assert len(told) == (1 if state in ("parked", "waiting") else 0)
    if state != "parked":
        assert node.events()[-1] == PagesReturned(1)
