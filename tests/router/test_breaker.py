"""A breaker in simulated time: every transition, what it does not hear, and how soon a node that is well is used again."""

import itertools
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import RouterConfig
from router.breaker import CLOSED, HALF_OPEN, NEXT, OPEN, Breaker, Event, IllegalEvent, State
from router.nodes import Node, NodeInfo, NodeTable, candidates

THRESHOLD, TIMEOUT_S = 3, 2.0
ILLEGAL = {(CLOSED, Event.TRIED)}
EXPECTED = {
    CLOSED: {Event.FAILED: CLOSED, Event.FAILED_TOO_OFTEN: OPEN, Event.ANSWERED: CLOSED, Event.ENDED_WELL: CLOSED, Event.CAME_BACK: CLOSED},
    OPEN: {Event.FAILED: OPEN, Event.FAILED_TOO_OFTEN: OPEN, Event.ANSWERED: CLOSED, Event.ENDED_WELL: CLOSED, Event.TRIED: HALF_OPEN,
           Event.CAME_BACK: CLOSED},
    HALF_OPEN: {Event.FAILED: OPEN, Event.FAILED_TOO_OFTEN: OPEN, Event.ANSWERED: CLOSED, Event.ENDED_WELL: CLOSED, Event.TRIED: HALF_OPEN,
                Event.CAME_BACK: CLOSED},
}  # fmt: skip


def breaker_in(state: State) -> Breaker:
    """In that state since 10 s; in CLOSED with no failure."""
    breaker = Breaker(THRESHOLD, TIMEOUT_S)
    if state is not CLOSED:
        for _ in range(THRESHOLD):
            breaker.failed(10.0 if state is OPEN else 10.0 - TIMEOUT_S)
    if state is HALF_OPEN:
        breaker.sent(10.0)
    assert breaker.state is state
    return breaker


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_event_in_every_state(state: State, event: Event) -> None:
    breaker = breaker_in(state)
    if (state, event) in ILLEGAL:
        assert (state, event) not in NEXT
        with pytest.raises(IllegalEvent, match=f"{event.value} in state {state.value}"):
            breaker._apply(event, 11.0)
        assert breaker.state is state
    else:
        changed = breaker._apply(event, 11.0)
        assert breaker.state is EXPECTED[state][event]
        assert changed == (breaker.state is not state)


def test_it_opens_after_failures_in_a_row() -> None:
    breaker = breaker_in(CLOSED)
    for _ in range(5):  # a success between them, and they are no row
        assert not breaker.failed(1.0)
        assert not breaker.failed(2.0)
        assert not breaker.ended_well(3.0)
    assert [breaker.failed(now_s) for now_s in (4.0, 5.0, 6.0)] == [False, False, True]
    assert not breaker.admits(6.0 + TIMEOUT_S - 0.001)
    assert breaker.admits(6.0 + TIMEOUT_S)


def test_one_request_is_the_trial() -> None:
    breaker = breaker_in(OPEN)
    assert not breaker.sent(10.0 + TIMEOUT_S - 0.001)  # as of the last node of its kind: no trial
    assert breaker.state is OPEN
    assert breaker.sent(10.0 + TIMEOUT_S)
    assert not breaker.admits(10.0 + TIMEOUT_S)
    assert not breaker.sent(10.0 + TIMEOUT_S)
    assert breaker.state is HALF_OPEN


def test_a_failed_trial_opens_it_for_as_long_again() -> None:
    breaker = breaker_in(HALF_OPEN)
    assert breaker.failed(11.0)
    assert not breaker.admits(11.0 + TIMEOUT_S - 0.001)
    assert breaker.admits(11.0 + TIMEOUT_S)


def test_a_trial_that_never_ends_is_followed_by_another() -> None:
    breaker = breaker_in(HALF_OPEN)
    for round_ in range(1, 4):
        due_s = 10.0 + round_ * TIMEOUT_S
        assert not breaker.admits(due_s - 0.001)
        assert breaker.admits(due_s)
        breaker.sent(due_s)
        assert breaker.state is HALF_OPEN
        assert not breaker.admits(due_s)


def test_an_answer_closes_it_and_the_next_failure_opens_it_again() -> None:
    breaker = breaker_in(HALF_OPEN)
    assert breaker.answered(11.0, 10.5)
    assert breaker.state is CLOSED
    assert breaker.failed(12.0, 11.5)
    assert breaker.state is OPEN


