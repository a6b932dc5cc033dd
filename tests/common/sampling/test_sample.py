"""What may be drawn, how often, and that nothing but a row itself decides it: the same of both forms."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.sampling.numba import _pick, sample_by_numba
from common.sampling.params import SamplingMix, SamplingRows
from common.sampling.philox import uniform
from common.sampling.sample import NON_FINITE, sample
from common.sampling.torch import sample_by_torch

VOCAB = 2000
CPU = torch.device("cpu")
FORMS = {"numba": lambda logits, rows, positions, mix: sample_by_numba(logits, rows, positions), "torch": sample_by_torch}
Form = Callable[[torch.Tensor, SamplingRows, torch.Tensor, SamplingMix], torch.Tensor]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def rows_like(num_rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0, seed: int = 0) -> SamplingRows:
    rows = SamplingRows.greedy(num_rows, CPU)
    for tensor, value in ((rows.temperature, temperature), (rows.top_p, top_p), (rows.top_k, top_k), (rows.min_p, min_p), (rows.seed, seed)):
        tensor.fill_(value)
    return rows


def mix_of(rows: SamplingRows) -> SamplingMix:
    return SamplingMix.of(rows.temperature.numpy(), rows.top_p.numpy(), rows.top_k.numpy(), rows.min_p.numpy())


def drawn(form: Form, logits: torch.Tensor, rows: SamplingRows, positions: torch.Tensor | None = None) -> list[int]:
    positions = torch.arange(len(logits)) if positions is None else positions
    return form(logits, rows, positions, mix_of(rows)).tolist()


def draws(form: Form, logits: torch.Tensor, num_draws: int, **parameters: float) -> list[int]:
    """Many draws from one row [V], at positions 0, 1, ..."""
    return drawn(form, logits.repeat(num_draws, 1), rows_like(num_draws, **parameters))


def normal(seed: int, *shape: int, spread: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, spread, shape).astype(np.float32))


def kept_weights(logits: torch.Tensor, temperature: float, top_p: float, top_k: int, min_p: float) -> NDArray[np.float64]:
    """The oracle: probabilities [V] of what may be drawn, 0 of the rest."""
    x = logits.double().numpy()
    weights = np.exp((x - x.max()) / temperature)
    order = np.argsort(-x, kind="stable")
    if 0 < top_k < len(x):
        weights[order[top_k:]] = 0
    if top_p < 1:
        cumulative = np.cumsum(weights[order])
        weights[order[int(np.searchsorted(cumulative, np.float64(np.float32(top_p)) * cumulative[-1] * (1 - 1e-9))) + 1 :]] = 0
    weights[weights < np.float32(min_p) * (1 - 1e-6)] = 0
    return weights / weights.sum()


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    vocab=st.sampled_from([1, 2, 63, 64, 65, 500, 4111]),
    spread=st.sampled_from([0.0, 0.3, 3.0]),
    step=st.sampled_from([0.0, 0.25, 1.0]),  # of a grid of logits: many are equal
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.sampled_from([-1, 2, 30, 700, 10**6]),
    top_p=st.sampled_from([1.0, 0.95, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    masked=st.booleans(),
)
def test_both_forms_draw_what_the_oracle_does(
    seed: int, vocab: int, spread: float, step: float, dtype: torch.dtype, temperature: float, top_k: int, top_p: float, min_p: float, masked: bool
) -> None:
    logits = normal(abs(seed), 3, vocab, spread=spread)
    if step:
        logits = (logits / step).round() * step
    if masked:
        logits[:, 1::2] = -torch.inf
    logits = logits.to(dtype)
    rows = rows_like(3, temperature, top_p, top_k, min_p, seed)
    uniforms = uniform(rows.seed, torch.arange(3)).tolist()
    for form in FORMS.values():
        for row, token in enumerate(drawn(form, logits, rows)):
            probs = kept_weights(logits[row], np.float32(temperature), top_p, top_k, min_p)
            assert probs[token] > 0
            after = probs[: token + 1].sum()
            assert after - probs[token] - 1e-5 <= uniforms[row] <= after + 1e-5  # in the order of ids


def test_sample_takes_the_form_of_its_device_and_leaves_the_logits() -> None:
    logits = normal(9, 4, 5000)
    before, rows = logits.clone(), rows_like(4, top_k=20, top_p=0.9)
    tokens = sample(logits, rows, torch.arange(4), mix_of(rows))
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == drawn(FORMS["torch"], logits, rows)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("parameters", [{}, {"top_k": 50, "top_p": 0.95}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_forms_draw_the_same_tokens(parameters: dict[str, float], dtype: torch.dtype) -> None:
    logits = normal(10, 64, 3001).to(dtype)
    rows = rows_like(64, **parameters)
    assert drawn(FORMS["numba"], logits, rows) == drawn(FORMS["torch"], logits, rows)


def questions(function: Callable[[], object]) -> set[str]:
    """Operations run that wait for a device: their result is on the host, or its shape depends on values."""
    with torch.autograd.profiler.profile() as profile:
        function()
    return {event.name for event in profile.function_events} & {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique"}


def test_torch_asks_its_device_nothing() -> None:
    logits, rows = normal(11, 4, VOCAB), rows_like(4, top_k=40, top_p=0.9, min_p=0.1)
    assert questions(lambda: logits[logits > 0])
    assert questions(lambda: logits[0, 0].item())
    for mix in (SamplingMix.GREEDY, SamplingMix(True, True, True, True, 40), SamplingMix(True, False, True, False, -1), SamplingMix(True)):
        assert not questions(lambda mix=mix: sample_by_torch(logits, rows, torch.arange(4), mix))


def test_greedy_takes_the_lowest_id_on_ties(form: Form) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [7, 1900]] = 4.0
    logits[2, :1000] = -0.0  # equals 0.0
    assert drawn(form, logits, rows_like(3, temperature=0.0)) == [7, 0, 0]
    assert drawn(form, -torch.arange(3.0, 103.0).repeat(2, 1), rows_like(2, temperature=0.0)) == [0, 0]


def test_top_k_one_and_a_tiny_top_p_are_greedy_at_any_temperature(form: Form) -> None:
    logits = normal(0, 3, VOCAB)
    for parameters in ({"top_k": 1}, {"top_p": 1e-30}, {"min_p": 1.0}):
        assert drawn(form, logits, rows_like(3, temperature=2.0, **parameters)) == logits.argmax(dim=1).tolist()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(FORMS)), num_rows=st.integers(1, 6))
def test_a_row_does_not_see_its_batch(data: st.DataObject, name: str, num_rows: int) -> None:
    form, logits = FORMS[name], normal(1, num_rows, VOCAB)
    rows = SamplingRows(*(torch.tensor(data.draw(st.lists(st.sampled_from(values), min_size=num_rows, max_size=num_rows)), dtype=dtype)
        for values, dtype in (
            ([0.0, 0.3, 1.0, 5.0], torch.float32), ([1.0, 0.95, 0.3, 1e-6], torch.float32), ([-1, 1, 5, 700, VOCAB, 10 * VOCAB], torch.int32),
            ([0.0, 0.02, 0.5, 1.0], torch.float32), ([-2, 0, 3, 2**62], torch.int64),
        )))  # fmt: skip
    positions = torch.arange(num_rows) * 1000
    together = drawn(form, logits, rows, positions)
    order = torch.tensor(data.draw(st.permutations(range(num_rows))))
    assert drawn(form, logits[order], rows.select(order), positions[order]) == [together[i] for i in order.tolist()]
    for one in order[:2].unsqueeze(1):
        assert drawn(form, logits[one], rows.select(one), positions[one]) == [together[int(one)]]


def test_seed_and_position_both_matter(form: Form) -> None:
    logits = torch.zeros(64, VOCAB)
    first, second = (drawn(form, logits, rows_like(64, seed=seed)) for seed in (1, 2))
    assert len(set(first)) > 50
    assert sum(a != b for a, b in zip(first, second, strict=True)) > 50


@pytest.mark.parametrize("top_k", [2, 40])
def test_top_k_draws_from_exactly_the_k_likeliest(form: Form, top_k: int) -> None:
    logits = normal(2, VOCAB)
    allowed = set(np.argsort(-logits.numpy(), kind="stable")[:top_k].tolist())
    assert set(draws(form, logits, 600, temperature=10.0, top_k=top_k)) == allowed


def test_top_k_cuts_ties_in_favour_of_lower_ids(form: Form) -> None:
    logits = torch.zeros(VOCAB)
    assert set(draws(form, logits, 200, top_k=3)) == {0, 1, 2}
    logits[1000:] = 1.0
    assert set(draws(form, logits, 200, top_k=2)) == {1000, 1001}


def test_top_p_counts_within_top_k(form: Form) -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    assert set(draws(form, logits, 300, top_k=2, top_p=0.6)) == {0, 1}  # of 0.7: 0.57 and 0.43
    assert set(draws(form, logits, 300, top_k=2, top_p=0.5)) == {0}
    assert set(draws(form, logits, 300, top_p=0.6)) == {0, 1}


def test_top_p_of_equal_tokens_keeps_exactly_as_many_as_reach_it(form: Form) -> None:
    for num_tokens, top_p, num_kept in ((4, 0.5, 2), (8, 0.125, 1), (200, 0.25, 50), (640, 0.5, 320)):
        assert max(draws(form, torch.zeros(num_tokens), 3000, top_p=top_p)) == num_kept - 1


def test_rows_with_and_without_a_cut_share_a_batch(form: Form) -> None:
    rows = rows_like(400)
    rows.top_k[::2] = 3
    logits = normal(12, VOCAB, spread=0.1)
    tokens = drawn(form, logits.repeat(400, 1), rows)
    assert set(tokens[::2]) == set(logits.topk(3).indices.tolist())
    assert len(set(tokens[1::2])) > 150


def test_the_ends_of_the_distribution_are_tokens_that_may_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = torch.full((1, 300), -torch.inf), rows_like(1)
    logits[0, [70, 200]] = 0.0
    weights, sums = np.exp(logits[0].numpy()), np.empty(5, np.int64)
    for u, token in ((0.0, 70), (0.5, 200), (1 - 2.0**-53, 200)):
        monkeypatch.setattr("common.sampling.torch._uniform", lambda seed, position, u=u: torch.full((1,), u, dtype=torch.float64))
        assert drawn(FORMS["torch"], logits, rows) == [token]
        assert _pick(weights, len(weights), sums, u) == token


def test_top_p_counts_what_is_beyond_the_likely_candidates(form: Form) -> None:
    """40 tokens of 0.02 and 1960 that share 0.2: the nucleus of 0.5 is 25 tokens, of 0.9 more than half of the others as well."""
    probs = torch.full((VOCAB,), 0.2 / (VOCAB - 40))
    probs[40 * torch.arange(40)] = 0.02
    assert len(set(draws(form, probs.log(), 2000, top_p=0.4999))) == 25
    assert len(set(draws(form, probs.log(), 2000, top_p=0.9))) > 40


@pytest.mark.parametrize("parameters", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 6}, {"temperature": 1.3, "top_p": 0.9}])
def test_frequencies_follow_the_distribution(form: Form, parameters: dict[str, float]) -> None:
    """Chi-squared over 12 tokens and 20000 draws; 40 is beyond the 1e-4 tail of 11 degrees of freedom (draws are seeded: no luck)."""
    logits = normal(6, 12, spread=1.0)
    probs = kept_weights(logits, **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, **parameters})
    counts = np.bincount(draws(form, logits, 20000, **parameters), minlength=12)
    assert counts[probs == 0].sum() == 0
    expected = 20000 * probs[probs > 0]
    assert (((counts[probs > 0] - expected) ** 2) / expected).sum() < 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_a_finite_maximum_fail_alone(form: Form, dtype: torch.dtype) -> None:
    logits = normal(7, 7, VOCAB).to(dtype)
    logits[1, 50], logits[2, 60], logits[3], logits[4, VOCAB - 1] = torch.nan, torch.inf, -torch.inf, -torch.tensor(torch.nan)
    for parameters in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}, {"top_k": VOCAB - 1}):
        tokens = drawn(form, logits, rows_like(7, **parameters))
        assert tokens[1:5] == [NON_FINITE] * 4
        assert min(tokens[0], *tokens[5:]) >= 0


def test_masked_tokens_are_never_drawn(form: Form) -> None:
    logits = torch.full((VOCAB,), -torch.inf)
    logits[[3, 8]] = 0.0
    everything = {"top_k": 50, "top_p": 0.9999, "min_p": 1e-6}
    for parameters in ({}, {"top_k": 50}, {"top_p": 0.999}, {"min_p": 0.1}, everything, {"temperature": torch.inf}):
        assert set(draws(form, logits, 60, **parameters)) == {3, 8}


def test_extreme_temperatures_stay_finite(form: Form) -> None:
    logits = normal(8, VOCAB, spread=1e4)
    assert draws(form, logits, 5, temperature=1e-4) == [int(logits.argmax())] * 5
    assert min(draws(form, logits, 50, temperature=1e6)) >= 0
    assert len(set(draws(form, logits, 50, temperature=torch.inf))) > 40


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p", "mix"),
    [
        ([0.0, 1.0], [0.5, 1.0], [5, 1], [0.1, 0.1], SamplingMix.GREEDY),
        ([0.0, 1.0], [0.5, 1.0], [5, -1], [0.1, 0.0], SamplingMix(any_random=True)),
        ([1.0, 1.0], [1.0, 1.0], [5, -1], [0.0, 0.1], SamplingMix(any_random=True, any_top_k=True, any_min_p=True, max_top_k=5)),
        ([1.0, 1.0], [0.5, 1.0], [5, 70], [0.0, 0.0], SamplingMix(any_random=True, any_top_k=True, any_top_p=True, max_top_k=70)),
        ([1.0, 1.0], [1.0, 0.5], [5, -1], [0.0, 0.0], SamplingMix(any_random=True, any_top_k=True, any_top_p=True, max_top_k=-1)),
    ],
)
def test_the_mix_is_what_some_random_row_needs(
    temperature: list[float], top_p: list[float], top_k: list[int], min_p: list[float], mix: SamplingMix
) -> None:
    assert SamplingMix.of(np.array(temperature), np.array(top_p), np.array(top_k), np.array(min_p)) == mix
