"""config.json in both its forms becomes one ModelConfig; what is not supported is one sentence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CONTEXT_LENGTH, EOS_ID, WINDOW, cached_checkpoint, edit_tensors

from common.errors import StartupError
from common.models.config import ModelConfig, fingerprint

OLD_FORM: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
    "rope_theta": 500000.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "torch_dtype": "float16",
    "eos_token_id": [7, 8],
}


def write(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_old_form_of_rope_and_dtype(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(write(tmp_path, OLD_FORM))
    assert (config.rope_theta, config.dtype, config.head_dim) == (500000.0, "float16", 16)
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 2048}


def test_new_form_of_rope_and_dtype(tmp_path: Path) -> None:
    new = {key: value for key, value in OLD_FORM.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "head_dim": 32}
    config = ModelConfig.from_dir(write(tmp_path, new))
    assert (config.rope_theta, config.rope_scaling, config.dtype, config.head_dim) == (1e6, None, "bfloat16", 32)


def test_eos_ids_of_both_files_are_joined_in_order(tmp_path: Path) -> None:
    assert ModelConfig.from_dir(write(tmp_path, OLD_FORM, {"eos_token_id": [8, 9]})).eos_token_ids == (7, 8, 9)
    assert ModelConfig.from_dir(write(tmp_path, OLD_FORM | {"eos_token_id": None}, {"eos_token_id": 3})).eos_token_ids == (3,)


def test_written_by_transformers() -> None:
    config = ModelConfig.from_dir(cached_checkpoint("qwen3_sliding"))
    assert config.sliding_window == (None, WINDOW, WINDOW)
    assert (config.qk_norm, config.qkv_bias, config.o_bias, config.mlp_bias, config.head_dim) == (True, True, True, False, 32)
    assert (config.context_length, config.eos_token_ids, config.dtype) == (CONTEXT_LENGTH, (EOS_ID,), "float32")
    assert ModelConfig.from_dir(cached_checkpoint("mistral_sliding")).sliding_window == (WINDOW,) * 3
    assert ModelConfig.from_dir(cached_checkpoint("mistral")).sliding_window == (None,) * 3
    qwen2 = ModelConfig.from_dir(cached_checkpoint("qwen2"))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.sliding_window) == (True, False, (None,) * 3)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    mistral = OLD_FORM | {"architectures": ["MistralForCausalLM"]}
    assert ModelConfig.from_dir(write(tmp_path, mistral)).sliding_window == (None, None)  # an absent key means 4096
    assert ModelConfig.from_dir(write(tmp_path, mistral | {"max_position_embeddings": 8192})).sliding_window == (4096, 4096)


def test_layer_types_say_where_the_window_is(tmp_path: Path) -> None:
    qwen = OLD_FORM | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}
    layer_types = {"layer_types": ["sliding_attention", "full_attention"]}
    assert ModelConfig.from_dir(write(tmp_path, qwen | layer_types)).sliding_window == (8, None)
    assert ModelConfig.from_dir(write(tmp_path, qwen | layer_types | {"use_sliding_window": False})).sliding_window == (None, None)


def test_yarn_lengthens_the_context(tmp_path: Path) -> None:
    yarn = OLD_FORM | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}
    assert ModelConfig.from_dir(write(tmp_path, yarn)).context_length == 8192


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM"),
        ({"architectures": None}, "none named in config.json"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "llama3 needs low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "by layer type are not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"torch_dtype": "int8"}, "dtype 'int8' is not supported"),
        ({"hidden_size": None}, "hidden_size is None; a positive integer is needed"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_key_value_heads": 3}, "heads must be a multiple of KV heads"),
    ],
)
def test_unsupported_is_one_sentence(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words) as error:
        ModelConfig.from_dir(write(tmp_path, OLD_FORM | change))
    assert "\n" not in str(error.value)


def test_missing_and_unreadable_config(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json does not exist"):
        ModelConfig.from_dir(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(StartupError, match="cannot be read"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(StartupError, match="not a JSON object"):
        ModelConfig.from_dir(tmp_path)


def test_fingerprint_knows_weights_and_geometry_but_not_files(tmp_path: Path) -> None:
    whole = cached_checkpoint("llama")
    assert fingerprint(whole) == fingerprint(cached_checkpoint("llama_sharded"))
    assert fingerprint(whole) != fingerprint(cached_checkpoint("llama", seed=1))
    assert fingerprint(whole) != fingerprint(cached_checkpoint("llama_linear"))  # the same weights, another rotation
    changed = Path(shutil.copytree(whole, tmp_path / "changed"))
    edit_tensors(changed, {"model.layers.1.mlp.down_proj.weight": torch.zeros(64, 96)})
    assert fingerprint(whole) != fingerprint(changed)


def test_fingerprint_of_no_weights_and_of_garbage(tmp_path: Path) -> None:
    write(tmp_path, OLD_FORM)
    with pytest.raises(StartupError, match=r"holds no \*\.safetensors"):
        fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"garbage" * 9)
    with pytest.raises(StartupError, match="not a readable safetensors file"):
        fingerprint(tmp_path)
