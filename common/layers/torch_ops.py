"""LayerOps in plain torch: any device, the oracle for the others. Rounds where transformers rounds."""

import torch
from torch.nn import functional as F

from common.layers.ops import NormWeight


class TorchOps:
    def rms_norm(self, x: torch.Tensor, weight: NormWeight) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + weight.eps)
        return weight.tensor * normed.to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: NormWeight) -> torch.Tensor:
        residual += x
        return self.rms_norm(residual, weight)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
