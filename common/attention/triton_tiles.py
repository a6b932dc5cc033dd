"""Online softmax over a range of paged keys, a tile at a time: the inner loop that decode and extend share.

Softmax is taken in base 2 and in float32 (Milakov and Gimelshein 2018). Pages are read in place: a tile's keys find their page through
the row of the page table, and a key's elements are contiguous, so a load is as wide as from a dense tensor. Addresses are 64 bit: a
pool is larger than 2^31 elements.

A masked tile may show a query nothing at all, when a window begins beyond it: its maximum stays -inf, and the guard makes exp2 give 0
and not NaN. A NaN in what a query does see comes out in that query alone.
"""

from typing import Any

import torch

from common.layers.triton_lang import INTERPRETED, jit, tl

LOG2_E = tl.constexpr(1.4426950408889634)
MINUS_INF = tl.constexpr(float("-inf"))
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def dot_dtype(operands: torch.dtype) -> Any:
    """Of the products. The interpreter keeps bfloat16 as integers and would multiply those (Triton 3.6 and 3.7, create_dot)."""
    return tl.float32 if INTERPRETED else TRITON_DTYPES[operands]


@jit()
def attend_tiles(
    q: tl.tensor, acc: tl.tensor, largest: tl.tensor, total: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, pages_ptr: tl.tensor,
    begin: tl.tensor, end: tl.tensor, last: tl.tensor,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
) -> Any:  # fmt: skip
    """Add keys [begin, end) of one row and KV head to the state of M queries.

    q [M, DIM_PAD] in the dtype of the products, zero beyond HEAD_DIM. State, float32: acc [M, DIM_PAD], not divided yet; largest score
    [M] in base 2; total weight [M]. keys_ptr, values_ptr: layer and head of the pool. pages_ptr: the row of the page table.
    last int32 [M]: the last key that a query sees, and with WINDOW > 0 the WINDOW - 1 before it. MASKED False: whole tiles, all visible.
    """
    dims = tl.arange(0, DIM_PAD)
    has_dim = dims < HEAD_DIM
    for first in range(begin, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        if MASKED:
            pages = tl.load(pages_ptr + keys // PAGE_SIZE, mask=keys < end, other=0)
        else:
            pages = tl.load(pages_ptr + keys // PAGE_SIZE)
        places = pages.to(tl.int64) * PAGE_STRIDE + (keys % PAGE_SIZE) * SLOT_STRIDE
        k_ptrs, v_ptrs = keys_ptr + places[None, :] + dims[:, None], values_ptr + places[:, None] + dims[None, :]
        if MASKED:  # what is not there is not read: never written slots may hold anything
            k = tl.load(k_ptrs, mask=has_dim[:, None] & (keys < end)[None, :], other=0.0)
            v = tl.load(v_ptrs, mask=(keys < end)[:, None] & has_dim[None, :], other=0.0)
        elif DIM_PAD != HEAD_DIM:
            k = tl.load(k_ptrs, mask=has_dim[:, None], other=0.0)
            v = tl.load(v_ptrs, mask=has_dim[None, :], other=0.0)
        else:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if SOFT_CAP > 0.0:  # cap * tanh(score / cap), tanh(x) = 1 - 2 / (e^2x + 1), right at both infinities
            scores = (SOFT_CAP * LOG2_E) * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * SCALE * LOG2_E / SOFT_CAP)) + 1.0))
        else:
            scores *= SCALE * LOG2_E
        if MASKED:
            visible = keys[None, :] <= last[:, None]
            if WINDOW > 0:
                visible = visible & (keys[None, :] > last[:, None] - WINDOW)
            scores = tl.where(visible, scores, MINUS_INF)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(new_largest == MINUS_INF, 0.0, new_largest)
        weights, decay = tl.exp2(scores - base[:, None]), tl.exp2(largest - base)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
        largest = new_largest
    return acc, largest, total
