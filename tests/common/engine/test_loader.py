"""A checkpoint that does not match its config.json is refused by the tensor's name; a good one is read with progress."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from float8 import multiplies_float8
from tiny_models import cached_checkpoint, edit_tensors

from common.engine.loader import load_weights, resolve_dtype
from common.engine.runner import ModelRunner
from common.errors import StartupError
from common.layers.quantized_fp8 import Float8Quantizer
from common.layers.torch_ops import TorchOps
from common.models.config import ModelConfig
from common.models.decoder import Decoder

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj.weight"


def load(model_dir: Path, dtype: torch.dtype = torch.float32) -> tuple[Decoder, list[float]]:
    model, seen = Decoder(ModelConfig.from_dir(model_dir), TorchOps(), dtype, CPU), []
    load_weights(model, model_dir, seen.append)
    return model, seen


def copy_of(name: str, target: Path, **config: Any) -> Path:
    directory = Path(shutil.copytree(cached_checkpoint(name), target / name))
    (directory / "config.json").write_text(json.dumps(json.loads((directory / "config.json").read_text()) | config))
    return directory


def test_progress_rises_to_one() -> None:
    _, seen = load(cached_checkpoint("llama_sharded"))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_sharded_equals_single_file() -> None:
    whole, parts = load(cached_checkpoint("llama"))[0].tensors(), load(cached_checkpoint("llama_sharded"))[0].tensors()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    directory = copy_of("llama", tmp_path)
    edit_tensors(directory, {DOWN: None})
    with pytest.raises(StartupError, match=DOWN):
        load(directory)


def test_left_over_tensor_is_named(tmp_path: Path) -> None:
    directory = copy_of("llama", tmp_path)
    edit_tensors(directory, {"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(StartupError, match=r"self_attn\.q_proj\.bias, which a model of this config.json does not have"):
        load(directory)


def test_misshaped_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    directory = copy_of("llama", tmp_path)
    edit_tensors(directory, {DOWN: torch.zeros(64, 97)})
    with pytest.raises(StartupError, match=rf"{DOWN} has shape \[64, 97\], config.json asks for \[64, 96\]"):
        load(directory)


def test_integer_tensor_is_refused(tmp_path: Path) -> None:
    directory = copy_of("llama", tmp_path)
    edit_tensors(directory, {DOWN: torch.zeros(64, 96, dtype=torch.int8)})
    with pytest.raises(StartupError, match="weights quantised to integers are not read"):
        load(directory)


def test_a_tied_head_and_stored_frequencies_are_ignored(tmp_path: Path) -> None:
    directory = copy_of("llama_tied", tmp_path)
    edit_tensors(directory, {"lm_head.weight": torch.zeros(260, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    model, _ = load(directory)
    assert model.head.weight is model.embedding


def test_missing_shard_and_truncated_file(tmp_path: Path) -> None:
    directory = copy_of("llama_sharded", tmp_path)
    lost = sorted(directory.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(StartupError, match=rf"names {lost.name}, not there"):
        load(directory)
    lost.write_bytes(b"\x10")
    with pytest.raises(StartupError, match="not a readable safetensors file"):
        load(directory)


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        ("float16", "auto", torch.bfloat16),
        ("float32", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
    ],
)
def test_dtype(tmp_path: Path, stored: str, asked: Any, expected: torch.dtype) -> None:
    config = ModelConfig.from_dir(copy_of("llama", tmp_path, dtype=stored))
    assert resolve_dtype(config, asked) == expected


def test_weights_are_converted() -> None:
    stored, converted = load(cached_checkpoint("qwen2"))[0].tensors(), load(cached_checkpoint("qwen2"), torch.bfloat16)[0]
    assert torch.equal(converted.embedding, stored["model.embed_tokens.weight"].bfloat16())


# ---- float8 ----------------------------------------------------------------------------------------------------------------------------

LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def float8_copy(
    target: Path, scale_of: Callable[[torch.Tensor], torch.Tensor], suffix: str, block: int = 128
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint whose linears are float8 with scales by `scale_of`, and what its weights then are."""
    stated = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [block, block]}
    directory = copy_of("llama", target, quantization_config=stated)
    plain, changed, meant = load(cached_checkpoint("llama"))[0].tensors(), {}, {}
    for layer in range(3):
        for name in (f"model.layers.{layer}.{linear}.weight" for linear in LINEARS):
            scale = scale_of(plain[name])
            wide = expanded(scale, plain[name].shape, block)
            changed |= {name: (plain[name] / wide).to(torch.float8_e4m3fn), name + suffix: scale}
            changed[name.replace("weight", "input_scale")] = torch.ones(1)
            meant[name] = changed[name].float() * wide
    edit_tensors(directory, changed)
    return directory, meant


