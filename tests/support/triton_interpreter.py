"""Triton's kernels where there is no device for them: on CPU tensors, by its interpreter (TRITON_INTERPRET=1, set by tests/conftest.py).

The interpreter truncates a float32 that becomes bfloat16, where devices round to nearest, ties to even (Triton 3.6 and 3.7, _convert_float; the
rounding it also has loses the carry). So results would be compared that no device computes: importing this module mends it.
"""

from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from common.layers.triton_lang import INTERPRETED, tl

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")  # where the kernels of this process run
as_silent_as_devices = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy's, of infinities and NaN


def _rounding_cast(self: Any, src: Any, dst_type: Any) -> Any:
    if (src.dtype.scalar, dst_type.scalar) == (tl.float32, tl.bfloat16):
        bits = torch.from_numpy(src.data.copy()).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(bits, tl.bfloat16)
    return _cast(self, src, dst_type)


if INTERPRETED:
    _cast = interpreter.InterpreterBuilder.cast_impl
    interpreter.InterpreterBuilder.cast_impl = _rounding_cast
