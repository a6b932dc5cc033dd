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

from common.layers.ops import NormWeight


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
    def plan(self, batch: AttentionBatch, lens: HostLens) -> None:
        """What the following forward() calls work on, once a step: the host's part, outside any graph. It does not wait for the device. The
        tensors' values may still be changed by what is launched before forward()."""

    def forward(self, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], unrotated, rows in the batch's order -> [T, num_heads * head_dim].

        Writes K and V of the T tokens into their pages first, so a token attends itself and those before it. Of a decode batch it may be
        captured: on the device nothing in it depends on the host's lengths.
        """
