"""What we do around FlashInfer, against a stand-in for the library that attends from the same buffers in plain loops."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_batches import Case, Step, cases
from hypothesis import given, settings
from triton_interpreter import DEVICE, as_silent_as_devices

from common.attention.backend import HostLens
from common.attention.flashinfer import FlashInferAttention, check
from common.errors import StartupError

pytestmark = as_silent_as_devices


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, soft_cap: float | None) -> torch.Tensor:
    """q [n, H, D] are the last n tokens of k, v [KV, context, D] -> [n, H, D]."""
    group, (num_new, context_len) = q.shape[1] // k.shape[0], (len(q), k.shape[1])
    scores = torch.einsum("nhd,hcd->hnc", q, k.repeat_interleave(group, 0)) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    positions = torch.arange(context_len, device=q.device)
    distance = positions[context_len - num_new :].unsqueeze(1) - positions
    hidden = (distance < 0) | (distance >= (window or context_len))
    return torch.einsum("hnc,hcd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v.repeat_interleave(group, 0))


class StandIn:
    """The two wrapper classes of flashinfer 0.7, argument by argument. run() reads the buffers it has, as a captured launch does."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, **buffers: Any) -> None:
        assert (workspace.dtype, kv_layout) == (torch.uint8, "HND")
        assert not workspace.any()
        self.buffers = buffers
        self.num_plans = 0

    def _plan(self, query_indptr: torch.Tensor, kv_indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
              heads: tuple[int, ...]) -> None:  # fmt: skip
        assert {t.dtype for t in (query_indptr, kv_indptr, indices, last_page_len)} == {torch.int32}
        assert len(indices) == kv_indptr[-1]
        self.query_indptr, self.heads = query_indptr, heads
        self.num_plans += 1

    def _attend(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], kv_indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor,
                scale: float, window_left: int, soft_cap: float | None) -> torch.Tensor:  # fmt: skip
        num_heads, num_kv_heads, head_dim, page_size = self.heads
        assert q.shape[1:] == (num_heads, head_dim)
        assert kv[0].shape[1:] == (num_kv_heads, page_size, head_dim)
        assert kv[0].stride() == kv[1].stride()
        out = torch.empty_like(q)
        for row in range(len(last)):
            pages = indices[kv_indptr[row] : kv_indptr[row + 1]].long()
            context_len = (len(pages) - 1) * page_size + int(last[row])
            k, v = (part[pages].transpose(0, 1).flatten(1, 2)[:, :context_len].float() for part in kv)
            own = slice(int(self.query_indptr[row]), int(self.query_indptr[row + 1]))
            out[own] = attend(q[own].float(), k, v, scale, None if window_left < 0 else window_left + 1, soft_cap).to(q.dtype)
        return out


class DecodeStandIn(StandIn):
    def plan(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int,
             page_size: int, *, sm_scale: float, window_left: int, logits_soft_cap: float | None, q_data_type: torch.dtype,
             kv_data_type: torch.dtype, o_data_type: torch.dtype) -> None:  # fmt: skip
        assert self.buffers["use_cuda_graph"]
        heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan(torch.arange(len(last_page_len) + 1, dtype=torch.int32), indptr, indices, last_page_len, heads)
        self.options = (sm_scale, window_left, logits_soft_cap)
        self.buffers["paged_kv_indptr_buffer"].copy_(indptr)
        self.buffers["paged_kv_last_page_len_buffer"].copy_(last_page_len)
        self.buffers["paged_kv_indices_buffer"][: len(indices)].copy_(indices)

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
        return self._attend(q, paged_kv_cache, *(self.buffers[name] for name in names), *self.options)


class PrefillStandIn(StandIn):
    def plan(self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor,
             num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float, window_left: int,
             logits_soft_cap: float | None, q_data_type: torch.dtype, kv_data_type: torch.dtype, o_data_type: torch.dtype) -> None:  # fmt: skip
        assert causal
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, heads)
        self.lists = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.options = (sm_scale, window_left, logits_soft_cap)

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self._attend(q, paged_kv_cache, *self.lists, *self.options)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=DecodeStandIn, BatchPrefillWithPagedKVCacheWrapper=PrefillStandIn)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr("common.attention.flashinfer.WORKSPACE_NBYTES", 16)


def backend_on(step: Step) -> FlashInferAttention:
    return FlashInferAttention(
        step.geometry, step.pool, step.rope, dtype=step.case.dtype, max_rows=len(step.batch.rows) + 3, max_context=step.max_context
    )


@settings(max_examples=20, deadline=None)
@given(cases(max_rows=3, max_new=9))
def test_any_batch_equals_the_oracle(case: Case) -> None:
    step = Step(case, DEVICE)
    step.check(backend_on(step))


