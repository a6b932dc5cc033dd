"""Who may go on, who waits, who is refused; in simulated time (bench/overload_sim.py)."""

import asyncio
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overload_sim import Job, Nodes, SimulatedLoop, Simulation

from common.config import RouterConfig
from common.errors import Failure, RequestError
from router.admission import MAX_RETRY_AFTER_S, Admission, State, Ticket
from router.ask import Ask
from router.keys import PRIORITIES, Client, Limits
from router.node import NodeInfo
from router.nodes import NodeTable
from router.pairing import Pairing
from router.waiting import STEP_S

ASK = Ask(None, 100)
NEVER_S = 1e9


class Rig:
    def __init__(self, predicted_ttft_s: Callable[[Ask], float | None] = lambda ask: None, num_rows: int | None = None, **flags: object) -> None:
        self.loop = SimulatedLoop()
        config = RouterConfig(**flags)  # type: ignore[arg-type]
        self.admission = Admission(config, predicted_ttft_s, self.loop.time, num_rows=lambda: num_rows, loop=self.loop)
        self.client = Client()

    def enter(self, client: Client | None = None, priority: int | None = None, end_s: float = NEVER_S) -> Ticket:
        return self.admission.enter(client or self.client, ASK, priority, end_s)

    def refusal(self, client: Client | None = None, priority: int | None = None, end_s: float = NEVER_S) -> Failure:
        before = (self.admission.num_running, self.admission.num_waiting, (client or self.client).num_open)
        with pytest.raises(RequestError) as raised:
            self.enter(client, priority, end_s)
        assert before == (self.admission.num_running, self.admission.num_waiting, (client or self.client).num_open)
        return raised.value.failure

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.admission.num_running, self.admission.num_waiting, self.client.num_open


def error_of(ticket: Ticket) -> Failure:
    assert ticket.granted is not None
    error = ticket.granted.exception()
    assert isinstance(error, RequestError)
    assert ticket.state is State.ENDED
    return error.failure


def went_on(ticket: Ticket) -> bool:
    return ticket.state is State.RUNNING and (ticket.granted is None or (ticket.granted.done() and ticket.granted.exception() is None))


# ---- the places ----------------------------------------------------------------------------------------------------------------


def test_who_finds_a_place_goes_on_at_once_and_gives_it_back_once() -> None:
    rig = Rig()
    first, second = rig.enter(), rig.enter()
    assert first.granted is None
    assert rig.counts == (2, 0, 2)
    first.leave()
    first.leave()
    assert rig.counts == (1, 0, 1)
    second.leave()
    assert rig.counts == (0, 0, 0)


def test_who_finds_none_waits_and_goes_on_when_one_leaves() -> None:
    rig = Rig(max_concurrent_requests=1)
    first, second, third = rig.enter(), rig.enter(), rig.enter()
    assert second.granted is not None
    assert rig.counts == (1, 2, 3)
    rig.loop.advance(2.0)
    first.leave()
    assert went_on(second)
    assert second.waited_s == 2.0
    assert not third.granted.done() if third.granted is not None else False
    assert rig.counts == (1, 1, 2)


def test_who_leaves_the_queue_frees_its_place_at_once() -> None:
    rig = Rig(max_concurrent_requests=1, queue_size=1)
    first, second = rig.enter(), rig.enter()
    assert rig.refusal().code == "queue_full"
    second.leave()
    second.leave()
    assert second.granted is not None
    assert second.granted.cancelled()
    assert rig.counts == (1, 0, 1)
    third = rig.enter()
    first.leave()
    assert went_on(third)
    rig.loop.advance(100.0)  # no timer is left that would end it
    assert went_on(third)


def test_a_full_queue_refuses_and_says_when_it_will_have_been_worked_off() -> None:
    rig = Rig(max_concurrent_requests=2, queue_size=3)
    first = rig.enter()
    rig.loop.advance(6.0)
    first.leave()  # six seconds are what a request takes, as far as is known
    for _ in range(5):
        rig.enter()
    failure = rig.refusal()
    assert (failure.status, failure.code, failure.stage) == (429, "queue_full", "queue")
    assert failure.retry_after_s == pytest.approx(4 * 6.0 / 2)
    assert "--max-concurrent-requests, --queue-size" in failure.message