def test_a_leg_that_ended_well_forgives_all() -> None:
    breaker = breaker_in(HALF_OPEN)
    breaker.answered(11.0, 10.5)
    breaker.ended_well(12.0, 11.5)
    assert [breaker.failed(13.0, 12.5) for _ in range(THRESHOLD)] == [False, False, True]


def test_success_of_the_last_node_closes_its_open_breaker() -> None:
    for succeed in (Breaker.answered, Breaker.ended_well):
        breaker = breaker_in(OPEN)
        assert succeed(breaker, 10.5, 10.25)
        assert breaker.state is CLOSED


def test_streams_from_before_the_trouble_do_not_hide_it() -> None:
    breaker = breaker_in(CLOSED)
    for now_s in (10.0, 11.0, 12.0):
        breaker.failed(now_s, now_s - 0.1)
        assert not breaker.ended_well(now_s + 0.5, 5.0)
        assert not breaker.answered(now_s + 0.5, 5.0)
    assert breaker.state is OPEN


@pytest.mark.parametrize("stream_s", [0.5, 10.0, 60.0])
def test_a_node_that_answers_some_requests_with_errors_keeps_its_place(stream_s: float) -> None:
    """50 requests a second, a first byte after 0.2 s; one in fifty is answered 500."""
    breaker = Breaker(5, TIMEOUT_S)
    events: list[tuple[float, float, str]] = []
    for number in range(50 * 100):
        began_s = number / 50
        outcomes = [(0.01, "failed")] if number % 50 == 0 else [(0.2, "answered"), (stream_s, "ended_well")]
        events += [(began_s + after_s, began_s, what) for after_s, what in outcomes]
    for now_s, began_s, what in sorted(events):
        if what == "failed":
            breaker.failed(now_s, began_s, answered=True)
        else:
            getattr(breaker, what)(now_s, began_s)
        assert breaker.state is CLOSED


def test_first_bytes_do_not_hide_that_every_stream_breaks() -> None:
    breaker = breaker_in(CLOSED)
    for number in range(THRESHOLD):
        breaker.answered(10.0 + number, 9.9 + number)
        breaker.failed(10.5 + number, 9.9 + number)
    assert breaker.state is OPEN


def test_failures_from_before_the_recovery_do_not_undo_it() -> None:
    breaker = breaker_in(HALF_OPEN)
    assert not breaker.failed(10.5, 9.0)  # sent before the trial
    assert breaker.state is HALF_OPEN
    breaker.ended_well(11.0, 10.2)
    for _ in range(10 * THRESHOLD):
        assert not breaker.failed(12.0, 10.9)
    assert breaker.num_failures == 0


def test_threshold_of_one() -> None:
    breaker = Breaker(1, TIMEOUT_S)
    assert breaker.failed(0.0)
    breaker.sent(2.0)
    assert breaker.answered(2.5, 2.0)
    assert breaker.failed(3.0, 2.6)
    assert breaker.came_back(3.1)
    assert breaker.num_failures == 0


@given(st.lists(st.tuples(st.sampled_from(["sent", "failed", "answered", "ended_well", "came_back"]), st.floats(0, 3), st.floats(0, 3)), max_size=60))
def test_whatever_happens_it_admits_a_request_before_long(events: list[tuple[str, float, float]]) -> None:
    breaker, now_s = Breaker(THRESHOLD, TIMEOUT_S), 0.0
    for name, pause_s, ago_s in events:
        now_s += pause_s
        was = breaker.state
        changed = getattr(breaker, name)(now_s, *(() if name in ("sent", "came_back") else (now_s - ago_s,)))
        assert changed == (breaker.state is not was)
        assert breaker.admits(now_s + TIMEOUT_S)
        assert breaker.num_failures < THRESHOLD or breaker.state is not CLOSED


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def two_nodes(clock: Clock) -> NodeTable:
    table = NodeTable.of(RouterConfig(decode=("http://a:1", "http://b:1")), clock)
    for node in table.all:
        node.probe_succeeded(NodeInfo(), 0)
    return table


