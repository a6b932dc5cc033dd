"""What every attention backend is held to: drawn batches, and a dense oracle that shares no code with any of them.

    @given(cases())
    def test_equals_the_oracle(case):
        step = Step(case)
        step.check(MyAttention(step.geometry, step.pool, step.rope))

A Case says everything; equal cases make equal bytes. The pool is full of numbers before the step, in every slot and layer, as one is that has
served for a while: a backend that reads or writes where it should not is found out. Table entries beyond a row's context name pages of others.
"""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from common.attention.backend import AttentionBackend, AttentionBatch, AttentionSpec, HeadGeometry, HostLens
from common.kvcache.layout import KVLayout, KVPool
from common.layers.ops import NormWeight
from common.layers.rope import RopeTable

NUM_LAYERS, LAYER = 2, 1
EPS = 1e-6
CPU = torch.device("cpu")
# rtol, atol of results near 1; bfloat16 rounds q, the weights of the average, the result, and norms before them
TOLERANCES = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (2e-2, 2e-2)}


@dataclass(frozen=True)
class Case:
    rows: tuple[tuple[int, int], ...]  # (cached, new) tokens of each
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    window: int | None = None
    soft_cap: float | None = None
    is_normed: bool = False
    is_decode: bool = False  # every row has one new token
    num_padding: int = 0  # rows after those, on page 0 with a context of 1
    seed: int = 0


@st.composite
def cases(
    draw: st.DrawFn,
    max_rows: int = 4,
    max_cached: int = 150,
    max_new: int = 50,
    groups: tuple[int, ...] = (1, 2, 3, 4, 7, 8),
    head_dims: tuple[int, ...] = (64, 80, 96, 128, 256),
    page_sizes: tuple[int, ...] = (1, 16, 64),
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    max_kv_heads: int = 2,
) -> Case:
    is_decode = draw(st.booleans())
    cached = st.one_of(st.sampled_from([0, 1, 15, 16, 63, 64]), st.integers(0, max_cached)).map(lambda n: min(n, max_cached))
    new = st.just(1) if is_decode else st.integers(1, max_new)
    return Case(
        rows=tuple(draw(st.lists(st.tuples(cached, new), min_size=1, max_size=max_rows))),
        kv_heads=draw(st.integers(1, max_kv_heads)),
        group=draw(st.sampled_from(groups)),
        head_dim=draw(st.sampled_from(head_dims)),
        page_size=draw(st.sampled_from(page_sizes)),
        dtype=draw(st.sampled_from(dtypes)),
        kv_dtype=draw(st.sampled_from(dtypes)),
        window=draw(st.one_of(st.none(), st.integers(1, 100))),
        soft_cap=draw(st.one_of(st.none(), st.sampled_from([2.0, 30.0]))),
        is_normed=draw(st.booleans()),
        is_decode=is_decode,
        num_padding=draw(st.integers(0, 3)) if is_decode else 0,
        seed=draw(st.integers(0, 99)),
    )