def test_who_makes_way_for_another_is_told_so() -> None:
    rig = Rig(max_concurrent_requests=1, queue_size=1)
    rig.enter()
    background = rig.enter(priority=10)
    better = rig.enter(priority=0)
    failure = error_of(background)
    assert (failure.status, failure.code) == (429, "queue_full")
    assert "made way" in failure.message
    assert rig.counts == (1, 1, 2)
    background.leave()
    assert rig.counts == (1, 1, 2)
    assert better.granted is not None
    assert not better.granted.done()


def test_no_queue_is_possible() -> None:
    rig = Rig(max_concurrent_requests=1, queue_size=0)
    rig.enter()
    assert rig.refusal(priority=-10).code == "queue_full"


# ---- waiting in vain -------------------------------------------------------------------------------------------------------------


def test_the_queue_gives_up_after_its_timeout_with_503() -> None:
    rig = Rig(max_concurrent_requests=1, queue_timeout_s=3.0)
    rig.enter()
    ticket = rig.enter()
    rig.loop.advance(2.999)
    assert rig.counts == (1, 1, 2)
    rig.loop.advance(3.0)
    failure = error_of(ticket)
    assert (failure.status, failure.code) == (503, "queue_timeout")
    assert failure.retry_after_s is not None
    assert "(--queue-timeout)" in failure.message
    assert rig.counts == (1, 0, 1)


def test_a_deadline_passes_in_the_queue_at_its_time() -> None:
    rig = Rig(max_concurrent_requests=1, queue_timeout_s=3.0)
    rig.enter()
    ticket = rig.enter(end_s=1.5)
    rig.loop.advance(1.5)
    failure = error_of(ticket)
    assert (failure.status, failure.code, failure.stage) == (504, "deadline_exceeded", "queue")


def test_a_deadline_that_passed_before_the_timer_ran_is_seen_at_its_turn() -> None:
    rig = Rig(max_concurrent_requests=1)
    first = rig.enter()
    late, next_ = rig.enter(end_s=1.5), rig.enter()
    rig.loop.now_s = 2.0  # a loop that was busy
    first.leave()
    assert error_of(late).status == 504
    assert went_on(next_)


async def test_a_waiter_that_is_cancelled_gives_its_place_up() -> None:
    """As the router uses it, in a real loop."""
    admission = Admission(RouterConfig(max_concurrent_requests=1), lambda ask: None)
    client = Client()
    first, second, third = (admission.enter(client, ASK, None, NEVER_S) for _ in range(3))

    async def wait(ticket: Ticket) -> None:
        try:
            assert ticket.granted is not None
            await ticket.granted
        finally:
            ticket.leave()

    waits = [asyncio.ensure_future(wait(ticket)) for ticket in (second, third)]
    await asyncio.sleep(0)
    waits[0].cancel()
    first.leave()  # before the task that was cancelled has run: second has the turn, and gives it on
    await asyncio.gather(*waits, return_exceptions=True)
    assert waits[0].cancelled()
    assert waits[1].result() is None
    assert (admission.num_running, admission.num_waiting, client.num_open) == (0, 0, 0)


# ---- limits ----------------------------------------------------------------------------------------------------------------------


def test_the_rate_allows_a_second_s_worth_at_once_and_says_when_the_next_may_come() -> None:
    rig = Rig(rate_limit=4.0)
    for _ in range(4):
        rig.enter().leave()
    failure = rig.refusal()
    assert (failure.status, failure.code) == (429, "rate_limit")
    assert failure.retry_after_s == pytest.approx(0.25)
    rig.loop.advance(0.25)
    rig.enter()
    assert rig.refusal().code == "rate_limit"
    rig.loop.advance(100.0)
    for _ in range(4):
        rig.enter()
    assert rig.refusal().code == "rate_limit"


