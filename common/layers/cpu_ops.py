"""The steps between two linears as fused numba kernels: one pass over each row. Rules of arithmetic: vectors.py."""

from typing import Any

import numpy as np

from common.layers.vectors import exp2, inner, kernel, narrow, widen

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
def _turn(x: Any, weight: Any, eps: float, cos: Any, sin: Any, out: Any) -> None:
    """One head: RMS norm unless `weight` is empty, then elements j and j + D/2 turn by angle j. x, out: [D]; cos, sin: [D/2]."""
    half = len(cos)
    if len(weight) == 0:
        for i in range(half):
            low, high = widen(x[i]), widen(x[half + i])
            out[i] = narrow(low * cos[i] - high * sin[i], out[i])
            out[half + i] = narrow(high * cos[i] + low * sin[i], out[i])
        return
    total = np.float32(0.0)
    for i in range(2 * half):
        total += widen(x[i]) * widen(x[i])
    inverse = np.float32(1.0) / np.sqrt(total / np.float32(2 * half) + np.float32(eps))
    for i in range(half):
        low, high = widen(x[i]) * inverse * widen(weight[i]), widen(x[half + i]) * inverse * widen(weight[half + i])
        out[i] = narrow(low * cos[i] - high * sin[i], out[i])
        out[half + i] = narrow(high * cos[i] + low * sin[i], out[i])


@kernel
def rope_scatter(
    qkv: Any, cos: Any, sin: Any, positions: Any, slots: Any, pool: Any, layer: int,
    q_norm_weight: Any, k_norm_weight: Any, eps: float, q_out: Any, num_kv_heads: int,
) -> None:  # fmt: skip
    """qkv [T, (H + 2 KV) * D]: q, normed and turned, -> q_out [T, H, D]; k, normed and turned, and v -> their slots of the pool.

    cos, sin: float32 [positions, D/2]. positions, slots: int64 [T], slot = page * page_size + offset. Norm weights: [D] or empty.
    """
    num_tokens, num_heads, head_dim = q_out.shape
    page_size = pool.shape[4]
    for t in range(num_tokens):
        c, s = cos[positions[t]], sin[positions[t]]
        page, offset = slots[t] // page_size, slots[t] % page_size
        for head in range(num_heads):
            _turn(qkv[t, head * head_dim : (head + 1) * head_dim], q_norm_weight, eps, c, s, q_out[t, head])
        for head in range(num_kv_heads):
            k_begin = (num_heads + head) * head_dim
            v_begin = k_begin + num_kv_heads * head_dim
            _turn(qkv[t, k_begin : k_begin + head_dim], k_norm_weight, eps, c, s, pool[page, head, layer, 0, offset])
            v = pool[page, head, layer, 1, offset]
            for i in range(head_dim):
                v[i] = narrow(widen(qkv[t, v_begin + i]), v[i])
