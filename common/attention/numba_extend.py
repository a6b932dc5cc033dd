"""Causal attention of requests' new tokens over their paged K and V, in place: no more than a tile of them is ever copied.

A block of queries meets the keys that its last token sees, KEYS at a time, with the online softmax of numba_decode.py:

    tile of K, transposed, and V       from the pages, as float32, or as pairs of bfloat16 (vectors.py, PAIRS); stays in the first caches
    each strip of STRIP query rows:    scores = q K^T;  weights, 0 beyond the diagonal and before the window;  out = out * decay + weights V

The query heads of one KV head are rows of one block, (token, head of the group) in that order, so a tile is unpacked once for all of
them. A strip leaves out the keys that none of its rows sees. Sums, scores and exponentials are float32; with PAIRS the weights are
rounded to bfloat16 before they meet V, as GPU kernels do.
"""

from typing import Any

import numpy as np

from common.attention.numba_decode import LOG2_E, exponent, locate, pad
from common.layers.vectors import LANES, STRIP, convert, exp2, inner, join, kernel, largest_of, multiply, narrow, transpose, zero_factor

KEYS = 128  # a tile: 32 KiB at head_dim 64 in bfloat16
SCORED = 4 * LANES  # keys scored together
QUERY_ROWS = 384  # of a block: more unpacks each tile less often, fewer keeps queries and sums in the second cache
STEP = 2 * LANES  # a head's width is padded to it