def test_a_rate_below_one_a_second_takes_one_at_a_time() -> None:
    rig = Rig(rate_limit=0.01)
    rig.enter()
    assert rig.refusal().retry_after_s == pytest.approx(100.0)


def test_a_rate_that_is_next_to_none_stays_a_number() -> None:
    rig = Rig(rate_limit=1e-310)
    rig.enter()
    rig.loop.advance(3600.0)
    assert rig.refusal().code == "rate_limit"


def test_keys_have_limits_of_their_own() -> None:
    rig = Rig(rate_limit=1000.0)
    alice = Client("alice", Limits(max_concurrent_requests=2, requests_per_second=3.0))
    first, _ = rig.enter(alice), rig.enter(alice)
    failure = rig.refusal(alice)
    assert (failure.status, failure.code) == (429, "key_limit")
    assert failure.retry_after_s == pytest.approx(0.5)  # one of two, each a second as far as is known
    assert "key alice" in failure.message
    rig.enter(Client("bob"))
    first.leave()
    rig.enter(alice).leave()
    failure = rig.refusal(alice)
    assert (failure.status, failure.code) == (429, "key_rate_limit")
    assert failure.retry_after_s == pytest.approx(1 / 3)


def test_what_waits_counts_for_its_key_and_refused_requests_count_for_nothing() -> None:
    rig = Rig(max_concurrent_requests=1, queue_size=1)
    alice = Client("alice", Limits(max_concurrent_requests=2, requests_per_second=2.0))
    rig.enter(alice)
    rig.enter(alice)
    assert rig.refusal(alice).code == "key_limit"
    assert rig.refusal(Client("bob", Limits(priority=10))).code == "queue_full"
    assert alice.num_open == 2


# ---- priority --------------------------------------------------------------------------------------------------------------------


def test_no_key_may_ask_for_better_than_it_has_and_nobody_for_what_there_is_not() -> None:
    rig = Rig()
    alice = Client("alice", Limits(priority=3))
    assert [rig.enter(alice, asked).priority for asked in (None, -5, 3, 7, 1000)] == [3, 3, 3, 7, 10]
    assert [rig.enter(None, asked).priority for asked in (None, -(10**30), 0, 10**30)] == [0, -10, 0, 10]


def test_the_worst_request_has_its_turn_under_a_flood_of_the_best() -> None:
    """Three of the best come for each that is served."""
    rig = Rig(max_concurrent_requests=1, queue_size=1000, queue_timeout_s=NEVER_S)
    alice, bob = Client("alice"), Client("bob")
    running = rig.enter(alice)
    worst, best = rig.enter(bob, PRIORITIES[-1]), []
    while worst.state is State.WAITING:
        best += [rig.enter(alice, PRIORITIES[0]) for _ in range(3)]
        rig.loop.advance(rig.loop.now_s + 0.5)
        running.leave()
        running = next(ticket for ticket in (worst, *best) if ticket.state is State.RUNNING)
    assert running is worst
    assert len(PRIORITIES) * STEP_S - 2 < worst.waited_s <= len(PRIORITIES) * STEP_S


# ---- the objective ---------------------------------------------------------------------------------------------------------------


def test_what_would_come_too_late_is_refused_at_once_with_the_time_to_come_again() -> None:
    predicted_s = 1.9
    rig = Rig(lambda ask: predicted_s, ttft_slo_s=2.0)
    rig.enter()
    predicted_s = 5.5
    failure = rig.refusal()
    assert (failure.status, failure.code) == (429, "ttft_slo")
    assert failure.retry_after_s == pytest.approx(3.5)
    assert "3.50 s later than 2 s, the objective (--ttft-slo)" in failure.message
    predicted_s = 500.0
    assert rig.refusal().retry_after_s == MAX_RETRY_AFTER_S


