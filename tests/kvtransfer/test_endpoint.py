"""Whole endpoints over loopback: threads, ZMQ sockets, the memory backend; tcp and processes where they die."""

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from endpoint_harness import NUM_PAGES, Child, Node, page_ids

from common.errors import Failure, StartupError
from kvtransfer.backend import PeerId, TransferError
from kvtransfer.endpoint import Delivered, FirstToken, OfferJoined, PagesReturned, RoomFailed, TransferCrashed, Wake
from kvtransfer.memory import MemoryFabric
from kvtransfer.protocol import MAX_FRAME_NBYTES, HelloBody, Offer, encode, hello, pack_pages
from kvtransfer.tcp import TcpBackend

DIGEST = b"digest"
GONE = Failure(499, "the client is gone", code="cancelled", stage="decode")
NO_MEMORY = Failure(503, "out of pages", code="overloaded", stage="prefill", retry_after_s=1.0)
SRC, DST = page_ids(1, 2, 3), page_ids(11, 12, 13)  # 9 tokens, 4 a page
DETECTED_S = 2.0  # a death is known in milliseconds; the rest is for a busy machine


class Cluster:
    """Nodes of this process over one memory fabric, and children; all are ended after the test."""

    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.nodes: list[Node] = []
        self.children: list[Child] = []

    def prefill(self, port: int = 0, **options: Any) -> Node:
        return self._add(Node(self.fabric.backend(), "prefill", port, **options))

    def decode(self, **options: Any) -> Node:
        return self._add(Node(self.fabric.backend(), "decode", **options))

    def tcp(self, role: str, **options: Any) -> Node:
        return self._add(Node(TcpBackend(), role, **options))

    def child(self, role: str, *arguments: Any) -> Child:
        self.children.append(Child(role, *arguments))
        return self.children[-1]

    def _add(self, node: Node) -> Node:
        node.pool[:] = np.arange(NUM_PAGES)[:, None]
        self.nodes.append(node)
        return node


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    threads_before = set(threading.enumerate())
    cluster = Cluster()
    yield cluster
    for child in cluster.children:
        child.stop()
    for node in cluster.nodes:
        node.endpoint.close()
    assert set(threading.enumerate()) <= threads_before


@pytest.fixture
def pair(cluster: Cluster) -> tuple[Node, Node]:
    return cluster.prefill(), cluster.decode()


def in_s(seconds: float) -> float:
    return time.time() + seconds


def expect(p: Node, room: int = 1, digest: bytes = DIGEST, timeout_s: float = 60.0) -> None:
    assert p.endpoint.expect(room, 9, digest, in_s(timeout_s)) is None


def offer(d: Node, p: Node | Child | int, room: int = 1, *, prefix: int = 0, dst: np.ndarray = DST, timeout_s: float = 60.0) -> None:
    port = p if isinstance(p, int) else p.port if isinstance(p, Child) else p.endpoint.port
    assert d.endpoint.offer(room, "127.0.0.1", port, 9, DIGEST, prefix, dst, in_s(timeout_s)) is None


def compute(p: Node, room: int = 1) -> None:
    p.endpoint.send_pages(room, 0, SRC[:2])
    p.endpoint.send_pages(room, 2, SRC[2:])
    p.endpoint.send_first_token(room, 42, 4)
    p.endpoint.finish(room)


def transfer(p: Node, d: Node, room: int = 1, dst: np.ndarray = DST) -> None:
    """One room from end to end."""
    expect(p, room)
    offer(d, p, room, dst=dst)
    assert p.event() == OfferJoined(room, 0)
    compute(p, room)
    assert [d.event(), d.event()] == [FirstToken(room, 42, 4), Delivered(room)]
    assert p.event() == Delivered(room)
    assert (d.pool[dst] == p.pool[SRC]).all()
    d.pool[dst] = 0


def assert_failed(node: Node, code: str, room: int = 1, status: int = 503, within_s: float = DETECTED_S) -> Failure:
    """RoomFailed and PagesReturned, the first in time."""
    failed = node.event(within_s)
    assert isinstance(failed, RoomFailed)
    assert (failed.room, failed.failure.code, failed.failure.status) == (room, code, status)
    assert node.event() == PagesReturned(room)
    return failed.failure


def assert_nothing_is_held(*nodes: Node) -> None:
    for node in nodes:
        eventually(lambda node=node: not node.rooms(), f"rooms are held: {node.rooms()}")


def eventually(fact: Callable[[], bool], message: str) -> None:
    deadline_s = time.monotonic() + 10.0
    while not fact():
        assert time.monotonic() < deadline_s, message
        time.sleep(0.002)