@inner
def _unpack(memory: Any, places: Any, count: int, v_begin: int, width: int, in_word: int, keys: Any, values: Any) -> None:
    """The tile's K -> keys [width, KEYS], V -> values [KEYS, width] in float32. In pairs, in_word 2: [width / 2, KEYS] of two elements of a
    key each, and [KEYS / 2, width] of two positions each."""
    for first in range(0, count, LANES):
        for column in range(0, width // in_word, LANES):
            transpose(memory, places, first, column, keys, column * KEYS + first, KEYS)
    for i in range(0, count, in_word):
        upper, lower = places[i] + v_begin, places[i + in_word - 1] + v_begin
        for column in range(0, width, LANES):
            join(memory, upper + column, lower + column, values, i // in_word * width + column)


@inner
def _weigh_row(scores: Any, scale: Any, soft_cap: Any, top: Any, weights: Any) -> Any:
    """weights = 2^(exponents of scores - top); returns their sum."""
    total = np.float32(0.0)
    if soft_cap == np.float32(0.0):
        for i in range(len(scores)):
            weight = exp2(scores[i] * (scale * LOG2_E) - top)
            weights[i] = narrow(weight, weights[i])
            total += weight
    else:
        for i in range(len(scores)):
            weight = exp2(exponent(scores[i], scale, soft_cap) - top)
            weights[i] = narrow(weight, weights[i])
            total += weight
    return total


@inner
def _attend_strip(
    factors: Any, keys: Any, values: Any, in_word: int, begins: Any, ends: Any, scale: Any, soft_cap: Any,
    scores: Any, weights: Any, largest: Any, decay: Any, total: Any, acc: Any,
) -> None:  # fmt: skip
    """Fold the tile into STRIP rows, of which row r sees positions [begins[r], ends[r]) of it, both rising with r."""
    width = acc.shape[1]
    begin, end = begins[0] // SCORED * SCORED, ends[STRIP - 1]
    for column in range(begin, end, SCORED):
        multiply(0, 4, factors, 0, width // in_word, keys, column, KEYS, width // in_word, decay, scores, column)
    for r in range(STRIP):
        weights[r, begin : end + in_word - 1] = 0  # what is not seen, and the other half of the last pair
        decay[r] = 1.0
        if begins[r] < ends[r]:
            before, found = largest[r], largest_of(scores, r * KEYS + begins[r], r * KEYS + ends[r])
            largest[r] = found if found > before else before
            top = exponent(largest[r], scale, soft_cap)
            decay[r] = exp2(exponent(before, scale, soft_cap) - top)
            total[r] = total[r] * decay[r] + _weigh_row(scores[r, begins[r] : ends[r]], scale, soft_cap, top, weights[r, begins[r] : ends[r]])
    first, count = begin // in_word, (end - begin + in_word - 1) // in_word
    for column in range(0, width // SCORED * SCORED, SCORED):
        multiply(1, 4, weights, first, KEYS // in_word, values, first * width + column, width, count, decay, acc, column)
    for column in range(width // SCORED * SCORED, width, STEP):
        multiply(1, 2, weights, first, KEYS // in_word, values, first * width + column, width, count, decay, acc, column)


@kernel
def paged_extend_attention(
    q: Any, pool: Any, layer: int, page_table: Any, requests: Any, window: int, scale: float, soft_cap: float, out: Any
) -> None:  # fmt: skip
    """q [T, H, D] -> out [T, H, D] for the last new tokens of each request, which see themselves and, of those before, the last
    `window` - 1 (0: all). soft_cap 0: none.

    pool [page, KV, layer, 2, page_size, D]. page_table int32 [R, max_pages]. requests int32 [n, 4]: row of the page table, first new token
    and end of them in q, tokens with them. All arrays contiguous.
    """
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, num_layers, _, page_size, _ = pool.shape
    group = num_heads // num_kv_heads
    width = (head_dim + STEP - 1) // STEP * STEP
    layer_stride = 2 * page_size * head_dim
    head_stride = num_layers * layer_stride
    page_stride = num_kv_heads * head_stride
    scale_, soft_cap_ = np.float32(scale), np.float32(soft_cap)
    memory = pool.reshape(-1)
    most_tokens: Any = 0
    for n in range(len(requests)):
        most_tokens = max(most_tokens, requests[n, 2] - requests[n, 1])
    block_tokens = min(most_tokens, max(1, QUERY_ROWS // group))
    max_rows = (block_tokens * group + STRIP - 1) // STRIP * STRIP
    none = zero_factor(q, memory)
    factors, weights = np.full((max_rows, width), none), np.full((STRIP, KEYS), none)
    in_word = 4 // factors.itemsize
    keys, values = np.full(in_word * width * KEYS // in_word, none), np.full(KEYS * width, none)
    acc, scores = np.empty((max_rows, width), np.float32), np.empty((STRIP, KEYS), np.float32)
    sums, decay = np.empty((2, max_rows), np.float32), np.empty(STRIP, np.float32)
    largest, total = sums[0], sums[1]
    seen = np.empty((2, STRIP), np.int64)
    begins, ends = seen[0], seen[1]
    places = np.zeros(KEYS + LANES, np.int64)
    padded = np.zeros(2 * KEYS * width if width != head_dim else 0, pool.dtype)
    for n in range(len(requests)):
        pages = page_table[requests[n, 0]]
        first_token: Any = np.int64(requests[n, 1])
        end_token: Any = np.int64(requests[n, 2])
        context: Any = np.int64(requests[n, 3])
        for kv_head in range(num_kv_heads):
            head_begin = kv_head * head_stride + layer * layer_stride
            for block in range(first_token, end_token, block_tokens):
                num_tokens = min(block_tokens, end_token - block)
                num_rows = num_tokens * group
                for r in range(num_rows):
                    heads = q[block + r // group, kv_head * group + r % group]
                    for i in range(head_dim):
                        factors[r, i] = convert(heads[i], none)
                largest[:], total[:], acc[:] = -np.inf, 0.0, 0.0
                first_position = context - end_token + block
                first_key = max(0, first_position + 1 - window) if window > 0 else 0
                for tile in range(first_key, first_position + num_tokens, KEYS):
                    count = min(KEYS, first_position + num_tokens - tile)
                    locate(pages, tile, count, page_stride, head_begin, page_size, head_dim, places, LANES)
                    source, v_begin = memory, page_size * head_dim
                    if width != head_dim:
                        pad(memory, places, count, LANES, v_begin, head_dim, padded, width, KEYS)
                        source, v_begin = padded, KEYS * width
                    _unpack(source, places, count, v_begin, width, in_word, keys, values)
                    for strip in range(0, num_rows, STRIP):
                        for r in range(STRIP):
                            end = first_position + min(strip + r, num_rows - 1) // group + 1 - tile
                            ends[r] = min(end, count)
                            begins[r] = max(0, end - window) if window > 0 else 0
                        if ends[STRIP - 1] > 0 and begins[0] < count:
                            s = slice(strip, strip + STRIP)
                            _attend_strip(
                                factors[s], keys, values, in_word, begins, ends, scale_, soft_cap_,
                                scores, weights, largest[s], decay, total[s], acc[s],
                            )  # fmt: skip
                for r in range(num_rows):
                    inverse = np.float32(1.0) / total[r]
                    target = out[block + r // group, kv_head * group + r % group]
                    for i in range(head_dim):
                        target[i] = narrow(acc[r, i] * inverse, target[i])
