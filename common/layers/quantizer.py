"""Which form the weights of linears take, from --quantization, the checkpoint, dtype and device.

    int8, int4    CPU, bfloat16: weights in blocks, activations as they are (quantized_cpu.py)
    fp8           CUDA, bfloat16: weights and activations in float8 (quantized_fp8.py)
    none          weights in --dtype
    auto          fp8 for a checkpoint in float8 on CUDA; else weights are brought to --dtype, those stored in float8 too

KV is not touched by it: nodes of a pair may differ, such as a prefill node in bfloat16 (many rows: bound by arithmetic) and a decode
node in int4 (few rows: bound by the bytes of the weights).
"""

import logging

import torch

from common.config import Quantization
from common.errors import StartupError
from common.layers.linear import Quantizer
from common.layers.quantized import BLOCK
from common.models.config import ModelConfig

BITS = {"int8": 8, "int4": 4}
FP8_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0)
log = logging.getLogger(__name__)


def make_quantizer(
    quantization: Quantization, config: ModelConfig, dtype: torch.dtype, device: torch.device, threads: int
) -> Quantizer | None:
    """None: weights stay in `dtype`. Raises StartupError where device, dtype or model cannot have what is asked for."""
    if quantization == "none":
        return None
    if quantization == "auto":
        may_fp8 = config.stores_float8 and device.type == "cuda" and dtype == torch.bfloat16 and _multiplies_float8(device)
        return _fp8(device) if may_fp8 else None
    if dtype != torch.bfloat16:
        raise StartupError(f"--quantization {quantization} computes in bfloat16, not in {dtype}; pass --dtype bfloat16, or leave it out")
    if quantization == "fp8":
        return _fp8(device)
    return _blocks(quantization, config, device, threads)


def _blocks(quantization: Quantization, config: ModelConfig, device: torch.device, threads: int) -> Quantizer:
    if device.type != "cpu":
        raise StartupError(f"--quantization {quantization} has kernels for CPU only; on {device.type} use fp8")
    attended = config.num_heads * config.head_dim
    inputs = {"hidden size": config.hidden_size, "heads times head_dim": attended, "intermediate size": config.intermediate_size}
    unfit = [f"{name} {size}" for name, size in inputs.items() if size % BLOCK]
    if config.hidden_size % BLOCK:
        raise StartupError(f"--quantization {quantization} needs inputs in blocks of {BLOCK}; this model has {', '.join(unfit)}; leave it out")
    if unfit:
        log.warning("linears with %s, no multiple of %d, stay in bfloat16", ", ".join(unfit), BLOCK)
    from common.layers.quantized_cpu import BlockQuantizer  # loads numba

    return BlockQuantizer(BITS[quantization], threads)


def _fp8(device: torch.device) -> Quantizer:
    if device.type != "cuda":
        raise StartupError(f"--quantization fp8 needs a GPU that multiplies float8; on {device.type} use int8 or int4")
    if not _multiplies_float8(device):
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise StartupError(f"--quantization fp8 needs compute capability 8.9 or later; this GPU has {found}; leave it out")
    from common.layers.quantized_fp8 import Float8Quantizer

    return Float8Quantizer()


def _multiplies_float8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