def wait_for_peer(node: Node, state: str) -> None:
    eventually(lambda: [peer["state"] for peer in node.endpoint.peers()] == [state], f"no peer is {state}: {node.endpoint.peers()}")


# ---- delivery ----------------------------------------------------------------------------------------------------------------


def test_a_prompt_travels(pair: tuple[Node, Node]) -> None:
    p, d = pair
    transfer(p, d)
    transfer(p, d, room=2)
    assert_nothing_is_held(p, d)
    assert p.endpoint.stats()["transfer_bytes_written_total"] == 2 * 3 * p.pool.shape[1]
    assert [peer["state"] for peer in (*p.endpoint.peers(), *d.endpoint.peers())] == ["up", "up"]


def test_an_offer_may_come_before_its_request(pair: tuple[Node, Node]) -> None:
    p, d = pair
    offer(d, p)
    eventually(lambda: p.rooms() == {"parked": 1}, "the offer is not parked")
    expect(p)
    assert p.event() == OfferJoined(1, 0)


def test_a_prefix_that_d_has_is_not_sent(pair: tuple[Node, Node]) -> None:
    p, d = pair
    expect(p)
    offer(d, p, prefix=2, dst=page_ids(13))
    assert p.event() == OfferJoined(1, 2)
    compute(p)
    assert [d.event(), d.event()] == [FirstToken(1, 42, 4), Delivered(1)]
    assert d.pool[[11, 12, 13], 0].tolist() == [11, 12, 3]


def test_a_prompt_that_d_has_wholly_is_delivered_too(pair: tuple[Node, Node]) -> None:
    p, d = pair
    expect(p)
    offer(d, p, prefix=3, dst=page_ids())
    assert p.event() == OfferJoined(1, 3)
    compute(p)
    assert [d.event(), d.event()] == [FirstToken(1, 42, 4), Delivered(1)]
    assert p.event() == Delivered(1)


def test_the_first_token_does_not_wait_for_pages(cluster: Cluster, pair: tuple[Node, Node]) -> None:
    p, d = pair
    cluster.fabric.hold()
    expect(p)
    offer(d, p)
    p.event()
    compute(p)
    assert d.event() == FirstToken(1, 42, 4)
    assert d.rooms() == {"offered": 1}
    cluster.fabric.resume()
    assert d.event() == Delivered(1)


def test_page_arrays_may_change_after_the_call(pair: tuple[Node, Node]) -> None:
    p, d = pair
    src, dst = SRC.copy(), DST.copy()
    expect(p)
    offer(d, p, dst=dst)
    dst[:] = 0
    p.event()
    p.endpoint.send_pages(1, 0, src)
    src[:] = 0
    p.endpoint.send_first_token(1, 42, 0)
    p.endpoint.finish(1)
    assert [type(d.event()), type(d.event())] == [FirstToken, Delivered]
    assert d.pool[DST, 0].tolist() == SRC.tolist()


def test_many_prefill_and_decode_nodes_form_pairs_as_they_are_needed(cluster: Cluster) -> None:
    prefills = [cluster.prefill() for _ in range(3)]
    decodes = [cluster.decode() for _ in range(2)]
    room = 0
    for p in prefills:
        for d in decodes:
            transfer(p, d, room := room + 1)
    assert [len(p.endpoint.peers()) for p in prefills] == [2, 2, 2]
    assert [len(d.endpoint.peers()) for d in decodes] == [3, 3]


def test_many_rooms_at_once(pair: tuple[Node, Node]) -> None:
    p, d = pair
    rooms = range(1, 101)
    for room in rooms:
        expect(p, room)
        offer(d, p, room)
    ended_p: set[int] = set()
    ended_d: set[int] = set()
    while len(ended_p) < len(rooms):
        event = p.event()
        if isinstance(event, OfferJoined):
            compute(p, event.room)
        else:
            assert isinstance(event, Delivered)
            ended_p.add(event.room)
    while len(ended_d) < len(rooms):
        event = d.event()
        if isinstance(event, Delivered):
            ended_d.add(event.room)
    assert ended_p == ended_d == set(rooms)
    assert_nothing_is_held(p, d)


def test_tcp_carries_the_pages_between_real_nodes(cluster: Cluster) -> None:
    p, d = cluster.tcp("prefill"), cluster.tcp("decode")
    transfer(p, d)
    transfer(p, d, room=2)


