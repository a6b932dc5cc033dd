"""philox.py's numbers in one kernel: in tensor operations they take over a hundred launches, which a host that runs ahead of a small model
has no time for. CPU tensors under TRITON_INTERPRET=1. Has never run on a GPU."""

import torch

from common.layers.triton_lang import jit, tl
from common.sampling.philox import DOUBLE_BITS

BLOCK = 128  # rows a program
HIGH_SHIFT, LOW_SHIFT, SCALE = tl.constexpr(DOUBLE_BITS - 32), tl.constexpr(64 - DOUBLE_BITS), tl.constexpr(2.0**-DOUBLE_BITS)


@jit(plain=["num_rows"])
def _uniform_kernel(seeds_ptr: tl.tensor, positions_ptr: tl.tensor, out_ptr: tl.tensor, num_rows: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Grid (blocks of num_rows). Triton's philox is Philox4x32-10 too."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds_ptr + rows, mask=rows < num_rows, other=0)
    position = tl.load(positions_ptr + rows, mask=rows < num_rows, other=0)
    zero = tl.zeros_like(position).to(tl.uint32)
    high, low, _, _ = tl.philox(seed, position.to(tl.uint32), (position >> 32).to(tl.uint32), zero, zero)
    bits = (high.to(tl.int64) << HIGH_SHIFT) | (low.to(tl.int64) >> LOW_SHIFT)
    tl.store(out_ptr + rows, bits.to(tl.float64) * SCALE, mask=rows < num_rows)


def uniform_by_triton(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """As philox.uniform(); contiguous."""
    out = torch.empty(len(seed), dtype=torch.float64, device=seed.device)
    _uniform_kernel[(-(-len(seed) // BLOCK),)](seed, position, out, len(seed), BLOCK=BLOCK)
    return out
