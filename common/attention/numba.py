"""CPU attention: decode reads pages in place with a numba kernel, extend gathers a request's pages once a layer for torch's SDPA.

One query row over paged keys is memory-bound, and a gather would move every byte three times instead of once. An extend batch is
compute-bound: there a contiguous copy costs little, and SDPA's blocked GEMMs win. Query heads of one KV head are laid out as the
batch's heads and share K and V by stride 0, so nothing is repeated. Without a cached prefix or a window that cuts, SDPA masks by
itself; otherwise one additive mask a request is made per step and distinct window. A window also limits what is gathered.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from common.attention import numba_decode
from common.attention.backend import AttentionSpec, Batch, Extent, HeadGeometry, TokenPlaces, extents
from common.engine.batch import DecodeBatch
from common.kvcache.layout import KVPool
from common.layers import cpu_ops
from common.layers.arrays import EMPTY, as_array
from common.layers.rope import RopeTable


@dataclass(slots=True)
class _Plan:
    places: TokenPlaces
    page_table: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    extents: list[Extent] | None  # None: a decode batch
    views: "dict[tuple[int, int | None], _KeyRange]"  # by (request row, window), made when first used


@dataclass(frozen=True, slots=True)
class _KeyRange:
    """What one request's new tokens can see under one window."""

    pages: torch.Tensor  # int64 [n], the pages that hold it
    num_keys: int  # from the first token of the first page
    mask: torch.Tensor | None  # [num_new, num_keys], 0 or -inf; None: plainly causal


class NumbaAttention:
    def __init__(self, geometry: HeadGeometry, pool: KVPool, rope: RopeTable) -> None:
        assert pool.array is not None, "the numba backend reads a CPU pool"
        self._geometry, self._pool, self._pool_array = geometry, pool, pool.array
        self._cos, self._sin = rope.cos.numpy(), rope.sin.numpy()
        self._no_norm = EMPTY[pool.layout.dtype]
        self._scale = geometry.head_dim**-0.5
        self._plan: _Plan | None = None

    def plan(self, batch: Batch) -> None:
        rows = None if isinstance(batch, DecodeBatch) else extents(batch)
        self._plan = _Plan(TokenPlaces.of(batch, self._pool.page_size), batch.page_table, batch.context_lens, rows, {})

    def forward(self, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        assert self._plan is not None, "forward() before plan()"
        plan, geometry = self._plan, self._geometry
        q = torch.empty(len(qkv), geometry.num_heads, geometry.head_dim, dtype=qkv.dtype)
        q_array = as_array(q)
        q_weight, k_weight, eps = self._no_norm, self._no_norm, 0.0
        if spec.q_norm is not None and spec.k_norm is not None:
            assert spec.q_norm.array is not None
            assert spec.k_norm.array is not None
            q_weight, k_weight, eps = spec.q_norm.array, spec.k_norm.array, spec.q_norm.eps
        cpu_ops.rope_scatter(
            as_array(qkv), self._cos, self._sin, plan.places.positions, plan.places.slots, self._pool_array, spec.layer,
            q_weight, k_weight, eps, q_array, geometry.num_kv_heads,
        )  # fmt: skip
        out = torch.empty_like(q)
        if plan.extents is None:
            numba_decode.paged_decode_attention(
                q_array, self._pool_array, spec.layer, plan.page_table, plan.context_lens, spec.window or 0, self._scale, as_array(out)
            )
        else:
            for extent in plan.extents:
                out[extent.begin : extent.end] = self._extend(q[extent.begin : extent.end], extent, spec)
        return out.view(len(qkv), -1)

    def _extend(self, q: torch.Tensor, extent: Extent, spec: AttentionSpec) -> torch.Tensor:
        """q: [n, num_heads, head_dim] -> the same shape."""
        num_new, geometry = len(q), self._geometry
        group = geometry.num_heads // geometry.num_kv_heads
        seen = self._key_range(extent, spec.window, q.dtype)
        shape = (geometry.num_kv_heads, 1, len(seen.pages) * self._pool.page_size, geometry.head_dim)
        k, v = (
            view.transpose(0, 1).index_select(1, seen.pages).view(shape)[:, :, : seen.num_keys].expand(-1, group, -1, -1)
            for view in (self._pool.keys(spec.layer), self._pool.values(spec.layer))
        )
        grouped = q.view(num_new, geometry.num_kv_heads, group, geometry.head_dim).permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen.mask, is_causal=seen.mask is None)
        return out.permute(2, 0, 1, 3).reshape(q.shape)

    def _key_range(self, extent: Extent, window: int | None, dtype: torch.dtype) -> _KeyRange:
        assert self._plan is not None
        if window is not None and extent.context_len <= window:
            window = None  # nothing is cut yet
        found = self._plan.views.get((extent.row, window))
        if found is None:
            found = self._plan.views[extent.row, window] = self._make_key_range(extent, window, dtype)
        return found

    def _make_key_range(self, extent: Extent, window: int | None, dtype: torch.dtype) -> _KeyRange:
        assert self._plan is not None
        page_size = self._pool.page_size
        first_page = 0 if window is None else max(0, extent.num_cached + 1 - window) // page_size
        end_page = -(-extent.context_len // page_size)
        pages = torch.from_numpy(self._plan.page_table[extent.row, first_page:end_page].astype(np.int64))
        first_key = first_page * page_size
        if window is None and extent.num_cached == 0:
            return _KeyRange(pages, extent.context_len, None)
        queries = torch.arange(extent.num_cached, extent.context_len).unsqueeze(1)
        keys = torch.arange(first_key, extent.context_len)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return _KeyRange(pages, extent.context_len - first_key, mask)
