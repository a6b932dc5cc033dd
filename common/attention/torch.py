"""The oracle: each request's pages are gathered, the mask is written out, torch's SDPA does the rest. Any device."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from common.attention.backend import AttentionSpec, Batch, Extent, HeadGeometry, TokenPlaces, extents
from common.kvcache.layout import KVPool
from common.layers.ops import NormWeight
from common.layers.rope import RopeTable
from common.layers.torch_ops import TorchOps


@dataclass(slots=True)
class _Plan:
    extents: list[Extent]
    positions: torch.Tensor  # int64 [T] on device
    pages: torch.Tensor  # int64 [T]
    offsets: torch.Tensor  # int64 [T]
    page_table: torch.Tensor  # int64 [B, max_pages]


class TorchAttention:
    def __init__(self, geometry: HeadGeometry, pool: KVPool, rope: RopeTable) -> None:
        self._geometry, self._pool, self._rope = geometry, pool, rope
        self._plan: _Plan | None = None

    def plan(self, batch: Batch) -> None:
        places, device, page_size = TokenPlaces.of(batch, self._pool.page_size), self._pool.tensor.device, self._pool.page_size
        slots = torch.from_numpy(places.slots).to(device)
        table = torch.from_numpy(batch.page_table).to(device, torch.int64)
        self._plan = _Plan(extents(batch), torch.from_numpy(places.positions).to(device), slots // page_size, slots % page_size, table)

    def forward(self, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        assert self._plan is not None, "forward() before plan()"
        plan, heads, kv_heads = self._plan, self._geometry.num_heads, self._geometry.num_kv_heads
        q, k, v = torch.split(qkv.view(len(qkv), -1, self._geometry.head_dim), [heads, kv_heads, kv_heads], dim=1)
        q, k = self._turn(q, spec.q_norm), self._turn(k, spec.k_norm)
        self._pool.keys(spec.layer)[plan.pages, :, plan.offsets] = k
        self._pool.values(spec.layer)[plan.pages, :, plan.offsets] = v
        out = torch.empty_like(q)
        for extent in plan.extents:
            out[extent.begin : extent.end] = self._attend(q[extent.begin : extent.end], extent, spec)
        return out.view(len(qkv), -1)

    def _turn(self, x: torch.Tensor, norm: NormWeight | None) -> torch.Tensor:
        assert self._plan is not None
        normed = x if norm is None else TorchOps().rms_norm(x, norm)
        return self._rope.rotate(normed.float(), self._plan.positions).to(x.dtype)

    def _attend(self, q: torch.Tensor, extent: Extent, spec: AttentionSpec) -> torch.Tensor:
        """q: [n, num_heads, head_dim] -> the same shape."""
        assert self._plan is not None
        num_pages = -(-extent.context_len // self._pool.page_size)
        pages = self._plan.page_table[extent.row, :num_pages]
        k, v = (self._gather(view, pages, extent.context_len) for view in (self._pool.keys(spec.layer), self._pool.values(spec.layer)))
        queries = torch.arange(extent.num_cached, extent.context_len, device=q.device).unsqueeze(1)
        keys = torch.arange(extent.context_len, device=q.device)
        mask = keys <= queries
        if spec.window is not None:
            mask &= keys > queries - spec.window
        return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask).transpose(0, 1)

    def _gather(self, view: torch.Tensor, pages: torch.Tensor, context_len: int) -> torch.Tensor:
        """The request's K or V, a head for each query head: [num_heads, context_len, head_dim]."""
        group = self._geometry.num_heads // self._geometry.num_kv_heads
        by_head = view[pages].transpose(0, 1).flatten(1, 2)[:, :context_len]
        return by_head.repeat_interleave(group, dim=0)
