"""Child program: turn a .gguf file into an ordinary checkpoint directory (bfloat16 safetensors, tokenizer, chat template).

    python -m common.models.gguf_convert SOURCE.gguf DESTINATION

A program of its own because it needs torch and transformers, which take 360 MB and seconds, and its caller (acquire.py) is a
text process. What transformers writes is read back before success is reported: a directory that lacks a weight, a tokenizer
or an end-of-text id would only be noticed as strange text. On failure the last line of standard error is the reason.

bfloat16, though the file says more: float32 would take twice the disk, and a model in bfloat16 or fewer bits gains nothing by it. int4 finds the
blocks of Q4_1 and Q4_0 again behind the rounding (quantized.py): the embedded model's logits are those of the exact weights.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from gguf import GGUFReader
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig, PreTrainedModel

from common.models.config import GGUF_BLOCKS


class ConversionFailed(Exception):
    """The file cannot become a checkpoint; the message is the sentence for the user."""


def convert(source: Path, destination: Path) -> None:
    """Write the checkpoint of `source` into the existing, empty directory `destination`. Raises ConversionFailed."""
    folder, name = str(source.parent), source.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16)
    except Exception as error:  # a reader of foreign files: its libraries raise everything, tokenizers bare Exception
        raise ConversionFailed(f"transformers cannot read it: {type(error).__name__}: {_first_line(error)}") from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    eos_token_ids = _eos_token_ids(model, tokenizer.eos_token_id)
    model.generation_config = GenerationConfig(eos_token_id=eos_token_ids, bos_token_id=model.config.bos_token_id)  # type: ignore[no-untyped-call]
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    _note_blocks(source, destination)
    verify(model, destination)


def _note_blocks(source: Path, destination: Path) -> None:
    """Write into config.json how most linears of the file were stored, such as Q4_1."""
    stored = Counter(tensor.tensor_type.name for tensor in GGUFReader(source).tensors if len(tensor.shape) == 2)
    path = destination / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), GGUF_BLOCKS: stored.most_common(1)[0][0]}, indent=2))


def verify(model: PreTrainedModel, destination: Path) -> None:
    """Read back what was written; raises ConversionFailed when a part is missing or differs from `model`."""
    written: dict[str, torch.Tensor] = {}
    for file in sorted(destination.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            written.update({name: tensors.get_tensor(name) for name in tensors.keys()})  # noqa: SIM118  # no dict: it cannot be iterated
    state = model.state_dict()
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    missing = sorted(state.keys() - written.keys() - tied)
    if missing:
        raise ConversionFailed(f"{len(missing)} weights were not written, first {missing[0]}")
    for name, tensor in written.items():
        if tensor.dtype != torch.bfloat16 or not torch.equal(tensor, state[name]) or not bool(tensor.isfinite().all()):
            raise ConversionFailed(f"weight {name} was not written as it was read, or is not finite")
    config = json.loads((destination / "config.json").read_text())
    if not config.get("architectures") or "quantization_config" in config:
        raise ConversionFailed("config.json names no architecture, or still says that weights are quantised")
    AutoTokenizer.from_pretrained(destination)
    if not (destination / "tokenizer.json").is_file():
        raise ConversionFailed("its tokenizer has no fast form (tokenizer.json)")


def _eos_token_ids(model: PreTrainedModel, tokenizer_eos: int | None) -> list[int]:
    """End-of-text ids from both places that may hold one: GGUF keeps it with the tokenizer, config.json may hold a default."""
    stated = model.config.eos_token_id
    ids = [tokenizer_eos] if tokenizer_eos is not None else stated if isinstance(stated, list) else [stated]
    known = [token_id for token_id in ids if token_id is not None]
    if not known:
        raise ConversionFailed("it names no end-of-text token, so no answer would ever end")
    return known


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0]


def main() -> None:
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except ConversionFailed as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
