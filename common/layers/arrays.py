"""One memory, two views: torch computes GEMMs on tensors, numba kernels take numpy arrays."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]  # float32, or uint16 holding bfloat16 bit patterns
EMPTY = {torch.float32: np.empty(0, np.float32), torch.bfloat16: np.empty(0, np.uint16)}  # "no weight" for kernels


def as_array(tensor: torch.Tensor) -> Array:
    """The CPU tensor's own memory; bfloat16, which numpy does not know, as its bit patterns."""
    array: Array = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on the device, without waiting for it: through pinned memory, which torch reuses only when the copy has been made."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Reused:
    """An output [rows, *tail] that is overwritten whenever it is asked for again.

    At one row a decode step makes some three hundred small tensors; allocating them and viewing them as arrays took 3 % of it.
    """

    def __init__(self, *tail: int) -> None:
        self._tail = tail
        self._all = torch.empty(0, *tail)
        self._rows = (self._all, as_array(self._all))

    def rows(self, num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, Array]:
        """The first `num_rows`, in both views."""
        if num_rows != len(self._rows[0]) or dtype != self._all.dtype:
            if num_rows > len(self._all) or dtype != self._all.dtype:
                self._all = torch.empty(num_rows, *self._tail, dtype=dtype)
            self._rows = (self._all[:num_rows], as_array(self._all[:num_rows]))
        return self._rows
