"""y = x W^T + b, with the weight in the form this machine multiplies fastest.

bfloat16 on CPU: oneDNN works on blocked weights and F.linear reorders a plain one at every call. Reordered once instead, all
linears of a 135M model took 18 instead of 31 ms for one row, 20 instead of 38 ms for eight, 325 instead of 350 ms for 256 (AVX-512
bf16, one thread; bench/decode_floor.py). The blocked form replaces the plain one, so it costs no memory. float32 stays plain.

With a quantizer the form is its choice (quantizer.py): fewer bytes a weight, so fewer bytes read a step.
"""

from typing import Protocol

import torch
from torch.nn import functional as F


class WeightForm(Protocol):
    """A weight [N, K], and a bias [N] or none, in final form. nbytes: what the weight takes. gives_rows: rows() may be called."""

    nbytes: int
    gives_rows: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> [T, N], of x's dtype. A row's result does not depend on the other rows beyond float rounding."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` (int64 [T]) of the weight, bfloat16 [T, K]."""


class Quantizer(Protocol):
    """head: the Quantizer for the vocabulary's linear, which may be the embedding too; None: it stays as it is."""

    @property
    def head(self) -> "Quantizer | None": ...

    def quantise(self, weight: torch.Tensor, bias: torch.Tensor | None, row_scale: torch.Tensor | None) -> WeightForm | None:
        """The quantised form of weight [N, K]; it does not keep `weight`. None: this weight stays as it is.

        row_scale: float32 [N], by which the checkpoint itself has scaled each row (float8), where it says so.
        """


class Linear:
    def __init__(
        self, num_in: int, num_out: int, bias: bool, dtype: torch.dtype, device: torch.device, quantizer: Quantizer | None = None
    ) -> None:
        """`weight` [num_out, num_in] and `bias` [num_out] are to be filled, `row_scale` where the checkpoint has one; then pack() called once."""
        self.num_in, self.num_out = num_in, num_out
        self.weight = torch.empty(num_out, num_in, dtype=dtype, device=device)
        self.bias = torch.empty(num_out, dtype=dtype, device=device) if bias else None
        self.row_scale = torch.zeros(num_out, dtype=torch.float32, device=device)  # 0: the checkpoint has none for this row
        self._quantizer = quantizer
        self._form: WeightForm | None = None

    @property
    def nbytes(self) -> int:
        """Memory of weight and bias as they are held now; a plain weight that is kept beside its final form counts too."""
        bias_nbytes = self.bias.nbytes if self.bias is not None else 0
        return self.weight.nbytes + bias_nbytes + (self._form.nbytes if self._form is not None else 0)

    def pack(self, keep_plain: bool = False) -> None:
        """Bring the weight into its final form. keep_plain: somebody else reads rows of the weight too (a tied embedding): embed() will."""
        if self._quantizer is not None:
            self._form = self._quantizer.quantise(self.weight, self.bias, self.row_scale if bool(self.row_scale.all()) else None)
        elif _is_blocked(self.weight):
            self._form = Blocked(self.weight, self.bias)
        self.row_scale = torch.empty(0)
        if self._form is not None and (self._form.gives_rows or not keep_plain):
            self.weight = torch.empty(0, dtype=self.weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, num_in] -> [T, num_out]."""
        return F.linear(x, self.weight, self.bias) if self._form is None else self._form(x)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 [T] -> rows of the weight [T, num_in]: of a head that is tied to the embedding."""
        return self._form.rows(ids) if self._form is not None and self._form.gives_rows else F.embedding(ids, self.weight)


class Blocked:
    """bfloat16 in oneDNN's own order."""

    gives_rows = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight, None), bias
        self.nbytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("oneDNN alone knows where a row lies")


def _is_blocked(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
