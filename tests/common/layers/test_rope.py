"""Frequencies and tables equal transformers'."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import cached_checkpoint
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from common.layers.rope import RopeTable, rope_frequencies
from common.models.config import ModelConfig

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn": YARN,
    "yarn_without_length": {"rope_type": "yarn", "factor": 2.0},
    "yarn_betas": YARN | {"factor": 40.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn_attention": YARN | {"attention_factor": 1.5},
    "yarn_mscale": YARN | {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_tables_equal_transformers(tmp_path: Path, case: str, head_dim: int) -> None:
    raw = json.loads((cached_checkpoint("llama") / "config.json").read_text())
    raw |= {"max_position_embeddings": 16384, "head_dim": head_dim, "rope_parameters": CASES[case] | {"rope_theta": 500000.0}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    oracle = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    config = ModelConfig.from_dir(tmp_path)
    inv_freq, attention_factor = rope_frequencies(config)
    torch.testing.assert_close(inv_freq, oracle.inv_freq, rtol=1e-6, atol=0)
    assert attention_factor == pytest.approx(oracle.attention_scaling)
    table = RopeTable.build(config, 3000, torch.device("cpu"))
    cos, sin = oracle(torch.empty(0), torch.arange(3000).unsqueeze(0))
    torch.testing.assert_close(table.cos, cos[0, :, : head_dim // 2], rtol=0, atol=1e-3)  # angles of 3000 rad have steps of 2e-4
    torch.testing.assert_close(table.sin, sin[0, :, : head_dim // 2], rtol=0, atol=1e-3)


def test_rotation_keeps_lengths_and_relative_angles() -> None:
    table = RopeTable.build(ModelConfig.from_dir(cached_checkpoint("llama")), 100, torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 16).unbind()

    def score(q_position: int, k_position: int) -> torch.Tensor:
        return (table.rotate(q, torch.tensor([q_position])) * table.rotate(k, torch.tensor([k_position]))).sum()

    torch.testing.assert_close(score(7, 3), score(94, 90), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(table.rotate(q, torch.tensor([50])).norm(), q.norm())
