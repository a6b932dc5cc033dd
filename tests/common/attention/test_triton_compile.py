"""The compiler takes every kernel of a step, for devices that are not there, and finds room for it. What it makes of them runs in tests/gpu."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHILD = ROOT / "tests" / "support" / "triton_compile_child.py"
KERNELS = {"rope_scatter_kernel", "decode_kernel", "merge_kernel", "extend_kernel", "_norm_kernel", "_silu_mul_kernel"}


@pytest.mark.parametrize(("capability", "largest_shared"), [(86, 99 << 10), (90, 227 << 10)])
def test_kernels_compile_and_fit(capability: int, largest_shared: int, tmp_path: Path) -> None:
    """86: the small tiles, tensor cores as since sm_80. 90: the large ones, warp-group products."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join((str(ROOT), str(CHILD.parent)))}
    done = subprocess.run([sys.executable, CHILD, str(capability)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["name"] for kernel in kernels} == KERNELS
    assert len(kernels) == len(KERNELS) + 1  # the norm with and without addition
    for kernel in kernels:
        assert kernel["shared"] <= largest_shared, kernel
        assert kernel["stack"] == 0, kernel
