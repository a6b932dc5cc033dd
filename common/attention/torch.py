"""The plain form: each request's pages are gathered, the mask is written out, softmax as the formula has it. Any device; slow."""

from dataclasses import dataclass

import torch

from common.attention.backend import AttentionBatch, AttentionSpec, HeadGeometry, HostLens
from common.kvcache.layout import KVPool
from common.layers.ops import NormWeight
from common.layers.rope import RopeTable
from common.layers.torch_ops import TorchOps


@dataclass(frozen=True, slots=True)
class _Extent:
    """One request's part of a batch: tokens [begin, end) of the batch, the last of its context_len."""

    row: int  # of the batch
    begin: int
    end: int
    context_len: int


class TorchAttention:
    def __init__(self, geometry: HeadGeometry, pool: KVPool, rope: RopeTable) -> None:
        self._geometry, self._pool, self._rope = geometry, pool, rope
        self._batch: AttentionBatch | None = None
        self._extents: list[_Extent] = []

    def plan(self, batch: AttentionBatch, lens: HostLens) -> None:
        self._batch = batch
        ends = lens.extend_lens.cumsum().tolist()
        rows = enumerate(zip(ends, lens.extend_lens.tolist(), lens.context_lens.tolist(), strict=True))
        self._extents = [_Extent(row, end - num_new, end, context_len) for row, (end, num_new, context_len) in rows]

    def forward(self, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        assert self._batch is not None, "forward() before plan()"
        batch, heads, kv_heads, page_size = self._batch, self._geometry.num_heads, self._geometry.num_kv_heads, self._pool.page_size
        q, k, v = torch.split(qkv.view(len(qkv), -1, self._geometry.head_dim), [heads, kv_heads, kv_heads], dim=1)
        q, k = self._turn(q, spec.q_norm, batch.positions), self._turn(k, spec.k_norm, batch.positions)
        pages, offsets = torch.div(batch.slots, page_size, rounding_mode="floor"), batch.slots % page_size
        self._pool.keys(spec.layer)[pages, :, offsets] = k.to(self._pool.layout.dtype)
        self._pool.values(spec.layer)[pages, :, offsets] = v.to(self._pool.layout.dtype)
        out = torch.empty_like(q)
        for extent in self._extents:
            out[extent.begin : extent.end] = self._attend(q[extent.begin : extent.end], extent, spec)
        return out.view(len(qkv), -1)

    def _turn(self, x: torch.Tensor, norm: NormWeight | None, positions: torch.Tensor) -> torch.Tensor:
        normed = x if norm is None else TorchOps().rms_norm(x, norm)
        return self._rope.rotate(normed.float(), positions).to(x.dtype)

    def _attend(self, q: torch.Tensor, extent: _Extent, spec: AttentionSpec) -> torch.Tensor:
        """q: [n, num_heads, head_dim] -> the same shape."""
        assert self._batch is not None
        num_pages = -(-extent.context_len // self._pool.page_size)
        row = self._batch.rows[extent.row : extent.row + 1]  # still a list: a number would be asked of the device
        pages = self._batch.page_table[row, :num_pages].squeeze(0).long()
        k, v = (self._gather(view, pages, extent.context_len) for view in (self._pool.keys(spec.layer), self._pool.values(spec.layer)))
        queries = torch.arange(extent.context_len - len(q), extent.context_len, device=q.device).unsqueeze(1)
        keys = torch.arange(extent.context_len, device=q.device)
        mask = keys <= queries
        if spec.window is not None:
            mask &= keys > queries - spec.window
        scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * self._geometry.head_dim**-0.5
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        attended: torch.Tensor = weights @ v
        return attended.transpose(0, 1).to(q.dtype)

    def _gather(self, view: torch.Tensor, pages: torch.Tensor, context_len: int) -> torch.Tensor:
        """The request's K or V in float32, a head for each query head: [num_heads, context_len, head_dim]."""
        group = self._geometry.num_heads // self._geometry.num_kv_heads
        by_head = view[pages].transpose(0, 1).flatten(1, 2)[:, :context_len]
        return by_head.float().repeat_interleave(group, dim=0)
