"""What may be drawn, how often, and that nothing but a row itself decides it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from paged_driver import greedy, sampling

from common.engine.batch import SamplingBatch
from common.sampling.sampler import NON_FINITE, sample

VOCAB = 2000


def rows_of(seed: int, num_rows: int = 1, spread: float = 3.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, spread, (num_rows, VOCAB)).astype(np.float32)


def draws(logits: NDArray[np.float32], num_draws: int, **parameters: float) -> NDArray[np.int64]:
    """Many draws from one row, at positions 0, 1, ..."""
    batch = sampling(num_draws, **parameters)
    batch.position[:] = np.arange(num_draws)
    return sample(np.repeat(logits, num_draws, axis=0), batch)


def probabilities(logits: NDArray[np.float32], temperature: float = 1.0) -> NDArray[np.float64]:
    weights = np.exp((logits[0].astype(np.float64) - logits.max()) / temperature)
    return weights / weights.sum()


def nucleus(probs: NDArray[np.float64], top_p: float) -> set[int]:
    order = np.argsort(-probs, kind="stable")
    return set(order[: int(np.searchsorted(np.cumsum(probs[order]), top_p)) + 1].tolist())


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, [7, 1900]] = 4.0
    assert sample(logits, greedy(2)).tolist() == [7, 0]


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    logits = rows_of(0, 3)
    assert sample(logits, sampling(3, temperature=2.0, top_k=1)).tolist() == logits.argmax(axis=1).tolist()


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    num_rows=st.integers(1, 6),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([-1, 1, 5, 700, VOCAB, 10 * VOCAB]),
    top_p=st.sampled_from([1.0, 0.95, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
def test_a_row_does_not_see_its_batch(data: st.DataObject, num_rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = rows_of(1, num_rows)
    batch = SamplingBatch(
        temperature=np.array([temperature, *data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=5, max_size=5))][:num_rows], np.float32),
        top_p=np.full(num_rows, top_p, np.float32),
        top_k=np.full(num_rows, top_k, np.int32),
        min_p=np.full(num_rows, min_p, np.float32),
        seed=np.arange(num_rows, dtype=np.int64) - 2,
        position=np.arange(num_rows, dtype=np.int64) * 1000,
    )
    together = sample(logits, batch)
    order = data.draw(st.permutations(range(num_rows)))
    shuffled = SamplingBatch(*(getattr(batch, name)[order] for name in batch.__slots__))
    assert sample(logits[order], shuffled).tolist() == together[order].tolist()
    assert sample(logits[:1], SamplingBatch(*(getattr(batch, name)[:1] for name in batch.__slots__))).tolist() == together[:1].tolist()


def test_seed_and_position_both_matter() -> None:
    logits = np.zeros((64, VOCAB), np.float32)
    one, other = sampling(64, seed=1), sampling(64, seed=2)
    one.position[:] = other.position[:] = np.arange(64)
    first, second = sample(logits, one), sample(logits, other)
    assert len(set(first.tolist())) > 50
    assert (first != second).sum() > 50


@pytest.mark.parametrize("top_k", [2, 40])
def test_top_k_draws_from_exactly_the_k_likeliest(top_k: int) -> None:
    logits = rows_of(2)
    allowed = set(np.argsort(-logits[0], kind="stable")[:top_k].tolist())
    assert set(draws(logits, 600, temperature=10.0, top_k=top_k).tolist()) == allowed


def test_top_k_cuts_ties_in_favour_of_lower_ids() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    assert set(draws(logits, 200, top_k=3).tolist()) == {0, 1, 2}


@pytest.mark.parametrize(("spread", "top_p"), [(3.0, 0.5), (3.0, 0.9), (0.1, 0.9)])
def test_top_p_draws_from_the_nucleus(spread: float, top_p: float) -> None:
    """Spread 0.1 needs most of the vocabulary."""
    logits = rows_of(3, spread=spread)
    allowed = nucleus(probabilities(logits), top_p)
    drawn = set(draws(logits, 400, top_p=top_p).tolist())
    assert drawn <= allowed
    assert len(drawn) > min(len(allowed), 250) // 3


def test_top_p_counts_within_top_k() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    assert set(draws(logits, 300, top_k=2, top_p=0.6).tolist()) == {0, 1}  # of 0.7: 0.57 and 0.43
    assert set(draws(logits, 300, top_k=2, top_p=0.5).tolist()) == {0}
    assert set(draws(logits, 300, top_p=0.6).tolist()) == {0, 1}


def test_top_p_zero_is_greedy() -> None:
    logits = rows_of(4)
    assert set(draws(logits, 50, top_p=0.0).tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize("other", [{}, {"top_k": 500}, {"top_p": 0.999999}])
def test_min_p_keeps_what_is_near_the_likeliest(other: dict[str, float]) -> None:
    logits = rows_of(5)
    probs = probabilities(logits, 2.0)
    allowed = set(np.flatnonzero(probs >= 0.2 * probs.max()).tolist())
    assert set(draws(logits, 500, temperature=2.0, min_p=0.2, **other).tolist()) == allowed


@pytest.mark.parametrize("parameters", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 6}, {"temperature": 1.3, "top_p": 0.9}])
def test_frequencies_follow_the_distribution(parameters: dict[str, float]) -> None:
    """Chi-squared over 12 tokens and 20000 draws; 40 is beyond the 1e-4 tail of 11 degrees of freedom (draws are seeded: no luck)."""
    logits = np.random.default_rng(6).normal(0, 1, (1, 12)).astype(np.float32)
    probs = probabilities(logits, parameters["temperature"])
    order = np.argsort(-probs)
    if "top_k" in parameters:
        probs[order[int(parameters["top_k"]) :]] = 0
    if "top_p" in parameters:
        probs[[i for i in range(12) if i not in nucleus(probs, parameters["top_p"])]] = 0
    probs /= probs.sum()
    counts = np.bincount(draws(logits, 20000, **parameters), minlength=12)
    assert counts[probs == 0].sum() == 0
    expected = 20000 * probs[probs > 0]
    assert (((counts[probs > 0] - expected) ** 2) / expected).sum() < 40


def test_rows_without_a_finite_maximum_fail_alone() -> None:
    logits = rows_of(7, 6)
    logits[1, 50], logits[2, 60], logits[3] = np.nan, np.inf, -np.inf
    for temperature in (0.0, 1.0):
        drawn = sample(logits, sampling(6, temperature=temperature, top_p=0.9))
        assert drawn[1:4].tolist() == [NON_FINITE] * 3
        assert (drawn[[0, 4, 5]] >= 0).all()


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, [3, 8]] = 0.0
    for parameters in ({}, {"top_k": 50}, {"top_p": 0.999}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.9999, "min_p": 1e-6}):
        assert set(draws(logits, 60, **parameters).tolist()) == {3, 8}


def test_extreme_temperatures_stay_finite() -> None:
    logits = rows_of(8, spread=1e4)
    assert draws(logits, 5, temperature=1e-4).tolist() == [int(logits.argmax())] * 5
    assert (draws(logits, 50, temperature=1e6) >= 0).all()
