"""Weights in blocks: 32 neighbouring inputs of one output share a scale.

    int8    w = scale * q              q in -127..127    8.5 bits a weight
    int4    w = scale * q + low        q in 0..15        5 bits a weight

scale and low are float16. These are the blocks of GGUF's Q8_0 and Q4_1 (https://github.com/ggml-org/ggml, ggml-common.h), and the values
are chosen by its rules. So weights that were dequantised from such a file to float32 come back as the blocks they were. Q4_0,
w = scale * (q - 8), is int4 with low = -8 * scale and comes back too. Through bfloat16, to which a .gguf is converted here, four bits come back
with an error of 1e-5 (Q4_1) or 2e-4 of the weights (the bfloat16 weights themselves are off by 1e-3), if the file was made of bfloat16
weights, as most are: the ends of a block were bfloat16 numbers, and rounding finds them again. Else, and in eight bits, both roundings add up.
"""

from dataclasses import dataclass

import torch

BLOCK = 32  # inputs that share a scale
INT4_MAX, INT4_ZERO, INT8_MAX = 15, 8, 127


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight [N, K] in blocks. q: uint8 or int8 [N, K]; scale, low: float16 [N, K / BLOCK], low None: zero."""

    q: torch.Tensor
    scale: torch.Tensor
    low: torch.Tensor | None

    def dequantised(self) -> torch.Tensor:
        """float32 [N, K]: exactly what the blocks say."""
        q = self.q.float().reshape(*self.scale.shape, BLOCK)
        w = q * self.scale.float()[..., None]
        return (w if self.low is None else w + self.low.float()[..., None]).reshape(self.q.shape)


def quantised(weight: torch.Tensor, bits: int) -> Blocks:
    """weight: [N, K], K a multiple of BLOCK, any float dtype. Rows are quantised independently of each other."""
    w = weight.float().reshape(len(weight), -1, BLOCK)
    return _int8(w) if bits == 8 else _int4(w)


def _int8(w: torch.Tensor) -> Blocks:
    scale = (w.abs().amax(2) / INT8_MAX).half()
    return Blocks(_steps(w, scale).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8).flatten(1), scale, None)


def _int4(w: torch.Tensor) -> Blocks:
    """For each block the better of two grids: from its least to its largest value, or around zero with the value farthest from it at an end."""
    least, largest = w.amin(2), w.amax(2)
    farthest = torch.where(largest >= -least, largest, least)
    grids = [((largest - least) / INT4_MAX, least), _around_zero(farthest)]
    (q, scale, low, error), other = (_on_grid(w, scale.half(), low.half()) for scale, low in grids)
    better = other[3] < error
    q = torch.where(better[..., None], other[0], q)
    return Blocks(q.to(torch.uint8).flatten(1), torch.where(better, other[1], scale), torch.where(better, other[2], low))


def _on_grid(w: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, scale, low, squared error of each block)."""
    q = _steps(w - low.float()[..., None], scale).round_().clamp_(0, INT4_MAX)
    return q, scale, low, (q * scale.float()[..., None] + low.float()[..., None] - w).square_().sum(2)


def _around_zero(farthest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4_0: the farthest value is step 0, and zero is step 8. (scale, low), scale of either sign."""
    scale = (farthest / -INT4_ZERO).half().float()
    return scale, -INT4_ZERO * scale


def _steps(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """w / scale; 0 where the scale is 0. A scale below float16's least number counts as that."""
    divisor = scale.float()[..., None]
    return torch.where(divisor == 0, 0.0, w / divisor)
