"""From safetensors files to a Decoder, with one copy of the weights in memory.

The files are mapped, and each tensor is copied (and converted) straight to its place: into its slice of a fused weight. A checkpoint
must match its config.json exactly; a tensor missing, left over or of another shape is an error that names it.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from common.config import DType
from common.errors import StartupError
from common.models.config import ModelConfig
from common.models.decoder import Decoder
from common.models.files import weight_files

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
    ignored = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for path in weight_files(model_dir):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    if name in ignored or name.endswith("rotary_emb.inv_freq"):
                        continue
                    _copy(file.get_tensor(name), targets, name, path)
                    missing.discard(name)
                    done_nbytes += targets[name].nbytes
                    progress(min(1.0, done_nbytes / total_nbytes))
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{path} is not a readable safetensors file: {error}") from None
    if missing:
        raise StartupError(f"{model_dir} lacks {len(missing)} tensors that its config.json asks for: {_some(missing)}")
    model.pack()


def _copy(source: torch.Tensor, targets: dict[str, torch.Tensor], name: str, path: Path) -> None:
    target = targets.get(name)
    if target is None:
        raise StartupError(f"{path} holds tensor {name}, which a model of this config.json does not have; is it another model's config?")
    if source.shape != target.shape:
        raise StartupError(f"{path}: tensor {name} has shape {list(source.shape)}, config.json asks for {list(target.shape)}")
    if not source.is_floating_point():
        raise StartupError(f"{path}: tensor {name} is {source.dtype}; quantised weights are not supported")
    target.copy_(source)


def _some(names: set[str], limit: int = 3) -> str:
    shown = ", ".join(sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown}, ..."
