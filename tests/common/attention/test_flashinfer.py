"""What we do around FlashInfer, against a stand-in for the library that attends from the same buffers in plain loops."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.attention.backend import AttentionBatch, AttentionSpec, HeadGeometry, HostLens
from common.attention.flashinfer import FlashInferAttention, check
from common.attention.flashinfer_plan import indptr
from common.errors import StartupError
from common.kvcache.layout import KVLayout, KVPool
from common.layers.ops import NormWeight
from common.layers.rope import RopeTable

CPU, NUM_LAYERS, NUM_PAGES, MAX_PAGES, MAX_ROWS = torch.device("cpu"), 2, 60, 6, 8


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, soft_cap: float | None) -> torch.Tensor:
    """q [n, H, D] are the last n tokens of k, v [KV, context, D] -> [n, H, D]."""
    group, (num_new, context_len) = q.shape[1] // k.shape[0], (len(q), k.shape[1])
    scores = torch.einsum("nhd,hcd->hnc", q, k.repeat_interleave(group, 0)) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(context_len - num_new, context_len).unsqueeze(1) - torch.arange(context_len)
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
            k, v = (part[pages].transpose(0, 1).flatten(1, 2)[:, :context_len].to(q.dtype) for part in kv)
            own = slice(int(self.query_indptr[row]), int(self.query_indptr[row + 1]))
            out[own] = attend(q[own], k, v, scale, None if window_left < 0 else window_left + 1, soft_cap)
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


class Paged:
    """A backend on a pool, and beside it each row's K and V as they should be: dense, rotated."""

    def __init__(self, geometry: HeadGeometry, page_size: int, dtype: torch.dtype = torch.float32) -> None:
        self.geometry, self.page_size, self.dtype = geometry, page_size, dtype
        self.pool = KVPool(KVLayout(geometry.num_kv_heads, NUM_LAYERS, page_size, geometry.head_dim, dtype), NUM_PAGES, CPU)
        angles = torch.outer(torch.arange(float(MAX_PAGES * page_size)), 1.0 / 1e4 ** (torch.arange(0, geometry.head_dim, 2) / geometry.head_dim))
        self.rope = RopeTable(angles.cos(), angles.sin())
        self.backend = FlashInferAttention(geometry, self.pool, self.rope, MAX_ROWS, MAX_PAGES * page_size, dtype)
        pages = torch.randperm(NUM_PAGES - 1)[: MAX_ROWS * MAX_PAGES].int() + 1
        self.table = torch.cat((pages.view(MAX_ROWS, MAX_PAGES), torch.zeros(1, MAX_PAGES, dtype=torch.int32)))  # the last is the padding row
        self.lens = [0] * MAX_ROWS
        nothing = torch.empty(0, geometry.num_kv_heads, geometry.head_dim)
        self.keys, self.values = ([[nothing] * NUM_LAYERS for _ in range(MAX_ROWS)] for _ in range(2))

    def batch(self, rows: list[int], extend_lens: list[int], num_padding: int = 0, is_decode: bool = False) -> tuple[AttentionBatch, HostLens]:
        for row, num_new in zip(rows, extend_lens, strict=True):
            self.lens[row] += num_new
        batch_rows = torch.tensor([*rows, *[MAX_ROWS] * num_padding], dtype=torch.int32)
        lens = HostLens(*(np.array([*own, *[1] * num_padding], np.int32) for own in (extend_lens, [self.lens[row] for row in rows])))
        parts = [torch.arange(end - n, end) for n, end in zip(lens.extend_lens.tolist(), lens.context_lens.tolist(), strict=True)]
        positions = torch.cat(parts)
        token_rows = torch.repeat_interleave(batch_rows, torch.from_numpy(lens.extend_lens))
        slots = self.table[token_rows, positions // self.page_size].long() * self.page_size + positions % self.page_size
        starts, context_lens = torch.from_numpy(indptr(lens.extend_lens)), torch.from_numpy(lens.context_lens)
        return AttentionBatch(self.table, batch_rows, context_lens, starts, positions, slots, is_decode), lens

    def expect(self, qkv: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec) -> torch.Tensor:
        """Dense attention, padding rows as if each were a request of one token."""
        heads, kv_heads = self.geometry.num_heads, self.geometry.num_kv_heads
        q, k, v = torch.split(qkv.view(len(qkv), -1, self.geometry.head_dim), [heads, kv_heads, kv_heads], dim=1)
        for norm, part in ((spec.q_norm, q), (spec.k_norm, k)):
            if norm is not None:
                part.copy_(part * (part.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.tensor)
        q, k = self.rope.rotate(q, batch.positions), self.rope.rotate(k, batch.positions)
        out = torch.empty_like(q)
        for place, row in enumerate(batch.rows.tolist()):
            own = slice(int(batch.query_starts[place]), int(batch.query_starts[place + 1]))
            if row == MAX_ROWS:
                continue
            self.keys[row][spec.layer] = torch.cat((self.keys[row][spec.layer], k[own]))
            self.values[row][spec.layer] = torch.cat((self.values[row][spec.layer], v[own]))
            kept = (self.keys[row][spec.layer].transpose(0, 1), self.values[row][spec.layer].transpose(0, 1))
            out[own] = attend(q[own], *kept, self.geometry.head_dim**-0.5, spec.window, spec.soft_cap)
        return out.view(len(qkv), -1)

    def check(self, specs: list[AttentionSpec], batch: AttentionBatch, lens: HostLens) -> None:
        self.backend.plan(batch, lens)
        real = torch.repeat_interleave(batch.rows, torch.from_numpy(lens.extend_lens)) != MAX_ROWS
        for spec in specs:
            qkv = torch.randn(len(batch.positions), self.geometry.qkv_size)
            found = self.backend.forward(qkv.clone(), spec)
            torch.testing.assert_close(found[real], self.expect(qkv, batch, spec)[real], rtol=1e-5, atol=1e-5)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Paged, list[AttentionSpec], list[int], list[int], int]:
    torch.manual_seed(draw(st.integers(0, 99)))
    kv_heads, group, head_dim, page_size = (draw(st.sampled_from(v)) for v in ([1, 2, 3], [1, 2, 3, 4, 8], [16, 64], [1, 2, 16]))
    norm = NormWeight(torch.randn(head_dim), 1e-6, None) if draw(st.booleans()) else None
    specs = [
        AttentionSpec(layer, draw(st.sampled_from([None, 1, 5, 40])), norm, norm, draw(st.sampled_from([None, 0.7, 30.0])))
        for layer in range(NUM_LAYERS)
    ]
    rows = draw(st.permutations(range(MAX_ROWS)))[: draw(st.integers(1, 4))]
    first_lens = [draw(st.integers(1, min(MAX_PAGES * page_size - 3, 40))) for _ in rows]  # three more tokens follow
    return Paged(HeadGeometry(kv_heads * group, kv_heads, head_dim), page_size), specs, rows, first_lens, draw(st.integers(0, MAX_ROWS - len(rows)))


@settings(max_examples=25, deadline=None)
@given(cases())
def test_chunks_and_decode_steps_equal_dense_attention(case: tuple[Paged, list[AttentionSpec], list[int], list[int], int]) -> None:
    """Two layers, of unlike kinds as drawn: a first chunk, a chunk on the cached prefix in another order, two padded decode steps."""
    paged, specs, rows, first_lens, num_padding = case
    paged.check(specs, *paged.batch(rows, first_lens))
    paged.check(specs, *paged.batch(rows[::-1][:2], [1] * len(rows[:2])))
    for _ in range(2):
        paged.check(specs, *paged.batch(rows, [1] * len(rows), num_padding, is_decode=True))


def test_padding_rows_write_to_page_0_only() -> None:
    paged = Paged(HeadGeometry(4, 2, 16), 4)
    paged.check([AttentionSpec(1, None, None, None)], *paged.batch([3], [1], 5, is_decode=True))
    written = paged.pool.tensor.ne(0).any(-1).nonzero()  # page, kv_head, layer, k or v, offset
    assert {(page, layer, offset) for page, _, layer, _, offset in written.tolist()} == {(0, 1, 0), (int(paged.table[3, 0]), 1, 0)}


def test_a_bucket_keeps_its_wrapper_and_its_buffers() -> None:
    """What a captured graph holds on to: the launch of a bucket reads, after the next plan(), that plan's lists from where it read before."""
    paged, spec = Paged(HeadGeometry(4, 2, 16), 4), AttentionSpec(0, None, None, None)
    paged.check([spec], *paged.batch([0, 1], [9, 2]))
    paged.check([spec], *paged.batch([0, 1], [1, 1], 2, is_decode=True))
    [wrapper] = paged.backend._decode.values()
    assert isinstance(wrapper, DecodeStandIn)
    places = [buffer.data_ptr() for buffer in wrapper.buffers.values() if isinstance(buffer, torch.Tensor)]
    paged.check([spec], *paged.batch([0], [1], 0, is_decode=True))
    paged.check([spec], *paged.batch([1, 5, 0], [1, 1, 1], 1, is_decode=True))
    assert {bucket for bucket, _ in paged.backend._decode} == {4, 1}
    assert wrapper.num_plans == 2
    assert [buffer.data_ptr() for buffer in wrapper.buffers.values() if isinstance(buffer, torch.Tensor)] == places


def test_kinds_of_layers_are_planned_once_a_step() -> None:
    """The first step learns them layer by layer; later ones are planned before the first layer, which may be inside a graph."""
    paged = Paged(HeadGeometry(4, 2, 16), 4)
    specs = [AttentionSpec(0, None, None, None), AttentionSpec(1, 7, None, None), AttentionSpec(1, 7, None, None, 20.0)]
    batch, lens = paged.batch([0, 1], [5, 3])
    paged.backend.plan(batch, lens)
    assert not paged.backend._extend
    for spec in specs:
        paged.backend.forward(torch.randn(8, paged.geometry.qkv_size), spec)
    assert [wrapper.num_plans for wrapper in paged.backend._extend.values()] == [1, 1, 1]  # type: ignore[attr-defined]
    batch, lens = paged.batch([0, 1], [1, 1], is_decode=True)
    paged.backend.plan(batch, lens)
    for spec in specs:
        paged.backend.forward(torch.randn(2, paged.geometry.qkv_size), spec)
    assert [wrapper.num_plans for wrapper in paged.backend._decode.values()] == [1, 1, 1]  # type: ignore[attr-defined]


def test_lengths_of_another_batch_are_refused() -> None:
    paged = Paged(HeadGeometry(4, 2, 16), 4)
    batch, lens = paged.batch([0, 1], [5, 3])
    with pytest.raises(AssertionError, match="lengths of 1 rows for a batch of 2"):
        paged.backend.plan(batch, HostLens(lens.extend_lens[:1], lens.context_lens[:1]))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_what_it_serves(kv_dtype: torch.dtype) -> None:
    check(128, torch.bfloat16, kv_dtype, "cuda")


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "device", "sentence"),
    [
        (96, torch.bfloat16, torch.bfloat16, "cuda", r"head_dim 64, 128, 256, this model's is 96; use --attention-backend triton"),
        (64, torch.float32, torch.float32, "cuda", r"not in float32 with one in float32; use --attention-backend triton"),
        (64, torch.bfloat16, torch.float32, "cuda", r"not in bfloat16 with one in float32"),
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
