"""The steps between two linears as fused numba kernels: one pass over each row, arithmetic in float32.

Arrays of the model are float32, or uint16 holding bfloat16 bit patterns; one is stored rounded to nearest, ties to even, and a NaN
stays a NaN: the sampler finds a broken row by its non-finite logits. So kernels may reorder sums but not assume finite numbers.
"""

from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba import njit, types

FAST = {"reassoc", "contract", "nsz", "arcp"}  # without nnan and ninf: non-finite values must come out again
I16, I32, F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
intrinsic: Any = numba.extending.intrinsic  # numba gives its decorators types that fit only Python callers
# Polynomial of 2^f on [-0.5, 0.5], least relative error for degree 5: 2.4e-7 evaluated in float32
C0, C1, C2, C3, C4, C5 = (
    np.float32(c)
    for c in (1.0000001192092896, 0.6931469440460205, 0.24022120237350464, 0.05550713464617729, 0.009675540961325169, 0.0013276460813358426)
)
MINUS_LOG2_E = np.float32(-1.4426950408889634)
LEAST_EXPONENT = np.float32(-126.0)  # of a normal float32


@intrinsic  # type: ignore[untyped-decorator]
def widen(context: Any, x: Any) -> Any:
    """A stored element as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if x == types.float32:
            return args[0]
        return builder.bitcast(builder.shl(builder.zext(args[0], I32), I32(16)), F32)

    return types.float32(x), generate


@intrinsic  # type: ignore[untyped-decorator]
def narrow(context: Any, x: Any, stored: Any) -> Any:
    """float32 as an element of the type of `stored`; to bfloat16 rounded to nearest, ties to even, NaN kept."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if stored == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], I32)
        upper = builder.lshr(bits, I32(16))
        rounded = builder.lshr(builder.add(bits, builder.add(I32(0x7FFF), builder.and_(upper, I32(1)))), I32(16))
        is_nan = builder.icmp_unsigned(">", builder.and_(bits, I32(0x7FFFFFFF)), I32(0x7F800000))
        quiet = builder.or_(upper, I32(0x40))  # rounding could carry a NaN's bits over to an infinity or to zero
        return builder.trunc(builder.select(is_nan, quiet, rounded), I16)

    return stored(types.float32, stored), generate


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
    """2^x, NaN for NaN; beyond the normal float32 the nearest of them."""
    x = LEAST_EXPONENT if x < LEAST_EXPONENT else x
    x = -LEAST_EXPONENT if x > -LEAST_EXPONENT else x
    whole = _round(x)
    f = x - np.float32(whole)
    fraction = C0 + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * C5))))
    return fraction * _from_bits(np.int32((whole + np.int32(127)) << np.int32(23)))


@njit(nogil=True, fastmath=FAST, error_model="numpy", cache=True)
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


@njit(nogil=True, fastmath=FAST, error_model="numpy", cache=True)
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


@njit(nogil=True, fastmath=FAST, error_model="numpy", cache=True)
def silu_mul(gate_up: Any, out: Any) -> None:
    """gate_up [T, 2I] -> silu(gate) * up [T, I]."""
    num_rows, size = out.shape
    for t in range(num_rows):
        for i in range(size):
            gate, up = widen(gate_up[t, i]), widen(gate_up[t, size + i])
            out[t, i] = narrow(gate / (np.float32(1.0) + exp2(gate * MINUS_LOG2_E)) * up, out[t, i])


@njit(nogil=True, fastmath=FAST, error_model="numpy", cache=True)
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


@njit(nogil=True, fastmath=FAST, error_model="numpy", cache=True)
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
                v[i] = qkv[t, v_begin + i]
