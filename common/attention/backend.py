"""The attention seam: what a backend is told once a step, and what it does once a layer.

A backend gets a layer's fused projection and does everything up to o_proj: q/k norm, rotation, writing K and V into the pool,
attending over the request's pages. These are one call because they are one pass over the same few bytes: split, each part would
cost a kernel launch a layer.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.batch import DecodeBatch, ExtendBatch
from common.layers.ops import NormWeight

Batch = ExtendBatch | DecodeBatch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention."""

    layer: int
    window: int | None  # attend the last `window` tokens, the current one included; None: all
    q_norm: NormWeight | None  # RMSNorm over head_dim before the rotation
    k_norm: NormWeight | None
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap), after the scale and before the mask; None: as they are


@dataclass(frozen=True, slots=True)
class HeadGeometry:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """T new tokens of B rows, packed row by row. Tensors are on the pool's device; their values may change from step to step while
    the tensors stay the same (a decode bucket's static buffers), which is what lets a CUDA graph be captured of forward()."""

    page_table: torch.Tensor  # int32 [R, max_pages], pages of every row there is; entries beyond a row's context are stale
    rows: torch.Tensor  # int32 [B] row of the page table of each request in the batch
    context_lens: torch.Tensor  # int32 [B] tokens after this step, new ones included; at least 1
    query_starts: torch.Tensor  # int32 [B + 1] first new token of each row in the batch, then T
    positions: torch.Tensor  # int64 [T] of each new token in its request
    slots: torch.Tensor  # int64 [T] page * page_size + offset in the pool, where its K and V go
    is_decode: bool  # every row has one new token: T == B


@dataclass(frozen=True, slots=True)
class HostLens:
    """What the host knows of the batch, without asking the device."""

    extend_lens: NDArray[np.int32]  # [B] new tokens of each row
    context_lens: NDArray[np.int32]  # [B]


class AttentionBackend(Protocol):
    def plan(self, batch: Batch) -> None:
        """What the following forward() calls work on. The batch's arrays must not change until the step is over."""

    def forward(self, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], unrotated, rows in the batch's order -> [T, num_heads * head_dim].

        Writes K and V of the T tokens into their pages first, so a token attends itself and those before it.
        """


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Where each of a batch's T new tokens belongs."""

    positions: NDArray[np.int64]  # [T] in its request
    slots: NDArray[np.int64]  # [T] page * page_size + offset in the pool

    @classmethod
    def of(cls, batch: Batch, page_size: int) -> "TokenPlaces":
        if isinstance(batch, DecodeBatch):
            positions = batch.context_lens.astype(np.int64) - 1
            rows = np.arange(len(positions))
        else:
            ends = np.cumsum(batch.extend_lens, dtype=np.int64)
            rows = np.repeat(np.arange(len(ends)), batch.extend_lens)
            positions = np.arange(len(rows)) + (batch.context_lens - ends)[rows]
        slots = batch.page_table[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size
        return cls(positions, slots)


@dataclass(frozen=True, slots=True)
class Extent:
    """One request's part of a batch: tokens [begin, end) of the batch, at positions [num_cached, context_len) of the request."""

    row: int
    begin: int
    end: int
    context_len: int

    @property
    def num_cached(self) -> int:
        return self.context_len - (self.end - self.begin)


def extents(batch: Batch) -> list[Extent]:
    lens = [1] * len(batch.context_lens) if isinstance(batch, DecodeBatch) else batch.extend_lens.tolist()
    result, begin = [], 0
    for row, (num_new, context_len) in enumerate(zip(lens, batch.context_lens.tolist(), strict=True)):
        result.append(Extent(row, begin, begin + num_new, context_len))
        begin += num_new
    return result
