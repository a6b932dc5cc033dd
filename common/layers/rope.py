"""Rotary position embedding: which angle each pair of a head's elements turns by at each position.

Element j and element j + head_dim/2 form a pair (the layout of Llama checkpoints). Frequencies follow Su et al. 2021 and the
published ways of stretching them: linear interpolation, dynamic NTK, llama3's by-wavelength, and YaRN (Peng et al. 2023), which
also scales cos and sin by its attention factor. Dynamic NTK changes only beyond max_position_embeddings, which no request may
exceed, so up to there it is the unscaled form.
"""

import math
from dataclasses import dataclass

import torch

from common.config import JsonObject
from common.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class RopeTable:
    cos: torch.Tensor  # float32 [positions, head_dim / 2]
    sin: torch.Tensor

    @classmethod
    def build(cls, config: ModelConfig, num_positions: int, device: torch.device) -> "RopeTable":
        inv_freq, attention_factor = rope_frequencies(config)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq)
        return cls((angles.cos() * attention_factor).to(device), (angles.sin() * attention_factor).to(device))

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x: float32 [T, heads, head_dim], positions: int64 [T]."""
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def rope_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """(float32 [head_dim / 2] radians a token, factor on cos and sin)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = torch.pow(torch.tensor(config.rope_theta), exponents).reciprocal()
    scaling = config.rope_scaling
    if scaling is None or scaling["rope_type"] == "dynamic":
        return inv_freq, 1.0
    if scaling["rope_type"] == "linear":
        return inv_freq / float(scaling["factor"]), 1.0
    if scaling["rope_type"] == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    return _yarn(inv_freq, config, scaling)


def _llama3(inv_freq: torch.Tensor, scaling: JsonObject) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, the band between blended."""
    turns = float(scaling["original_max_position_embeddings"]) * inv_freq / (2 * math.pi)  # over the original context
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * inv_freq / float(scaling["factor"]) + kept * inv_freq


def _yarn(inv_freq: torch.Tensor, config: ModelConfig, scaling: JsonObject) -> tuple[torch.Tensor, float]:
    """Dimensions that turn more than beta_fast times over the original context are kept, under beta_slow stretched."""
    factor, dim = scaling["factor"], config.head_dim

    def dimension_turning(turns: float) -> float:
        return dim * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension_turning(scaling.get("beta_fast") or 32), dimension_turning(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001  # a step instead of a division by zero
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return inv_freq / factor * stretched + inv_freq * (1 - stretched), _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: JsonObject) -> float:
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)

    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return mscale(numerator) / mscale(denominator) if numerator and denominator else mscale(1.0)