def test_a_node_bound_to_all_addresses_is_reached_where_it_is_seen(cluster: Cluster) -> None:
    p = Node(TcpBackend("0.0.0.0"), "prefill", host="0.0.0.0")
    d = Node(TcpBackend("0.0.0.0"), "decode")
    for node in (p, d):
        cluster._add(node)
    transfer(p, d)


def test_pages_gather_and_leave_with_the_end(cluster: Cluster) -> None:
    p, d = cluster.prefill(post_tokens=1024), cluster.decode()
    for room in (1, 2):
        transfer(p, d, room)
    stats = p.endpoint.stats()
    assert (stats["transfer_posts_total"], stats["transfer_pages_total"], stats["transfer_descriptors_total"]) == (2, 6, 2)


def test_pages_leave_once_their_event_has_passed(pair: tuple[Node, Node]) -> None:
    p, d = pair
    asked, passed = threading.Event(), threading.Event()

    class Event:
        def query(self) -> bool:
            asked.set()
            return passed.is_set()

    expect(p)
    offer(d, p)
    assert p.event() == OfferJoined(1, 0)
    p.endpoint.send_pages(1, 0, SRC, Event())
    p.endpoint.send_first_token(1, 42, 4)
    p.endpoint.finish(1)
    assert d.event() == FirstToken(1, 42, 4)
    for _ in range(3):
        asked.clear()
        assert asked.wait(10.0)
    assert p.endpoint.stats()["transfer_posts_total"] == 0
    passed.set()
    assert [d.event(), p.event()] == [Delivered(1), Delivered(1)]


# ---- checksums -----------------------------------------------------------------------------------------------------------------


def test_checksums_of_both_nodes_agree(cluster: Cluster) -> None:
    p, d = cluster.prefill(), cluster.decode(digest=True)
    transfer(p, d)
    transfer(p, d, room=2)
    assert d.endpoint.stats()["transfer_corrupt_pages_total"] == 0


def test_a_page_damaged_on_the_way_fails_the_request_and_the_pair_goes_on(cluster: Cluster) -> None:
    p, d = cluster.prefill(), cluster.decode(digest=True)
    cluster.fabric.hold()
    expect(p)
    offer(d, p)
    assert p.event() == OfferJoined(1, 0)
    compute(p)
    assert d.event() == FirstToken(1, 42, 4)
    eventually(lambda: len(cluster.fabric.in_flight) == 2, "nothing is written")
    p.pool[SRC[1]] ^= 1  # after its checksum was taken
    cluster.fabric.resume()
    assert_failed(d, "corrupt_kv")
    assert p.event() == Delivered(1)
    transfer(p, d, room=2)


# ---- withdrawn rooms -----------------------------------------------------------------------------------------------------------


def test_a_request_that_d_will_not_offer_ends_on_p_at_once(pair: tuple[Node, Node]) -> None:
    p, d = pair
    expect(p)
    d.endpoint.withdraw(1, "127.0.0.1", p.endpoint.port, NO_MEMORY)  # dials
    assert [p.event(), p.event()] == [RoomFailed(1, NO_MEMORY), PagesReturned(1)]
    d.endpoint.withdraw(2, "127.0.0.1", p.endpoint.port, NO_MEMORY)
    d.endpoint.withdraw(2**63, "127.0.0.1", p.endpoint.port, NO_MEMORY)
    d.endpoint.withdraw(3, "127.0.0.1", closed_port(), NO_MEMORY)
    transfer(p, d, room=4)
    expect(p, 2)
    assert [p.event(), p.event()] == [RoomFailed(2, NO_MEMORY), PagesReturned(2)]
    assert_nothing_is_held(p, d)


@pytest.mark.parametrize("refuses", ["p", "d"])
def test_the_requests_of_a_pair_that_does_not_fit_end_on_both_nodes_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    p, d = cluster.prefill(), cluster.decode(compat_changes={"page_size": 8} if refuses == "p" else None)
    if refuses == "d":

        def refuse(peer: str, description: bytes) -> None:
            raise TransferError("not this one")

        monkeypatch.setattr(d.backend, "accept", refuse)
    for room in (1, 2, 3):
        expect(p, room)
        offer(d, p, room)
        for node in (d, p):
            assert_failed(node, "incompatible_peer", room)
    assert_nothing_is_held(p, d)


# ---- aborts --------------------------------------------------------------------------------------------------------------------


def test_p_gives_up_and_d_hears_why(pair: tuple[Node, Node]) -> None:
    p, d = pair
    expect(p)
    offer(d, p)
    assert p.event() == OfferJoined(1, 0)
    p.endpoint.abort(1, NO_MEMORY)
    assert p.event() == PagesReturned(1)
    assert [d.event(), d.event()] == [RoomFailed(1, NO_MEMORY), PagesReturned(1)]
    assert_nothing_is_held(p, d)


