"""Paged extend: ragged rows of new tokens, packed, each attending the row's pages, the cached prefix among them, in place.

A program takes a block of a row's new tokens with all query heads of one KV head: the M rows of its products are (token, head) pairs, so a
short chunk fills them too, and a key is read once for the whole group. Which row and which block comes from `tiles`, since rows differ in
length and a grid over the longest would be mostly empty (FlashAttention-2: Dao 2023, for the tiling; the tile list is ours).

Keys before the block's first token are visible to all of its tokens: their tiles need no mask. With a window every tile is masked, and those
before the first token's window are not read.
"""

from common.attention.triton_tiles import MINUS_INF, attend_tiles
from common.layers.triton_lang import jit, tl


@jit(plain=["table_stride"], unaligned=["rows_ptr", "context_lens_ptr", "query_starts_ptr", "tiles_ptr"])
def extend_kernel(
    q_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, page_table_ptr: tl.tensor, rows_ptr: tl.tensor,
    context_lens_ptr: tl.tensor, query_starts_ptr: tl.tensor, tiles_ptr: tl.tensor, out_ptr: tl.tensor, table_stride: tl.tensor,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, DOT_DTYPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (tiles, num_kv_heads). q, out [T, num_heads, HEAD_DIM]. tiles int32 [tiles, 2]: row of the batch, block of BLOCK_M // GROUP tokens."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    batch_row, block = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    first_token = tl.load(query_starts_ptr + batch_row)
    num_new = tl.load(query_starts_ptr + batch_row + 1) - first_token
    context = tl.load(context_lens_ptr + batch_row)
    first_last = context - num_new + block * QUERIES  # the last key that the block's first token sees: its own
    last_last = tl.minimum(first_last + QUERIES, context) - 1
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIM_PAD)
    tokens = block * QUERIES + rows // GROUP
    is_token = (rows < QUERIES * GROUP) & (tokens < num_new)
    last = tl.minimum(first_last + rows // GROUP, last_last)  # of rows that are no token too: they compute what nobody stores
    heads = (first_token + tokens).to(tl.int64) * (tl.num_programs(1) * GROUP) + kv_head * GROUP + rows % GROUP
    places = heads[:, None] * HEAD_DIM + dims[None, :]
    is_element = is_token[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + places, mask=is_element, other=0.0).to(DOT_DTYPE)
    pages_ptr = page_table_ptr + tl.load(rows_ptr + batch_row).to(tl.int64) * table_stride
    keys_ptr += kv_head * HEAD_STRIDE
    values_ptr += kv_head * HEAD_STRIDE
    acc = tl.zeros((BLOCK_M, DIM_PAD), tl.float32)
    largest, total = tl.full((BLOCK_M,), MINUS_INF, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    if WINDOW > 0:
        masked_begin = tl.maximum(first_last - WINDOW + 1, 0)
    else:
        masked_begin = (first_last + 1) // BLOCK_N * BLOCK_N
        acc, largest, total = attend_tiles(
            q, acc, largest, total, keys_ptr, values_ptr, pages_ptr, 0, masked_begin, last,
            HEAD_DIM, DIM_PAD, PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, BLOCK_N, SCALE, SOFT_CAP, WINDOW, False,
        )  # fmt: skip
    acc, largest, total = attend_tiles(
        q, acc, largest, total, keys_ptr, values_ptr, pages_ptr, masked_begin, last_last + 1, last,
        HEAD_DIM, DIM_PAD, PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, BLOCK_N, SCALE, SOFT_CAP, WINDOW, True,
    )  # fmt: skip
    tl.store(out_ptr + places, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_element)
