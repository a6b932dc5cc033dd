"""The steps between two linears, behind one interface: torch is the oracle, numba the CPU's fast form.

Fused because torch's cost of 5-10 us a call, several calls a step, would be a third of a small model's decode time.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from common.layers.arrays import Array, as_array


@dataclass(frozen=True, slots=True)
class NormWeight:
    """An RMSNorm's weight [N] and epsilon; `array` is the same memory for numba (CPU only)."""

    tensor: torch.Tensor
    eps: float
    array: Array | None

    @classmethod
    def empty(cls, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> "NormWeight":
        tensor = torch.empty(size, dtype=dtype, device=device)
        return cls(tensor, eps, as_array(tensor) if device.type == "cpu" else None)


class LayerOps(Protocol):
    """A result may be overwritten when a norm, or silu_mul, is called again: use it before that."""

    def rms_norm(self, x: torch.Tensor, weight: NormWeight) -> torch.Tensor:
        """x [T, N], normalised in float32; x is kept."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: NormWeight) -> torch.Tensor:
        """residual += x in place; returns the norm of the sum."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2I] -> silu(gate) * up [T, I]."""