def test_a_request_refused_at_ps_intake_is_answered_to_the_offer(pair: tuple[Node, Node]) -> None:
    p, d = pair
    p.endpoint.abort(1, NO_MEMORY)
    offer(d, p)
    assert [d.event(), d.event()] == [RoomFailed(1, NO_MEMORY), PagesReturned(1)]


def test_d_gives_up_before_p_answers_hello(cluster: Cluster) -> None:
    d = cluster.decode()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        offer(d, mute.getsockname()[1])
        eventually(lambda: d.rooms() == {"pending": 1}, "the offer is not pending")
        d.endpoint.abort(1, GONE)
        assert d.event() == PagesReturned(1)


@pytest.mark.parametrize("phase", ["parked", "waiting", "computing", "sending"])
def test_d_gives_up_and_gets_its_pages_once_p_has_closed(cluster: Cluster, pair: tuple[Node, Node], phase: str) -> None:
    p, d = pair
    cluster.fabric.hold()
    offer(d, p)
    if phase != "parked":
        expect(p)
        assert p.event() == OfferJoined(1, 0)
    if phase == "computing":
        p.endpoint.send_pages(1, 0, SRC[:2])
    elif phase == "sending":
        compute(p)
        assert d.event() == FirstToken(1, 42, 4)
    eventually(lambda: p.rooms() == {phase: 1}, f"not {phase}")
    d.endpoint.abort(1, GONE)
    if phase in ("computing", "sending"):
        assert p.event() == RoomFailed(1, GONE)
        assert d.rooms() == {"quarantine": 1}
        assert d.endpoint.poll() == []
        cluster.fabric.resume()
    elif phase == "waiting":
        assert p.event() == RoomFailed(1, GONE)
    assert d.event() == PagesReturned(1)
    if phase != "parked":
        assert p.event() == PagesReturned(1)
    assert_nothing_is_held(p, d)


def test_the_deadline_ends_the_room_on_both_sides(pair: tuple[Node, Node]) -> None:
    p, d = pair
    expect(p, timeout_s=0.3)
    offer(d, p, timeout_s=0.3)
    assert p.event() == OfferJoined(1, 0)
    for node in (p, d):
        assert_failed(node, "deadline_exceeded", status=504, within_s=5.0)
    assert_nothing_is_held(p, d)


def test_an_offer_alone_is_answered_after_the_offer_timeout(cluster: Cluster) -> None:
    p, d = cluster.prefill(offer_timeout_s=0.2), cluster.decode()
    offer(d, p, room=2)
    assert_failed(d, "offer_expired", room=2)
    assert_nothing_is_held(p, d)


# ---- what does not fit ---------------------------------------------------------------------------------------------------------


def test_different_prompts_fail_on_both_sides(pair: tuple[Node, Node]) -> None:
    p, d = pair
    expect(p, digest=b"another")
    offer(d, p)
    for node in (p, d):
        assert_failed(node, "prompt_mismatch", status=400)


def test_a_room_is_taken_once_on_either_side(pair: tuple[Node, Node]) -> None:
    p, d = pair
    expect(p)
    offer(d, p)
    for refusal in (p.endpoint.expect(1, 9, DIGEST, in_s(60)), d.endpoint.offer(1, "127.0.0.1", 1, 9, DIGEST, 0, DST, in_s(60))):
        assert (refusal.status, refusal.code) == (400, "duplicate_room")
    assert p.event() == OfferJoined(1, 0)
    compute(p)
    assert [type(d.event()), type(d.event()), type(p.event())] == [FirstToken, Delivered, Delivered]


def test_another_node_that_offers_a_taken_room_is_refused_alone(cluster: Cluster, pair: tuple[Node, Node]) -> None:
    p, d = pair
    forger = cluster.decode()
    expect(p)
    offer(d, p)
    assert p.event() == OfferJoined(1, 0)
    offer(forger, p)
    assert_failed(forger, "duplicate_room", status=400)
    compute(p)
    assert [type(d.event()), type(d.event()), type(p.event())] == [FirstToken, Delivered, Delivered]
    offer(forger, p)  # and when it is over
    assert_failed(forger, "duplicate_room", status=400)
    assert (forger.pool[DST, 0] == DST).all()