class Traffic:
    """20 requests a second to two decode nodes in turn, with answers that go on; the first node fails until `recovers_s`, while its probes succeed.

    fault: how. "error" at once, "slow error" 1.5 s after a request was sent, "reset" of its connection, "client leaves": errors until
    the breaker is open, then nothing ever comes."""

    PAUSE_S = 0.05

    def __init__(self, fault: str, recovers_in_s: float) -> None:
        self.clock = Clock()
        self.table = two_nodes(self.clock)
        self.sick, self.well = self.table.decode
        self.fault = fault
        self.recovers_s = self.clock.now_s + recovers_in_s
        self.sick_used_s: list[float] = []
        self.slow_errors: deque[float] = deque()  # when they were sent

    def run(self, until_s: float) -> None:
        for turn in itertools.count():
            self.clock.now_s += self.PAUSE_S
            if self.clock.now_s >= until_s:
                return
            while self.slow_errors and self.clock.now_s >= self.slow_errors[0] + 1.5:
                self.sick.blame("answered 500", began_s=self.slow_errors.popleft(), answered=True)
            allowed = candidates(self.table.decode, self.clock.now_s)
            node = allowed[turn % len(allowed)]
            node.sent()
            if node is self.sick:
                self.sick_used_s.append(self.clock.now_s)
            if node is self.sick and self.clock.now_s < self.recovers_s:
                self._fail(node)
            else:
                node.answered(self.clock.now_s)

    def _fail(self, node: Node) -> None:
        if self.fault == "slow error":
            self.slow_errors.append(self.clock.now_s)
        elif self.fault == "reset":
            node.blame("reset", began_s=self.clock.now_s)
            node.probe_succeeded(node.info, node.num_blames)  # asked for at once
            node.probe_ended(node.num_blames)
        elif self.fault == "error" or node.breaker.state is CLOSED:
            node.blame("answered 500", began_s=self.clock.now_s, answered=True)


@pytest.mark.parametrize("fault", ["error", "slow error", "reset", "client leaves"])
def test_a_node_that_is_well_again_is_used_within_5_s(fault: str) -> None:
    """With default settings, whenever in the breaker's round it recovers."""
    config = RouterConfig()
    for phase in range(24):
        traffic = Traffic(fault, recovers_in_s=4.0 + phase * 0.25)
        traffic.run(traffic.recovers_s)
        num_spoilt = len(traffic.sick_used_s)
        assert num_spoilt < 24 + (traffic.recovers_s - 1000.0) / config.cb_timeout_s  # of 80 to 195 that would have gone there
        assert traffic.sick.breaker.state is not CLOSED
        traffic.run(traffic.recovers_s + 5.0)
        assert traffic.sick.breaker.state is CLOSED
        first_s = traffic.sick_used_s[num_spoilt]
        assert first_s - traffic.recovers_s <= 2 * config.cb_timeout_s + 0.1  # a trial from before that fails late, and the pause after it
        assert sum(used_s > first_s for used_s in traffic.sick_used_s) >= 0.4 * (traffic.clock.now_s - first_s) / traffic.PAUSE_S  # its share


def test_the_last_node_of_its_kind_is_never_held_back() -> None:
    clock = Clock()
    table = two_nodes(clock)
    for node in table.all:
        for _ in range(9):
            node.blame("answered 500", answered=True)
        assert node.breaker.state is OPEN
    assert candidates(table.decode, clock.now_s) == list(table.decode)
    table.drain(table.decode[0])
    assert candidates(table.decode, clock.now_s) == [table.decode[1]]
    clock.now_s += 100
    table.undrain(table.decode[0])
    table.decode[0].sent()
    assert candidates(table.decode, clock.now_s) == [table.decode[1]]  # whose trial is due


def test_many_requests_that_fail_by_one_event_are_one_failure() -> None:
    clock = Clock()
    node = two_nodes(clock).decode[0]
    for _ in range(100):
        node.blame("reset")
    assert (node.breaker.state, node.breaker.num_failures, node.num_blames) == (CLOSED, 1, 100)
    assert candidates([node], clock.now_s) == []  # a suspect
    node.probe_succeeded(NodeInfo(), node.num_blames)
    node.probe_ended(node.num_blames)
    assert candidates([node], clock.now_s) == [node]
    node.blame("reset")
    assert node.breaker.num_failures == 2


def test_a_restarted_node_starts_with_a_closed_breaker() -> None:
    clock = Clock()
    for infos, away in (((NodeInfo(incarnation=1), NodeInfo(incarnation=2)), False), ((NodeInfo(), NodeInfo()), True)):
        node = two_nodes(clock).decode[0]
        node.probe_succeeded(infos[0], 0)
        for _ in range(9):
            node.blame("answered 500", answered=True)
        node.probe_succeeded(infos[0], 0)
        assert node.breaker.state is OPEN  # its probes say nothing of its requests
        if away:
            node.probe_failed("is not ready (it answers 503)")
        node.probe_succeeded(infos[1], 0)
        assert node.breaker.state is CLOSED
