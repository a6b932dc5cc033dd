"""D's rooms: the test plays the scheduler and the prefill nodes."""

import logging
import zlib
from typing import Any

import numpy as np
import pytest
from transfer_sim import COMPAT, NUM_PAGES, PAGE_NBYTES, UNIX_OFFSET_S, EventLog, RecordingDialWire, frame, pages, registered_backend, settings

from common.errors import Failure
from kvtransfer.backend import PeerId, Region
from kvtransfer.events import Delivered, FirstToken, PagesReturned, RoomFailed
from kvtransfer.link import Address
from kvtransfer.memory import MemoryFabric
from kvtransfer.protocol import Cancel, Closed, Heartbeat, HelloBody, Offer, Withdraw, hello_ack, hello_refusal, pack_pages
from kvtransfer.protocol import FirstToken as FirstTokenMessage
from kvtransfer.receiver import Receiver

P, D = PeerId("p-process"), PeerId("d-process")
HOME, OTHER = Address("p.example", 8998), Address("q.example", 8998)
GONE = Failure(499, "the client is gone", code="cancelled", stage="decode")
LEASE_S = settings().silent_s  # P may write for so long after it was heard, if the backend cannot bar it
NO_MEMORY = Failure(503, "out of pages", code="overloaded", stage="prefill")