def test_a_bucket_keeps_its_wrapper_and_its_buffers() -> None:
    """What a captured graph holds on to: the launch of a bucket reads, after the next plan(), that plan's lists from where it read before."""
    step = Step(Case(rows=((19, 1), (40, 1)), is_decode=True, num_padding=2), DEVICE)
    backend = backend_on(step)
    step.check(backend)
    [wrapper] = backend._decode.values()
    assert isinstance(wrapper, DecodeStandIn)
    buffers = {name: buffer for name, buffer in wrapper.buffers.items() if isinstance(buffer, torch.Tensor)}
    places = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    one = slice(0, 1)
    alone = replace(step.batch, rows=step.batch.rows[one], context_lens=step.batch.context_lens[one], query_starts=step.batch.query_starts[:2])
    backend.plan(alone, HostLens(step.lens.extend_lens[one], step.lens.context_lens[one]))
    backend.plan(step.batch, replace(step.lens, context_lens=np.array([3, 33, 1, 1], np.int32)))
    assert ({bucket for bucket, _ in backend._decode}, wrapper.num_plans) == ({4, 1}, 2)
    assert buffers["paged_kv_indptr_buffer"].tolist() == [0, 1, 4, 5, 6]
    assert buffers["paged_kv_last_page_len_buffer"].tolist() == [3, 1, 1, 1]
    own_pages = step.batch.page_table[step.batch.rows.long()]
    assert buffers["paged_kv_indices_buffer"][:6].tolist() == [*own_pages[0, :1].tolist(), *own_pages[1, :3].tolist(), 0, 0]
    assert {name: buffer.data_ptr() for name, buffer in buffers.items()} == places


@pytest.mark.parametrize("is_decode", [False, True])
def test_kinds_of_layers_are_planned_once_a_step(is_decode: bool) -> None:
    """The first step learns them layer by layer; later ones are planned before the first layer, which may be inside a graph."""
    step = Step(Case(rows=((5, 1), (30, 1)), is_decode=is_decode), DEVICE)
    backend = backend_on(step)
    specs = [replace(step.spec, window=window, soft_cap=soft_cap) for window, soft_cap in ((None, None), (7, None), (7, 20.0), (None, None))]
    for num_steps in (1, 2):
        backend.plan(step.batch, step.lens)
        for spec in specs:
            backend.forward(step.qkv.to(DEVICE), spec)
        wrappers = [*backend._decode.values()] if is_decode else [*backend._extend.values()]
        assert [wrapper.num_plans for wrapper in wrappers] == [num_steps] * 3  # type: ignore[attr-defined]


def test_a_schedule_is_filled_in_only_when_the_one_before_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    step, order = Step(Case(rows=((5, 1), (30, 1)), is_decode=True), DEVICE), []
    backend, fill = backend_on(step), StandIn._plan
    monkeypatch.setattr(StandIn, "_plan", lambda *arguments: (order.append("filled"), fill(*arguments)))
    monkeypatch.setattr(backend, "_copied", SimpleNamespace(synchronize=lambda: order.append("waited"), record=lambda: order.append("copied")))
    step.run(backend)
    assert order == ["waited", "copied", "filled", "copied"]  # no kind of layer was known before the first forward()
    backend.plan(step.batch, step.lens)
    assert order[4:] == ["waited", "filled", "copied"]


def test_lengths_of_another_batch_are_refused() -> None:
    step = Step(Case(rows=((5, 1), (30, 1))), DEVICE)
    with pytest.raises(AssertionError, match="lengths of 1 rows for a batch of 2"):
        backend_on(step).plan(step.batch, HostLens(step.lens.extend_lens[:1], step.lens.context_lens[:1]))


def test_what_it_serves() -> None:
    check(128, torch.bfloat16, torch.bfloat16, "cuda")


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "device", "sentence"),
    [
        (96, torch.bfloat16, torch.bfloat16, "cuda", r"head_dim 64, 128, 256, this model's is 96; use --attention-backend triton"),
        (64, torch.float32, torch.float32, "cuda", r"not in float32 with KV in float32; use --attention-backend triton"),
        (64, torch.bfloat16, torch.float32, "cuda", r"not in bfloat16 with KV in float32"),
        (64, torch.bfloat16, torch.bfloat16, "cpu", r"not on --device cpu; use --attention-backend auto"),
    ],
)
def test_what_it_lacks_is_said(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: str, sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        check(head_dim, dtype, kv_dtype, device)


def test_a_missing_library_is_a_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(StartupError, match="pip install flashinfer-python"):
        check(64, torch.bfloat16, torch.bfloat16, "cuda")
