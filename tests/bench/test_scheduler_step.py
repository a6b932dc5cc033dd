"""bench/scheduler_step.py: its device by a clock of the test's; and with it, counted and not timed, what the scheduler does in a step."""

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import pytest
from scheduler_device import HostClock, SyntheticDevice, SyntheticStep, WallClock
from scheduler_harness import ListIntake
from scheduler_load import FIRST_TOKEN_ID, SHORT, VOCABULARY, Load, Requests
from scheduler_step import BACK_TO_BACK, BATCH_SIZES, BY_QUEUE, BY_SERVED, BY_SIZE, PAGE_SIZE, Case, Measured, Node, make_node, plot, run, tables

from common.engine.batch import NO_SAMPLING, NO_UPDATES, Batch, DecodeBatch
from common.messages import ToScheduler
from common.scheduling import outbox as outbox_module
from common.scheduling.outbox import Outbox

STEP_S = 0.010
FOR_EVER = (4000, 4000)  # output tokens


class CountedClock:
    """Moves when somebody waits, or by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def now_s(self) -> float:
        return self.now

    def wait_until(self, moment_s: float) -> None:
        self.now = max(self.now, moment_s)


def decode_batch(num_rows: int) -> DecodeBatch:
    rows: Any = [0] * num_rows
    return DecodeBatch(NO_UPDATES, rows, rows, NO_SAMPLING)


# ---- the device ---------------------------------------------------------------------------------------------------------


def test_a_step_starts_when_it_is_launched_or_the_one_before_ends() -> None:
    clock = CountedClock()
    device = SyntheticDevice(clock, STEP_S, max_rows=4)
    first, second = device.launch(decode_batch(3)), device.launch(decode_batch(2))
    assert (first.ends_s, second.ends_s) == (pytest.approx(100.010), pytest.approx(100.020))
    assert (first.done(), first.ready, clock.now) == (False, first, 100.0)
    assert len(second.tokens()) == 2
    assert (clock.now, first.done(), first.ready, device.idle_s) == (pytest.approx(100.020), True, None, 0.0)
    clock.now = 100.025
    third = device.launch(decode_batch(1))
    assert (third.ends_s, device.idle_s, device.num_steps) == (pytest.approx(100.035), pytest.approx(0.005), 3)


def test_tokens_are_of_the_vocabulary_and_wait_no_longer_than_the_step() -> None:
    for clock in (HostClock(), WallClock()):
        device = SyntheticDevice(clock, 0.001, max_rows=4)
        step = device.launch(decode_batch(4))
        tokens = step.tokens().tolist()
        assert all(FIRST_TOKEN_ID <= token < VOCABULARY for token in tokens)
        assert step.done()


def test_the_hosts_clock_counts_a_wait_as_long_as_it_was_meant() -> None:
    clock = HostClock()
    moment_s = clock.now_s() + 0.002
    clock.wait_until(moment_s)
    assert clock.now_s() >= moment_s
    clock.wait_until(moment_s)  # has passed
    before_s = clock.now_s()
    clock.wait_until(before_s - 1)
    assert clock.now_s() < before_s + 1


# ---- the scheduler on it ------------------------------------------------------------------------------------------------


class SlowHost(ListIntake):
    """Each turn of the scheduler costs the host some time."""

    def __init__(self, clock: CountedClock, host_s: float) -> None:
        super().__init__()
        self._clock, self._host_s = clock, host_s

    def messages(self) -> Iterator[ToScheduler]:
        self._clock.now += self._host_s
        return super().messages()


class WatchedDevice(SyntheticDevice):
    """Writes down which step was launched, and which was waited for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.events: list[tuple[str, int]] = []

    def launch(self, batch: Batch) -> Any:
        step = super().launch(batch)
        self.events.append(("launch", self.num_steps))
        return WatchedStep(step, self.num_steps, self.events)


class WatchedStep:
    def __init__(self, step: SyntheticStep, number: int, events: list[tuple[str, int]]) -> None:
        self._step, self._number, self._events = step, number, events
        self.done = step.done

    def tokens(self) -> Any:
        if not self._step.done():
            self._events.append(("wait", self._number))
        return self._step.tokens()


def served_node(num_running: int, *, overlap: bool = True, num_waiting: int = 0, num_served: int = 0, host_s: float = 0.0) -> Node:
    """A node whose rows are all taken, for ever."""
    clock = CountedClock()
    device = WatchedDevice(clock, STEP_S, max_rows=num_running)
    intake: Any = SlowHost(clock, host_s)
    requests = Requests(Load(num_running + num_waiting, 3 * PAGE_SIZE, FOR_EVER, num_served))
    intake.pending += [requests.make() for _ in range(num_served + num_running + num_waiting)]
    node = make_node(device, Outbox(lambda message: None, lambda status: None), intake, max_running=num_running, overlap=overlap)
    while node.outbox.num_finished < num_served or len(node.work.running) < num_running:
        node.step()
    return node


