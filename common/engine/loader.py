"""From safetensors files to a Decoder, with one copy of the weights in memory.

The files are mapped, and each tensor is copied (and converted) straight to its place: into its slice of a fused weight. A checkpoint
must match its config.json exactly; a tensor missing, left over or of another shape is an error that names it.

A weight stored in float8 stands beside its scale: NAME_scale or NAME_scale_inv, by which it is multiplied (in spite of the second name), one
for the weight, one for each output, or one for each block of outputs and inputs. It is brought to the model's dtype, and a scale that is
the same along a row is kept for who multiplies in float8 (Linear.row_scale). Scales of activations are left: those are taken as they come.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any  # an open safetensors file has no types

import torch
from safetensors import SafetensorError, safe_open

from common.config import DType
from common.errors import StartupError
from common.models.config import ModelConfig
from common.models.decoder import Decoder
from common.models.files import weight_files

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_SUFFIXES = ("_scale", "_scale_inv")  # after NAME.weight; compressed-tensors and per-tensor fp8, fp8 in blocks
SCALE_NAMES = tuple(f".weight{suffix}" for suffix in SCALE_SUFFIXES)
ACTIVATION_SCALES = (".input_scale", ".activation_scale")
Progress = Callable[[float], None]  # fraction done, 0..1
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_dtype(config: ModelConfig, dtype: DType) -> torch.dtype:
    """auto: the checkpoint's own; float16 becomes bfloat16, which CPUs multiply natively and which does not overflow."""
    wanted = config.dtype if dtype == "auto" else dtype
    return TORCH_DTYPES["bfloat16" if wanted == "float16" else wanted]


def load_weights(model: Decoder, model_dir: Path, progress: Progress) -> None:
    """Fill and pack `model`. Raises StartupError naming the file or tensor at fault."""
    targets = model.tensors()
    missing, total_nbytes, done_nbytes = set(targets), sum(t.nbytes for t in targets.values()), 0
    scales = _scales(model_dir) if model.config.stores_float8 else {}
    row_scales = model.row_scales() if scales else {}
    ignored = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for path in weight_files(model_dir):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                if name in ignored or name.endswith("rotary_emb.inv_freq") or name in scales or name.endswith(ACTIVATION_SCALES):
                    continue
                source = _checked(file.get_tensor(name), targets, name, path)
                if source.dtype in FLOAT8:
                    scale, block = _scale_of(name, scales, path), model.config.float8_block
                    source = _unscaled(source, scale, row_scales.get(name), block, f"{path}: tensor {name}")
                targets[name].copy_(source)
                missing.discard(name)
                done_nbytes += targets[name].nbytes
                progress(min(1.0, done_nbytes / total_nbytes))
    if missing:
        raise StartupError(f"{model_dir} lacks {len(missing)} tensors that its config.json asks for: {_some(missing)}")
    model.pack()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{path} is not a readable safetensors file: {error}") from None


def _checked(source: torch.Tensor, targets: dict[str, torch.Tensor], name: str, path: Path) -> torch.Tensor:
    """`source`, if it fits where it belongs."""
    target = targets.get(name)
    if target is None:
        raise StartupError(f"{path} holds tensor {name}, which a model of this config.json does not have; is it another model's config?")
    if source.shape != target.shape:
        raise StartupError(f"{path}: tensor {name} has shape {list(source.shape)}, config.json asks for {list(target.shape)}")
    if not source.is_floating_point():
        raise StartupError(f"{path}: tensor {name} is {source.dtype}; weights quantised to integers are not read")
    return source


# ---- float8 ----------------------------------------------------------------------------------------------------------------------------


def _scales(model_dir: Path) -> dict[str, torch.Tensor]:
    """All scales of weights, by name: one may stand in another file than its weight."""
    found = {}
    for path in weight_files(model_dir):
        with _opened(path) as file:
            found.update({name: file.get_tensor(name).float() for name in file.keys() if name.endswith(SCALE_NAMES)})  # noqa: SIM118  (no dict)
    return found


def _scale_of(name: str, scales: dict[str, torch.Tensor], path: Path) -> torch.Tensor:
    for suffix in SCALE_SUFFIXES:
        if (scale := scales.get(name + suffix)) is not None:
            return scale
    raise StartupError(f"{path}: tensor {name} is in float8, but {name}{SCALE_SUFFIXES[0]} and {SCALE_SUFFIXES[1]} are not there; is a file missing?")


def _unscaled(
    stored: torch.Tensor, scale: torch.Tensor, row_scale: torch.Tensor | None, block: tuple[int, int], what: str
) -> torch.Tensor:
    """stored: float8 [N, K]; scale: one number, [N] or [N, 1], or [n, k] for blocks of `block` rows and columns -> float32 [N, K].

    row_scale: float32 [N], filled unless the scale differs along a row. Raises StartupError about `what` for a scale of another shape.
    """
    num_out, num_in = stored.shape
    if scale.numel() == 1:
        scale, block = scale.reshape(1, 1), (num_out, num_in)
    elif scale.numel() == num_out and scale.ndim in (1, 2) and len(scale) == num_out:
        scale, block = scale.reshape(num_out, 1), (1, num_in)
    if scale.shape != (-(-num_out // block[0]), -(-num_in // block[1])):
        raise StartupError(f"{what} is [{num_out}, {num_in}] with scales {list(scale.shape)}: not one, one a row, or one a block of {list(block)}")
    by_row = scale.repeat_interleave(block[0], 0)[:num_out]
    if scale.shape[1] == 1 and row_scale is not None:
        row_scale.copy_(by_row[:, 0])
    return stored.float() * by_row.repeat_interleave(block[1], 1)[:, :num_in]


def _some(names: set[str], limit: int = 3) -> str:
    shown = ", ".join(sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown}, ..."
