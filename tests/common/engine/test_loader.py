"""A checkpoint that does not match its config.json is refused by the tensor's name; a good one is read with progress."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import cached_checkpoint, edit_tensors

from common.engine.loader import load_weights, resolve_dtype
from common.engine.runner import ModelRunner
from common.errors import StartupError
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
    with pytest.raises(StartupError, match="quantised weights are not supported"):
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
