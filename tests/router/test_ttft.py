"""What is learnt of first tokens, and what of that holds requests back."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ttft import MARGIN, Mean, Sent, TtftModel

SLO_S = 2.0


def answered(model: TtftModel, number: int, measured_s: float, predicted_s: float = 0.1, now_s: float = 0.0) -> float:
    """One after another; returns the time then."""
    for _ in range(number):
        sent = model.sent(predicted_s, now_s)
        now_s += measured_s
        model.first_byte(sent, now_s)
    return now_s


def test_at_first_the_prediction_is_believed() -> None:
    model = TtftModel(SLO_S)
    assert model.bound_s(1.5, 0.0) == 1.5
    assert model.keeps(2.0, SLO_S, 0.0)
    assert not model.keeps(2.1, SLO_S, 0.0)


def test_what_comes_later_than_predicted_widens_the_margin_in_proportion() -> None:
    model = TtftModel(SLO_S)
    answered(model, 500, measured_s=1.5, predicted_s=1.0)
    assert model.slope_s == 0.0  # nobody was before them
    assert model.deviation == pytest.approx(0.5, rel=0.01)
    assert model.bound_s(1.0, 30.0) == pytest.approx(1.0 + MARGIN * 0.5, rel=0.01)
    assert model.bound_s(0.0, 30.0) == pytest.approx(MARGIN * 0.5 * SLO_S / 4, rel=0.01)


def test_one_late_first_token_shuts_nobody_out() -> None:
    """A first prompt that waits for its kernels to be compiled."""
    model = TtftModel(SLO_S)
    now_s = answered(model, 1, measured_s=60.0)
    model.sent(0.1, now_s)
    assert model.keeps(0.1, SLO_S, now_s)
    assert model.keeps(0.9, SLO_S, now_s)


def test_a_line_that_moves_slower_than_predicted_is_learnt_by_its_places() -> None:
    """Each place costs a tenth of a second that no prediction knows."""
    model, now_s = TtftModel(SLO_S), 0.0
    line: list[Sent] = []
    for _ in range(600):
        now_s += 0.1
        if len(line) >= 40:
            model.first_byte(line.pop(0), now_s)
        line.append(model.sent(0.0, now_s))
    assert model.slope_s == pytest.approx(0.1, rel=0.05)
    assert model.bound_s(0.0, now_s) == pytest.approx(4.0, rel=0.1)
    assert not model.keeps(0.0, SLO_S, now_s)


def test_a_few_late_answers_to_short_lines_say_little_of_long_ones() -> None:
    model, now_s = TtftModel(SLO_S), 0.0
    for _ in range(50):
        pair = [model.sent(0.0, now_s) for _ in range(2)]
        now_s += 0.1
        for sent in pair:
            model.first_byte(sent, now_s)
    assert model.slope_s < 0.02


def test_a_stalled_line_holds_back_and_one_that_was_overtaken_does_not() -> None:
    model = TtftModel(SLO_S)
    stuck = model.sent(0.5, 0.0)
    assert model.bound_s(0.1, 0.5) == pytest.approx(0.1)
    assert model.bound_s(0.1, 2.5) == pytest.approx(2.1)
    other = model.sent(0.1, 2.5)
    assert not model.keeps(0.1, SLO_S, 2.6)
    model.first_byte(other, 2.6)
    assert model.bound_s(0.1, 9.0) < SLO_S
    model.forget(stuck)


def test_what_was_learnt_never_shuts_the_door_for_longer_than_an_objective() -> None:
    model = TtftModel(SLO_S)
    now_s = answered(model, 64, measured_s=10.0)
    assert not model.keeps(0.1, SLO_S, now_s - 10.0 + SLO_S)
    assert model.keeps(0.1, SLO_S, now_s - 10.0 + SLO_S + 0.001)
    assert not model.keeps(SLO_S + 0.1, SLO_S, now_s + 100.0)  # the bare prediction counts always


def test_a_mean_begins_as_that_of_all_and_forgets_later() -> None:
    mean = Mean(5.0)
    assert mean.value == 5.0
    for value in (1.0, 2.0, 3.0):
        mean.add(value)
    assert mean.value == pytest.approx(2.0)
    for _ in range(1000):
        mean.add(7.0)
    assert mean.value == pytest.approx(7.0, rel=1e-4)


@given(st.lists(st.tuples(st.sampled_from(["send", "answer", "forget"]), st.floats(0, 5), st.floats(0, 3)), max_size=80), st.randoms())
def test_any_course_leaves_nothing_awaited_and_bounds_that_are_numbers(course: list[tuple[str, float, float]], chance: random.Random) -> None:
    model, now_s = TtftModel(SLO_S), 0.0
    awaited: list[Sent] = []
    for event, pause_s, predicted_s in course:
        now_s += pause_s
        if event == "send":
            awaited.append(model.sent(predicted_s, now_s))
        elif awaited:
            sent = awaited.pop(chance.randrange(len(awaited)))
            model.first_byte(sent, now_s) if event == "answer" else model.forget(sent)
        assert 0.0 <= model.bound_s(predicted_s, now_s) < 1e6
    for sent in awaited:
        model.forget(sent)
    assert model.num_awaited == 0
    assert model.keeps(1.0, SLO_S, now_s + SLO_S + 0.1)
