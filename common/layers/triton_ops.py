"""LayerOps as fused Triton kernels: each reads its inputs once and rounds where TorchOps rounds.

A program normalises one token, whose elements stay in registers between the sum and the product. All are bound by memory. Tensors may have any
device that Triton has; CPU tensors under TRITON_INTERPRET=1. In-place and allocation-free but for results, so they can be captured.
"""

import torch

from common.layers.ops import NormWeight
from common.layers.triton_lang import jit, tl

SILU_BLOCK = 1024  # elements a program: 8 a thread


@jit()  # specialised for `stride`: loads are wide if it is a multiple of 16
def _norm_kernel(
    x_ptr: tl.tensor, residual_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor, stride: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, ADDS: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (T,). x, its tokens `stride` elements apart; out and residual [T, SIZE]. ADDS: residual += x, and the norm of that."""
    token = tl.program_id(0).to(tl.int64)
    elements = tl.arange(0, BLOCK)
    here = elements < SIZE
    x = tl.load(x_ptr + token * stride + elements, mask=here, other=0.0)
    dtype = x.dtype
    if ADDS:
        residual_ptrs = residual_ptr + token * SIZE + elements
        x = (tl.load(residual_ptrs, mask=here, other=0.0).to(tl.float32) + x.to(tl.float32)).to(dtype)
        tl.store(residual_ptrs, x, mask=here)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + EPS)).to(dtype)
    weight = tl.load(weight_ptr + elements, mask=here, other=0.0)
    tl.store(out_ptr + token * SIZE + elements, (weight.to(tl.float32) * normed.to(tl.float32)).to(dtype), mask=here)


@jit()
def _silu_mul_kernel(gate_up_ptr: tl.tensor, out_ptr: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Grid (T, blocks of SIZE). gate_up [T, 2 * SIZE] -> out [T, SIZE]."""
    token = tl.program_id(0).to(tl.int64)
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = elements < SIZE
    gate_ptrs = gate_up_ptr + token * (2 * SIZE) + elements
    gate, up = tl.load(gate_ptrs, mask=here, other=0.0), tl.load(gate_ptrs + SIZE, mask=here, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + token * SIZE + elements, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=here)


class TritonOps:
    def rms_norm(self, x: torch.Tensor, weight: NormWeight) -> torch.Tensor:
        return _norm(x, None, weight)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: NormWeight) -> torch.Tensor:
        assert residual.is_contiguous(), residual.stride()
        return _norm(x, residual, weight)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        assert gate_up.is_contiguous(), gate_up.stride()
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
        _silu_mul_kernel[(num_tokens, -(-size // SILU_BLOCK))](gate_up, out, SIZE=size, BLOCK=SILU_BLOCK, num_warps=4)
        return out


def _norm(x: torch.Tensor, residual: torch.Tensor | None, weight: NormWeight) -> torch.Tensor:
    assert x.stride(1) == 1, x.stride()
    num_tokens, size = x.shape
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    block = 1 << (size - 1).bit_length()
    _norm_kernel[(num_tokens,)](
        x, x if residual is None else residual, weight.tensor, out, x.stride(0),
        SIZE=size, BLOCK=block, EPS=weight.eps, ADDS=residual is not None, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out
