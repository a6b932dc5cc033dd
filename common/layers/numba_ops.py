"""LayerOps through the fused numba kernels of cpu_ops.py. A result is valid until the same op is called again."""

import torch

from common.layers import cpu_ops
from common.layers.arrays import Reused, as_array
from common.layers.ops import NormWeight


class NumbaOps:
    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
        self._normed, self._gated, self._dtype = Reused(hidden_size), Reused(intermediate_size), dtype

    def rms_norm(self, x: torch.Tensor, weight: NormWeight) -> torch.Tensor:
        out, out_array = self._normed.rows(len(x), self._dtype)
        cpu_ops.rms_norm(as_array(x), weight.array, weight.eps, out_array)
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: NormWeight) -> torch.Tensor:
        out, out_array = self._normed.rows(len(x), self._dtype)
        cpu_ops.add_rms_norm(as_array(x), as_array(residual), weight.array, weight.eps, out_array)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out, out_array = self._gated.rows(len(gate_up), self._dtype)
        cpu_ops.silu_mul(as_array(gate_up), out_array)
        return out
