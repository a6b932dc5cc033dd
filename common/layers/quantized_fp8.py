"""Linear layers in float8 (e4m3) on CUDA: weights scaled by output, activations by token as they come.

    w[n, k] = weight_scale[n] * q[n, k]        x[t, k] = x_scale[t] * p[t, k]        y = (p q^T) * x_scale * weight_scale

Both scales bring the largest magnitude to float8's largest number, 448. A checkpoint in float8 brings its own weight scales; by them its
q come out as they were stored. Scales by token need no calibration and keep one row's outliers from the others.

torch._scaled_mm multiplies; it has never been run on a GPU here. The arithmetic is tested on CPU, where torch 2.13 has the same function. All of
it is of fixed shape and on the device, so it may be captured in a CUDA graph.
"""

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_SCALE = 1e-12  # of a row of zeros: nothing is divided by zero
ALIGNMENT = 16  # _scaled_mm takes sizes that are multiples of it


def scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> float8 [M, K] and float32 scale [M, 1], x = float8 * scale but for rounding. A row that holds NaN or infinity becomes NaN."""
    scale = (x.abs().amax(1, keepdim=True).float() / LARGEST).clamp(min=LEAST_SCALE)
    return (x.float() / scale).to(FLOAT8), scale


class Float8Weight:
    """A WeightForm: q float8 [N, K], scale float32 [1, N]."""

    gives_rows = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, row_scale: torch.Tensor | None) -> None:
        if row_scale is None:
            self._q, scale = scaled(weight)
        else:
            scale = row_scale.unsqueeze(1)
            self._q = (weight.float() / scale).to(FLOAT8)
        self._scale, self._bias = scale.T.contiguous(), bias
        self.nbytes = self._q.nbytes + self._scale.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        p, x_scale = scaled(x)
        y = torch._scaled_mm(p, self._q.T, scale_a=x_scale, scale_b=self._scale, out_dtype=x.dtype)
        return y if self._bias is None else y + self._bias

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("an embedding stays in bfloat16")


class Float8Quantizer:
    """The head stays in bfloat16, as in the checkpoints that are published in float8."""

    head = None

    def quantise(self, weight: torch.Tensor, bias: torch.Tensor | None, row_scale: torch.Tensor | None) -> Float8Weight | None:
        if weight.shape[0] % ALIGNMENT or weight.shape[1] % ALIGNMENT:
            return None
        return Float8Weight(weight, bias, row_scale)
