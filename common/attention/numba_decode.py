"""Attention of one query token a request over paged K and V, in place: each is read once and serves all query heads of its KV head.

The softmax runs online, a tile of TILE positions at a time, so that exponentials are vectors and sums are rescaled once a tile:

    scores = q K^T of the tile;  largest' = max(largest, scores);  decay = e(largest) / e(largest')
    weights = e(scores) / e(largest');  total = total * decay + sum(weights);  out = out * decay + weights V

with e(score) = 2^(log2(e) * score * scale), or of soft_cap * tanh(score * scale / soft_cap). Sums are float32, and so are q, K and V but
where the processor multiplies bfloat16 (vectors.py, PAIRS): there q K^T has factors as they are stored, which is as exact. Dao et al.
2022 (FlashAttention) name the recurrence, Kwon et al. 2023 the pages. Pages are scattered, so a processor that fetches ahead by itself
stops at each: the next tile's lines are asked for explicitly, be it the next request's, while a tile is worked on, and a line of each page
of the tile after that, whose address may take as long to translate as the line takes to come.
A head's width is padded to whole vectors; where that changes it, the tile is first copied to padded rows.
"""

from typing import Any

import numpy as np

from common.layers.vectors import LANES, STRIP, TILE, UNROLL, accumulate, convert, exp2, inner, kernel, narrow, prefetch, score, tanh, zero_factor

LOG2_E = np.float32(1.4426950408889634)
SPARE = UNROLL - 1  # score() works in fours


@inner
def locate(pages: Any, first: int, count: int, page_stride: int, head_begin: int, page_size: int, head_dim: int, places: Any, spare: int) -> None:
    """Where K of positions [first, first + count) begins in the pool -> places; the last is repeated `spare` times, for what works in blocks."""
    page, offset, done = first // page_size, first % page_size, 0
    if page_size == 1:  # worth a loop of its own
        for i in range(count):
            places[i] = np.int64(pages[first + i]) * page_stride + head_begin
        done = count
    while done < count:
        begin = np.int64(pages[page]) * page_stride + head_begin + offset * head_dim
        num_here = min(page_size - offset, count - done)
        for i in range(num_here):
            places[done + i] = begin + i * head_dim
        done += num_here
        page, offset = page + 1, 0
    for i in range(count, count + spare):
        places[i] = places[count - 1]


@inner
def pad(memory: Any, places: Any, count: int, spare: int, v_begin: int, head_dim: int, padded: Any, width: int, tile: int) -> None:
    """Copy the tile's K rows, then its V rows, to `padded` at a stride of `width`; places then point there."""
    for i in range(count):
        for j in range(head_dim):
            padded[i * width + j] = memory[places[i] + j]
            padded[(tile + i) * width + j] = memory[places[i] + v_begin + j]
    for i in range(count + spare):
        places[i] = min(i, count - 1) * width


@inner
def _first_position(context: Any, window: int) -> Any:
    return max(0, context - window) if window > 0 else 0


