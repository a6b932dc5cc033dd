"""Tiny random checkpoints of every supported architecture, written by transformers itself, and its greedy answer as the oracle.

Each has 256 + 4 token ids: the bytes and four special tokens, so a byte-level tokenizer without merges serves it. Weights are drawn
with a standard deviation that makes greedy output vary (transformers' default of 0.02 repeats one token for ever).
"""

import atexit
import json
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
EOS_ID = 256 + SPECIAL_TOKENS.index("<|im_end|>")
CONTEXT_LENGTH = 512
WINDOW = 40  # of the checkpoints with a sliding window
WEIGHT_STD = 0.3
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": VOCAB_SIZE - 1,
}


def _rope(rope_type: str, **parameters: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
_SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_RECIPES: dict[str, tuple[type[PreTrainedModel], Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama_tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama_bias": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3_rope": (LlamaForCausalLM, LlamaConfig, _LLAMA3),
    "llama_yarn": (LlamaForCausalLM, LlamaConfig, _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "llama_linear": (LlamaForCausalLM, LlamaConfig, _rope("linear", factor=2.0)),
    "llama_dynamic": (LlamaForCausalLM, LlamaConfig, _rope("dynamic", factor=2.0)),
    "llama_sharded": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral_sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": WINDOW}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2_sliding": (Qwen2ForCausalLM, Qwen2Config, {**_SLIDING, "tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_sliding": (Qwen3ForCausalLM, Qwen3Config, {**_SLIDING, "head_dim": 32, "attention_bias": True}),
}
CHECKPOINTS: tuple[str, ...] = tuple(_RECIPES)
# Slow for its size, and long: for tests that must catch a node in the middle of an answer.
_RECIPES["llama_deep"] = (LlamaForCausalLM, LlamaConfig, {"num_hidden_layers": 60, "max_position_embeddings": 8192})


def make_checkpoint(name: str, directory: Path, seed: int = 0, dtype: str = "float32") -> Path:
    """Write checkpoint `name` with its tokenizer to directory/name-seed-dtype and return that; an existing one is returned as it is."""
    target = directory / f"{name}-{seed}-{dtype}"
    if (target / "tokenizer.json").exists():
        return target
    model_class, config_class, differences = _RECIPES[name]
    config = config_class(**{**_BASE, **differences})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for parameter_name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in parameter_name else 0.0
            torch.nn.init.normal_(parameter, mean, WEIGHT_STD)
    model.to(getattr(torch, dtype)).save_pretrained(target, max_shard_size="60KB" if name == "llama_sharded" else "1GB")
    _write_tokenizer(target)
    return target


@cache
def _session_directory() -> tuple[Path, threading.Lock]:
    directory = tempfile.TemporaryDirectory(prefix="tiny-models-")
    atexit.register(directory.cleanup)
    return Path(directory.name), threading.Lock()


def cached_checkpoint(name: str, seed: int = 0, dtype: str = "float32") -> Path:
    """make_checkpoint() in a directory that lives as long as this process."""
    directory, lock = _session_directory()
    with lock:
        return make_checkpoint(name, directory, seed, dtype)


def greedy_oracle(
    model_dir: Path, prompt_ids: list[int], num_new_tokens: int, stop_at_eos: bool = False, repetition_penalty: float | None = None
) -> list[int]:
    """What transformers generates greedily in float32; ends early only with stop_at_eos (the EOS included)."""
    output = oracle_model(model_dir).generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=num_new_tokens,
        min_new_tokens=None,
        repetition_penalty=repetition_penalty,
        eos_token_id=EOS_ID if stop_at_eos else None,
        pad_token_id=VOCAB_SIZE - 1,
    )
    tokens: list[int] = output[0, len(prompt_ids) :].tolist()
    return tokens


def oracle_logits(model_dir: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """transformers' logits after each token: [len(token_ids), vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = oracle_model(model_dir, dtype)(torch.tensor([token_ids])).logits[0]
    return logits


@cache
def oracle_model(model_dir: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of the checkpoint, kept for the session."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # greedy_oracle() says when to stop
    return model


def edit_tensors(model_dir: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a single-file checkpoint."""
    file = model_dir / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()} | {n: t for n, t in change.items() if t is not None}
    save_file({name: tensor for name, tensor in tensors.items() if change.get(name, tensor) is not None}, file, metadata={"format": "pt"})


def _write_tokenizer(target: Path) -> None:
    """Byte level, no merges: the first 256 ids are bytes, then SPECIAL_TOKENS; ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[3],
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    tokenizer.save(str(target / "tokenizer.json"))
