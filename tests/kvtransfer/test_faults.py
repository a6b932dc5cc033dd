"""Real endpoints with faulty backends and wires: each fault by name, what both sides are told, and that the pair heals.

Backends are tcp and memory, in one process; support/faults.py says what the faults are. The last tests draw them: rooms by the dozen,
every one of which must end on both sides, and no write may land in a page that is free.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from endpoint_harness import NUM_PAGES, Node, page_ids
from faults import BACKEND_FAULTS, WIRE_FAULTS, Decision, Faults, FaultyBackend, on_every_wire

from common.errors import Failure
from kvtransfer.backend import PeerId, Region, TransferBackend, TransferError
from kvtransfer.endpoint import Delivered, FirstToken, OfferJoined, PagesReturned, RoomFailed
from kvtransfer.memory import MemoryFabric
from kvtransfer.tcp import TcpBackend

GONE = Failure(499, "the client is gone", code="cancelled", stage="decode")
SRC, DST = page_ids(1, 2, 3), page_ids(11, 12, 13)  # 9 tokens, 4 a page
SETTLE_S = 10.0
DELIVERED = ["FirstToken", "Delivered"]


class Cluster:
    """Nodes whose backends and wires meet `faults`: sites "P" and "D", "P wire" and "D wire"."""

    def __init__(self, faults: Faults, backend: str) -> None:
        self.faults = faults
        self.nodes: list[Node] = []
        fabric = MemoryFabric()
        self._inner: Callable[[], TransferBackend] = fabric.backend if backend == "memory" else TcpBackend

    def add(self, role: str, **settings: Any) -> Node:
        node = Node(FaultyBackend(self._inner(), self.faults, role[0].upper()), role, **settings)
        node.pool[:] = np.arange(NUM_PAGES)[:, None]
        self.nodes.append(node)
        return node

    def pair(self, **settings: Any) -> tuple[Node, Node]:
        return self.add("prefill", **settings), self.add("decode", **settings)


@pytest.fixture(params=["memory", "tcp"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with running(request.param, Faults()) as cluster:
        yield cluster


@pytest.fixture
def one_sided() -> Iterator[Cluster]:
    with running("memory", Faults(one_sided=True, fence_delay_s=0.1)) as cluster:
        yield cluster


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Memory backends; faults on the wires."""
    faults = Faults(delay_s=0.02)
    on_every_wire(faults, monkeypatch)
    with running("memory", faults) as cluster:
        yield cluster


@contextmanager
def running(backend: str, faults: Faults) -> Iterator[Cluster]:
    threads_before = set(threading.enumerate())
    cluster = Cluster(faults, backend)
    try:
        with faults:
            yield cluster
    finally:
        for node in cluster.nodes:
            node.endpoint.close()
    eventually(lambda: set(threading.enumerate()) <= threads_before)