@pytest.mark.parametrize(("overlap", "host_ms", "idle_ms"), [(True, 3, 0), (False, 3, 3), (True, 12, 2), (False, 12, 12)])
def test_the_device_idles_as_long_as_the_host_holds_it_up(overlap: bool, host_ms: int, idle_ms: int) -> None:
    node = served_node(4, overlap=overlap, host_s=host_ms / 1e3)
    node.step()
    before_s, num_before = node.device.idle_s, node.num_decoded_tokens
    for _ in range(50):
        node.step()
    assert node.device.idle_s - before_s == pytest.approx(50 * idle_ms / 1e3)
    assert node.num_decoded_tokens - num_before == 50 * 4


@pytest.mark.parametrize("overlap", [True, False])
def test_a_launch_waits_for_no_more_than_the_step_before_the_last(overlap: bool) -> None:
    node = served_node(4, overlap=overlap, host_s=0.001)
    assert isinstance(node.device, WatchedDevice)
    node.device.events.clear()
    for _ in range(10):
        node.step()
    launched, waits = 0, []
    for event, number in node.device.events:
        if event == "launch":
            launched = number
        else:
            waits.append(launched - number)
    assert waits == [1 if overlap else 0] * 10


# ---- what a step costs, in calls ----------------------------------------------------------------------------------------


def num_calls(node: Node, num_steps: int = 2 * PAGE_SIZE) -> int:
    """Calls of functions, Python's and C's, during so many steps: every row takes a page as often as every other."""
    count = 0

    def on_event(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(PAGE_SIZE):
        node.step()
    sys.setprofile(on_event)
    try:
        for _ in range(num_steps):
            node.step()
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture
def no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """But the first: those that follow come by the time of day."""
    monkeypatch.setattr(outbox_module, "HEARTBEAT_S", 1e9)


@pytest.mark.usefixtures("no_heartbeat")
def test_a_step_costs_the_same_whoever_waits() -> None:
    """The head of the line is looked at, nobody else."""
    assert num_calls(served_node(8, num_waiting=2000)) == num_calls(served_node(8, num_waiting=1))


@pytest.mark.usefixtures("no_heartbeat")
def test_a_step_costs_the_same_however_many_were_served() -> None:
    """As long as nothing must be evicted: that costs some calls for each page, whatever is cached."""
    assert num_calls(served_node(1, num_served=80)) == num_calls(served_node(1))


@pytest.mark.usefixtures("no_heartbeat")
def test_a_row_more_costs_a_few_calls() -> None:
    num_steps = 2 * PAGE_SIZE
    per_row = (num_calls(served_node(24), num_steps) - num_calls(served_node(8), num_steps)) / (16 * num_steps)
    assert per_row < 6


# ---- the measurement ----------------------------------------------------------------------------------------------------


def test_requests_come_in_their_order_and_lengths() -> None:
    requests = Requests(Load(4, 20, (100, 300), num_short=5))
    made = [requests.make() for _ in range(50)]
    assert all(SHORT[0] <= request.sampling.max_new_tokens <= SHORT[1] for request in made[:5])
    assert all(100 <= request.sampling.max_new_tokens <= 300 for request in made[5:])
    assert {len(request.prompt_ids) for request in made} == {20}
    assert len({request.rid for request in made}) == len({request.bootstrap and request.bootstrap.room for request in made}) == 50


def test_a_load_of_requests_that_come_and_go_is_measured() -> None:
    measured = run(Case("churn", 4, 0.2, num_served=20), HostClock(), num_steps=300)
    assert 0 < measured.ideal <= 1.01
    assert 0 < measured.median_us <= measured.p99_us


def test_tables_and_plot_have_every_size() -> None:
    measured = {case: Measured(0.5, 100.0, 110.0, 150.0) for case in (*BY_SIZE, *BACK_TO_BACK, *BY_QUEUE, *BY_SERVED)}
    text = tables(measured)
    assert text.count("50.0%") == len(BY_SIZE)
    assert text.count("100 / 110 / 150") == 3 * len(BATCH_SIZES) + len(BY_QUEUE) + len(BY_SERVED)
    lines = ET.fromstring(plot(measured)).findall("{*}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [len(BATCH_SIZES)] * 7
