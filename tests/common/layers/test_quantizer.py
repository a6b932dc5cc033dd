"""--quantization: what it chooses, and the sentence where device, dtype or model cannot have it."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import cached_checkpoint

from common.errors import StartupError
from common.layers.quantized_cpu import BlockQuantizer
from common.layers.quantized_fp8 import Float8Quantizer
from common.layers.quantizer import make_quantizer
from common.models.config import ModelConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig.from_dir(cached_checkpoint("llama"))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_without_the_flag_weights_stay_as_they_are(config: ModelConfig) -> None:
    assert make_quantizer("auto", config, torch.bfloat16, CPU, 1) is None
    assert make_quantizer("auto", replace(config, stores_float8=True), torch.bfloat16, CPU, 1) is None


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_blocks_on_cpu(config: ModelConfig, quantization: Any) -> None:
    assert isinstance(make_quantizer(quantization, config, torch.bfloat16, CPU, 1), BlockQuantizer)


def test_float8_where_the_checkpoint_or_the_flag_says_so(config: ModelConfig, hopper: None) -> None:
    assert isinstance(make_quantizer("fp8", config, torch.bfloat16, CUDA, 1), Float8Quantizer)
    assert isinstance(make_quantizer("auto", replace(config, stores_float8=True), torch.bfloat16, CUDA, 1), Float8Quantizer)
    assert make_quantizer("auto", replace(config, stores_float8=True), torch.float32, CUDA, 1) is None
    assert make_quantizer("none", replace(config, stores_float8=True), torch.bfloat16, CUDA, 1) is None


@pytest.mark.parametrize(
    ("quantization", "dtype", "device", "sentence"),
    [
        ("int4", torch.float32, CPU, "computes in bfloat16"),
        ("fp8", torch.float32, CUDA, "computes in bfloat16"),
        ("int8", torch.bfloat16, CUDA, "on cuda use fp8"),
        ("fp8", torch.bfloat16, CPU, "on cpu use int8 or int4"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_what_cannot_be_is_a_sentence(config: ModelConfig, quantization: Any, dtype: torch.dtype, device: torch.device, sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        make_quantizer(quantization, config, dtype, device, 1)


def test_an_older_gpu_is_a_sentence(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(StartupError, match=r"needs compute capability 8\.9 or later; this GPU has 8\.0"):
        make_quantizer("fp8", config, torch.bfloat16, CUDA, 1)
    assert make_quantizer("auto", replace(config, stores_float8=True), torch.bfloat16, CUDA, 1) is None


def test_sizes_that_fill_no_block(config: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StartupError, match=r"in blocks of 32; this model has hidden size 72"):
        make_quantizer("int4", replace(config, hidden_size=72), torch.bfloat16, CPU, 1)
    with caplog.at_level(logging.WARNING):
        assert make_quantizer("int4", replace(config, intermediate_size=100), torch.bfloat16, CPU, 1) is not None
    assert "intermediate size 100, no multiple of 32, stay in bfloat16" in caplog.text
