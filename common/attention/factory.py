"""Which attention backend, and which fused steps go with it?

    numba        CPU: reads pages in place
    triton       CUDA: our own kernels; on CPU under TRITON_INTERPRET=1, where it is a test of them
    flashinfer   CUDA
    torch        anywhere: the oracle of the others
"""

import os
from typing import Literal

import torch

from common.attention.backend import AttentionBackend, HeadGeometry
from common.config import AttentionName
from common.errors import StartupError
from common.kvcache.layout import KVPool
from common.layers.ops import LayerOps
from common.layers.rope import RopeTable
from common.models.config import ModelConfig

Resolved = Literal["torch", "numba", "triton", "flashinfer"]


def resolve_attention(name: AttentionName, device: torch.device) -> Resolved:
    """Raises StartupError when the device cannot have it."""
    if name == "auto":
        return "numba" if device.type == "cpu" else "triton"
    if name == "numba" and device.type != "cpu":
        raise StartupError(f"--attention-backend numba: its kernels run on CPU, not on {device.type}; use triton, flashinfer or auto")
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if name in ("triton", "flashinfer") and device.type == "cpu" and not interpreted:
        raise StartupError(f"--attention-backend {name}: its kernels run on CUDA; use numba or auto on CPU")
    return name


def check_attention(name: Resolved, config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> None:
    """Before weights are loaded. Raises StartupError: the library is missing, or lacks what the model needs."""
    if name == "flashinfer":
        from common.attention.flashinfer import check

        check(config.head_dim, dtype, kv_dtype, device.type)


def make_ops(name: Resolved, config: ModelConfig, dtype: torch.dtype) -> LayerOps:
    if name == "numba":
        from common.layers.numba_ops import NumbaOps  # loads numba, which the others do without

        return NumbaOps(config.hidden_size, config.intermediate_size, dtype)
    if name == "torch":
        from common.layers.torch_ops import TorchOps

        return TorchOps()
    from common.layers.triton_ops import TritonOps

    return TritonOps()


def make_attention(
    name: Resolved, config: ModelConfig, dtype: torch.dtype, pool: KVPool, rope: RopeTable, *, max_rows: int, max_context: int
) -> AttentionBackend:
    """dtype: of activations. max_rows, max_context: of a decode batch. Raises StartupError as check_attention()."""
    geometry = HeadGeometry(config.num_heads, config.num_kv_heads, config.head_dim)
    if name == "numba":
        from common.attention.numba import NumbaAttention

        return NumbaAttention(geometry, pool, rope)
    if name == "triton":
        from common.attention.triton import TritonAttention

        return TritonAttention(geometry, pool, rope, max_rows=max_rows, max_context=max_context)
    if name == "flashinfer":
        from common.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(geometry, pool, rope, dtype=dtype, max_rows=max_rows, max_context=max_context)
    from common.attention.torch import TorchAttention

    return TorchAttention(geometry, pool, rope)
