"""What a checkpoint directory says about its model. Torch-free: the text processes read limits and ids from here."""

from dataclasses import dataclass, field
from pathlib import Path

from common.config import JsonObject

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry and limits, normalised over the architectures. Sizes are in elements, positions in tokens."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int  # max_position_embeddings
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: JsonObject | None  # the checkpoint's own dict, {"rope_type": "llama3" | "yarn" | "linear" | "dynamic" | ..., ...}
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: tuple[int | None, ...]  # per layer: window in tokens, None = full attention
    hidden_act: str
    dtype: str  # "float32", "bfloat16" or "float16", as stored
    eos_token_ids: tuple[int, ...]  # config.json and generation_config.json together
    bos_token_id: int | None
    raw: JsonObject = field(repr=False)

    @classmethod
    def from_dir(cls, path: Path) -> "ModelConfig":
        """Read config.json (and generation_config.json). Raises StartupError naming what is missing or unsupported."""
        raise NotImplementedError  # engine part


def fingerprint(model_dir: Path) -> str:
    """Hex digest that differs when geometry or weights differ; compared in Hello (R8)."""
    raise NotImplementedError  # engine part
