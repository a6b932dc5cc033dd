"""Changed logits equal what a walk over prompt and output says, whenever and however often they are asked for."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.request import SamplingParams
from common.sampling.params import SamplingMix, SamplingRows
from common.sampling.penalties import LogitChanges, LogitHistory, change
from common.sampling.sample import NON_FINITE, sample

VOCAB = 40
EOS = (3, VOCAB + 7)  # a checkpoint may name an id that has no logit
CPU = torch.device("cpu")


def params_of(**fields: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=64, **fields)


def changed(logits: torch.Tensor, *rows: tuple[int, LogitHistory, list[int], int]) -> torch.Tensor:
    return change(logits, LogitChanges.build(rows, CPU))


def oracle(logits: NDArray[np.float32], params: SamplingParams, prompt_ids: list[int], output_ids: list[int]) -> NDArray[np.float32]:
    result = logits.astype(np.float64)
    for token_id in range(VOCAB):
        x, count = result[token_id], output_ids.count(token_id)
        if token_id in prompt_ids or count:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        x += dict(params.logit_bias).get(token_id, 0.0)
        ends = token_id in params.stop_token_ids or (token_id in EOS and not params.ignore_eos)
        result[token_id] = -np.inf if ends and len(output_ids) < params.min_tokens else x
    return result.astype(np.float32)


token_ids = st.integers(0, VOCAB - 1)
some_params = st.builds(
    params_of,
    presence_penalty=st.sampled_from([0.0, -2.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.1, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-100.0, 1.5, 100.0]), max_size=4).map(lambda bias: tuple(bias.items())),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(token_ids, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)
requests = st.tuples(some_params, st.lists(token_ids, min_size=1, max_size=30), st.lists(token_ids, max_size=30))


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(requests, min_size=1, max_size=4), steps=st.lists(st.integers(0, 5), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_a_batch_is_changed_as_each_row_alone_says(
    requests: list[tuple[SamplingParams, list[int], list[int]]], steps: list[int], seed: int
) -> None:
    """Outputs become known in strides, as after a chunk or a retraction."""
    histories = [LogitHistory(params, prompt_ids, EOS, VOCAB) for params, prompt_ids, _ in requests]
    rng = np.random.default_rng(seed)
    for num_outputs in np.cumsum(steps).tolist():
        logits = torch.from_numpy(rng.normal(0, 3, (len(requests) + 1, VOCAB)).astype(np.float32))
        logits[0, 0] = -torch.inf
        known = [output_ids[:num_outputs] for _, _, output_ids in requests]
        rows = [(row, history, output_ids, len(output_ids)) for row, (history, output_ids) in enumerate(zip(histories, known, strict=True))]
        before = logits.clone()
        result = changed(logits, *rows[::-1])
        for row, (params, prompt_ids, _) in enumerate(requests):
            expected = oracle(logits[row].numpy(), params, prompt_ids, known[row])
            np.testing.assert_allclose(result[row].numpy(), expected, rtol=1e-6, atol=1e-5)
        assert torch.equal(result[-1], logits[-1])
        assert torch.equal(logits, before)


def test_what_needs_no_history_is_told_by_number_alone() -> None:
    """A bias and min_tokens do not wait for the tokens under way."""
    params = params_of(min_tokens=2, logit_bias=((5, 1.0),))
    assert params.changes_logits
    assert not params.needs_history
    history, logits = LogitHistory(params, [1], EOS, VOCAB), torch.zeros(1, VOCAB)
    assert [changed(logits, (0, history, [], n))[0, 3].item() for n in range(4)] == [-torch.inf, -torch.inf, 0.0, 0.0]


@pytest.mark.parametrize("field", [{"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 1.1}])
def test_a_penalty_waits_for_the_last_token(field: dict[str, float]) -> None:
    params = params_of(**field)
    assert params.needs_history
    assert params.changes_logits
    with pytest.raises(AssertionError):
        LogitHistory(params, [1], EOS, VOCAB).terms([7], 2)


def test_nothing_changes_without_a_reason() -> None:
    assert not params_of().changes_logits
    assert LogitChanges.build([], CPU) is None
    assert LogitChanges.build([(0, LogitHistory(params_of(presence_penalty=1.0), [1], EOS, VOCAB), [], 0)], CPU) is None


def test_a_long_output_is_counted_once() -> None:
    """A step looks only at the new tokens."""

    class Watched(list[int]):
        num_read = 0

        def __getitem__(self, index: Any) -> Any:
            part = super().__getitem__(index)
            Watched.num_read += len(part)
            return part

    history, output_ids = LogitHistory(params_of(frequency_penalty=0.25), [1], EOS, VOCAB), Watched()
    for step in range(200):
        output_ids.append(step % 30)
        history.terms(output_ids, len(output_ids))
    assert Watched.num_read == 200
    token_ids, scale, added = history.terms(output_ids, 200)
    assert dict(zip(token_ids.tolist(), added.tolist(), strict=True)) == {token: -0.25 * (7 if token < 20 else 6) for token in range(30)}
    assert set(scale.tolist()) == {1.0}


def test_bfloat16_logits_are_changed_in_float32() -> None:
    history = LogitHistory(params_of(logit_bias=((1, 0.5), (2, 100.0))), [0], EOS, VOCAB)
    logits = torch.full((1, VOCAB), 7.0, dtype=torch.bfloat16)
    result = changed(logits, (0, history, [], 0))
    assert result.dtype == torch.bfloat16
    assert result[0, :4].tolist() == [7.0, 7.5, 107.0, 7.0]


def test_a_row_with_everything_masked_has_no_token() -> None:
    params = params_of(min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    logits = changed(torch.zeros(2, VOCAB), (1, LogitHistory(params, [0], EOS, VOCAB), [], 0))
    assert sample(logits, SamplingRows.greedy(2, CPU), torch.zeros(2, dtype=torch.int64), SamplingMix.GREEDY).tolist() == [0, NON_FINITE]