def test_a_node_that_was_slow_once_is_tried_again() -> None:
    """Its first prompt waits 30 s for kernels to be compiled; then it computes 1000 tokens a second, and says so to nobody who does not ask."""
    config = RouterConfig(prefill=("http://p:1",), decode=("http://d:1",))
    nodes = NodeTable.of(config)
    for node in nodes.all:
        node.probe_succeeded(NodeInfo(), 0)
    rig = Rig(ttft_slo_s=2.0)
    pairing = Pairing(nodes, config, rig.loop.time)
    rig.admission._predicted_ttft_s = pairing.predicted_ttft_s

    def serve(seconds: float) -> bool:
        try:
            ticket = rig.enter()
        except RequestError:
            return False
        placement = pairing.place(ASK)
        rig.loop.advance(rig.loop.now_s + seconds)
        placement.prefill_ended(True)
        ticket.first_byte()
        placement.decode_ended()
        ticket.leave()
        return True

    assert [serve(30.0), serve(0.1), serve(0.1)] == [True, True, False]
    served = []
    for _ in range(1000):
        rig.loop.advance(rig.loop.now_s + 0.1)
        served.append(serve(0.1))
    assert 15 < served[:200].count(True) < 25  # one a second
    assert all(served[-200:])


def test_background_work_leaves_room() -> None:
    rig = Rig(lambda ask: 1.2, ttft_slo_s=2.0)
    assert rig.refusal(priority=10).code == "ttft_slo"
    rig.enter(priority=8).leave()
    rig.enter(priority=0).leave()


def test_a_deadline_before_the_first_token_is_as_good_as_an_objective() -> None:
    rig = Rig(lambda ask: 1.2, ttft_slo_s=2.0)
    assert rig.refusal(end_s=1.0).code == "ttft_slo"


def test_the_wait_in_the_queue_counts_when_a_request_comes_and_when_its_turn_comes() -> None:
    predicted_s = 0.1
    rig = Rig(lambda ask: predicted_s, ttft_slo_s=2.0, max_concurrent_requests=1)
    first, second = rig.enter(), rig.enter()
    assert rig.refusal().code == "ttft_slo"  # two turns of a second each, as far as is known
    third = rig.enter(priority=-1)
    rig.loop.advance(1.95)
    first.leave()
    for ticket in (second, third):
        failure = error_of(ticket)
        assert (failure.status, failure.code) == (429, "ttft_slo")
    assert rig.counts == (0, 0, 0)


def test_rows_that_are_all_taken_are_waited_for_by_the_time_that_one_is_held() -> None:
    rig = Rig(lambda ask: 0.1, num_rows=2, ttft_slo_s=2.0)
    for _ in range(64):
        ticket = rig.enter()
        rig.loop.advance(rig.loop.now_s + 0.1)
        ticket.first_byte()
        rig.loop.advance(rig.loop.now_s + 10.0)
        ticket.leave()
    for _ in range(2):
        rig.enter().first_byte()
    failure = rig.refusal()  # ten seconds a row, two rows: five seconds, and its deviation
    assert failure.code == "ttft_slo"
    assert failure.retry_after_s == pytest.approx(3.33 * 5.0 - 2.0, abs=0.5)


def test_nothing_is_learnt_from_answers_that_come_in_one_piece() -> None:
    rig = Rig(lambda ask: 0.1, ttft_slo_s=2.0)
    for _ in range(20):
        tickets = [rig.enter() for _ in range(10)]
        for ticket in tickets:
            ticket.untimed()
        rig.loop.advance(rig.loop.now_s + 30.0)
        for ticket in tickets:
            ticket.first_byte()
            ticket.leave()
    assert rig.counts == (0, 0, 0)


NODES = {
    "prefill": Nodes(),
    "several prefill nodes": Nodes(num_prefill=4),
    "rates that fall with length": Nodes(half_rate_tokens=4000),
    "rates believed to be twice as high": Nodes(belief=2.0),
    "rows": Nodes(num_prefill=4, rows=64, tpot_s=0.05),
    "rows that nobody counts": Nodes(num_prefill=4, rows=64, tpot_s=0.05, tells_rows=False),
}


