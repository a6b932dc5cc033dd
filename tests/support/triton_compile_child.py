"""Compiles what a step launches for a device that is not there: `python triton_compile_child.py CAPABILITY`, without TRITON_INTERPRET.

Launches go through TritonAttention and TritonOps as ever, on CPU tensors; what would be a launch ends with the compiled kernel. Prints a JSON object
a kernel: its name, and the bytes of shared memory and of stack that a program takes. Stack is what the compiler spilt.
"""

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from attention_batches import Case, Step
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from common.attention import triton as attention
from common.layers.ops import NormWeight
from common.layers.triton_ops import TritonOps

LARGE = (80, 90, 100)  # have the shared memory that attention.py asks torch about
BF16 = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}


class NoDevice:
    """A driver for compiling alone."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def stack_nbytes(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bSTACK:(\d+)", usage)
    assert found, usage
    return int(found[1])


def main(capability: int) -> None:
    driver.set_active(NoDevice(capability))
    launch, seen = JITFunction.run, set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            print(json.dumps({"name": kernel.name, "shared": kernel.metadata.shared, "stack": stack_nbytes(kernel.asm["cubin"])}), flush=True)

    JITFunction.run = compile_only
    attention._has_large_shared_memory = lambda device: capability in LARGE
    for rows, is_decode in ((((5, 1), (300, 1)), True), (((5, 30),), False)):
        step = Step(Case(rows, kv_heads=2, group=4, head_dim=128, is_normed=True, is_decode=is_decode, **BF16))
        step.run(attention.TritonAttention(step.geometry, step.pool, step.rope, max_rows=8, max_context=32768, num_sms=132))
    x, weight = torch.empty(2, 4096, dtype=torch.bfloat16), NormWeight.empty(4096, 1e-6, torch.bfloat16, torch.device("cpu"))
    TritonOps().add_rms_norm(x, torch.empty_like(x), weight)
    TritonOps().rms_norm(x, weight)
    TritonOps().silu_mul(x)


if __name__ == "__main__":
    main(int(sys.argv[1]))