class Node:
    def __init__(self, fence_delay_s: float = 0.0, **changes: Any) -> None:
        self.now_s = 100.0
        self.fabric = MemoryFabric(fence_delay_s=fence_delay_s)
        self.wire = RecordingDialWire()
        self.backend, self.pool = registered_backend(self.fabric)
        region = Region(self.pool.ctypes.data, NUM_PAGES, PAGE_NBYTES, "cpu", self.pool)
        self.receiver = Receiver(settings(region=region, **changes), D, self.wire, self.backend)
        self.log = EventLog()
        self.peer_backend, _ = registered_backend(self.fabric)
        self.peer_backend.connect(D, self.backend.describe())

    def step(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        for _ in range(2):  # a fence of no length is over in the next step
            self.receiver.poll_backend(self.now_s)
            self.receiver.tick(self.now_s)
            for event in self.receiver.events:
                self.log.add(event)
            self.receiver.events.clear()

    def live(self, seconds: float) -> None:
        """Time passes, and P goes on sending heartbeats."""
        for _ in range(round(seconds)):
            self.receive(Heartbeat(P, D))
            self.step(1.0)

    def offer(self, room: int = 1, address: Address = HOME, timeout_s: float = 60.0) -> None:
        self.log.open(room)
        deadline_s = self.now_s + timeout_s
        self.receiver.offer(room, address, 9, b"digest", 1, pages(21, 22), deadline_s, deadline_s + UNIX_OFFSET_S, self.now_s)
        self.step()

    def acknowledge_room_with_rid(self, rid: str) -> None:
        self.log.open(1)
        deadline_s = self.now_s + 60.0
        self.receiver.offer(1, HOME, 9, b"digest", 1, pages(21, 22), deadline_s, deadline_s + UNIX_OFFSET_S, self.now_s, rid=rid)
        self.step()
        self.acknowledge()

    def abort(self, room: int = 1) -> None:
        self.log.aborted.add(room)
        self.receiver.abort(room, GONE, self.now_s)
        self.step()

    # ---- the prefill node

    def receive(self, message: Any, link: int = 1) -> None:
        self.receiver.on_frame(link, frame(message), self.now_s)
        self.step()

    def acknowledge(self, link: int = 1, peer: PeerId = P) -> None:
        self.receive(hello_ack(peer, HelloBody(settings().compat, self.peer_backend.describe(), 0.5, 3.0)), link)

    def disconnect(self, link: int = 1) -> None:
        self.receiver.on_disconnected(link, "its connection ended", self.now_s)
        self.step()

    def token(self, attempt: int = 1, room: int = 1, sender: str = P) -> None:
        self.receive(FirstTokenMessage(room=room, attempt=attempt, sender=sender, receiver=D, token_id=42, num_cached_tokens=4))

    def closed(self, status: Any, failure: Failure | None = None, attempt: int = 1, room: int = 1, page_digests: bytes = b"") -> None:
        self.receive(Closed(room=room, attempt=attempt, sender=P, receiver=D, status=status, failure=failure, page_digests=page_digests))

    def withdraw(self, room: int = 9, address: Address = HOME) -> None:
        self.receiver.withdraw(room, address, NO_MEMORY, self.now_s)
        self.step()

    def withdrawn(self, link: int = 1) -> list[Withdraw]:
        return [message for message in self.wire.take(link) if isinstance(message, Withdraw)]

    # ---- what came of it

    def events(self, room: int = 1) -> list[Any]:
        return self.log.by_room[room]

    def sent(self, link: int = 1) -> list[Offer | Cancel]:
        return [message for message in self.wire.take(link) if isinstance(message, Offer | Cancel)]

    def rooms(self) -> dict[str, float]:
        prefix = "transfer_rooms_"
        return {name.removeprefix(prefix): count for name, count in self.receiver.stats().items() if name.startswith(prefix) and count}

    def reach(self, state: str) -> None:
        self.offer()
        if state != "pending":
            self.acknowledge()
            self.sent()
        if state == "quarantine":
            self.abort()
            self.sent()
        assert self.rooms() == {state: 1}


def test_an_offer_waits_for_the_link_and_leaves_with_it() -> None:
    node = Node()
    node.offer()
    assert node.rooms() == {"pending": 1}
    assert node.sent() == []
    node.acknowledge()
    assert node.rooms() == {"offered": 1}
    assert node.sent() == [
        Offer(
            room=1, attempt=1, sender=D, receiver=P, num_prompt_tokens=9, prompt_digest=b"digest", decode_prefix_pages=1,
            dst_pages=pack_pages(pages(21, 22)), deadline_unix_s=160.0 + UNIX_OFFSET_S,
        )
    ]  # fmt: skip


def test_the_second_offer_leaves_at_once_and_has_a_number_of_its_own() -> None:
    node = Node()
    node.reach("offered")
    node.offer(room=2)
    [offer] = node.sent()
    assert (offer.room, offer.attempt) == (2, 2)
    assert node.wire.opened == [HOME]


def test_token_and_pages_delivered() -> None:
    node = Node()
    node.reach("offered")
    node.token()
    assert node.events() == [FirstToken(1, 42, 4)]
    node.closed("DELIVERED")
    assert node.events() == [FirstToken(1, 42, 4), Delivered(1)]
    assert node.rooms() == {}
    totals = {name.removeprefix("transfer_").removesuffix("_total"): n for name, n in node.receiver.stats().items() if name.endswith("_total")}
    assert totals == {
        "offers": 1, "delivered": 1, "failed": 0, "corrupt_pages": 0, "offer_waits": 1, "offer_wait_seconds": 0, "waits": 1, "wait_seconds": 0
    }  # fmt: skip


def test_a_token_that_comes_twice_is_told_once() -> None:
    node = Node()
    node.reach("offered")
    node.token()
    node.token()
    assert node.events() == [FirstToken(1, 42, 4)]


@pytest.mark.parametrize(
    ("token_id", "num_cached_tokens", "sentence"),
    [
        (COMPAT.vocab_size, 0, f"sent token {COMPAT.vocab_size} of a vocabulary of {COMPAT.vocab_size}"),
        (2**31 - 1, 0, "sent token 2147483647"),
        (5, 10, "says that 10 of 9 prompt tokens were cached"),
    ],
)
def test_a_token_that_no_honest_node_sends_ends_the_room_and_nothing_else(token_id: int, num_cached_tokens: int, sentence: str) -> None:
    node = Node()
    node.offer()
    node.acknowledge()
    node.receive(FirstTokenMessage(room=1, attempt=1, sender=P, receiver=D, token_id=token_id, num_cached_tokens=num_cached_tokens))
    node.step()
    [failed] = node.events()
    assert isinstance(failed, RoomFailed)
    assert failed.failure.code == "protocol_error"
    assert sentence in failed.failure.message
    assert isinstance(node.sent()[-1], Cancel)
    node.closed("ABORTED", failed.failure)
    node.step()
    assert node.events()[-1] == PagesReturned(1)


def test_delivered_without_token_1_is_a_failure_with_pages_returned() -> None:
    node = Node()
    node.reach("offered")
    node.closed("DELIVERED")
    [failed, returned] = node.events()
    assert (failed.failure.status, failed.failure.code, returned) == (503, "protocol_error", PagesReturned(1))


@pytest.mark.parametrize("status", ["FAILED", "ABORTED", "REFUSED"])
@pytest.mark.parametrize("failure", [NO_MEMORY, None], ids=["with", "without"])
def test_a_failure_of_p_reaches_the_scheduler_as_it_is(status: str, failure: Failure | None) -> None:
    node = Node()
    node.reach("offered")
    node.token()
    node.closed(status, failure)
    [_, failed, returned] = node.events()
    assert failed.failure == failure if failure else failed.failure.status == 503
    assert returned == PagesReturned(1)
    assert node.rooms() == {}


# ---- giving up -----------------------------------------------------------------------------------------------------------------


def test_an_offer_that_has_not_left_is_given_up_at_once() -> None:
    node = Node()
    node.reach("pending")
    node.abort()
    assert node.events() == [PagesReturned(1)]
    node.acknowledge()
    assert node.sent() == []


@pytest.mark.parametrize("status", ["DELIVERED", "FAILED", "ABORTED", "REFUSED"])
def test_abort_keeps_pages_until_p_closes(status: str) -> None:
    node = Node()
    node.reach("offered")
    node.abort()
    assert node.sent() == [Cancel(room=1, attempt=1, sender=D, receiver=P, failure=GONE)]
    assert node.rooms() == {"quarantine": 1}
    assert node.events() == []
    node.token()
    assert node.events() == []
    node.closed(status, None if status == "DELIVERED" else NO_MEMORY)
    assert node.events() == [PagesReturned(1)]
    assert node.rooms() == {}


@pytest.mark.parametrize("state", ["pending", "offered"])
def test_the_deadline_answers_the_client_and_keeps_offered_pages(state: str) -> None:
    node = Node(peer_timeout_s=1000.0)
    node.reach(state)
    node.step(59.9)
    assert node.events() == []
    node.step(0.2)
    failed = node.events()[0]
    assert isinstance(failed, RoomFailed)
    assert (failed.failure.status, failed.failure.code) == (504, "deadline_exceeded")
    if state == "pending":
        assert node.events()[1:] == [PagesReturned(1)]
        return
    assert node.events()[1:] == []
    [cancel] = node.sent()
    assert isinstance(cancel, Cancel)
    node.closed("ABORTED", cancel.failure)
    assert node.events()[1:] == [PagesReturned(1)]


@pytest.mark.parametrize("again", ["abort", "deadline", "fail"])
def test_a_room_is_given_up_once(again: str) -> None:
    node = Node(peer_timeout_s=1000.0)
    node.reach("quarantine")
    if again == "abort":
        node.abort()
    elif again == "fail":
        node.receiver.fail(1, NO_MEMORY, node.now_s)
    else:
        node.step(61.0)
    node.step()
    assert node.sent() == []
    assert node.events() == []
    assert node.rooms() == {"quarantine": 1}


def test_a_cancel_that_is_never_answered_costs_p_the_link_and_then_the_fence_ends_it() -> None:
    node = Node(fence_delay_s=2.0, peer_timeout_s=3.0)
    node.reach("quarantine")
    node.live(29)
    assert node.rooms() == {"quarantine": 1}
    node.live(2)
    assert 1 in node.wire.closed
    assert node.events() == []
    node.step(1.9)
    assert node.events() == []
    node.step(LEASE_S)
    assert node.events() == [PagesReturned(1)]


# ---- a lost peer -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_first", [False, True])
def test_a_lost_peer_is_answered_at_once_and_its_pages_wait_for_the_fence(token_first: bool) -> None:
    node = Node(fence_delay_s=2.0)
    node.reach("offered")
    if token_first:
        node.token()
    node.disconnect()
    failed = node.events()[-1]
    assert isinstance(failed, RoomFailed)
    assert (failed.failure.status, failed.failure.code, failed.failure.stage) == (503, "peer_lost", "transfer")
    assert not node.backend.lets_in(node.peer_backend)
    assert node.rooms() == {"quarantine": 1}
    node.step(LEASE_S + 1.9)
    assert node.events()[-1] == failed
    node.step(0.2)
    assert node.events()[-1] == PagesReturned(1)
    assert node.rooms() == {}


def test_a_lost_peer_ends_a_quarantine_by_the_fence() -> None:
    node = Node(fence_delay_s=2.0)
    node.reach("quarantine")
    node.disconnect()
    assert node.events() == []
    node.step(LEASE_S + 2.0)
    assert node.events() == [PagesReturned(1)]


def test_a_lost_peer_touches_no_other_rooms() -> None:
    node = Node()
    node.reach("offered")
    node.offer(room=2, address=OTHER)
    node.acknowledge(2, PeerId("q-process"))
    node.disconnect(1)
    assert node.log.is_over(1)
    assert node.events(2) == []
    assert node.rooms() == {"offered": 1}


def test_no_abort_or_deadline_changes_a_fence_that_runs() -> None:
    node = Node(fence_delay_s=100.0)
    node.reach("offered")
    node.disconnect()
    node.abort()
    node.step(LEASE_S + 99.0)
    assert node.rooms() == {"quarantine": 1}
    node.step(1.0)
    assert [type(event) for event in node.events()] == [RoomFailed, PagesReturned]


def test_what_p_says_by_a_new_link_does_not_end_the_fence_of_the_old_one() -> None:
    node = Node(fence_delay_s=2.0)
    node.reach("offered")
    node.disconnect()
    node.offer(room=2)
    node.acknowledge(2)
    node.receive(Closed(room=1, attempt=1, sender=P, receiver=D, status="REFUSED"), link=2)
    assert node.rooms() == {"quarantine": 1, "offered": 1}


@pytest.mark.parametrize("how", ["refused connection", "refused hello"])
def test_parked_offers_fail_with_the_link_and_return_their_pages(how: str) -> None:
    node = Node()
    for room in (1, 2):
        node.offer(room=room)
    node.offer(room=3, address=OTHER)
    if how == "refused connection":
        node.disconnect()
    else:
        node.receive(hello_refusal(P, "page size: 16 here, 4 at the peer"))
    for room in (1, 2):
        [failed, returned] = node.events(room)
        assert failed.failure.status == 503
        assert failed.failure.code == ("peer_unreachable" if how == "refused connection" else "incompatible_peer")
        assert returned == PagesReturned(room)
    assert node.rooms() == {"pending": 1}


def test_an_offer_to_a_refused_node_fails_at_once() -> None:
    node = Node()
    node.reach("pending")
    node.receive(hello_refusal(P, "page size: 16 here, 4 at the peer"))
    node.offer(room=2)
    [failed, returned] = node.events(2)
    assert (failed.failure.code, returned) == ("incompatible_peer", PagesReturned(2))


# ---- withdrawn rooms -----------------------------------------------------------------------------------------------------------


def withdrawal(room: int, failure: Failure) -> Withdraw:
    return Withdraw(room=room, sender=D, receiver=P, failure=failure)


def test_a_withdrawal_leaves_by_the_link_that_is_there() -> None:
    node = Node()
    node.reach("offered")
    node.withdraw()
    assert node.withdrawn() == [withdrawal(9, NO_MEMORY)]
    assert node.rooms() == {"offered": 1}


def test_a_withdrawal_dials_and_leaves_with_the_link() -> None:
    node = Node()
    node.withdraw()
    assert node.wire.opened == [HOME]
    assert node.withdrawn() == []
    node.acknowledge()
    assert node.withdrawn() == [withdrawal(9, NO_MEMORY)]
    assert node.receiver._withdrawals == []


def test_a_withdrawal_that_cannot_be_told_is_dropped_and_said_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    with caplog.at_level(logging.DEBUG, "kvtransfer.receiver"):
        node.withdraw()
        node.disconnect()
        node.withdraw(address=Address("", 1))
    assert [record.levelname for record in caplog.records if "is not withdrawn" in record.getMessage()] == ["DEBUG", "DEBUG"]
    assert node.receiver._withdrawals == []
    assert node.wire.opened == [HOME]


def test_withdrawals_that_wait_for_their_links_are_bounded() -> None:
    node = Node(max_rooms=3)
    for room in range(10):
        node.withdraw(room)
    assert len(node.receiver._withdrawals) == 3


@pytest.mark.parametrize("how", ["hello refused", "description refused"])
def test_a_refused_node_hears_of_its_rooms_by_that_very_connection(how: str) -> None:
    node = Node()
    for room in (1, 2):
        node.offer(room=room)
    if how == "hello refused":
        node.receive(hello_refusal(P, "page size: 16 here, 4 at the peer"))
    else:
        node.receive(hello_ack(P, HelloBody(settings().compat, b"of another backend", 0.5, 3.0)))
    node.offer(room=3)  # fails at once, while the refusal holds
    told = node.withdrawn()
    failures = [node.events(room)[0].failure for room in (1, 2, 3)]
    assert told == [withdrawal(room, failure) for room, failure in zip((1, 2, 3), failures, strict=True)]
    assert {failure.code for failure in failures} == {"incompatible_peer"}
    assert 1 not in node.wire.closed
    node.step(5.1)
    assert 1 in node.wire.closed


@pytest.mark.parametrize("why", ["abort", "deadline"])
def test_a_room_that_ends_before_it_was_offered_is_withdrawn_when_the_link_is_up(why: str) -> None:
    node = Node(peer_timeout_s=1000.0)
    node.reach("pending")
    if why == "abort":
        node.abort()
    else:
        node.step(60.1)
    node.acknowledge()
    [told] = node.withdrawn()
    assert (told.room, told.failure.code) == (1, "cancelled" if why == "abort" else "deadline_exceeded")


def test_a_refused_dial_does_not_keep_the_next_offer_from_its_node() -> None:
    node = Node()
    node.reach("pending")
    node.disconnect()
    node.offer(room=2)
    node.acknowledge(2)
    assert [type(message) for message in node.sent(2)] == [Offer]


# ---- checksums -----------------------------------------------------------------------------------------------------------------


def digests(node: Node, *dst_pages: int) -> bytes:
    return np.array([zlib.crc32(node.pool[page].tobytes()) for page in dst_pages], "<u4").tobytes()


def test_pages_that_arrived_whole_are_delivered() -> None:
    node = Node(digest=True)
    node.offer()
    node.acknowledge()
    [offer] = node.sent()
    assert isinstance(offer, Offer)
    assert offer.digest
    node.token()
    node.closed("DELIVERED", page_digests=digests(node, 21, 22))
    assert node.events()[-1] == Delivered(1)


def test_a_damaged_page_fails_the_room_and_returns_its_pages() -> None:
    node = Node(digest=True)
    node.reach("offered")
    node.token()
    sent = digests(node, 21, 22)
    node.pool[22, 3] ^= 1
    node.closed("DELIVERED", page_digests=sent)
    [_, failed, returned] = node.events()
    assert (failed.failure.status, failed.failure.code, failed.failure.stage, returned) == (503, "corrupt_kv", "transfer", PagesReturned(1))
    assert failed.failure.message.startswith("KV page 2 of the prompt (page 22 of the pool) arrived damaged")
    stats = node.receiver.stats()
    assert (stats["transfer_corrupt_pages_total"], stats['transfer_failures_total{cause="corrupt_kv"}']) == (1, 1)


@pytest.mark.parametrize("sent", [b"", bytes(4), bytes(7), bytes(12)])
def test_checksums_that_do_not_fit_the_pages_fail_the_room(sent: bytes) -> None:
    node = Node(digest=True)
    node.reach("offered")
    node.token()
    node.closed("DELIVERED", page_digests=sent)
    assert node.events()[1].failure.code == "protocol_error"


def test_pages_of_a_room_that_was_given_up_are_not_compared() -> None:
    node = Node(digest=True)
    node.reach("quarantine")
    node.closed("DELIVERED", page_digests=bytes(8))
    assert node.events() == [PagesReturned(1)]
    assert node.receiver.stats()["transfer_corrupt_pages_total"] == 0


# ---- what is said and counted --------------------------------------------------------------------------------------------------


def test_a_failed_room_is_one_line_with_room_request_peer_stage_and_cause(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    node.acknowledge_room_with_rid("cmpl-17")
    node.receiver.fail(1, NO_MEMORY, node.now_s)
    node.step()
    node.closed("ABORTED", NO_MEMORY)
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line == "room 1, request cmpl-17, peer p.example:8998: failed in prefill: out of pages (overloaded)"


def test_waits_and_peers_are_counted() -> None:
    node = Node()
    node.reach("offered")
    node.step(1.5)
    node.token()
    node.step(0.5)
    node.closed("DELIVERED")
    node.step(1.0)
    stats = node.receiver.stats()
    assert (stats["transfer_offer_wait_seconds_total"], stats["transfer_offer_waits_total"]) == (1.5, 1)
    assert (stats["transfer_wait_seconds_total"], stats["transfer_waits_total"]) == (0.5, 1)
    assert (stats['transfer_peers{state="up"}'], stats['transfer_peers{state="refused"}']) == (1, 0)
    assert stats["transfer_heartbeat_age_seconds"] == 1.0


# ---- stale and forged ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"attempt": 2}, {"room": 2}], ids=str)
def test_messages_about_another_offer_are_passed_over(wrong: dict[str, int]) -> None:
    node = Node()
    node.reach("offered")
    node.token(**wrong)
    node.closed("DELIVERED", **wrong)
    node.closed("FAILED", NO_MEMORY, **wrong)
    assert node.events() == []
    assert node.rooms() == {"offered": 1}


def test_another_prefill_node_cannot_close_the_room() -> None:
    node = Node()
    node.reach("offered")
    node.offer(room=2, address=OTHER)
    node.acknowledge(2, PeerId("q-process"))
    node.receive(Closed(room=1, attempt=1, sender="q-process", receiver=D, status="FAILED", failure=NO_MEMORY), link=2)
    assert node.events() == []


def test_messages_after_the_end_are_passed_over_and_the_room_can_be_used_again() -> None:
    node = Node()
    node.reach("offered")
    node.closed("FAILED", NO_MEMORY)
    node.closed("FAILED", NO_MEMORY)
    node.log.by_room.clear()
    node.offer()
    node.closed("FAILED", NO_MEMORY)  # of the first offer
    assert node.rooms() == {"offered": 1}


def test_close_gives_every_room_up_and_tells_p() -> None:
    node = Node()
    node.reach("offered")
    node.offer(room=2, address=OTHER)
    node.receiver.close(NO_MEMORY, node.now_s)
    node.step()
    assert [type(message) for message in node.sent()] == [Cancel]
    assert node.events(1) == [RoomFailed(1, NO_MEMORY)]
    assert node.events(2) == [RoomFailed(2, NO_MEMORY), PagesReturned(2)]
