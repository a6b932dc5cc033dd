"""A model on quantised weights is still that model: the embedded one reads English as well as in bfloat16, and answers."""

from functools import cache
from pathlib import Path

import pytest
import torch
from paged_driver import PagedDriver
from quantization import WINDOW, english, load, quality, read
from tiny_models import cached_checkpoint

from common.engine.runner import ModelRunner
from common.models.acquire import resolve_model
from common.models.decoder import Decoder
from common.server.tokenizer import Tokenizer

Logits = list[torch.Tensor]
NUM_TOKENS = 256


@pytest.fixture(scope="module")
def demo_model() -> Path:
    return resolve_model("demo", print)


@cache
def logits_of(model_dir: Path, quantization: str, dtype: torch.dtype) -> tuple[torch.Tensor, Logits, int]:
    """(the text, logits after each of its tokens, bytes of the model's weights)."""
    windows = english(model_dir, WINDOW)[:, :NUM_TOKENS]
    model = load(model_dir, quantization, dtype)  # type: ignore[arg-type]
    return windows, read(model, windows), model.nbytes


@pytest.mark.parametrize(
    ("quantization", "least_agreement", "most_megabytes"),
    [
        ("int8", 0.90, 145),  # 95.4 % over 2560 tokens, 143.0 MB
        ("int4", 0.93, 98),  # 97.2 %, 96.5 MB: the file's own four bits
    ],
)
def test_the_embedded_model_reads_as_well_as_in_bfloat16(
    demo_model: Path, quantization: str, least_agreement: float, most_megabytes: float
) -> None:
    windows, plain, plain_nbytes = logits_of(demo_model, "none", torch.bfloat16)
    _, ours, nbytes = logits_of(demo_model, quantization, torch.bfloat16)
    bfloat16, found = (quality(logits, windows, plain, plain) for logits in (plain, ours))
    assert 4 < bfloat16.perplexity < 30  # of English, by a model that has learnt it
    assert found.perplexity < 1.02 * bfloat16.perplexity
    assert found.agreement > least_agreement
    assert nbytes < most_megabytes * 1e6 < plain_nbytes / 2


def test_int4_is_as_near_to_float32_as_bfloat16(demo_model: Path) -> None:
    """The file holds four bits; what is lost on the way through bfloat16 comes back."""
    windows, exact, _ = logits_of(demo_model, "none", torch.float32)
    _, plain, _ = logits_of(demo_model, "none", torch.bfloat16)
    _, ours, _ = logits_of(demo_model, "int4", torch.bfloat16)
    assert quality(ours, windows, plain, exact).logits_error < 1.15 * quality(plain, windows, plain, exact).logits_error


def test_int4_answers_through_the_engine(demo_model: Path) -> None:
    tokenizer = Tokenizer.from_dir(demo_model)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(question), add_special_tokens=False)
    runner = ModelRunner(demo_model, dtype="bfloat16", quantization="int4", num_pages=16, max_running_requests=1, context_length=128)
    answer = PagedDriver(runner).generate(prompt, 7, chunk=16)
    assert tokenizer.decode(answer) == "The capital of France is Paris."


@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama_bias", "qwen3"])
def test_every_linear_is_quantised_in_its_place(name: str) -> None:
    """Fused projections, biases, tied embeddings: eight bits a weight change no logit by much."""
    model_dir, ids = cached_checkpoint(name), torch.arange(40)[None]
    exact, ours = (read(load(model_dir, form, dtype), ids)[0] for form, dtype in (("none", torch.float32), ("int8", torch.bfloat16)))  # type: ignore[arg-type]
    plain = read(load(model_dir, "none", torch.bfloat16), ids)[0]
    error, plain_error = ((logits - exact).norm() / exact.norm() for logits in (ours, plain))
    assert error < 2 * plain_error + 0.02
    model: Decoder = load(model_dir, "int8", torch.bfloat16)
    assert all(linear.weight.numel() == 0 for linear in model.linears())
    assert (model.embedding.numel() == 0) == model.config.tie_word_embeddings