class Step:
    """One batch of a case, on `device`. Make the backend on geometry, pool and rope, then check() it."""

    def __init__(self, case: Case, device: torch.device = CPU) -> None:
        self.case, self.device = case, device
        self._random = torch.Generator().manual_seed(case.seed)
        self.geometry = HeadGeometry(case.kv_heads * case.group, case.kv_heads, case.head_dim)
        self.extend_lens = [new for _, new in case.rows] + [1] * case.num_padding
        self.context_lens = [cached + new for cached, new in case.rows] + [1] * case.num_padding
        self.max_context = max(self.context_lens)
        self.num_tokens = sum(new for _, new in case.rows)  # of rows that are no padding
        self.page_table = self._make_table()
        layout = KVLayout(case.kv_heads, NUM_LAYERS, case.page_size, case.head_dim, case.kv_dtype)
        self.pool = KVPool(layout, int(self.page_table.max()) + 2, device)
        self.pool.tensor.copy_(torch.randn(self.pool.tensor.shape, generator=self._random))
        angles = torch.rand(self.max_context, case.head_dim // 2, generator=self._random) * 6
        self.rope = RopeTable(angles.cos().to(device), angles.sin().to(device))
        q_norm, k_norm = (self._norm() if case.is_normed else None for _ in range(2))
        self.spec = AttentionSpec(LAYER, case.window, q_norm, k_norm, case.soft_cap)
        self.qkv = torch.randn(sum(self.extend_lens), self.geometry.qkv_size, generator=self._random).to(case.dtype)
        self.batch, self.lens = self._make_batch()

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """The result for the rows that are no padding, [num_tokens, num_heads, head_dim] on the host; K and V are then in self.pool."""
        with torch.inference_mode():
            backend.plan(self.batch, self.lens)
            out = backend.forward(self.qkv.to(self.device, copy=True), self.spec)
        assert out.shape == (len(self.qkv), self.geometry.num_heads * self.geometry.head_dim)
        assert out.dtype == self.case.dtype
        return out.cpu().view(len(out), self.geometry.num_heads, -1)[: self.num_tokens]

    def check(self, backend: AttentionBackend) -> None:
        """Run `backend`: right result, K and V where they belong, and not a bit changed elsewhere, page 0 apart, which padding may write."""
        before = self.pool.tensor.cpu()
        before = before.clone()
        expected, pages, offsets, k, v = self.expected()
        found, after = self.run(backend), self.pool.tensor.cpu()
        coarsest = max((self.case.dtype, self.case.kv_dtype), key=lambda dtype: TOLERANCES[dtype])
        rtol, atol = TOLERANCES[self.case.dtype if self.case.kv_dtype == torch.float32 else coarsest]
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)
        torch.testing.assert_close(after[pages, :, LAYER, 0, offsets].double(), k, rtol=rtol, atol=atol)
        assert torch.equal(after[pages, :, LAYER, 1, offsets], v)
        before[pages, :, LAYER, :, offsets] = after[pages, :, LAYER, :, offsets]
        assert torch.equal(before[1:], after[1:])
        before[0, :, LAYER, :, 0] = after[0, :, LAYER, :, 0]
        assert torch.equal(before[0], after[0])
        assert self.case.num_padding or torch.equal(before, after)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Before the step is run: the result in float64 [num_tokens, num_heads, head_dim]; pages and offsets [num_tokens] of the new
        tokens; their K in float64 and V as stored, [num_tokens, kv_heads, head_dim]."""
        case, heads, kv_heads = self.case, self.geometry.num_heads, self.geometry.num_kv_heads
        tokens = self.qkv[: self.num_tokens].view(self.num_tokens, -1, case.head_dim)
        q, k, v = torch.split(tokens, [heads, kv_heads, kv_heads], dim=1)
        positions = torch.cat([torch.arange(cached, cached + new) for cached, new in case.rows])
        rows = torch.repeat_interleave(torch.arange(len(case.rows)), torch.tensor(self.extend_lens[: len(case.rows)]))
        pages = torch.from_numpy(self.page_table)[self.table_rows[rows], positions // case.page_size].long()
        offsets = positions % case.page_size
        q, k = self._turned(q, self.spec.q_norm, positions), self._turned(k, self.spec.k_norm, positions)
        pool = self.pool.tensor.cpu().clone()
        pool[pages, :, LAYER, 0, offsets], pool[pages, :, LAYER, 1, offsets] = k.to(case.kv_dtype), v.to(case.kv_dtype)
        out = torch.empty(q.shape, dtype=torch.float64)
        for row, (cached, new) in enumerate(case.rows):
            places = torch.arange(cached + new)
            own_pages = torch.from_numpy(self.page_table)[self.table_rows[row], places // case.page_size].long()
            keys, values = pool[own_pages, :, LAYER, :, places % case.page_size].double().permute(2, 1, 0, 3).repeat_interleave(case.group, dim=1)
            scores = torch.einsum("qhd,hkd->hqk", q[rows == row].double(), keys) * case.head_dim**-0.5
            if case.soft_cap is not None:
                scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
            age = torch.arange(cached, cached + new)[:, None] - places[None, :]
            scores.masked_fill_((age < 0) | (age >= (case.window or self.max_context + 1)), -torch.inf)
            out[rows == row] = torch.einsum("hqk,hkd->qhd", torch.softmax(scores, dim=-1), values)
        return out, pages, offsets, k.to(case.kv_dtype).double(), v.to(case.kv_dtype)

    def _turned(self, x: torch.Tensor, norm: NormWeight | None, positions: torch.Tensor) -> torch.Tensor:
        """Norm and rotation, rounded to the compute dtype at the end."""
        wide = x.float()
        if norm is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.tensor.cpu().float()
        cos, sin = (table.cpu()[positions, None] for table in (self.rope.cos, self.rope.sin))
        low, high = wide.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)

    def _norm(self) -> NormWeight:
        norm = NormWeight.empty(self.case.head_dim, EPS, self.case.dtype, self.device)
        norm.tensor.copy_(torch.randn(self.case.head_dim, generator=self._random) * 0.3 + 1.0)
        return norm

    def _make_table(self) -> np.ndarray:
        """int32 [R, max_pages]. The batch's rows are table_rows; the last row is the padding row; the others belong to nobody in the batch."""
        num_rows, page_size = len(self.case.rows), self.case.page_size
        counts = [-(-context // page_size) for context in self.context_lens[:num_rows]]
        self.table_rows = torch.randperm(num_rows + 2, generator=self._random)[:num_rows]
        pages = (torch.randperm(sum(counts) + 2, generator=self._random) + 1).to(torch.int32)
        table = pages[torch.randint(len(pages), (num_rows + 3, max(counts, default=0) + 2), generator=self._random)].numpy()
        for row, own in zip(self.table_rows.tolist(), torch.split(pages[: sum(counts)], counts), strict=True):
            table[row, : len(own)] = own.numpy()
        table[-1] = 0
        return table

    def _make_batch(self) -> tuple[AttentionBatch, HostLens]:
        padding_row = len(self.page_table) - 1
        rows = np.array(self.table_rows.tolist() + [padding_row] * self.case.num_padding, np.int32)
        extend_lens, context_lens = np.array(self.extend_lens, np.int32), np.array(self.context_lens, np.int32)
        starts = np.concatenate(([0], np.cumsum(extend_lens))).astype(np.int32)
        of_token = np.repeat(np.arange(len(rows)), extend_lens)
        positions = np.arange(starts[-1]) - starts[of_token] + (context_lens - extend_lens)[of_token]
        page_size = self.case.page_size
        slots = self.page_table[rows[of_token], positions // page_size].astype(np.int64) * page_size + positions % page_size
        tensors = (torch.from_numpy(array).to(self.device) for array in (self.page_table, rows, context_lens, starts, positions, slots))
        return AttentionBatch(*tensors, is_decode=self.case.is_decode), HostLens(extend_lens, context_lens)