def test_full_tables_refuse_with_retry_after(cluster: Cluster) -> None:
    p, d = cluster.prefill(max_rooms=2), cluster.decode(max_rooms=2)
    for room in (1, 2):
        expect(p, room)
        offer(d, p, room)
    for refusal in (p.endpoint.expect(3, 9, DIGEST, in_s(60)), d.endpoint.offer(3, "127.0.0.1", 1, 9, DIGEST, 0, DST, in_s(60))):
        assert (refusal.status, refusal.code) == (503, "overloaded")
        assert refusal.retry_after_s


def test_a_room_that_no_message_can_carry_is_refused(pair: tuple[Node, Node]) -> None:
    p, d = pair
    for room in (-1, 2**63):
        assert p.endpoint.expect(room, 9, DIGEST, in_s(60)).status == 400
        assert d.endpoint.offer(room, "127.0.0.1", 1, 9, DIGEST, 0, DST, in_s(60)).status == 400


def test_nodes_that_do_not_fit_say_so_and_stay_up(cluster: Cluster, pair: tuple[Node, Node]) -> None:
    p, d = pair
    other = cluster.decode(compat_changes={"page_size": 8, "dtype": "bfloat16"})
    for room in (1, 2):
        offer(other, p, room)
        failure = assert_failed(other, "incompatible_peer", room)
        assert "dtype: float32 on the prefill node, bfloat16 on the decode node; page size: 4 on the prefill node, 8 on" in failure.message
    assert [(peer["state"], "page size" in peer["reason"]) for peer in other.endpoint.peers()] == [("refused", True)]
    transfer(p, d, room=3)


def test_a_refused_pair_meets_again_after_a_redeployment(cluster: Cluster) -> None:
    former = cluster.prefill(compat_changes={"model": "former"})
    d = cluster.decode(refused_retry_s=0.0)
    offer(d, former, 1)
    assert_failed(d, "incompatible_peer", 1)
    port = former.endpoint.port
    former.endpoint.close()
    wait_for_peer(d, "refused")
    p = cluster.prefill(port)
    transfer(p, d, room=2)


# ---- garbage -------------------------------------------------------------------------------------------------------------------


def test_bytes_that_are_no_zmq_change_nothing(pair: tuple[Node, Node]) -> None:
    p, d = pair
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, b"\xff" * 4096):
        with socket.create_connection(("127.0.0.1", p.endpoint.port)) as connection:
            connection.sendall(garbage)
    transfer(p, d)


def test_frames_that_are_no_messages_change_nothing(pair: tuple[Node, Node]) -> None:
    p, d = pair
    context: Any = zmq.Context()
    try:
        for kind in (zmq.DEALER, zmq.REQ):
            stranger = context.socket(kind)
            stranger.set(zmq.LINGER, 1000)
            stranger.connect(f"tcp://127.0.0.1:{p.endpoint.port}")
            stranger.send(b"\xc1garbage")
            stranger.close()
        stranger = context.socket(zmq.DEALER)
        stranger.set(zmq.LINGER, 0)
        stranger.connect(f"tcp://127.0.0.1:{p.endpoint.port}")
        stranger.send_multipart([b"", b"a", b"b"])
        stranger.send(b"x" * (MAX_FRAME_NBYTES + 1))  # ends its connection
        transfer(p, d)
        stranger.close()
    finally:
        context.destroy(linger=0)
    assert len(p.endpoint.peers()) == 1


def test_a_stranger_without_hello_is_told_so_and_gets_no_room(pair: tuple[Node, Node]) -> None:
    p, d = pair
    forged = Offer(
        room=1, attempt=1, sender="who", receiver="ever", num_prompt_tokens=9, prompt_digest=DIGEST, decode_prefix_pages=0,
        dst_pages=pack_pages(DST), deadline_unix_s=in_s(60),
    )  # fmt: skip
    context: Any = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    try:
        stranger.connect(f"tcp://127.0.0.1:{p.endpoint.port}")
        stranger.send(encode(forged))
        assert stranger.poll(5000)
        assert b"say Hello first" in stranger.recv()
        body = HelloBody(p.endpoint._settings.compat, b"not a description", 0.5, 3.0)
        stranger.send(encode(hello(PeerId("who"), body)))
        assert stranger.poll(5000)
        assert b"KV transfer: the peer's description" in stranger.recv()
    finally:
        context.destroy(linger=0)
    assert p.rooms() == {}
    transfer(p, d)


def test_a_flood_of_garbage_does_not_stop_transfers(pair: tuple[Node, Node], caplog: pytest.LogCaptureFixture) -> None:
    p, d = pair
    context: Any = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    try:
        stranger.connect(f"tcp://127.0.0.1:{p.endpoint.port}")
        for _ in range(5000):
            stranger.send(b"\xc1")
        transfer(p, d)
    finally:
        context.destroy(linger=0)
    assert len([record for record in caplog.records if "dropped" in record.getMessage()]) <= 2