def expanded(scale: torch.Tensor, shape: torch.Size, block: int) -> torch.Tensor:
    """`scale` over the blocks of a weight of `shape`."""
    for dim in (0, 1) if scale.ndim == 2 and scale.shape[1] > 1 else ():
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, shape[dim])
    return scale


def by_block(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A scale for each size x size block, the last ones smaller."""
    return lambda weight: torch.stack([torch.stack([part.abs().max() / 448 for part in rows.split(size, 1)]) for rows in weight.split(size, 0)])


SCALES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tensor": lambda weight: (weight.abs().max() / 448).reshape(1),
    "output": lambda weight: weight.abs().amax(1, keepdim=True) / 448,
    "block of 24": by_block(24),
    "block of 40": by_block(40),  # 96 rows are 3 blocks, and not of 32
}


@pytest.mark.parametrize("scaling", SCALES)
def test_float8_weights_are_their_numbers_times_their_scale(tmp_path: Path, scaling: str) -> None:
    block = int(scaling.split()[-1]) if "block" in scaling else 128
    directory, meant = float8_copy(tmp_path, SCALES[scaling], "_scale_inv" if "block" in scaling else "_scale", block)
    loaded = load(directory)[0].tensors()
    assert all(torch.equal(loaded[name], weight) for name, weight in meant.items())


def test_float8_scales_that_fit_no_block_are_refused(tmp_path: Path) -> None:
    directory, _ = float8_copy(tmp_path, SCALES["block of 24"], "_scale_inv", 24)
    raw = json.loads((directory / "config.json").read_text())
    raw["quantization_config"]["weight_block_size"] = [40, 40]
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(StartupError, match=r"is \[\d+, \d+\] with scales \[\d, \d\]: not one, one a row, or one a block of \[40, 40\]"):
        load(directory)


@multiplies_float8
def test_float8_numbers_survive_bfloat16_and_are_multiplied_as_they_were_stored(tmp_path: Path) -> None:
    """The scale by row goes with the weight; without it the numbers would be rounded to float8 a second time."""
    directory, meant = float8_copy(tmp_path, SCALES["output"], "_scale")
    model = Decoder(ModelConfig.from_dir(directory), TorchOps(), torch.bfloat16, CPU, Float8Quantizer())
    load_weights(model, directory, lambda fraction: None)
    ones = torch.eye(96, dtype=torch.bfloat16)
    weight = meant["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(model.layers[1].down(ones).T, weight.bfloat16())


def test_float8_without_its_scale_is_named(tmp_path: Path) -> None:
    directory, _ = float8_copy(tmp_path, SCALES["tensor"], "_scale")
    edit_tensors(directory, {DOWN + "_scale": None})
    with pytest.raises(StartupError, match=rf"{DOWN} is in float8, but {DOWN}_scale and _scale_inv are not there"):
        load(directory)


def test_runner_refuses_what_it_cannot_hold() -> None:
    directory = cached_checkpoint("llama")
    with pytest.raises(StartupError, match=r"--context-length 513: this model takes 1 to 512"):
        ModelRunner(directory, num_pages=8, context_length=513)
    with pytest.raises(StartupError, match="no memory for a KV pool"):
        ModelRunner(directory, mem_fraction=1e-9)


def test_pool_fills_the_fraction_of_free_memory() -> None:
    runner = ModelRunner(cached_checkpoint("llama"), mem_fraction=1e-3, attention_backend="torch")
    assert runner.kv.page_nbytes == 2 * 3 * 2 * 16 * 16 * 4
    assert runner.kv.num_pages > 2
    assert runner.kv.nbytes == runner.kv.num_pages * runner.kv.page_nbytes


def test_warmup_writes_only_the_padding_page_and_shows_progress() -> None:
    seen: list[tuple[str, float]] = []
    runner = ModelRunner(cached_checkpoint("llama"), num_pages=4, progress=lambda stage, fraction: seen.append((stage, fraction)))
    runner.warmup()
    assert not runner.kv.tensor[1:].any()
    for stage in ("loading weights", "warming up"):
        fractions = [fraction for name, fraction in seen if name == stage]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0