@pytest.mark.parametrize("name", NODES)
def test_at_three_times_what_nodes_can_do_the_admitted_keep_the_objective(name: str) -> None:
    nodes, slo_s, learning_s, seconds = NODES[name], 2.0, 30.0, 120.0
    chance = random.Random(1)
    jobs = [Job(0.0, min(16000, max(50, int(chance.lognormvariate(6.9, 0.9)))), 1 + int(chance.expovariate(0.01))) for _ in range(10_000)]
    capacity = nodes.capacity(statistics.mean(nodes.compute_s(job.num_tokens) for job in jobs), 100)
    simulation = Simulation(nodes)
    num_admitted = simulation.offer(RouterConfig(ttft_slo_s=slo_s), jobs, 3 * capacity, seconds, chance)
    after = [job.ttft_s for job in simulation.admitted if job.arrived_s > learning_s]
    assert None not in after
    in_time = sum(ttft_s <= slo_s for ttft_s in after if ttft_s is not None) / len(after)
    assert in_time >= (0.95 if name == "rows that nobody counts" else 0.98)
    assert num_admitted > 0.9 * capacity * seconds  # and what they can do is done


# ---- any course ------------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["enter", "leave", "cancel", "first_byte", "untimed"]), st.integers(0, 2),
                       st.sampled_from([*PRIORITIES, None]), st.sampled_from([0.0, 0.0, 0.1, 1.0, 4.0])), max_size=60),
    st.integers(1, 3), st.integers(0, 4), st.sampled_from([None, 1.0]), st.randoms(),
)  # fmt: skip
def test_any_course_keeps_counts_and_limits_and_loses_nobody(course: list[tuple[str, int, int | None, float]], most: int, queue_size: int,
                                                              slo_s: float | None, chance: random.Random) -> None:  # fmt: skip
    rig = Rig(lambda ask: chance.choice([None, 0.1, 0.5]), max_concurrent_requests=most, queue_size=queue_size, queue_timeout_s=5.0, ttft_slo_s=slo_s)
    clients = [Client("a", Limits(max_concurrent_requests=2)), Client("b", Limits(requests_per_second=1.0)), Client("c")]
    tickets: list[Ticket] = []
    refusals: list[Failure] = []

    def check() -> None:
        states = [ticket.state for ticket in tickets]
        assert states.count(State.RUNNING) == rig.admission.num_running <= most
        assert states.count(State.WAITING) == rig.admission.num_waiting <= queue_size
        assert rig.admission.num_waiting == 0 or rig.admission.num_running == most
        for client in clients:
            assert client.num_open == sum(ticket.client is client and ticket.state is not State.ENDED for ticket in tickets)
            assert client.max_open is None or client.num_open <= client.max_open
        for ticket in tickets:
            if ticket.granted is not None:
                assert ticket.granted.done() or ticket.state is State.WAITING

    for event, number, priority, pause_s in course:
        rig.loop.advance(rig.loop.now_s + pause_s)
        open_tickets = [ticket for ticket in tickets if ticket.state is not State.ENDED]
        if event == "enter":
            try:
                tickets.append(rig.enter(clients[number], priority, rig.loop.now_s + chance.choice([1.0, NEVER_S])))
            except RequestError as error:
                refusals.append(error.failure)
        elif open_tickets:
            ticket = open_tickets[number % len(open_tickets)]
            if event == "cancel" and ticket.granted is not None:
                ticket.granted.cancel()  # its task was cancelled, and has not run yet
            elif event == "leave":
                ticket.leave()
            elif ticket.state is State.RUNNING:
                ticket.first_byte() if event == "first_byte" else ticket.untimed()
        if event != "cancel":
            check()
    for ticket in tickets:
        ticket.leave()
    check()
    assert all(failure.status == 429 and failure.retry_after_s is not None and failure.retry_after_s >= 0 for failure in refusals)
    rig.loop.advance(NEVER_S)
    assert rig.admission.num_running == rig.admission.num_waiting == 0
    assert [client.num_open for client in clients] == [0, 0, 0]