# ---- reaching and losing peers -------------------------------------------------------------------------------------------------


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nobody_listens_there(cluster: Cluster) -> None:
    d = cluster.decode()
    for room in (1, 2):
        offer(d, closed_port(), room)
        assert "connection refused" in assert_failed(d, "peer_unreachable", room).message


@pytest.mark.parametrize("host", ["", "not a host", "a:b:c", "x" * 5000, "\0", "ü.example"])
def test_an_address_that_is_none(cluster: Cluster, host: str) -> None:
    d = cluster.decode(peer_timeout_s=0.3)
    assert d.endpoint.offer(1, host, 70_000, 9, DIGEST, 0, DST, in_s(60)) is None
    assert_failed(d, "peer_unreachable")


def test_something_else_listens_there(cluster: Cluster) -> None:
    d = cluster.decode(peer_timeout_s=0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        offer(d, mute.getsockname()[1])
        assert "no answer to Hello" in assert_failed(d, "peer_unreachable", within_s=5.0).message
        offer(d, mute.getsockname()[1], room=2)
        for _ in range(2):
            connection, _ = mute.accept()
            connection.close()
        assert_failed(d, "peer_unreachable", room=2)


def test_a_node_that_closes_ends_its_rooms_and_the_next_behind_its_port_serves(cluster: Cluster, pair: tuple[Node, Node]) -> None:
    p, d = pair
    expect(p, 1)
    offer(d, p, 1)
    assert p.event() == OfferJoined(1, 0)
    port = p.endpoint.port
    p.endpoint.close()
    assert_failed(d, "shutting_down", 1)
    wait_for_peer(d, "down")
    transfer(cluster.prefill(port), d, room=2)


def test_writes_outstanding_when_p_closes_are_fenced_by_the_end_of_the_link(cluster: Cluster, pair: tuple[Node, Node]) -> None:
    p, d = pair
    cluster.fabric.hold()
    expect(p)
    offer(d, p)
    assert p.event() == OfferJoined(1, 0)
    p.endpoint.send_pages(1, 0, SRC)
    eventually(lambda: len(cluster.fabric.in_flight) == 1, "nothing is written")
    p.endpoint.close()
    assert_failed(d, "peer_lost")


@pytest.mark.parametrize("phase", ["waiting", "computing", "sending"])
def test_a_decode_node_that_closes_ends_its_rooms_on_p(cluster: Cluster, pair: tuple[Node, Node], phase: str) -> None:
    p, d = pair
    cluster.fabric.hold()
    expect(p)
    offer(d, p)
    assert p.event() == OfferJoined(1, 0)
    if phase == "computing":
        p.endpoint.send_pages(1, 0, SRC)
    elif phase == "sending":
        compute(p)
    eventually(lambda: p.rooms() == {phase: 1}, f"not {phase}")
    d.endpoint.close()
    failed = p.event(DETECTED_S)
    assert isinstance(failed, RoomFailed)
    assert failed.failure.status == 503
    assert p.event() == PagesReturned(1)
    cluster.fabric.resume()
    transfer(p, cluster.decode(), room=2)


def joined_with_child(p: Child, d: Node, room: int = 1) -> None:
    assert p.expect(room, 9, "digest", in_s(60)) is None
    offer(d, p, room)
    assert p.event() == "OfferJoined"


def compute_in_child(p: Child, d: Node, room: int) -> None:
    p.send_pages(room, 0, [1, 2, 3])
    p.send_first_token(room, 42, 4)
    p.finish(room)
    assert [d.event(), d.event()] == [FirstToken(room, 42, 4), Delivered(room)]
    assert d.pool[DST, 0].tolist() == [1, 2, 3]
    assert p.event() == "Delivered"


@pytest.mark.parametrize("phase", ["parked", "waiting", "computing"])
def test_a_killed_prefill_node_is_noticed_at_once_and_its_successor_serves(cluster: Cluster, phase: str) -> None:
    p, d = cluster.child("prefill"), cluster.tcp("decode")
    if phase == "parked":
        offer(d, p)
        eventually(lambda: d.rooms() == {"offered": 1}, "not offered")
    else:
        joined_with_child(p, d)
    if phase == "computing":
        p.send_first_token(1, 42, 0)
        assert d.event() == FirstToken(1, 42, 0)
    p.kill()
    assert_failed(d, "peer_lost")
    offer(d, p, room=2)
    assert_failed(d, "peer_unreachable", room=2)
    successor = cluster.child("prefill", p.port)
    joined_with_child(successor, d, 3)
    compute_in_child(successor, d, 3)


@pytest.mark.parametrize("phase", ["parked", "waiting", "computing"])
def test_a_killed_decode_node_is_noticed_at_once(cluster: Cluster, phase: str) -> None:
    p, child = cluster.tcp("prefill"), cluster.child("decode")
    assert child.offer(1, "127.0.0.1", p.endpoint.port, 9, "digest", 0, [11, 12, 13], in_s(60)) is None
    if phase != "parked":
        expect(p)
        assert p.event() == OfferJoined(1, 0)
    if phase == "computing":
        p.endpoint.send_pages(1, 0, SRC)
        eventually(lambda: p.rooms() == {"computing": 1}, "not computing")
    else:
        eventually(lambda: p.rooms() == {phase: 1}, f"not {phase}")
    child.kill()
    if phase != "parked":
        failed = p.event(DETECTED_S)
        assert isinstance(failed, RoomFailed)
        assert failed.failure.code in ("peer_lost", "transfer_failed")  # whichever of both connections ends first
        assert p.event() == PagesReturned(1)
    eventually(lambda: p.rooms() == {} and p.endpoint.peers() == [], "the dead node's rooms are held")
    transfer(p, cluster.tcp("decode"), room=2)


def test_a_stopped_prefill_node_is_lost_after_the_timeout_and_met_again_when_it_goes_on(cluster: Cluster) -> None:
    p, d = cluster.child("prefill", 0, 1.0), cluster.tcp("decode", peer_timeout_s=1.0)
    joined_with_child(p, d)
    p.freeze()
    failure = assert_failed(d, "peer_lost", within_s=5.0)
    assert "nothing heard of it for 1 s" in failure.message
    p.thaw()
    assert [p.event(), p.event()] == ["RoomFailed", "PagesReturned"]
    assert p.expect(2, 9, "digest", in_s(60)) is None
    offer(d, p, 2)
    assert p.event() == "OfferJoined"
    compute_in_child(p, d, 2)


def test_a_stopped_decode_node_is_lost_after_the_timeout_and_serves_again_when_it_goes_on(cluster: Cluster) -> None:
    p, child = cluster.tcp("prefill", peer_timeout_s=1.0), cluster.child("decode", 0, 1.0)
    expect(p)
    assert child.offer(1, "127.0.0.1", p.endpoint.port, 9, "digest", 0, [11, 12, 13], in_s(60)) is None
    assert p.event() == OfferJoined(1, 0)
    child.freeze()
    assert_failed(p, "peer_lost", within_s=5.0)
    child.thaw()
    assert [child.event(), child.event()] == ["RoomFailed", "PagesReturned"]
    expect(p, 2)
    assert child.offer(2, "127.0.0.1", p.endpoint.port, 9, "digest", 0, [11, 12, 13], in_s(60)) is None
    assert p.event() == OfferJoined(2, 0)
    compute(p, 2)
    assert [child.event(), child.event()] == ["FirstToken", "Delivered"]


def test_a_stopped_prefill_node_that_goes_on_writes_nothing_of_what_it_was_asked_before(cluster: Cluster) -> None:
    """Its scheduler handed pages over while D dropped it: the commands wait in the stopped process, as D's heartbeats do."""
    p, d = cluster.child("prefill", 0, 1.0), cluster.tcp("decode", peer_timeout_s=1.0)
    joined_with_child(p, d)
    p.freeze()
    p.tell("send_pages", 1, 0, [1, 2, 3])
    assert_failed(d, "peer_lost", within_s=5.0)
    d.pool[DST] = 99  # D's own again
    p.thaw()
    assert p.told() is None
    assert [p.event(), p.event()] == ["RoomFailed", "PagesReturned"]
    assert p.stats()["transfer_posts_total"] == 0
    assert (d.pool[DST] == 99).all()


def test_two_names_of_one_node_lead_to_one_link(pair: tuple[Node, Node]) -> None:
    p, d = pair
    transfer(p, d)
    for room in (2, 3):
        expect(p, room)
        assert d.endpoint.offer(room, "localhost", p.endpoint.port, 9, DIGEST, 0, DST, in_s(60)) is None
        assert p.event() == OfferJoined(room, 0)
        compute(p, room)
        assert [type(d.event()), type(d.event()), type(p.event())] == [FirstToken, Delivered, Delivered]
    transfer(p, d, room=4)
    assert len(p.endpoint.peers()) == 1
    assert sorted(peer["state"] for peer in d.endpoint.peers()) == ["alias", "up"]


# ---- the endpoint itself -------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_a_startup_error(cluster: Cluster, pair: tuple[Node, Node]) -> None:
    p, _ = pair
    with pytest.raises(StartupError, match=rf"127.0.0.1:{p.endpoint.port} cannot be bound: .*--bootstrap-port"):
        cluster.prefill(p.endpoint.port)
    with pytest.raises(StartupError, match="cannot be bound"):
        cluster.prefill(host="no-such-host.invalid")


def test_a_host_name_can_be_bound(cluster: Cluster) -> None:
    p = cluster.prefill(host="localhost")
    assert p.endpoint.port > 0


def test_wake_fd_is_readable_while_events_wait(pair: tuple[Node, Node]) -> None:
    p, d = pair
    assert select.select([p.endpoint.wake_fd], [], [], 0)[0] == []
    expect(p)
    offer(d, p)
    assert select.select([p.endpoint.wake_fd], [], [], 10.0)[0]
    assert p.endpoint.poll() == [OfferJoined(1, 0)]
    assert select.select([p.endpoint.wake_fd], [], [], 0)[0] == []
    assert p.endpoint.poll() == []


def test_an_idle_endpoint_sleeps(pair: tuple[Node, Node]) -> None:
    p, d = pair
    for node in pair:
        assert node.endpoint._next_due_s() == float("inf")
    transfer(p, d)
    for node in pair:
        assert node.endpoint._next_due_s() > time.monotonic() - 0.1  # heartbeats only


def test_a_defect_of_the_scheduler_costs_its_room_alone(pair: tuple[Node, Node], caplog: pytest.LogCaptureFixture) -> None:
    p, d = pair
    expect(p)
    offer(d, p)
    assert p.event() == OfferJoined(1, 0)
    p.endpoint.finish(1)
    assert "FINISH may not happen in WAITING" in assert_failed(p, "internal_error", status=500).message
    assert_failed(d, "internal_error", status=500)
    transfer(p, d, room=2)
    expect(p, 3)
    offer(d, p, 3)
    assert p.event() == OfferJoined(3, 0)
    p.endpoint.send_pages(3, 0, page_ids(1, 2, NUM_PAGES))
    assert "outside the region" in assert_failed(p, "internal_error", 3, status=500).message
    assert any("may not be done" in record.getMessage() for record in caplog.records)


def test_commands_for_rooms_that_are_over_or_unknown_are_ignored(pair: tuple[Node, Node]) -> None:
    p, d = pair
    transfer(p, d)
    for room in (1, 99):
        p.endpoint.send_pages(room, 0, SRC)
        p.endpoint.send_first_token(room, 1, 0)
        p.endpoint.finish(room)
        d.endpoint.abort(room, GONE)
    transfer(p, d, room=2)


def test_a_defect_of_the_thread_reaches_the_scheduler(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    p, _ = pair
    monkeypatch.setattr(p.endpoint._sender, "expect", lambda *_, **__: 1 // 0)
    expect(p)
    assert select.select([p.endpoint.wake_fd], [], [], 10.0)[0]
    with pytest.raises(TransferCrashed, match="division"):
        p.endpoint.poll()


def test_close_is_quick_final_and_can_be_called_twice(cluster: Cluster, pair: tuple[Node, Node]) -> None:
    p, d = pair
    transfer(p, d)
    offer(d, p, room=2)
    started_s = time.monotonic()
    for node in (*pair, *pair):
        node.endpoint.close()
        node.endpoint.poll()
    assert time.monotonic() - started_s < 2.0
    cluster.prefill(p.endpoint.port)


def test_a_wake_is_readable_from_set_to_clear_however_often_it_is_set() -> None:
    wake = Wake()

    def readable() -> bool:
        return bool(select.select([wake.fd], [], [], 0)[0])

    assert not readable()
    for _ in range(3):
        wake.set()
        wake.set()
        assert readable()
        wake.clear()
        assert not readable()
    wake.close()


def test_no_wake_is_lost_between_two_threads() -> None:
    """A producer appends and sets, a consumer waits, clears and takes: everything is taken."""
    wake, queue, taken = Wake(), deque[int](), 0

    def produce() -> None:
        for number in range(20_000):
            queue.append(number)
            wake.set()

    producer = threading.Thread(target=produce)
    producer.start()
    while taken < 20_000:
        assert select.select([wake.fd], [], [], 10.0)[0], f"asleep with {len(queue)} in the queue"
        wake.clear()
        for _ in range(len(queue)):
            assert queue.popleft() == taken
            taken += 1
    producer.join()
    wake.close()
