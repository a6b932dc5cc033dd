"""What a step of a dense decoder must move and compute at the least: the yardsticks of bench/gpu.py. Numbers only, no device."""

from dataclasses import dataclass
from typing import Any

from common.models.config import ModelConfig

LLAMA_3_8B: dict[str, Any] = {  # config.json of meta-llama/Meta-Llama-3-8B, with room for an 8192-token prompt and its answer
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
TINY: dict[str, Any] = LLAMA_3_8B | {  # runs anywhere in a moment
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one model whose every layer attends everything (no sliding window)."""

    config: ModelConfig
    item_nbytes: int  # of weights, activations and KV

    def __post_init__(self) -> None:
        assert not any(self.config.sliding_window), "the counts are of full attention"

    @property
    def layer_params(self) -> int:
        """Of the four linears of a layer; biases and norms are a ten-thousandth of them."""
        config = self.config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return config.hidden_size * (q_size + 2 * kv_size) + q_size * config.hidden_size + 3 * config.hidden_size * config.intermediate_size

    @property
    def head_params(self) -> int:
        return self.config.hidden_size * self.config.vocab_size

    @property
    def kv_token_nbytes(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim * self.item_nbytes

    def decode_nbytes(self, num_rows: int, context_len: int) -> int:
        """Read by one decode step: every linear once, the rows' KV, their embeddings. context_len: tokens a row attends."""
        weights = self.config.num_layers * self.layer_params + self.head_params + num_rows * self.config.hidden_size
        return weights * self.item_nbytes + num_rows * context_len * self.kv_token_nbytes

    def prefill_flops(self, num_tokens: int, num_cached: int = 0) -> int:
        """One extend of one request, its head for the last token only. A multiplication and its addition are two."""
        config = self.config
        linears = 2 * (num_tokens * config.num_layers * self.layer_params + self.head_params)
        num_scores = num_tokens * num_cached + num_tokens * (num_tokens + 1) // 2  # causal: a token attends itself and those before it
        return linears + config.num_layers * 4 * num_scores * config.num_heads * config.head_dim


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    what: str
    measured: str
    share: float | None = None  # of what the device was measured to do; None: there is nothing to hold it against
    goal: float | None = None


def table(results: list[Result]) -> str:
    """Aligned columns, a header, and whether each goal is met."""
    rows = [("", "measured", "share", "goal", "")]
    for one in results:
        share, goal = ("" if value is None else f"{value:.0%}" for value in (one.share, one.goal))
        met = "" if one.share is None or one.goal is None else "met" if one.share >= one.goal else "missed"
        rows.append((one.what, one.measured, share, goal, met))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
