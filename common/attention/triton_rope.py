"""What stands between a layer's fused projection and its attention, in one pass: q/k norm, rotation, K and V into their slots.

A program takes some heads of one token, of q, k and v alike: all are read the same way, v is left as it is, and masks say where each is stored.
Rounds where the torch backend rounds: after the norm, after its weight, after the rotation, and once more to the pool's dtype.
"""

from common.layers.triton_lang import jit, tl


@jit(unaligned=["positions_ptr", "slots_ptr"])
def rope_scatter_kernel(
    qkv_ptr: tl.tensor, q_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor,
    positions_ptr: tl.tensor, slots_ptr: tl.tensor, q_weight_ptr: tl.tensor, k_weight_ptr: tl.tensor,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr,
    Q_EPS: tl.constexpr, K_EPS: tl.constexpr, IS_NORMED: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (T, blocks of HEAD_BLOCK heads of NUM_HEADS + 2 NUM_KV_HEADS). qkv [T, heads * HEAD_DIM] -> q [T, NUM_HEADS, HEAD_DIM], and
    keys and values of one layer of the pool. cos, sin float32 [positions, HEAD_DIM / 2]. Norm weights [HEAD_DIM], of the dtype of qkv."""
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = HEAD_DIM // 2
    heads, angles = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK), tl.arange(0, HALF_PAD)
    has_angle = angles < HALF
    is_q = heads < NUM_HEADS
    is_k = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_v = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    source = qkv_ptr + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + heads[:, None] * HEAD_DIM + angles[None, :]
    is_element = (is_q | is_k | is_v)[:, None] & has_angle[None, :]
    low, high = tl.load(source, mask=is_element, other=0.0), tl.load(source + HALF, mask=is_element, other=0.0)
    dtype = low.dtype
    position = tl.load(positions_ptr + token)
    cos = tl.load(cos_ptr + position * HALF + angles, mask=has_angle, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * HALF + angles, mask=has_angle, other=0.0)[None, :]
    low_in, high_in = low.to(tl.float32), high.to(tl.float32)
    if IS_NORMED:
        square = (tl.sum(low_in * low_in, 1) + tl.sum(high_in * high_in, 1)) / HEAD_DIM
        inverse = tl.rsqrt(square + tl.where(is_q, Q_EPS, K_EPS))[:, None]
        weight_ptrs = tl.where(is_q[:, None], q_weight_ptr + angles[None, :], k_weight_ptr + angles[None, :])
        low_weight = tl.load(weight_ptrs, mask=is_element, other=0.0).to(tl.float32)
        high_weight = tl.load(weight_ptrs + HALF, mask=is_element, other=0.0).to(tl.float32)
        low_in = ((low_in * inverse).to(dtype).to(tl.float32) * low_weight).to(dtype).to(tl.float32)
        high_in = ((high_in * inverse).to(dtype).to(tl.float32) * high_weight).to(dtype).to(tl.float32)
    low_out = tl.where(is_v[:, None], low, (low_in * cos - high_in * sin).to(dtype))
    high_out = tl.where(is_v[:, None], high, (high_in * cos + low_in * sin).to(dtype))

    q_ptrs = q_ptr + (token * NUM_HEADS + heads[:, None]) * HEAD_DIM + angles[None, :]
    tl.store(q_ptrs, low_out, mask=is_q[:, None] & has_angle[None, :])
    tl.store(q_ptrs + HALF, high_out, mask=is_q[:, None] & has_angle[None, :])

    slot = tl.load(slots_ptr + token)
    kv_heads = tl.where(is_k, heads - NUM_HEADS, heads - NUM_HEADS - NUM_KV_HEADS)
    places = slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * SLOT_STRIDE + kv_heads[:, None] * HEAD_STRIDE + angles[None, :]
    kv_dtype = keys_ptr.dtype.element_ty
    tl.store(keys_ptr + places, low_out.to(kv_dtype), mask=is_k[:, None] & has_angle[None, :])
    tl.store(keys_ptr + places + HALF, high_out.to(kv_dtype), mask=is_k[:, None] & has_angle[None, :])
    tl.store(values_ptr + places, low_out.to(kv_dtype), mask=is_v[:, None] & has_angle[None, :])
    tl.store(values_ptr + places + HALF, high_out.to(kv_dtype), mask=is_v[:, None] & has_angle[None, :])
