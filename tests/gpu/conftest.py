"""Tests that need a CUDA device: `python -m pytest tests/gpu`. Not collected where there is none.

FlashInfer's are skipped where it is not installed, NIXL's need NIXL for the device's CUDA version.
"""

from collections.abc import Iterator

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """No TF32: products in float32 are those of a CPU but for the order of sums."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
