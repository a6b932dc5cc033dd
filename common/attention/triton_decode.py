"""Paged decode: one query a row, long contexts split among programs (Flash-Decoding: Dao et al. 2023).

A program takes all query heads of one KV head, so a key is read once. They are the rows of a tensor-core product, padded to 16 of them:
decode is bound by memory, and the padding costs arithmetic that would be idle.

The grid must not depend on the step, because a captured graph has one. So `num_splits` is fixed for a bucket, and where a split begins is
computed here from the row's context: it is divided evenly, in whole tiles, into pieces of at least MIN_SPLIT keys, and programs beyond the
last piece return at once. With one split the result is stored as it is; with more, the second kernel weighs the parts by their sums.
"""

from common.attention.triton_tiles import MINUS_INF, attend_tiles
from common.layers.triton_lang import jit, tl

MIN_SPLIT = tl.constexpr(128)  # keys: below that starting a program and merging its part take longer than reading them


@jit()
def split_length(num_keys: tl.tensor, num_splits: tl.tensor, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Keys a split takes: every split before the last live one is full, the first is never empty."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), BLOCK_N) * BLOCK_N, MIN_SPLIT)


@jit(plain=["num_splits", "table_stride"], unaligned=["rows_ptr", "context_lens_ptr"])
def decode_kernel(
    q_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, page_table_ptr: tl.tensor, rows_ptr: tl.tensor, context_lens_ptr: tl.tensor,
    out_ptr: tl.tensor, parts_ptr: tl.tensor, sums_ptr: tl.tensor, num_splits: tl.tensor, table_stride: tl.tensor,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, DOT_DTYPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, IS_SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (B, num_kv_heads, num_splits). q, out [B, num_heads, HEAD_DIM].

    IS_SPLIT: instead of out, parts float32 [B, num_heads, num_splits, HEAD_DIM], each a softmax of its own, and sums float32
    [B, num_heads, num_splits], log2 of the weight it stands for.
    """
    batch_row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_lens_ptr + batch_row)
    first_key = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
    length = split_length(context - first_key, num_splits, BLOCK_N)
    begin = first_key + split * length
    end = tl.minimum(begin + length, context)
    if begin >= end:
        return
    group, dims = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    is_element = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = (batch_row * tl.num_programs(1) + kv_head) * GROUP + group
    q = tl.load(q_ptr + heads[:, None] * HEAD_DIM + dims[None, :], mask=is_element, other=0.0).to(DOT_DTYPE)
    pages_ptr = page_table_ptr + tl.load(rows_ptr + batch_row).to(tl.int64) * table_stride
    keys_ptr += kv_head * HEAD_STRIDE
    values_ptr += kv_head * HEAD_STRIDE
    acc = tl.zeros((GROUP_PAD, DIM_PAD), tl.float32)
    largest, total = tl.full((GROUP_PAD,), MINUS_INF, tl.float32), tl.zeros((GROUP_PAD,), tl.float32)
    last = tl.full((GROUP_PAD,), 0, tl.int32) + (end - 1)
    whole = begin + (end - begin) // BLOCK_N * BLOCK_N
    acc, largest, total = attend_tiles(
        q, acc, largest, total, keys_ptr, values_ptr, pages_ptr, begin, whole, last,
        HEAD_DIM, DIM_PAD, PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, BLOCK_N, SCALE, SOFT_CAP, 0, False,
    )  # fmt: skip
    acc, largest, total = attend_tiles(
        q, acc, largest, total, keys_ptr, values_ptr, pages_ptr, whole, end, last,
        HEAD_DIM, DIM_PAD, PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, BLOCK_N, SCALE, SOFT_CAP, 0, True,
    )  # fmt: skip
    result = acc / total[:, None]
    if IS_SPLIT:
        parts = heads.to(tl.int64) * num_splits + split
        tl.store(parts_ptr + parts[:, None] * HEAD_DIM + dims[None, :], result, mask=is_element)
        tl.store(sums_ptr + parts, largest + tl.log2(total), mask=group < GROUP)
    else:
        tl.store(out_ptr + heads[:, None] * HEAD_DIM + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=is_element)


@jit(plain=["num_splits"], unaligned=["context_lens_ptr"])
def merge_kernel(
    parts_ptr: tl.tensor, sums_ptr: tl.tensor, context_lens_ptr: tl.tensor, out_ptr: tl.tensor, num_splits: tl.tensor,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (B, num_heads): the live parts of one head, weighed by their sums."""
    batch_row = tl.program_id(0)
    head = batch_row * tl.num_programs(1) + tl.program_id(1)
    context = tl.load(context_lens_ptr + batch_row)
    num_keys = tl.minimum(context, WINDOW) if WINDOW > 0 else context
    num_live = tl.cdiv(num_keys, split_length(num_keys, num_splits, BLOCK_N))
    splits, dims = tl.arange(0, SPLITS_PAD), tl.arange(0, DIM_PAD)
    is_live, has_dim = splits < num_live, dims < HEAD_DIM
    parts = head.to(tl.int64) * num_splits + splits
    sums = tl.load(sums_ptr + parts, mask=is_live, other=MINUS_INF)
    weights = tl.exp2(sums - tl.max(sums, 0))
    values = tl.load(parts_ptr + parts[:, None] * HEAD_DIM + dims[None, :], mask=is_live[:, None] & has_dim[None, :], other=0.0)
    result = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + head.to(tl.int64) * HEAD_DIM + dims, result.to(out_ptr.dtype.element_ty), mask=has_dim)
