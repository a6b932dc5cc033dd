"""Rates that are measured, mixed and forgotten; what a decode node still has room for."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.load import EVIDENCE_HALF_LIFE_S, MAX_PRICE, DecodeLoad, PrefillLoad


def compute(load: PrefillLoad, now_s: float, num_tokens: int, spent_s: float) -> float:
    load.begin(num_tokens, now_s)
    load.end(num_tokens, now_s + spent_s, computed=True)
    return now_s + spent_s


def fleet(number: int) -> list[PrefillLoad]:
    return [PrefillLoad() for _ in range(number)]


def test_first_measurement_is_known_everywhere_at_once() -> None:
    loads = fleet(3)
    assert not any(load.measured for load in loads)
    loads[0].begin(1000, 10.0)
    assert loads[0].end(1000, 12.0, computed=True)
    PrefillLoad.fleet(loads, 12.0)
    assert [load.tokens_per_s for load in loads] == [pytest.approx(500.0)] * 3
    loads[0].begin(1000, 12.0)
    assert not loads[0].end(1000, 14.0, computed=True)


def test_seconds_a_prompt_and_a_token_are_told_apart() -> None:
    loads, now_s = fleet(1), 0.0
    for n in range(60):
        num_tokens = (50, 400, 3000)[n % 3]
        now_s = compute(loads[0], now_s, num_tokens, 0.03 + num_tokens / 10_000)
    PrefillLoad.fleet(loads, now_s)
    assert loads[0].prompt_s == pytest.approx(0.03, rel=0.05)
    assert loads[0].tokens_per_s == pytest.approx(10_000, rel=0.05)


def test_node_that_served_cached_prompts_only_does_not_look_slow() -> None:
    loads, now_s = fleet(2), 0.0
    for _ in range(40):
        compute(loads[0], now_s, 10, 0.021)
        now_s = compute(loads[1], now_s, 3000, 0.32)
    for n in range(10):
        now_s = compute(loads[1], now_s, 100 * n + 10, 0.02 + (100 * n + 10) / 10_000)
    PrefillLoad.fleet(loads, now_s)
    # from prompts that are all alike nothing is known of the slope; that costs a factor, until it gets one long prompt
    now_s = compute(loads[0], now_s, 3000, 0.32)
    PrefillLoad.fleet(loads, now_s)
    assert loads[0].done_s(5000) == pytest.approx(loads[1].done_s(5000), rel=0.5)


def test_queue_counts_in_seconds_of_the_node() -> None:
    loads = fleet(2)
    for load, spent_s in zip(loads, (0.1, 0.4), strict=True):
        now_s = 0.0
        for _ in range(40):
            now_s = compute(load, now_s, 1000, spent_s)
    PrefillLoad.fleet(loads, 20.0)
    assert loads[0].done_s(1000) == pytest.approx(0.1, rel=0.3)
    assert loads[1].done_s(1000) == pytest.approx(0.4, rel=0.3)
    before_s = loads[0].done_s(1000)
    loads[0].begin(2000, 20.0)
    assert loads[0].done_s(1000) == pytest.approx(3 * before_s)


def test_prompts_computed_side_by_side_share_the_time() -> None:
    load = PrefillLoad()
    for n in range(30):
        for _ in range(4):
            load.begin(1000, n * 1.0)
        for _ in range(4):
            load.end(1000, n * 1.0 + 0.8, computed=True)
    PrefillLoad.fleet([load], 31.0)
    assert load.tokens_per_s == pytest.approx(5000, rel=0.3)


def test_differences_of_a_few_percent_are_no_differences() -> None:
    loads = fleet(3)
    for load, spent_s in zip(loads, (0.100, 0.104, 0.097), strict=True):
        compute(load, 0.0, 1000, spent_s)
    PrefillLoad.fleet(loads, 1.0)
    assert len({load.token_s for load in loads}) == 1


def test_node_that_was_slow_once_is_tried_again() -> None:
    loads = fleet(2)
    compute(loads[0], 0.0, 100, 20.0)  # compiled its kernels
    for n in range(20):
        compute(loads[1], n * 1.0, 100, 0.01)
    PrefillLoad.fleet(loads, 20.0)
    assert loads[0].token_s > 3 * loads[1].token_s
    for n in range(20, 620):
        compute(loads[1], n * 1.0, 100, 0.01)
        PrefillLoad.fleet(loads, n + 0.5)
    assert loads[0].token_s < 1.5 * loads[1].token_s
    assert EVIDENCE_HALF_LIFE_S == 60.0


def test_node_that_joins_after_a_quiet_night_is_an_average_one() -> None:
    loads = fleet(2)
    for load, spent_s in zip(loads, (0.1, 0.3), strict=True):
        compute(load, 0.0, 1000, spent_s)
    PrefillLoad.fleet(loads, 1.0)
    loads = [*loads, PrefillLoad()]
    PrefillLoad.fleet(loads, 40_000.0)
    assert loads[2].measured
    assert len({load.token_s for load in loads}) == 1
    assert 0.0001 < loads[2].token_s < 0.0003


def test_failed_prompts_teach_nothing() -> None:
    load = PrefillLoad()
    load.begin(10_000, 0.0)
    assert not load.end(10_000, 0.001, computed=False)
    assert load.tokens_per_s is None
    assert (load.num_queued, load.queued_tokens) == (0, 0)


def test_price_of_computing_twice_rises_with_utilisation() -> None:
    load = PrefillLoad()
    for n in range(200):
        compute(load, n * 1.0, 1000, 0.6)
        PrefillLoad.fleet([load], n + 1.0)
    assert load.new_token_s / load.token_s == pytest.approx(2.5, rel=0.1)
    for n in range(200, 400):
        compute(load, n * 1.0, 1000, 1.0)
        PrefillLoad.fleet([load], n + 1.0)
    assert load.new_token_s / load.token_s == pytest.approx(MAX_PRICE)
    PrefillLoad.fleet([load], 1000.0)
    assert load.new_token_s == pytest.approx(load.token_s, rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 10**6), st.floats(0, 1000), st.booleans(), st.floats(0, 10**4)), max_size=60))
def test_estimates_are_always_usable(events: list[tuple[int, int, float, bool, float]]) -> None:
    loads, now_s = fleet(3), 0.0
    for which, num_tokens, spent_s, computed, pause_s in events:
        loads[which].begin(num_tokens, now_s)
        loads[which].end(num_tokens, now_s + spent_s, computed=computed)
        now_s += spent_s + pause_s
        PrefillLoad.fleet(loads, now_s)
        for load in loads:
            assert 0 < load.token_s < math.inf
            assert load.token_s <= load.new_token_s * 1.000001
            assert load.new_token_s <= (MAX_PRICE + 0.001) * load.token_s
            assert 0 <= load.prompt_s < math.inf


def test_decode_node_that_says_nothing_has_room() -> None:
    load = DecodeLoad()
    load.probed(None, None, None, None, None)
    load.begin(10**9)
    assert load.room_tokens == math.inf
    assert load.has_room(10**9)
    assert load.fullness == pytest.approx(1 / 64)


def test_fullness_is_rows_and_pool_together() -> None:
    load = DecodeLoad()
    load.probed(running=2, waiting=1, rows=10, room_tokens=600, pool_tokens=1000)
    assert (load.num_others, load.fullness) == (3, pytest.approx(0.3 + 0.4))
    probe = load.begin(100)
    assert load.fullness == pytest.approx(0.4 + 0.5)
    assert load.has_room(500)
    assert not load.has_room(501)
    load.end(100, probe)
    assert load.fullness == pytest.approx(0.3 + 0.4)
