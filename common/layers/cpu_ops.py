"""The steps between two linears as fused numba kernels: one pass over each row. Rules of arithmetic: vectors.py."""

from typing import Any

import numpy as np

from common.layers.vectors import LANES, convert, exp2, inner, kernel, narrow, turn, widen

MINUS_LOG2_E = np.float32(-1.4426950408889634)


@kernel
def rms_norm(x: Any, weight: Any, eps: float, out: Any) -> None:
    """x [T, N], weight [N] -> out [T, N]."""
    num_rows, size = x.shape
    for t in range(num_rows):
        total = np.float32(0.0)
        for i in range(size):
            total += widen(x[t, i]) * widen(x[t, i])
        inverse = np.float32(1.0) / np.sqrt(total / np.float32(size) + np.float32(eps))
        for i in range(size):
            out[t, i] = narrow(widen(x[t, i]) * inverse * widen(weight[i]), out[t, i])


@kernel
def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float, out: Any) -> None:
    """residual [T, N] += x [T, N], then the norm of what is now stored there -> out [T, N]."""
    num_rows, size = x.shape
    for t in range(num_rows):
        total = np.float32(0.0)
        for i in range(size):
            stored = narrow(widen(residual[t, i]) + widen(x[t, i]), residual[t, i])
            residual[t, i] = stored
            total += widen(stored) * widen(stored)
        inverse = np.float32(1.0) / np.sqrt(total / np.float32(size) + np.float32(eps))
        for i in range(size):
            out[t, i] = narrow(widen(residual[t, i]) * inverse * widen(weight[i]), out[t, i])


@kernel
def silu_mul(gate_up: Any, out: Any) -> None:
    """gate_up [T, 2I] -> silu(gate) * up [T, I]."""
    num_rows, size = out.shape
    for t in range(num_rows):
        for i in range(size):
            gate, up = widen(gate_up[t, i]), widen(gate_up[t, size + i])
            out[t, i] = narrow(gate / (np.float32(1.0) + exp2(gate * MINUS_LOG2_E)) * up, out[t, i])


@inner
def _rotate(x: Any, begin: int, half: int, cos: Any, sin: Any, angles: int, out: Any, out_begin: int) -> None:
    if half % LANES == 0:
        turn(x, begin, half, cos, sin, angles, out, out_begin)
        return
    for i in range(half):
        low, high, c, s = widen(x[begin + i]), widen(x[begin + half + i]), cos[angles + i], sin[angles + i]
        out[out_begin + i] = narrow(low * c - high * s, out[0])
        out[out_begin + half + i] = narrow(high * c + low * s, out[0])


@inner
def _turn(
    x: Any, begin: int, head_dim: int, weight: Any, eps: float, cos: Any, sin: Any, angles: int, out: Any, out_begin: int, normed: Any
) -> None:  # fmt: skip
    """One head x[begin : + head_dim]: RMS norm unless `weight` is empty, then elements j and j + D/2 turn by angle j. normed: scratch [D]."""
    half = head_dim // 2
    if len(weight) > 0:
        total = np.float32(0.0)
        for i in range(head_dim):
            total += widen(x[begin + i]) * widen(x[begin + i])
        inverse = np.float32(1.0) / np.sqrt(total / np.float32(head_dim) + np.float32(eps))
        for i in range(head_dim):
            normed[i] = widen(x[begin + i]) * inverse * widen(weight[i])
        _rotate(normed, 0, half, cos, sin, angles, out, out_begin)
    else:
        _rotate(x, begin, half, cos, sin, angles, out, out_begin)


@kernel
def rope_scatter(
    qkv: Any, cos: Any, sin: Any, positions: Any, slots: Any, pool: Any, layer: int,
    q_norm_weight: Any, k_norm_weight: Any, eps: float, q_out: Any, num_kv_heads: int,
) -> None:  # fmt: skip
    """qkv [T, (H + 2 KV) * D]: q, normed and turned, -> q_out [T, H, D]; k, normed and turned, and v -> their slots of the pool.

    cos, sin: float32 [positions, D/2]. positions, slots: int64 [T], slot = page * page_size + offset. Norm weights: [D] or empty.
    All contiguous.
    """
    num_tokens, num_heads, head_dim = q_out.shape
    _, _, num_layers, _, page_size, _ = pool.shape
    layer_stride = 2 * page_size * head_dim
    x, cos, sin, out, memory = qkv.reshape(-1), cos.reshape(-1), sin.reshape(-1), q_out.reshape(-1), pool.reshape(-1)
    normed = np.empty(head_dim, np.float32)
    for t in range(num_tokens):
        token, angles = t * (num_heads + 2 * num_kv_heads) * head_dim, positions[t] * (head_dim // 2)
        page, offset = slots[t] // page_size, slots[t] % page_size
        for head in range(num_heads):
            place = (t * num_heads + head) * head_dim
            _turn(x, token + head * head_dim, head_dim, q_norm_weight, eps, cos, sin, angles, out, place, normed)
        for head in range(num_kv_heads):
            k, v = token + (num_heads + head) * head_dim, token + (num_heads + num_kv_heads + head) * head_dim
            place = ((page * num_kv_heads + head) * num_layers + layer) * layer_stride + offset * head_dim
            _turn(x, k, head_dim, k_norm_weight, eps, cos, sin, angles, memory, place, normed)
            stored, given = memory[place + page_size * head_dim :], x[v:]
            for i in range(head_dim):
                stored[i] = convert(given[i], stored[i])
