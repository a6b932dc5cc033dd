"""y = x W^T + b, with the weight in the form this machine multiplies fastest.

bfloat16 on CPU: oneDNN works on blocked weights and F.linear reorders a plain one at every call. Reordered once instead, all
linears of a 135M model took 18 instead of 31 ms for one row, 20 instead of 38 ms for eight, 325 instead of 350 ms for 256 (AVX-512
bf16, one thread; bench/decode_floor.py). The blocked form replaces the plain one, so it costs no memory. float32 stays plain.
"""

import torch
from torch.nn import functional as F


class Linear:
    def __init__(self, num_in: int, num_out: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        """`weight` [num_out, num_in] and `bias` [num_out] are to be filled, then pack() called once."""
        self.num_in, self.num_out = num_in, num_out
        self.weight = torch.empty(num_out, num_in, dtype=dtype, device=device)
        self.bias = torch.empty(num_out, dtype=dtype, device=device) if bias else None
        self._blocked: torch.Tensor | None = None

    def pack(self, keep_plain: bool = False) -> None:
        """Bring the weight into its final form. keep_plain: somebody else reads `weight` too (a tied embedding)."""
        if self.weight.device.type != "cpu" or self.weight.dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return
        self._blocked = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)
        if not keep_plain:
            self.weight = torch.empty(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, num_in] -> [T, num_out]."""
        if self._blocked is None:
            return F.linear(x, self.weight, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._blocked, self.bias, "none", [], "")
        return y
