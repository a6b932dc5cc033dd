"""LayerOps through the fused numba kernels of cpu_ops.py."""

import torch

from common.layers import cpu_ops
from common.layers.arrays import as_array
from common.layers.ops import NormWeight


class NumbaOps:
    def rms_norm(self, x: torch.Tensor, weight: NormWeight) -> torch.Tensor:
        out = torch.empty_like(x)
        cpu_ops.rms_norm(as_array(x), weight.array, weight.eps, as_array(out))
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: NormWeight) -> torch.Tensor:
        out = torch.empty_like(x)
        cpu_ops.add_rms_norm(as_array(x), as_array(residual), weight.array, weight.eps, as_array(out))
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_tokens, width = gate_up.shape
        out = torch.empty(num_tokens, width // 2, dtype=gate_up.dtype)
        cpu_ops.silu_mul(as_array(gate_up), as_array(out))
        return out
