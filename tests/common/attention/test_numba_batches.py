"""The numba backend against the dense oracle, on drawn batches and on those that lie across its blocks."""

import dataclasses

import pytest
import torch
from attention_batches import Case, Step, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from common.attention.backend import HostLens
from common.attention.numba import FEW_TOKENS, NumbaAttention
from common.attention.numba_extend import KEYS, QUERY_ROWS

BF16, F32 = torch.bfloat16, torch.float32


PAIRS_OF_DTYPES = [(F32, F32), (F32, BF16), (BF16, F32), (BF16, BF16)]  # compute, KV: each is compiled by itself


@pytest.mark.parametrize("dtypes", PAIRS_OF_DTYPES, ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_the_oracle(data: st.DataObject, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    case = dataclasses.replace(data.draw(cases()), dtype=dtypes[0], kv_dtype=dtypes[1])
    step = Step(case)
    step.check(NumbaAttention(step.geometry, step.pool, step.rope))


LONG = ((0, 1), (0, KEYS + 3), (5, 17), (100, FEW_TOKENS), (KEYS, KEYS), (1100, 70), (1, QUERY_ROWS // 3 + 1))
CASES = [
    Case(LONG, kv_heads=3, group=3, dtype=BF16, kv_dtype=BF16),
    Case(LONG, kv_heads=3, group=3),
    Case(LONG, kv_heads=2, group=3, dtype=BF16, window=KEYS + 5),
    Case(LONG, kv_heads=2, group=2, kv_dtype=BF16, window=1, soft_cap=5.0),
    Case(LONG, group=8, head_dim=128, dtype=BF16, kv_dtype=BF16, window=33, is_normed=True),
    Case(LONG, kv_heads=2, head_dim=80, page_size=1, dtype=BF16, kv_dtype=BF16, window=200),
    Case(LONG, kv_heads=2, head_dim=20, page_size=64),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_long_batches_equal_the_oracle(case: Case) -> None:
    """No cached prefix and a long one; fewer and more new tokens than a tile of keys, and than a block of queries."""
    step = Step(case)
    step.check(NumbaAttention(step.geometry, step.pool, step.rope))


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_threads_share_a_batch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    step = Step(case)
    step.check(NumbaAttention(step.geometry, step.pool, step.rope))


def test_one_backend_takes_turns_with_batches_of_every_kind() -> None:
    """As if each had one of its own: nothing is left over from the step before."""
    cases_in_turn = [Case(((9, 1), (64, 1)), is_decode=True), Case(((3, 40), (70, 2))), Case(((200, 1),), dtype=BF16, is_decode=True)]
    steps = [Step(dataclasses.replace(case, group=2, page_size=1)) for case in cases_in_turn]
    largest = max(steps, key=lambda step: step.pool.num_pages)
    content = largest.pool.tensor.clone()

    def run(step: Step, backend: NumbaAttention) -> torch.Tensor:
        step.pool.tensor.copy_(content)
        return step.run(backend)

    for step in steps:
        step.pool, step.rope = largest.pool, largest.rope
    expected = [run(step, NumbaAttention(step.geometry, step.pool, step.rope)) for step in steps]
    one = NumbaAttention(largest.geometry, largest.pool, largest.rope)
    for turn in (0, 1, 0, 2, 1):
        assert torch.equal(run(steps[turn], one), expected[turn])


def test_a_decode_batch_is_read_when_it_runs() -> None:
    """Its tensors are a bucket's buffers, filled after plan()."""
    step = Step(Case(((20, 1), (70, 1)), is_decode=True, group=2))
    backend = NumbaAttention(step.geometry, step.pool, step.rope)
    expected = step.run(backend)
    kept = step.batch.context_lens.clone()
    step.batch.context_lens.fill_(1)
    backend.plan(step.batch, HostLens(step.lens.extend_lens, step.lens.context_lens))
    step.batch.context_lens.copy_(kept)
    found = backend.forward(step.qkv.clone(), step.spec).view(expected.shape)
    assert torch.equal(found, expected)
