"""CPU attention: decode reads pages in place with one kernel, extend gathers a request's pages once a layer and works in GEMMs.

One query row over paged keys is memory-bound, and a gather would move every byte three times instead of once. An extend batch is
compute-bound: there a contiguous copy costs little and GEMMs win. It takes its queries in blocks, so that no more than a block's keys
are ever multiplied (the mask is an index comparison in the kernel, never an array) and scores stay in the cache. A sliding window
also limits which pages are gathered.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from common.attention import numba_decode, numba_extend
from common.attention.backend import AttentionSpec, Batch, Extent, HeadGeometry, TokenPlaces, extents
from common.engine.batch import DecodeBatch
from common.kvcache.layout import KVPool
from common.layers import cpu_ops
from common.layers.arrays import EMPTY, Array, Reused, as_array
from common.layers.rope import RopeTable

LONG_BLOCK, SHORT_BLOCK = 128, 64  # queries: longer means fewer calls, shorter keeps scores in the cache and wastes less on the diagonal
MAX_SCORES = 1 << 20  # of a long block, all heads; beyond, short ones won (9 heads: 5 % slower at 512 keys, 4 % faster at 1024)


@dataclass(frozen=True, slots=True)
class _Plan:
    places: TokenPlaces
    page_table: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    extents: list[Extent] | None  # None: a decode batch


class NumbaAttention:
    def __init__(self, geometry: HeadGeometry, pool: KVPool, rope: RopeTable) -> None:
        assert pool.array is not None, "the numba backend reads a CPU pool"
        self._geometry, self._pool, self._pool_array = geometry, pool, pool.array
        self._cos, self._sin = rope.cos.numpy(), rope.sin.numpy()
        self._group = geometry.num_heads // geometry.num_kv_heads
        self._no_norm = EMPTY[pool.layout.dtype]
        self._scale = geometry.head_dim**-0.5
        self._exponent_factor = self._scale * math.log2(math.e)
        self._q, self._out = (Reused((geometry.num_heads, geometry.head_dim), pool.layout.dtype) for _ in range(2))
        self._plan: _Plan | None = None

    def plan(self, batch: Batch) -> None:
        rows = None if isinstance(batch, DecodeBatch) else extents(batch)
        # copies in one layout and dtype: a kernel is compiled anew, for seconds, for an argument of another kind
        page_table, context_lens = (np.array(array, np.int32, order="C") for array in (batch.page_table, batch.context_lens))
        self._plan = _Plan(TokenPlaces.of(batch, self._pool.page_size), page_table, context_lens, rows)

    def forward(self, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        assert self._plan is not None, "forward() before plan()"
        plan, geometry = self._plan, self._geometry
        (_, q_array), (out, out_array) = self._q.rows(len(qkv)), self._out.rows(len(qkv))
        q_weight, k_weight, eps = self._no_norm, self._no_norm, 0.0
        if spec.q_norm is not None and spec.k_norm is not None:
            assert spec.q_norm.array is not None
            assert spec.k_norm.array is not None
            q_weight, k_weight, eps = spec.q_norm.array, spec.k_norm.array, spec.q_norm.eps
        cpu_ops.rope_scatter(
            as_array(qkv), self._cos, self._sin, plan.places.positions, plan.places.slots, self._pool_array, spec.layer,
            q_weight, k_weight, eps, q_array, geometry.num_kv_heads,
        )  # fmt: skip
        if plan.extents is None:
            numba_decode.paged_decode_attention(
                q_array, self._pool_array, spec.layer, plan.page_table, plan.context_lens, spec.window or 0, self._scale, out_array
            )
        else:
            for extent in plan.extents:
                self._extend(q_array, extent, plan.page_table[extent.row], spec, out_array)
        return out.view(len(qkv), -1)

    def _extend(self, q: Array, extent: Extent, row_pages: NDArray[np.int32], spec: AttentionSpec, out: Array) -> None:
        """Attention of one request's new tokens. q, out: [T, num_heads, head_dim] of the whole batch."""
        kv_heads, group, page_size, window = self._geometry.num_kv_heads, self._group, self._pool.page_size, spec.window or 0
        first_page = max(0, extent.num_cached + 1 - window) // page_size if window else 0
        first_key = first_page * page_size
        k, v = self._gather(row_pages[first_page : -(-extent.context_len // page_size)], spec.layer)
        block = LONG_BLOCK if LONG_BLOCK * k.shape[1] * self._geometry.num_heads <= MAX_SCORES else SHORT_BLOCK
        for begin in range(extent.begin, extent.end, block):
            end = min(begin + block, extent.end)
            first_visible = extent.num_cached + begin - extent.begin - first_key  # the last key that the block's first token sees
            num_keys = first_visible + end - begin
            queries = torch.empty(kv_heads, (end - begin) * group, self._geometry.head_dim, dtype=k.dtype)
            numba_extend.group_queries(q[begin:end], as_array(queries))
            weights, sums = torch.bmm(queries, k[:, :num_keys].transpose(1, 2)), np.empty(queries.shape[:2], np.float32)
            numba_extend.masked_exp(as_array(weights), group, first_visible, window, self._exponent_factor, sums)
            numba_extend.normalise(as_array(torch.bmm(weights, v[:, :num_keys])), sums, out[begin:end])

    def _gather(self, pages: NDArray[np.int32], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the pages, in order: [num_kv_heads, tokens, head_dim] each."""
        shape = (self._geometry.num_kv_heads, len(pages) * self._pool.page_size, self._geometry.head_dim)
        k, v = (torch.empty(shape, dtype=self._pool.layout.dtype) for _ in range(2))
        numba_extend.gather_pages(self._pool_array, layer, pages, as_array(k), as_array(v))
        return k, v
