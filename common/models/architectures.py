"""What differs between the supported architectures, as data.

All of them are the same pre-norm decoder: RMSNorm, rotary grouped-query attention, a SiLU-gated MLP. They differ in biases, in a
norm on q and k, in which layers have a sliding window, and in what a key means when config.json leaves it out. Nothing of that
needs code of its own in the forward pass, so there is one skeleton (decoder.py) and this table; an architecture that does need
code gets a file beside decoder.py. The defaults are those of transformers' configuration classes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from common.config import JsonObject
from common.errors import StartupError

Windows = Callable[[JsonObject, int], tuple[int | None, ...]]


def full_attention(raw: JsonObject, num_layers: int) -> tuple[int | None, ...]:
    return (None,) * num_layers


def one_window(raw: JsonObject, num_layers: int) -> tuple[int | None, ...]:
    """Mistral: every layer has the same window; an absent key means 4096, null means none."""
    return (raw.get("sliding_window", 4096),) * num_layers


def window_by_layer(raw: JsonObject, num_layers: int) -> tuple[int | None, ...]:
    """Qwen: only with `use_sliding_window`; `layer_types` says where, without it the layers from `max_window_layers` on."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    if window is None:
        return (None,) * num_layers
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers or set(layer_types) - {"full_attention", "sliding_attention"}:
        raise StartupError(f"config.json: layer_types {layer_types} is not full_attention or sliding_attention for each of {num_layers} layers")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


@dataclass(frozen=True, slots=True)
class Architecture:
    """None means: as config.json says (`attention_bias`, `mlp_bias`, `num_attention_heads`, hidden_size / heads)."""

    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    windows: Windows
    default_num_kv_heads: int | None = None
    default_head_dim: int | None = None
    default_context_length: int = 32768


ARCHITECTURE_TABLE = {
    "LlamaForCausalLM": Architecture(None, None, None, False, full_attention, default_context_length=2048),
    "MistralForCausalLM": Architecture(False, False, False, False, one_window, default_num_kv_heads=8, default_context_length=131072),
    "Qwen2ForCausalLM": Architecture(True, False, False, False, window_by_layer, default_num_kv_heads=32),
    "Qwen3ForCausalLM": Architecture(None, None, False, True, window_by_layer, default_num_kv_heads=32, default_head_dim=128),
}
