"""Attention of one query token a request over paged K and V, in place: each is read once and serves all query heads of its KV head.

The softmax runs online, a tile of TILE positions at a time, so that exponentials are vectors and sums are rescaled once a tile:

    scores = q K^T of the tile;  largest' = max(largest, scores);  decay = 2^(largest - largest')
    weights = 2^(scores - largest');  total = total * decay + sum(weights);  out = out * decay + weights V

Everything in float32, log2(e) folded into q. Dao et al. 2022 (FlashAttention) name the recurrence, Kwon et al. 2023 the pages.
Pages are scattered, so a processor that fetches ahead by itself stops at each: the next tile's lines are asked for explicitly, which
took a third off the time of 8 x 1024 tokens.
A head's width is padded to whole vectors; where that changes it, the tile is first copied to padded rows.
"""

from typing import Any

import numpy as np

from common.layers.vectors import LANES, TILE, accumulate, exp2, inner, kernel, narrow, score, widen

LOG2_E = 1.4426950408889634
STRIP = 4  # query heads whose sums stay in registers together


@inner
def _locate(pages: Any, first: int, count: int, page_stride: int, head_begin: int, page_size: int, head_dim: int, rows: Any) -> None:
    """Where K of positions [first, first + count) begins in the pool -> rows; the last is repeated thrice, score() works in fours."""
    for i in range(count):
        position = np.uint64(first + i)
        page, offset = position // np.uint64(page_size), position % np.uint64(page_size)
        rows[i] = pages[page] * page_stride + head_begin + np.int64(offset) * head_dim
    for i in range(count, count + 3):
        rows[i] = rows[count - 1]


@inner
def _pad(memory: Any, rows: Any, count: int, v_begin: int, head_dim: int, padded: Any, width: int) -> None:
    """Copy the tile's K rows, then its V rows, to `padded` at a stride of `width`; rows then point there."""
    for i in range(count):
        for j in range(head_dim):
            padded[i * width + j] = memory[rows[i] + j]
            padded[(TILE + i) * width + j] = memory[rows[i] + v_begin + j]
    for i in range(count + 3):
        rows[i] = min(i, count - 1) * width


@inner
def _weigh(scores: Any, count: int, largest: Any, decay: Any, total: Any) -> None:
    """scores [n, TILE] become weights below largest [n]; total [n], that was weighed below decay's exponent, takes their sum."""
    for g in range(len(largest)):
        added = np.float32(0.0)
        for i in range(count):
            weight = exp2(scores[g, i] - largest[g])
            scores[g, i] = weight
            added += weight
        total[g] = total[g] * decay[g] + added


@inner
def _attend_tile(
    q: Any, memory: Any, rows: Any, count: int, v_begin: int, next_rows: Any, scores: Any, largest: Any, decay: Any, total: Any, acc: Any
) -> None:
    """Fold the tile's `count` positions into the heads of one strip: largest, total [n], acc [n, width].

    q: float32 [n, width]. K of position i is memory[rows[i] : rows[i] + width], V lies v_begin further.
    next_rows: where the next tile's K begins. scores [n, TILE], decay [n]: scratch.
    """
    num, width = q.shape
    for g in range(num):
        decay[g] = largest[g]
    if num == 4:
        score(4, q, width, memory, rows, count, scores, largest, next_rows, v_begin)
    elif num == 3:
        score(3, q, width, memory, rows, count, scores, largest, next_rows, v_begin)
    elif num == 2:
        score(2, q, width, memory, rows, count, scores, largest, next_rows, v_begin)
    else:
        score(1, q, width, memory, rows, count, scores, largest, next_rows, v_begin)
    for g in range(num):
        decay[g] = exp2(decay[g] - largest[g])
    _weigh(scores, count, largest, decay, total)
    if num == 4:
        accumulate(4, scores, memory, rows, count, v_begin, width, decay, acc)
    elif num == 3:
        accumulate(3, scores, memory, rows, count, v_begin, width, decay, acc)
    elif num == 2:
        accumulate(2, scores, memory, rows, count, v_begin, width, decay, acc)
    else:
        accumulate(1, scores, memory, rows, count, v_begin, width, decay, acc)


@kernel
def paged_decode_attention(q: Any, pool: Any, layer: int, page_table: Any, context_lens: Any, window: int, scale: float, out: Any) -> None:
    """q [B, H, D] -> out [B, H, D], over the last `window` (0: all) of each row's context_lens [B] tokens; a row without any gets zeros.

    pool [page, KV, layer, 2, page_size, D]. page_table int32 [B, max_pages]. All arrays contiguous.
    """
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, num_layers, _, page_size, _ = pool.shape
    group = num_heads // num_kv_heads
    width = (head_dim + LANES - 1) // LANES * LANES
    layer_stride = 2 * page_size * head_dim
    head_stride = num_layers * layer_stride
    page_stride = num_kv_heads * head_stride
    factor = np.float32(scale * LOG2_E)
    memory = pool.reshape(-1)
    wide_q, acc = np.zeros((group, width), np.float32), np.empty((group, width), np.float32)
    scores, sums = np.empty((STRIP, TILE), np.float32), np.empty((3, group), np.float32)
    largest, decay, total = sums[0], sums[1], sums[2]
    rows, next_rows = np.zeros(TILE + 3, np.int64), np.zeros(TILE + 3, np.int64)
    padded = np.zeros(2 * TILE * width if width != head_dim else 0, pool.dtype)
    for row in range(num_rows):
        context: Any = np.int64(context_lens[row])
        first = max(0, context - window) if window > 0 else 0
        for kv_head in range(num_kv_heads):
            heads = q[row, kv_head * group : (kv_head + 1) * group]
            for g in range(group):
                largest[g], total[g] = -np.inf, 0.0
                for i in range(width):
                    acc[g, i] = 0.0
                for i in range(head_dim):
                    wide_q[g, i] = widen(heads[g, i]) * factor
            for tile in range(first, context, TILE):
                count = min(TILE, context - tile)
                rows, next_rows = next_rows, rows
                if kv_head == 0 and tile == first:
                    _locate(page_table[row], tile, count, page_stride, layer * layer_stride, page_size, head_dim, rows)
                next_head, next_tile = (kv_head, tile + TILE) if tile + TILE < context else (kv_head + 1, first)
                if next_head < num_kv_heads:
                    num_next, head_begin = min(TILE, context - next_tile), next_head * head_stride + layer * layer_stride
                    _locate(page_table[row], next_tile, num_next, page_stride, head_begin, page_size, head_dim, next_rows)
                source, v_begin = memory, page_size * head_dim
                if width != head_dim:
                    _pad(memory, rows, count, v_begin, head_dim, padded, width)
                    source, v_begin = padded, TILE * width
                for g in range(0, group, STRIP):
                    s = slice(g, min(g + STRIP, group))
                    _attend_tile(wide_q[s], source, rows, count, v_begin, next_rows, scores, largest[s], decay[s], total[s], acc[s])
            for g in range(group):
                inverse = np.float32(1.0) / total[g] if context > 0 else np.float32(0.0)
                for i in range(head_dim):
                    out[row, kv_head * group + g, i] = narrow(acc[g, i] * inverse, out[row, 0, i])
