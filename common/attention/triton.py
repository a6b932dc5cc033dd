"""CUDA attention in Triton: every kernel reads and writes the pool's pages in place. Under TRITON_INTERPRET=1 it runs on CPU tensors.

A layer is two launches, or three where contexts are split:
    rope_scatter      q/k norm and rotation; q aside, K and V into the pool      triton_rope.py
    extend or decode  attention over the row's pages                             triton_extend.py, triton_decode.py
    merge             the parts of a split decode into one                       triton_decode.py
Nothing that forward() passes for a decode batch depends on the step: grids come from the batch's size and max_context, the rest is read on
the device. So it may be captured. An extend batch's grid is a list of tiles, which the host makes of the lengths it knows, once a step.

What is a constant of the model is a constant of the kernel. Block sizes are fixed tables: autotuning would run inside a capture. A kernel is
compiled when it is first called with another set of constants, so warm-up has to run each kind of batch before a graph is captured of it.

Compiled for sm_80, sm_86, sm_90, sm_100 and sm_120, run by the interpreter; has never run on a GPU, so no constant here was measured.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.attention.backend import AttentionBatch, AttentionSpec, HeadGeometry, HostLens
from common.attention.rope_scatter import RopeScatter
from common.attention.triton_decode import MIN_SPLIT, decode_kernel, merge_kernel
from common.attention.triton_extend import extend_kernel
from common.attention.triton_tiles import dot_dtype
from common.errors import StartupError
from common.kvcache.layout import KVPool
from common.layers.arrays import to_device
from common.layers.rope import RopeTable

MAX_HEAD_DIM = 256
GROUP_PAD = 16  # rows of the smallest tensor-core product
PROGRAMS_PER_SM = 2  # of decode, resident at once
DECODE_TILE_NBYTES = 16384  # of K, V the same: two programs have 64 KiB on their way to an SM, meant to hide the latency of HBM
LONGEST_SPLIT = 16384  # keys; longer, and one long row in a large batch of short ones would outlast them by far
MAX_SPLITS = 64  # parts of a head: merge holds them in registers
INTERPRETER_SMS = 4  # stands for a device where there is none: small batches are split, larger ones are not

# Loads run ahead in stages. The page of a key must be there before the key's address is known, which takes as many stages again: with fewer than 5
# the compiled loop has one buffer for K and one for V, and reads nothing while it computes. Products in float32, without tensor cores, are there
# for exact comparisons and need not be fast.
NUM_STAGES = {2: 5, 4: 2}  # by bytes of an element in products


@dataclass(frozen=True, slots=True)
class ExtendTile:
    block_m: int  # (token, head) pairs: rows of the products
    block_n: int  # keys
    num_warps: int


# By bytes of an element in products, and padded head_dim: where a program may have 160 KiB of shared memory (sm_80, sm_90, sm_100), and elsewhere
# (99 KiB). The largest that compile for these with 16 bytes of spills a thread or none.
EXTEND_TILES = {
    (2, 64): (ExtendTile(128, 64, 8), ExtendTile(128, 64, 8)),
    (2, 128): (ExtendTile(128, 64, 8), ExtendTile(64, 32, 4)),
    (2, 256): (ExtendTile(64, 32, 8), ExtendTile(64, 16, 8)),
    (4, 64): (ExtendTile(32, 32, 4), ExtendTile(32, 32, 4)),
    (4, 128): (ExtendTile(32, 32, 4), ExtendTile(32, 32, 4)),
    (4, 256): (ExtendTile(16, 16, 4), ExtendTile(16, 16, 4)),
}


class TritonAttention:
    def __init__(
        self, geometry: HeadGeometry, pool: KVPool, rope: RopeTable, *, max_rows: int, max_context: int, num_sms: int | None = None
    ) -> None:
        """max_rows: of a decode batch. max_context: tokens that one of its rows may have. num_sms: decode is split to fill so many; None:
        the device's. Raises StartupError for a head_dim above 256."""
        if geometry.head_dim > MAX_HEAD_DIM:
            raise StartupError(f"--attention-backend triton takes a head_dim of up to {MAX_HEAD_DIM}, this model's is {geometry.head_dim}; use torch")
        self._geometry, self._max_context, self._kv_dtype = geometry, max_context, pool.layout.dtype
        self._rope_scatter = RopeScatter(geometry, pool, rope)
        self._group = geometry.num_heads // geometry.num_kv_heads
        self._num_sms = _device_sms(pool.tensor.device) if num_sms is None else num_sms
        num_layers = range(pool.layout.num_layers)
        self._keys, self._values = [pool.keys(layer) for layer in num_layers], [pool.values(layer) for layer in num_layers]
        page_stride, head_stride, slot_stride, _ = self._keys[0].stride()
        self._places = {"PAGE_SIZE": pool.page_size, "PAGE_STRIDE": page_stride, "HEAD_STRIDE": head_stride, "SLOT_STRIDE": slot_stride}
        self._dim_pad = max(16, _power_of_2(geometry.head_dim))  # 16: the least depth of a product
        self._max_rows = max_rows
        self._is_small = not _has_large_shared_memory(pool.tensor.device)
        num_parts = max(rows * self.num_splits(rows) for rows in range(1, max_rows + 1)) * geometry.num_heads
        self._parts = torch.empty(num_parts, geometry.head_dim, dtype=torch.float32, device=pool.tensor.device)
        self._sums = torch.empty(num_parts, dtype=torch.float32, device=pool.tensor.device)
        self._planned: tuple[AttentionBatch, HostLens] | None = None
        self._tiles: torch.Tensor | None = None  # of the planned batch, once an extend has asked for them

    def plan(self, batch: AttentionBatch, lens: HostLens) -> None:
        self._planned, self._tiles = (batch, lens), None

    def forward(self, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] -> [T, num_heads * head_dim]."""
        assert self._planned is not None, "forward() before plan()"
        batch, lens = self._planned
        q = self._rope_scatter(qkv, batch, spec).flatten(1)
        return self._decode(q, batch, spec) if batch.is_decode else self._extend(q, batch, lens, spec)

    def num_splits(self, num_rows: int) -> int:
        """Parts that the context of each row of a decode batch is split into at most: enough to fill the device, or for no part to be
        too long. The same in every step, because a graph is captured with it."""
        to_fill = -(-PROGRAMS_PER_SM * self._num_sms // (num_rows * self._geometry.num_kv_heads))
        to_balance = -(-self._max_context // LONGEST_SPLIT)
        worth_it = -(-self._max_context // int(MIN_SPLIT.value))
        return min(MAX_SPLITS, max(to_fill, to_balance), worth_it)

    def _decode(self, q: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec) -> torch.Tensor:
        geometry, out, num_rows = self._geometry, torch.empty_like(q), len(batch.rows)
        assert num_rows <= self._max_rows, "the parts would not hold"
        num_splits, constants = self.num_splits(num_rows), self._constants(q.dtype, spec)
        block_n = min(128, max(16, DECODE_TILE_NBYTES // (self._dim_pad * self._operands(q.dtype).itemsize)))
        decode_kernel[(num_rows, geometry.num_kv_heads, num_splits)](
            q, self._keys[spec.layer], self._values[spec.layer], batch.page_table, batch.rows, batch.context_lens,
            out, self._parts, self._sums, num_splits, batch.page_table.stride(0),
            GROUP_PAD=max(GROUP_PAD, _power_of_2(self._group)), BLOCK_N=block_n, IS_SPLIT=num_splits > 1, **constants, num_warps=4,
        )  # fmt: skip
        if num_splits > 1:
            merge_kernel[(num_rows, geometry.num_heads)](
                self._parts, self._sums, batch.context_lens, out, num_splits,
                HEAD_DIM=geometry.head_dim, DIM_PAD=self._dim_pad, SPLITS_PAD=_power_of_2(num_splits),
                BLOCK_N=block_n, WINDOW=constants["WINDOW"], num_warps=4,
            )  # fmt: skip
        return out

    def _extend(self, q: torch.Tensor, batch: AttentionBatch, lens: HostLens, spec: AttentionSpec) -> torch.Tensor:
        out, tile = torch.empty_like(q), EXTEND_TILES[self._operands(q.dtype).itemsize, max(64, self._dim_pad)][self._is_small]
        block_m = max(tile.block_m, _power_of_2(self._group))
        if self._tiles is None:  # the first layer of a step
            self._tiles = to_device(extend_tiles(lens, block_m // self._group), q.device)
        extend_kernel[(len(self._tiles), self._geometry.num_kv_heads)](
            q, self._keys[spec.layer], self._values[spec.layer], batch.page_table, batch.rows, batch.context_lens, batch.query_starts,
            self._tiles, out, batch.page_table.stride(0),
            BLOCK_M=block_m, BLOCK_N=tile.block_n, **self._constants(q.dtype, spec), num_warps=tile.num_warps,
        )  # fmt: skip
        return out

    def _operands(self, dtype: torch.dtype) -> torch.dtype:
        """Of the products: neither q nor stored keys lose anything by it."""
        return torch.promote_types(dtype, self._kv_dtype)

    def _constants(self, dtype: torch.dtype, spec: AttentionSpec) -> dict[str, Any]:
        """What the two kernels that attend have in common."""
        operands = self._operands(dtype)
        return self._places | {
            "GROUP": self._group,
            "HEAD_DIM": self._geometry.head_dim,
            "DIM_PAD": self._dim_pad,
            "DOT_DTYPE": dot_dtype(operands),
            "SCALE": self._geometry.head_dim**-0.5,
            "SOFT_CAP": spec.soft_cap or 0.0,
            "WINDOW": spec.window or 0,
            "num_stages": NUM_STAGES[operands.itemsize],
        }


def extend_tiles(lens: HostLens, tile_tokens: int) -> NDArray[np.int32]:
    """Row and block of `tile_tokens` new tokens of each tile, int32 [tiles, 2]. Those that see most keys come first, so that the last to
    finish are short."""
    num_blocks = -(-lens.extend_lens // tile_tokens)
    rows = np.repeat(np.arange(len(num_blocks)), num_blocks)
    blocks = np.arange(len(rows)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    first_positions = (lens.context_lens - lens.extend_lens)[rows] + blocks * tile_tokens
    order = np.argsort(-first_positions, kind="stable")
    return np.stack((rows[order], blocks[order]), axis=1).astype(np.int32)


def _device_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else INTERPRETER_SMS


def _has_large_shared_memory(device: torch.device) -> bool:
    """160 KiB for a program, as the data centre's devices have; 99 KiB else."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))


def _power_of_2(number: int) -> int:
    """The next one, or the number itself."""
    return 1 << (number - 1).bit_length()
