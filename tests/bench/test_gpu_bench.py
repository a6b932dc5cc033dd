"""The yardsticks of bench/gpu.py are those of the models it runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_engine import DECODE_GOAL, PREFILL_GOAL, SMALL, engine_results
from gpu_shapes import LLAMA_3_8B, TINY, Costs, Result, table

from common.layers.torch_ops import TorchOps
from common.models.config import ModelConfig
from common.models.decoder import Decoder


def config_of(raw: dict[str, Any], tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_dir(tmp_path)


def test_llama_3_8b_has_its_published_size(tmp_path: Path) -> None:
    config = config_of(LLAMA_3_8B, tmp_path)
    costs = Costs(config, 2)
    norms = (2 * config.num_layers + 1) * config.hidden_size
    assert config.num_layers * costs.layer_params + 2 * costs.head_params + norms == 8_030_261_248  # the model card's 8.03B
    assert costs.kv_token_nbytes == 128 << 10


def test_bytes_of_a_decode_step_are_those_of_the_weights_it_reads(tmp_path: Path) -> None:
    """All but the embedding, of which a step reads its rows, and the norms."""
    config = config_of(TINY, tmp_path)
    model = Decoder(config, TorchOps(), torch.float32, torch.device("cpu"))
    linears = sum(linear.weight.nbytes for linear in model.linears())
    costs = Costs(config, 4)
    assert costs.decode_nbytes(3, 10) == linears + 3 * model.embedding[0].nbytes + 30 * costs.kv_token_nbytes
    assert costs.kv_token_nbytes == 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head_dim, float32


def test_flops_of_a_prefill_are_those_of_its_products(tmp_path: Path) -> None:
    config, num_tokens, num_cached = config_of(TINY, tmp_path), 7, 3
    *linears, head = Decoder(config, TorchOps(), torch.float32, torch.device("cpu")).linears()
    flops = 2 * head.num_in * head.num_out
    for linear in linears:
        flops += 2 * num_tokens * linear.num_in * linear.num_out
    for query in range(num_cached, num_cached + num_tokens):
        for _ in range(config.num_layers * config.num_heads):
            flops += 2 * 2 * config.head_dim * (query + 1)  # q K^T, weights V
    assert Costs(config, 4).prefill_flops(num_tokens, num_cached) == flops


def test_windows_are_not_counted(tmp_path: Path) -> None:
    windowed = TINY | {"architectures": ["MistralForCausalLM"], "sliding_window": 32}
    with pytest.raises(AssertionError, match="full attention"):
        Costs(config_of(windowed, tmp_path), 2)


def test_table_says_which_goals_are_met() -> None:
    lines = table([Result("copy", "4100 GB/s"), Result("decode", "5.10 ms", 0.853, 0.85), Result("prefill", "99 ms", 0.5999, 0.6)]).splitlines()
    assert lines[0].split() == ["measured", "share", "goal"]
    assert lines[1].split() == ["copy", "4100", "GB/s"]
    assert lines[2].split() == ["decode", "5.10", "ms", "85%", "85%", "met"]
    assert lines[3].split() == ["prefill", "99", "ms", "60%", "60%", "missed"]


def test_every_line_is_measured_where_there_is_no_gpu() -> None:
    """The same code, small: a line for each device figure, each batch at each context, each prompt; and what does not fit is said."""
    results = list(engine_results(replace(SMALL, contexts=(16, 400)), "cpu", "torch"))
    by_name = {one.what: one for one in results[2:]}
    assert [one.goal for one in results[:2]] == [None, None]
    for num_rows in SMALL.batches:
        assert by_name.pop(f"decode, batch {num_rows} at context 400").measured == "no room for its KV"
        assert by_name[f"decode, batch {num_rows} at context 16"].goal == DECODE_GOAL
    assert by_name[f"prefill, {SMALL.chunks[0]} tokens"].goal == PREFILL_GOAL
    assert len(by_name) == len(SMALL.batches) + len(SMALL.chunks)
    assert all(one.share is not None and one.share > 0 for one in by_name.values())
