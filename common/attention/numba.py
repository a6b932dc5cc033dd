"""CPU attention: each new token's K and V go to their slot, then the batch attends over pages in place, with one of two kernels.

One query token over paged keys is bound by memory: numba_decode.py reads each byte once, where it lies. Many new tokens of a request
are bound by arithmetic: numba_extend.py unpacks a tile of keys for all of them. Of an extend batch, requests with few new tokens (the rest
of a prompt that was cached) take the former, a token at a time, and the others the latter, on as many threads as torch has.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from common.attention import numba_decode, numba_extend
from common.attention.backend import AttentionBatch, AttentionSpec, HeadGeometry, HostLens
from common.kvcache.layout import KVPool
from common.layers import cpu_ops
from common.layers.arrays import EMPTY, Reused, as_array
from common.layers.rope import RopeTable

FEW_TOKENS = 2  # up to so many a request, reading its K and V for each takes less than unpacking them
PART_TOKENS = 64  # of a request, for one thread; each part unpacks the keys again


@dataclass(frozen=True, slots=True)
class _Plan:
    """Arrays in one layout and dtype each: a kernel is compiled anew, for seconds, for an argument of another kind."""

    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T]
    page_table: NDArray[np.int32]  # [R, max_pages]
    tokens: NDArray[np.int32]  # [N] those that attend alone; their rows, and how many tokens each sees
    rows: NDArray[np.int32]  # [N]
    context_lens: NDArray[np.int32]  # [N]
    requests: list[NDArray[np.int32]]  # of each thread, [n, 4]: those whose tokens attend together, see paged_extend_attention


class NumbaAttention:
    def __init__(self, geometry: HeadGeometry, pool: KVPool, rope: RopeTable) -> None:
        assert pool.array is not None, "the numba backend reads a CPU pool"
        self._geometry, self._pool = geometry, pool.array
        self._cos, self._sin = rope.cos.numpy(), rope.sin.numpy()
        self._scale = geometry.head_dim**-0.5
        self._q, self._out = (Reused(geometry.num_heads, geometry.head_dim) for _ in range(2))
        self._threads = torch.get_num_threads()
        self._others = ThreadPoolExecutor(self._threads - 1, "attention") if self._threads > 1 else None
        self._batch: AttentionBatch | None = None
        self._plan: _Plan | None = None

    def plan(self, batch: AttentionBatch, lens: HostLens) -> None:
        if not batch.is_decode:
            self._plan = _extending(batch, lens, self._threads)
        elif batch is not self._batch:  # a decode bucket's views stay as they are
            rows = batch.rows.numpy()
            tokens = np.arange(len(rows), dtype=np.int32)
            self._plan = _Plan(batch.positions.numpy(), batch.slots.numpy(), batch.page_table.numpy(), tokens, rows, batch.context_lens.numpy(), [])
        self._batch = batch

    def forward(self, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        assert self._plan is not None, "forward() before plan()"
        plan, pool, window, soft_cap = self._plan, self._pool, spec.window or 0, spec.soft_cap or 0.0
        (_, q), (out, out_array) = self._q.rows(len(qkv), qkv.dtype), self._out.rows(len(qkv), qkv.dtype)
        q_weight, k_weight, eps = EMPTY[qkv.dtype], EMPTY[qkv.dtype], 0.0
        if spec.q_norm is not None and spec.k_norm is not None:
            assert spec.q_norm.array is not None
            assert spec.k_norm.array is not None
            q_weight, k_weight, eps = spec.q_norm.array, spec.k_norm.array, spec.q_norm.eps
        cpu_ops.rope_scatter(
            as_array(qkv), self._cos, self._sin, plan.positions, plan.slots, pool, spec.layer,
            q_weight, k_weight, eps, q, self._geometry.num_kv_heads,
        )  # fmt: skip
        if len(plan.tokens):
            numba_decode.paged_decode_attention(
                q, pool, spec.layer, plan.page_table, plan.tokens, plan.rows, plan.context_lens, window, self._scale, soft_cap, out_array
            )

        def extend(requests: NDArray[np.int32]) -> None:
            numba_extend.paged_extend_attention(q, pool, spec.layer, plan.page_table, requests, window, self._scale, soft_cap, out_array)

        under_way = [self._others.submit(extend, requests) for requests in plan.requests[1:]] if self._others is not None else []
        for requests in plan.requests[:1]:
            extend(requests)
        for part in under_way:
            part.result()
        return out.view(len(qkv), -1)


def _extending(batch: AttentionBatch, lens: HostLens, threads: int) -> _Plan:
    positions, rows, new = batch.positions.numpy(), batch.rows.numpy(), lens.extend_lens
    ends, few = np.cumsum(new, dtype=np.int32), new <= FEW_TOKENS
    requests = np.stack((rows, ends - new, ends, lens.context_lens), axis=1, dtype=np.int32)[~few]
    if threads > 1:
        requests = _parts(requests)
    tokens = np.flatnonzero(np.repeat(few, new)).astype(np.int32)
    return _Plan(
        positions=positions,
        slots=batch.slots.numpy(),
        page_table=batch.page_table.numpy(),
        tokens=tokens,
        rows=np.repeat(rows, new)[tokens],
        context_lens=(positions[tokens] + 1).astype(np.int32),
        requests=[np.ascontiguousarray(requests[thread::threads]) for thread in range(min(threads, len(requests)))],
    )


def _parts(requests: NDArray[np.int32]) -> NDArray[np.int32]:
    """The same, at most PART_TOKENS in each: to be dealt out in turn."""
    parts = [
        (row, first, min(first + PART_TOKENS, end), context - max(0, end - first - PART_TOKENS))
        for row, begin, end, context in requests.tolist()
        for first in range(begin, end, PART_TOKENS)
    ]
    return np.array(parts, np.int32).reshape(-1, 4)