def eventually(fact: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SETTLE_S
    while not fact():
        assert time.monotonic() < deadline_s, "it did not come true"
        time.sleep(0.002)


def begin(p: Node, d: Node, room: int, dst: np.ndarray = DST, timeout_s: float = 60.0) -> None:
    """Both sides have the request."""
    assert p.endpoint.expect(room, 9, b"digest", time.time() + timeout_s) is None
    assert d.endpoint.offer(room, "127.0.0.1", p.endpoint.port, 9, b"digest", 0, dst, time.time() + timeout_s) is None


def compute(p: Node, room: int, src: np.ndarray = SRC) -> None:
    """Token 1, then all pages; one write."""
    p.endpoint.send_first_token(room, 42, 0)
    p.endpoint.send_pages(room, 0, src)
    p.endpoint.finish(room)


def join(p: Node, d: Node, room: int, dst: np.ndarray = DST, timeout_s: float = 60.0) -> None:
    begin(p, d, room, dst, timeout_s)
    assert p.event() == OfferJoined(room, 0)


def ends(node: Node, room: int) -> tuple[list[str], Failure | None]:
    """Names of the room's events up to its terminal one, and why it failed."""
    names, failure = [], None
    while not names or names[-1] not in ("Delivered", "PagesReturned"):
        event = node.event()
        assert event.room == room
        names.append(type(event).__name__)
        failure = event.failure if isinstance(event, RoomFailed) else failure
    return names, failure


def assert_the_pair_works(p: Node, d: Node, room: int = 99) -> None:
    join(p, d, room)
    compute(p, room)
    assert ends(d, room) == (DELIVERED, None)
    assert ends(p, room) == (["Delivered"], None)
    assert (d.pool[DST] == p.pool[SRC]).all()
    assert not p.rooms()
    assert not d.rooms()


# ---- faults of the backend -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["delay", "hold"])
def test_a_slow_write_is_delivered_late(cluster: Cluster, kind: str) -> None:
    p, d = cluster.pair()
    cluster.faults.script("P", kind)
    join(p, d, 1)
    compute(p, 1)
    assert ends(d, 1) == (DELIVERED, None)
    assert (d.pool[DST] == p.pool[SRC]).all()
    assert p.event() == Delivered(1)
    assert_the_pair_works(p, d)


@pytest.mark.parametrize("kind", ["partial", "error", "cut", "refuse"])
def test_a_failed_write_fails_its_room_on_both_sides_with_its_cause(cluster: Cluster, kind: str) -> None:
    p, d = cluster.pair()
    cluster.faults.script("P", kind)
    join(p, d, 1)
    compute(p, 1)
    names, failure = ends(d, 1)
    assert names == ["FirstToken", "RoomFailed", "PagesReturned"]
    assert failure is not None
    assert (failure.status, failure.code, failure.stage) == (503, "transfer_failed", "transfer")
    assert "injected" in failure.message
    assert ends(p, 1) == (["RoomFailed", "PagesReturned"], failure)
    assert_the_pair_works(p, d)


def test_a_failed_write_harms_no_other_room(cluster: Cluster) -> None:
    p, d = cluster.pair()
    for room, dst in ((1, DST), (2, page_ids(21, 22, 23))):
        join(p, d, room, dst)
    cluster.faults.script("P", "stuck", "partial")
    compute(p, 2)
    eventually(lambda: len(cluster.faults.in_flight) == 1)
    compute(p, 1)
    assert [type(d.event()) for _ in range(4)] == [FirstToken, FirstToken, RoomFailed, PagesReturned]
    cluster.faults.finish_all()
    assert d.event() == Delivered(2)
    assert (d.pool[21:24] == p.pool[SRC]).all()


def test_a_broken_data_connection_fails_every_write_on_it(cluster: Cluster) -> None:
    p, d = cluster.pair()
    for room, dst in ((1, DST), (2, page_ids(21, 22, 23))):
        join(p, d, room, dst)
    cluster.faults.script("P", "stuck", "cut")
    compute(p, 1)
    eventually(lambda: len(cluster.faults.in_flight) == 1)
    compute(p, 2)
    failed = [event for event in (d.event() for _ in range(6)) if isinstance(event, RoomFailed)]
    assert {event.room for event in failed} == {1, 2}
    assert all("injected: cut" in event.failure.message for event in failed)
    for _ in range(4):
        assert isinstance(p.event(), RoomFailed | PagesReturned)
    assert_the_pair_works(p, d)


def test_checksums_find_a_flipped_bit(cluster: Cluster) -> None:
    p, d = cluster.pair(digest=True)
    cluster.faults.script("P", Decision("corrupt", 0.5))
    join(p, d, 1)
    compute(p, 1)
    names, failure = ends(d, 1)
    assert names == ["FirstToken", "RoomFailed", "PagesReturned"]
    assert failure is not None
    assert (failure.status, failure.code) == (503, "corrupt_kv")
    assert "page 1 of the prompt (page 12 of the pool)" in failure.message
    assert p.event() == Delivered(1)  # it has done its part
    assert d.endpoint.stats()["transfer_corrupt_pages_total"] == 1
    assert_the_pair_works(p, d)


def test_without_checksums_a_flipped_bit_is_found_by_nobody(cluster: Cluster) -> None:
    """What --kv-transfer-digest is for."""
    p, d = cluster.pair()
    cluster.faults.script("P", "corrupt")
    join(p, d, 1)
    compute(p, 1)
    assert ends(d, 1) == (DELIVERED, None)
    assert np.count_nonzero(d.pool[DST] != p.pool[SRC]) == 1


def test_a_stuck_write_costs_the_link_and_the_pair_meets_again(cluster: Cluster) -> None:
    p, d = cluster.pair(peer_timeout_s=0.3)
    cluster.faults.script("P", "stuck")
    join(p, d, 1)
    compute(p, 1)
    assert d.event() == FirstToken(1, 42, 0)
    p.endpoint.abort(1, GONE)
    names, failure = ends(d, 1)
    assert names == ["RoomFailed", "PagesReturned"]
    assert failure is not None
    assert failure.code == "peer_lost"
    assert p.event() == PagesReturned(1)
    assert_the_pair_works(p, d)


def test_d_gets_its_pages_back_when_the_write_has_ended(cluster: Cluster) -> None:
    p, d = cluster.pair()
    cluster.faults.script("P", "stuck")
    join(p, d, 1)
    compute(p, 1)
    assert d.event() == FirstToken(1, 42, 0)
    d.endpoint.abort(1, GONE)
    assert p.event() == RoomFailed(1, GONE)
    assert d.rooms() == {"quarantine": 1}
    d.pool[DST] = 0
    cluster.faults.finish_all()
    assert d.event() == PagesReturned(1)
    assert (d.pool[DST] == p.pool[SRC]).all()  # it did land
    assert p.event() == PagesReturned(1)
    assert_the_pair_works(p, d)


def test_a_prefill_node_that_ends_in_the_middle_of_a_write(one_sided: Cluster) -> None:
    """Its write lands late, and D's pages are not D's before."""
    p, d = one_sided.pair(peer_timeout_s=0.5)
    one_sided.faults.script("P", "stuck")
    join(p, d, 1)
    compute(p, 1)
    eventually(lambda: len(one_sided.faults.in_flight) == 1)
    p.endpoint.close()
    names, failure = ends(d, 1)
    assert names == ["FirstToken", "RoomFailed", "PagesReturned"]
    assert failure is not None
    assert failure.code in ("peer_lost", "shutting_down")
    assert not one_sided.faults.in_flight
    assert (d.pool[DST] == p.pool[SRC]).all()
    assert_the_pair_works(one_sided.add("prefill"), d)


def test_a_decode_node_that_ends_in_the_middle_of_a_write(cluster: Cluster) -> None:
    p, d = cluster.pair()
    cluster.faults.script("P", "stuck")
    join(p, d, 1)
    compute(p, 1)
    eventually(lambda: len(cluster.faults.in_flight) == 1)
    d.endpoint.close()
    names, failure = ends(p, 1)
    assert names == ["RoomFailed", "PagesReturned"]
    assert failure is not None
    assert failure.code in ("peer_lost", "shutting_down")
    assert_the_pair_works(p, cluster.add("decode"))


# ---- faults of the wire ----------------------------------------------------------------------------------------------------------


def test_every_message_comes_twice(wired: Cluster) -> None:
    wired.faults.rates = {"P wire": {"duplicate": 1.0}, "D wire": {"duplicate": 1.0}}
    p, d = wired.pair()
    for room in range(1, 9):
        assert_the_pair_works(p, d, room)


def test_token_1_that_is_overtaken_fails_the_room_and_leaves_no_page_behind(wired: Cluster) -> None:
    """TCP does not reorder; should anything else, an answer is an answer."""
    p, d = wired.pair(peer_timeout_s=60.0, heartbeat_s=10.0)
    assert_the_pair_works(p, d, 98)
    join(p, d, 1)
    wired.faults.delay_s = 60.0
    wired.faults.script("P wire", "reorder")
    compute(p, 1)
    names, failure = ends(d, 1)
    assert names == ["RoomFailed", "PagesReturned"]
    assert failure is not None
    assert failure.code == "protocol_error"
    assert p.event() == Delivered(1)
    assert_the_pair_works(p, d)


@pytest.mark.parametrize(("kind", "fraction"), [("drop", 0.0), ("corrupt", 0.0), ("corrupt", 0.8)])
def test_an_offer_that_is_lost_or_damaged_ends_at_the_deadline_on_both_sides(wired: Cluster, kind: str, fraction: float) -> None:
    p, d = wired.pair(peer_timeout_s=60.0, heartbeat_s=10.0)  # no heartbeat may take the fault
    assert_the_pair_works(p, d, 98)
    wired.faults.script("D wire", Decision(kind, fraction))
    begin(p, d, 1, timeout_s=1.0)
    for node, stage in ((p, "transfer"), (d, "transfer")):
        names, failure = ends(node, 1)
        assert names == ["RoomFailed", "PagesReturned"]
        assert failure is not None
        assert (failure.status, failure.stage) == (504, stage)
    assert_the_pair_works(p, d)


@pytest.mark.parametrize("site", ["D wire", "P wire"])
def test_a_connection_that_ends_or_falls_silent_is_made_again(wired: Cluster, site: str) -> None:
    p, d = wired.pair(peer_timeout_s=0.5)
    join(p, d, 1)
    wired.faults.script(site, "cut")  # at the next heartbeat if not before; P's end cannot cut, and falls silent
    names, failure = ends(d, 1)
    assert names == ["RoomFailed", "PagesReturned"]
    assert failure is not None
    assert failure.code == "peer_lost"
    assert ends(p, 1)[0] == ["RoomFailed", "PagesReturned"]
    assert_the_pair_works(p, d)


# ---- drawn faults ----------------------------------------------------------------------------------------------------------------

FREE_ON_D, FREE_ON_P = 0xEE, 0xDD
AT_ONCE, TOTAL_ROOMS = 4, 150
BACKEND_RATES = {"P": {"delay": 0.1, "hold": 0.1, "partial": 0.05, "error": 0.05, "refuse": 0.05, "corrupt": 0.1, "cut": 0.05}}
WIRE_RATES = {
    "P wire": {"duplicate": 0.05, "delay": 0.1, "reorder": 0.05, "drop": 0.01, "corrupt": 0.01},
    "D wire": {"duplicate": 0.05, "delay": 0.1, "reorder": 0.05, "drop": 0.01, "corrupt": 0.01, "cut": 0.005},
}


class Traffic:
    """Schedulers of both nodes, as far as rooms and pages go."""

    def __init__(self, p: Node, d: Node) -> None:
        self.p, self.d = p, d
        self.free = {p.endpoint: [*range(NUM_PAGES)], d.endpoint: [*range(NUM_PAGES)]}
        self.marks = {p.endpoint: FREE_ON_P, d.endpoint: FREE_ON_D}
        self.taken: dict[tuple[Any, int], list[int]] = {}
        self.ends: dict[tuple[Any, int], list[str]] = {}
        for node in (p, d):
            node.pool[:] = self.marks[node.endpoint]

    def take(self, node: Node, room: int) -> np.ndarray:
        free = self.free[node.endpoint]
        pages = self.taken[node.endpoint, room] = [free.pop(0) for _ in range(3)]
        self.ends[node.endpoint, room] = []
        return page_ids(*pages)

    def begin(self, room: int) -> None:
        self.p.pool[self.take(self.p, room)] = self.content(room)
        begin(self.p, self.d, room, self.take(self.d, room), timeout_s=1.5)

    @staticmethod
    def content(room: int) -> np.ndarray:
        """uint8[3, 1]; never a mark."""
        return ((room * 3 + np.arange(3)[:, None]) % 200).astype(np.uint8)

    def turn(self) -> None:
        for node in (self.p, self.d):
            while event := node.maybe_event(0.0):
                key = node.endpoint, event.room
                self.ends[key].append(type(event).__name__)
                if isinstance(event, OfferJoined):
                    compute(self.p, event.room, page_ids(*self.taken[key]))
                elif isinstance(event, Delivered | PagesReturned):
                    pages = self.taken.pop(key)
                    if node is self.d and isinstance(event, Delivered):
                        assert (node.pool[pages] == self.content(event.room)).all(), f"room {event.room} was delivered damaged"
                    node.pool[pages] = self.marks[node.endpoint]
                    self.free[node.endpoint] += pages
            assert (node.pool[self.free[node.endpoint]] == self.marks[node.endpoint]).all(), "a write landed in a free page"

    def run(self) -> int:
        """All rooms; how many were delivered."""
        rooms = itertools.count(1)
        deadline_s = time.monotonic() + 60
        while len(self.ends) < 2 * TOTAL_ROOMS or self.taken:
            assert time.monotonic() < deadline_s, f"not ended: {[room for _, room in self.taken]}"
            while len(self.ends) < 2 * TOTAL_ROOMS and len(self.taken) <= 2 * (AT_ONCE - 1):
                self.begin(next(rooms))
            self.turn()
            time.sleep(0.0005)
        assert {names[-1] for names in self.ends.values()} <= {"Delivered", "PagesReturned"}
        return sum(self.ends[self.d.endpoint, room][-1] == "Delivered" for room in range(1, TOTAL_ROOMS + 1))


@pytest.mark.parametrize(("backend", "seed"), [("tcp", 1), ("memory", 2)])
def test_drawn_faults_of_the_backend(backend: str, seed: int) -> None:
    with running(backend, Faults(seed, BACKEND_RATES, delay_s=0.02)) as cluster:
        traffic = Traffic(*cluster.pair(digest=True, peer_timeout_s=1.0))
        assert 0 < traffic.run() < TOTAL_ROOMS
        assert_what_was_drawn(cluster.faults, BACKEND_RATES)


@pytest.mark.parametrize("seed", [3, 4])
def test_drawn_faults_of_the_wire_too(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    faults = Faults(seed, {**BACKEND_RATES, **WIRE_RATES}, delay_s=0.02, one_sided=True, fence_delay_s=0.05)
    on_every_wire(faults, monkeypatch)
    with running("memory", faults) as cluster:
        assert Traffic(*cluster.pair(digest=True, peer_timeout_s=1.0)).run() > 0


def assert_what_was_drawn(faults: Faults, rates: dict[str, dict[str, float]]) -> None:
    """A site's decisions depend on the seed alone, and can be met again."""
    for site in rates:
        decisions = faults.decisions[site]
        again, replayed = Faults(faults.seed, rates), Faults(replay={site: decisions})
        for decision in decisions:
            assert again.decide(site) == replayed.decide(site) == decision


# ---- the faults themselves -------------------------------------------------------------------------------------------------------


def test_every_fault_that_is_named_can_be_drawn() -> None:
    faults = Faults(5, {"backend": dict.fromkeys(BACKEND_FAULTS, 1 / 8), "wire": dict.fromkeys(WIRE_FAULTS, 1 / 7)})
    for site, kinds in (("backend", BACKEND_FAULTS), ("wire", WIRE_FAULTS)):
        assert {faults.decide(site).kind for _ in range(300)} >= set(kinds)


def test_a_failing_test_says_what_was_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    faults = Faults(7, {"P": {"drop": 1.0}})
    with pytest.raises(KeyError), faults:
        {}[faults.decide("P")]
    assert "seed 7" in (said := capsys.readouterr().out)
    assert "'P': [('drop', " in said


def test_a_one_sided_write_lands_until_the_fence_has_passed_and_no_longer() -> None:
    faults = Faults(one_sided=True, fence_delay_s=0.0)
    fabric = MemoryFabric()
    pools = [np.zeros((8, 64), np.uint8), np.zeros((8, 64), np.uint8)]
    pools[0][:] = 7
    p, d = (FaultyBackend(fabric.backend(), faults, site) for site in ("P", "D"))
    for backend, pool in zip((p, d), pools, strict=True):
        backend.register(Region(pool.ctypes.data, *pool.shape, "cpu", pool))
    p.connect(PeerId("d"), d.describe())
    d.accept(PeerId("p"), p.describe())
    faults.script("P", "stuck", "stuck")
    tickets = [p.post("WRITE", PeerId("d"), page_ids(1), page_ids(remote)) for remote in (3, 4)]
    p.disconnect(PeerId("d"))
    assert [(done.ticket, isinstance(done.error, TransferError)) for done in p.poll()] == [(ticket, True) for ticket in tickets]
    fence = d.disconnect(PeerId("p"))
    assert not pools[1].any()
    assert fence.passed()
    assert pools[1][[3, 4], 0].tolist() == [7, 7]
    assert not faults.in_flight
    p.close()
    d.close()
