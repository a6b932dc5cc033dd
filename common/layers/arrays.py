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