@inner
def _tile_len(num_positions: Any) -> Any:
    """Of equal tiles, whole fours: a short last one would leave its successor little time to arrive."""
    num_tiles = (num_positions + TILE - 1) // TILE
    return ((num_positions + num_tiles - 1) // num_tiles + UNROLL - 1) // UNROLL * UNROLL


@inner
def _look_ahead(
    ahead: Any, memory: Any, page_table: Any, rows: Any, context_lens: Any, window: int, num_kv_heads: int,
    page_stride: int, head_stride: int, layer_begin: int, page_size: int, head_dim: int, places: Any,
) -> None:  # fmt: skip
    """Locate the tile where `ahead` int64 [3] stands (n-th token, KV head, first position), ask for a line of each page, and step to
    the next tile. At the end, nothing: places stay what they were."""
    n, kv_head = ahead[0], ahead[1]
    if n == len(rows):
        return
    context: Any = np.int64(context_lens[n])
    first = _first_position(context, window)
    tile_len = _tile_len(context - first)
    begin, count = ahead[2], min(tile_len, context - ahead[2])
    locate(page_table[rows[n]], begin, count, page_stride, kv_head * head_stride + layer_begin, page_size, head_dim, places, SPARE)
    prefetch(memory, places[0])
    for i in range(page_size - begin % page_size, count, page_size):
        prefetch(memory, places[i])
    ahead[2] += tile_len
    if ahead[2] >= context:
        ahead[1], ahead[2] = kv_head + 1, first
        if kv_head + 1 == num_kv_heads:
            _start_at(ahead, n + 1, context_lens, window)


@inner
def _start_at(ahead: Any, n: Any, context_lens: Any, window: int) -> None:
    """The n-th token's first tile, or that of the next one that sees any."""
    while n < len(context_lens) and context_lens[n] == 0:
        n += 1
    ahead[0], ahead[1] = n, 0
    if n < len(context_lens):
        ahead[2] = _first_position(np.int64(context_lens[n]), window)


@inner
def exponent(score: Any, scale: Any, soft_cap: Any) -> Any:
    """log2 of what a score weighs. soft_cap 0: none."""
    if soft_cap == np.float32(0.0):
        return score * scale * LOG2_E
    return soft_cap * tanh(score * scale / soft_cap) * LOG2_E


@inner
def _weigh(scores: Any, count: int, scale: Any, soft_cap: Any, largest: Any, decay: Any, total: Any) -> None:
    """scores [n, TILE] become weights below largest [n]. decay [n]: the largest of the tiles before -> by how much their weights shrink;
    total [n] shrinks so and takes the tile's sum."""
    for g in range(len(largest)):
        top, added = exponent(largest[g], scale, soft_cap), np.float32(0.0)
        if soft_cap == np.float32(0.0):
            for i in range(count):
                weight = exp2(scores[g, i] * (scale * LOG2_E) - top)
                scores[g, i] = weight
                added += weight
        else:
            for i in range(count):
                weight = exp2(exponent(scores[g, i], scale, soft_cap) - top)
                scores[g, i] = weight
                added += weight
        decay[g] = exp2(exponent(decay[g], scale, soft_cap) - top)
        total[g] = total[g] * decay[g] + added


@inner
def _attend_tile(
    q: Any, memory: Any, rows: Any, count: int, v_begin: int, next_rows: Any, scale: Any, soft_cap: Any,
    scores: Any, largest: Any, decay: Any, total: Any, acc: Any,
) -> None:  # fmt: skip
    """Fold the tile's `count` positions into the heads of one strip: largest, total [n], acc [n, width].

    q: [n, width], in the type of zero_factor(). K of position i is memory[rows[i] : rows[i] + width], V lies v_begin further.
    next_rows: where the next tile's K begins. scores [n, TILE], decay [n]: scratch.
    """
    num, width = q.shape
    for g in range(num):
        decay[g] = largest[g]
    if num == 4:
        score(4, q, width, memory, rows, count, scores, largest, next_rows)
    elif num == 3:
        score(3, q, width, memory, rows, count, scores, largest, next_rows)
    elif num == 2:
        score(2, q, width, memory, rows, count, scores, largest, next_rows)
    else:
        score(1, q, width, memory, rows, count, scores, largest, next_rows)
    _weigh(scores, count, scale, soft_cap, largest, decay, total)
    if num == 4:
        accumulate(4, scores, memory, rows, count, v_begin, width, decay, acc, next_rows)
    elif num == 3:
        accumulate(3, scores, memory, rows, count, v_begin, width, decay, acc, next_rows)
    elif num == 2:
        accumulate(2, scores, memory, rows, count, v_begin, width, decay, acc, next_rows)
    else:
        accumulate(1, scores, memory, rows, count, v_begin, width, decay, acc, next_rows)


@kernel
def paged_decode_attention(
    q: Any, pool: Any, layer: int, page_table: Any, tokens: Any, rows: Any, context_lens: Any, window: int, scale: float, soft_cap: float, out: Any
) -> None:
    """q [T, H, D] -> out [T, H, D] at tokens [B], each over the last `window` (0: all) of context_lens [B] tokens of its row [B] of
    page_table [R, max_pages]; a token without any gets zeros. soft_cap 0: none.

    pool [page, KV, layer, 2, page_size, D]. Indices and lengths: int32. All arrays contiguous.
    """
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, num_layers, _, page_size, _ = pool.shape
    group = num_heads // num_kv_heads
    width = (head_dim + LANES - 1) // LANES * LANES
    layer_stride = 2 * page_size * head_dim
    head_stride = num_layers * layer_stride
    page_stride = num_kv_heads * head_stride
    scale_, soft_cap_ = np.float32(scale), np.float32(soft_cap)
    memory = pool.reshape(-1)
    factors, acc = np.full((group, width), zero_factor(q, memory)), np.empty((group, width), np.float32)
    scores, sums = np.empty((STRIP, TILE), np.float32), np.empty((3, group), np.float32)
    largest, decay, total = sums[0], sums[1], sums[2]
    ring, ahead, at = np.zeros((3, TILE + SPARE), np.int64), np.zeros(3, np.int64), 0
    padded = np.zeros(2 * TILE * width if width != head_dim else 0, pool.dtype)
    _start_at(ahead, np.int64(0), context_lens, window)
    for i in range(2):
        _look_ahead(
            ahead, memory, page_table, rows, context_lens, window, num_kv_heads,
            page_stride, head_stride, layer * layer_stride, page_size, head_dim, ring[i],
        )  # fmt: skip
    for n in range(len(tokens)):
        token = tokens[n]
        context: Any = np.int64(context_lens[n])
        first = _first_position(context, window)
        tile_len = _tile_len(context - first) if context > 0 else TILE
        for kv_head in range(num_kv_heads):
            heads = q[token, kv_head * group : (kv_head + 1) * group]
            for g in range(group):
                largest[g], total[g] = -np.inf, 0.0
                for i in range(width):
                    acc[g, i] = 0.0
                for i in range(head_dim):
                    factors[g, i] = convert(heads[g, i], factors[g, i])
            for tile in range(first, context, tile_len):
                count = min(tile_len, context - tile)
                places, next_places = ring[at], ring[(at + 1) % 3]
                _look_ahead(
                    ahead, memory, page_table, rows, context_lens, window, num_kv_heads,
                    page_stride, head_stride, layer * layer_stride, page_size, head_dim, ring[(at + 2) % 3],
                )  # fmt: skip
                at = (at + 1) % 3
                source, v_begin = memory, page_size * head_dim
                if width != head_dim:
                    pad(memory, places, count, SPARE, v_begin, head_dim, padded, width, TILE)
                    source, v_begin = padded, TILE * width
                for g in range(0, group, STRIP):
                    s = slice(g, min(g + STRIP, group))
                    _attend_tile(
                        factors[s], source, places, count, v_begin, next_places, scale_, soft_cap_,
                        scores, largest[s], decay[s], total[s], acc[s],
                    )  # fmt: skip
            for g in range(group):
                inverse = np.float32(1.0) / total[g] if context > 0 else np.float32(0.0)
                for i in range(head_dim):
                    out[token, kv_head * group + g, i] = narrow(acc[g, i] * inverse, out[token, 0, i])
