"""Attention of one query token a request over paged K and V, in place: each is read once and serves all query heads of its KV head.

The softmax runs online, a page at a time, so that an exponential and a rescaling of the sums is paid once a page and head:

    scores = q K^T of the page;  largest' = max(largest, scores);  decay = 2^(largest - largest')
    weights = 2^(scores - largest');  total = total * decay + sum(weights);  out = out * decay + weights V

Everything in float32, log2(e) folded into q. Dao et al. 2022 (FlashAttention) name the recurrence, Kwon et al. 2023 the pages.
"""

from typing import Any

import numpy as np
from numba import njit, types

from common.layers.cpu_ops import F32, FAST, I32, intrinsic, narrow, widen

LOG2_E = 1.4426950408889634
# Polynomial of 2^f on [-0.5, 0.5], least relative error for degree 5: 2.4e-7 evaluated in float32
C0, C1, C2, C3, C4, C5 = (
    np.float32(c)
    for c in (1.0000001192092896, 0.6931469440460205, 0.24022120237350464, 0.05550713464617729, 0.009675540961325169, 0.0013276460813358426)
)
LEAST_EXPONENT = np.float32(-126.0)  # of a normal float32: what is smaller counts as 2^-126


@intrinsic  # type: ignore[untyped-decorator]
def _from_bits(context: Any, bits: Any) -> Any:
    """int32 -> the float32 of these bits."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(args[0], F32)


@intrinsic  # type: ignore[untyped-decorator]
def _round(context: Any, x: Any) -> Any:
    """float32 -> nearest int32; of a NaN, anything."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fptosi(builder.call(builder.module.declare_intrinsic("llvm.rint", [F32]), args), I32)

    return types.int32(types.float32), generate


@njit(nogil=True, fastmath=FAST, error_model="numpy", cache=True, inline="always")
def exp2(x: Any) -> Any:
    """2^x for x <= 0, NaN for NaN."""
    x = LEAST_EXPONENT if x < LEAST_EXPONENT else x
    whole = _round(x)
    f = x - np.float32(whole)
    fraction = C0 + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * C5))))
    return fraction * _from_bits(np.int32((whole + np.int32(127)) << np.int32(23)))


@njit(nogil=True, fastmath=FAST, error_model="numpy", cache=True)
def _attend_page(q: Any, k: Any, v: Any, begin: int, end: int, scores: Any, state: Any, acc: Any) -> None:
    """Fold positions [begin, end) of a page, k and v [page_size, D], into state [group, 2] (largest, total) and acc [group, D].

    q: float32 [group, D]. scores: float32 [group, page_size], overwritten.
    """
    group, head_dim = q.shape
    for offset in range(begin, end):
        for g in range(group):
            score = np.float32(0.0)
            for i in range(head_dim):
                score += q[g, i] * widen(k[offset, i])
            scores[g, offset] = score
    for g in range(group):
        largest = state[g, 0]
        for offset in range(begin, end):
            largest = scores[g, offset] if scores[g, offset] > largest else largest
        decay, total = exp2(state[g, 0] - largest), np.float32(0.0)
        for offset in range(begin, end):
            weight = exp2(scores[g, offset] - largest)
            scores[g, offset] = weight
            total += weight
        state[g, 0], state[g, 1] = largest, state[g, 1] * decay + total
        for i in range(head_dim):
            acc[g, i] *= decay
        for offset in range(begin, end):
            weight = scores[g, offset]
            for i in range(head_dim):
                acc[g, i] += weight * widen(v[offset, i])


@njit(nogil=True, fastmath=FAST, error_model="numpy", cache=True)
def paged_decode_attention(q: Any, pool: Any, layer: int, page_table: Any, context_lens: Any, window: int, scale: float, out: Any) -> None:
    """q [B, H, D] -> out [B, H, D], over the last `window` (0: all) of each row's context_lens [B] tokens; a row without any gets zeros.

    pool [page, KV, layer, 2, page_size, D]. page_table int32 [B, max_pages].
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, page_size = pool.shape[1], pool.shape[4]
    group = num_heads // num_kv_heads
    factor = np.float32(scale * LOG2_E)
    wide_q, acc = np.empty((group, head_dim), np.float32), np.empty((group, head_dim), np.float32)
    scores, state = np.empty((group, page_size), np.float32), np.empty((group, 2), np.float32)
    for row in range(num_rows):
        context = context_lens[row]
        first = max(0, context - window) if window > 0 else 0
        for kv_head in range(num_kv_heads):
            heads, outs = q[row, kv_head * group : (kv_head + 1) * group], out[row, kv_head * group : (kv_head + 1) * group]
            for g in range(group):
                state[g, 0], state[g, 1] = -np.inf, 0.0
                for i in range(head_dim):
                    wide_q[g, i], acc[g, i] = widen(heads[g, i]) * factor, 0.0
            for n in range(first // page_size, (context + page_size - 1) // page_size):
                page = pool[page_table[row, n], kv_head, layer]
                begin, end = max(first - n * page_size, 0), min(context - n * page_size, page_size)
                _attend_page(wide_q, page[0], page[1], begin, end, scores, state, acc)
            for g in range(group):
                inverse = np.float32(1.0) / state[g, 1] if context > 0 else np.float32(0.0)
                for i in range(head_dim):
                    outs[g, i] = narrow(acc[g, i] * inverse, outs[g, i])
