"""What a checkpoint directory says about its model. Torch-free: the text processes read limits and ids from here.

config.json comes in two forms: up to transformers 4 `rope_theta`, `rope_scaling` and `torch_dtype`, from 5 on `rope_parameters`
(both in one) and `dtype`. Either is read; from here on there is one form.
"""

import hashlib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path

from common.config import JsonObject
from common.errors import StartupError
from common.models.architectures import ARCHITECTURE_TABLE, Architecture
from common.models.files import weight_digest

ARCHITECTURES = tuple(ARCHITECTURE_TABLE)
GGUF_BLOCKS = "gguf_blocks"  # key of config.json in a converted .gguf: how most of its linears were stored
NOT_GEOMETRY = ("raw", "eos_token_ids", "bos_token_id", "float8_block", "held_4_bits")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
ROPE_KEYS = {  # what each scaled type cannot do without
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
DTYPES = ("float32", "bfloat16", "float16")
FLOAT8_CONFIGS = {"fp8": None, "compressed-tensors": "float-quantized"}  # quant_method -> its `format`: checkpoints whose weights are float8


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
    context_length: int  # max_position_embeddings; with yarn the scaled length if that is longer
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: JsonObject | None  # {"rope_type": "llama3" | "yarn" | "linear" | "dynamic", ...}; None: not scaled
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: tuple[int | None, ...]  # per layer: window in tokens, None = full attention
    hidden_act: str
    dtype: str  # "float32", "bfloat16" or "float16", as stored; of what is not in float8
    stores_float8: bool  # linears are float8 (e4m3) with scales
    float8_block: tuple[int, int]  # rows and columns of a weight that share a scale, where there is one a block
    held_4_bits: bool  # the .gguf that it was converted from had its linears in Q4_0 or Q4_1, which int4 brings back
    eos_token_ids: tuple[int, ...]  # config.json and generation_config.json together
    bos_token_id: int | None
    raw: JsonObject = field(repr=False)

    @classmethod
    def from_dir(cls, path: Path) -> "ModelConfig":
        """Read config.json (and generation_config.json). Raises StartupError naming what is missing or unsupported."""
        raw = _read_json(path / "config.json")
        name, architecture = _architecture(raw)
        num_layers, num_heads = _size(raw, "num_hidden_layers"), _size(raw, "num_attention_heads")
        hidden_size = _size(raw, "hidden_size")
        num_kv_heads = _size(raw, "num_key_value_heads", architecture.default_num_kv_heads or num_heads)
        head_dim = _size(raw, "head_dim", architecture.default_head_dim or hidden_size // num_heads)
        if num_heads % num_kv_heads or head_dim % 2:
            raise StartupError(
                f"config.json: {num_heads} heads, {num_kv_heads} KV heads, head_dim {head_dim}; heads must be a multiple of KV heads, head_dim even"
            )
        max_positions = _size(raw, "max_position_embeddings", architecture.default_context_length)
        rope_theta, rope_scaling = _rope(raw, max_positions)
        context_length = _context_length(max_positions, rope_scaling)
        attention_bias = bool(raw.get("attention_bias", False))
        return cls(
            architecture=name,
            hidden_size=hidden_size,
            intermediate_size=_size(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=_size(raw, "vocab_size"),
            context_length=context_length,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias if architecture.qkv_bias is None else architecture.qkv_bias,
            o_bias=attention_bias if architecture.o_bias is None else architecture.o_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) if architecture.mlp_bias is None else architecture.mlp_bias,
            qk_norm=architecture.qk_norm,
            # a window as long as the context never cuts anything
            sliding_window=tuple(w if w is not None and w < context_length else None for w in architecture.windows(raw, num_layers)),
            hidden_act=_one_of(raw.get("hidden_act", "silu"), ("silu", "swish"), "hidden_act"),
            dtype=_one_of(str(raw.get("dtype") or raw.get("torch_dtype") or "float32"), DTYPES, "dtype"),
            stores_float8=_stores_float8(raw),
            float8_block=_float8_block(raw),
            held_4_bits=raw.get(GGUF_BLOCKS) in ("Q4_0", "Q4_1"),
            eos_token_ids=_eos_token_ids(path, raw),
            bos_token_id=raw.get("bos_token_id"),
            raw=raw,
        )


def fingerprint(model_dir: Path) -> str:
    """Hex digest that differs when geometry or weights differ; compared in Hello (R8).

    Weights are sampled (files.py), so this takes milliseconds; how the checkpoint is cut into files does not matter.
    """
    config = ModelConfig.from_dir(model_dir)
    geometry = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in NOT_GEOMETRY}
    return hashlib.sha256(json.dumps(geometry, sort_keys=True).encode() + weight_digest(model_dir)).hexdigest()


def _read_json(path: Path) -> JsonObject:
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StartupError(f"{path} does not exist; --model needs a directory with config.json, tokenizer.json and *.safetensors") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise StartupError(f"{path} holds {type(raw).__name__}, not a JSON object")
    return raw


def _architecture(raw: JsonObject) -> tuple[str, Architecture]:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURE_TABLE:
            return name, ARCHITECTURE_TABLE[name]
    found = ", ".join(map(str, names)) or "none named in config.json"
    raise StartupError(f"architecture {found} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _size(raw: JsonObject, key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StartupError(f"config.json: {key} is {value!r}; a positive integer is needed")
    return value


def _one_of(value: str, supported: tuple[str, ...], key: str) -> str:
    if value not in supported:
        raise StartupError(f"config.json: {key} {value!r} is not supported; supported are {', '.join(supported)}")
    return value


def _float8_block(raw: JsonObject) -> tuple[int, int]:
    """transformers' default is 128 by 128."""
    rows, columns = (raw.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    return rows, columns


def _stores_float8(raw: JsonObject) -> bool:
    """Whether `quantization_config` says float8; StartupError when it says something else."""
    stated = raw.get("quantization_config")
    if not stated:
        return False
    method, stored_format = stated.get("quant_method"), stated.get("format")
    if method not in FLOAT8_CONFIGS or FLOAT8_CONFIGS[method] not in (None, stored_format):
        found = f"{method} {stored_format}" if stored_format else method
        raise StartupError(f"config.json: weights quantised as {found} are not read; fp8, compressed-tensors float-quantized and plain ones are")
    return True


def _rope(raw: JsonObject, max_positions: int) -> tuple[float, JsonObject | None]:
    """(theta, scaling); scaling has `rope_type` and every key its type needs."""
    parameters = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in parameters.values()):
        raise StartupError("config.json: rope_parameters by layer type are not supported; one set for all layers is")
    rope_type = _one_of(parameters.get("rope_type") or parameters.get("type") or "default", ROPE_TYPES, "rope_type")
    theta = float(parameters.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    if (parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise StartupError("config.json: partial_rotary_factor is not supported; the whole head must be rotated")
    if rope_type == "default":
        return theta, None
    if missing := [key for key in ROPE_KEYS[rope_type] if not isinstance(parameters.get(key), int | float)]:
        raise StartupError(f"config.json: rope type {rope_type} needs {', '.join(missing)}")
    parameters.pop("type", None)
    scaling = parameters | {"rope_type": rope_type}
    scaling["original_max_position_embeddings"] = (
        raw.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings") or max_positions
    )
    return theta, scaling


def _context_length(max_positions: int, rope_scaling: JsonObject | None) -> int:
    """Published yarn checkpoints keep max_position_embeddings at the length before scaling."""
    if rope_scaling is None or rope_scaling["rope_type"] != "yarn":
        return max_positions
    return max(max_positions, int(rope_scaling["original_max_position_embeddings"] * rope_scaling["factor"]))


def _eos_token_ids(path: Path, raw: JsonObject) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    sources = [raw, _read_json(generation)] if generation.exists() else [raw]
    ids: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [value] if value is not None else []
    return tuple(dict.fromkeys(ids))
