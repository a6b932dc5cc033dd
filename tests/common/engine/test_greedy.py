"""Tokens and logits equal transformers', for every architecture, over chunks, decode steps and shuffled pages."""

from functools import cache
from typing import Literal

import numpy as np
import pytest
import torch
from paged_driver import PagedDriver, Row
from tiny_models import CHECKPOINTS, VOCAB_SIZE, WINDOW, cached_checkpoint, greedy_oracle, oracle_logits

from common.engine.batch import NON_FINITE
from common.engine.runner import ModelRunner

PAGE = 16
Backend = Literal["torch", "numba"]
BACKENDS: tuple[Backend, ...] = ("torch", "numba")


@cache
def runner_of(checkpoint: str, backend: Backend) -> ModelRunner:
    return ModelRunner(cached_checkpoint(checkpoint), page_size=PAGE, num_pages=64, attention_backend=backend)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((seed, num_tokens)).integers(0, 256, num_tokens).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_float32_logits_equal_transformers(checkpoint: str, backend: Backend) -> None:
    tokens, chunk, num_decoded = prompt(3 * PAGE + 5 + WINDOW), 37, 20
    expected = oracle_logits(cached_checkpoint(checkpoint), tokens)
    found = PagedDriver(runner_of(checkpoint, backend)).all_logits(tokens, chunk, num_decoded)
    prefix = len(tokens) - num_decoded
    after = [min(end, prefix) - 1 for end in range(chunk, prefix + chunk, chunk)] + list(range(prefix, len(tokens)))
    torch.testing.assert_close(found, expected[after], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_greedy_tokens_equal_transformers_over_chunks_and_decode(checkpoint: str) -> None:
    driver = PagedDriver(runner_of(checkpoint, "numba"))
    for num_tokens, chunk in ((1, 8), (PAGE - 1, 8), (PAGE, 64), (PAGE + 1, 16), (5 * PAGE + 3, 23), (2 * WINDOW, 2 * WINDOW)):
        tokens = prompt(num_tokens, seed=1)
        assert driver.generate(tokens, PAGE + 2, chunk) == greedy_oracle(cached_checkpoint(checkpoint), tokens, PAGE + 2), num_tokens


@pytest.mark.parametrize("checkpoint", ["llama_tied", "mistral_sliding", "qwen2_sliding", "qwen3"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_batches_with_cached_prefixes_equal_single_requests(checkpoint: str, backend: Backend) -> None:
    """Rows of different lengths, some with KV already in place, extend and decode together and get what they would get alone."""
    driver = PagedDriver(runner_of(checkpoint, backend), seed=2)
    rows = [Row(prompt(n, seed=3)) for n in (70, 1, PAGE, 45, 2 * PAGE + 1)]
    expected = [greedy_oracle(cached_checkpoint(checkpoint), row.token_ids, 6) for row in rows]
    driver.extend([(rows[0], 41), (rows[4], PAGE)])
    driver.extend([(rows[3], 44)])
    drawn = driver.extend([(rows[0], 29), (rows[1], 1), (rows[2], PAGE), (rows[3], 1), (rows[4], PAGE + 1)])
    outputs = [[token] for token in drawn.tolist()]
    for _ in range(5):
        for row, output in zip(rows, outputs, strict=True):
            row.token_ids.append(output[-1])
        for output, token in zip(outputs, driver.decode(rows).tolist(), strict=True):
            output.append(token)
    assert outputs == expected


def test_only_rows_that_sample_yield_tokens() -> None:
    driver = PagedDriver(runner_of("llama", "numba"))
    rows = [Row(prompt(n, seed=4)) for n in (9, 20, 30)]
    assert driver.extend([(rows[0], 5), (rows[1], 7)]).shape == (0,)
    drawn = driver.extend([(rows[1], 3), (rows[0], 4), (rows[2], 30)])
    assert drawn.tolist() == [greedy_oracle(cached_checkpoint("llama"), rows[i].token_ids, 1)[0] for i in (0, 2)]


@pytest.mark.parametrize("checkpoint", ["llama_tied", "qwen2_sliding", "qwen3_sliding"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_logits_stay_near_float32(checkpoint: str, backend: Backend) -> None:
    """Stated tolerance, against transformers in float32 on the same weights: on average 4 % of the logits' spread, which is what
    rounding to 2^-8 at every step makes of random weights, and not a quarter more than transformers' own bfloat16 is off."""
    tokens, num_decoded, model_dir = prompt(90, seed=5), 30, cached_checkpoint(checkpoint, dtype="bfloat16")
    exact, rounded = (oracle_logits(model_dir, tokens, dtype)[len(tokens) - num_decoded :].float() for dtype in (torch.float32, torch.bfloat16))
    runner = ModelRunner(model_dir, page_size=PAGE, num_pages=64, attention_backend=backend)
    assert runner.dtype == torch.bfloat16
    found = PagedDriver(runner).all_logits(tokens, 60, num_decoded)[1:]
    error = (found - exact).abs().mean()
    assert error < 0.04 * exact.std()
    assert error < 1.25 * (rounded - exact).abs().mean()


@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_any_page_size_gives_the_same_tokens(page_size: int) -> None:
    runner = ModelRunner(cached_checkpoint("mistral_sliding"), page_size=page_size, num_pages=2 + 128 // page_size)
    tokens = prompt(70, seed=6)
    assert PagedDriver(runner).generate(tokens, 20, 33) == greedy_oracle(cached_checkpoint("mistral_sliding"), tokens, 20)


def test_the_last_position_of_the_context_is_usable() -> None:
    driver = PagedDriver(runner_of("llama_yarn", "numba"))
    tokens = prompt(505, seed=7)
    assert driver.generate(tokens, 8, 128) == greedy_oracle(cached_checkpoint("llama_yarn"), tokens, 8)


def test_vocabulary_is_the_checkpoints() -> None:
    assert runner_of("llama", "torch").model_config.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_with_nan_fails_alone(backend: Backend, dtype: Literal["float32", "bfloat16"]) -> None:
    """A NaN that enters at an early token, even of an earlier chunk, is seen in its own request's tokens and in no other's."""
    runner = ModelRunner(cached_checkpoint("llama"), dtype=dtype, page_size=PAGE, num_pages=64, attention_backend=backend)
    runner.model.embedding[VOCAB_SIZE - 2] = float("nan")
    driver, clean_alone = PagedDriver(runner), Row(prompt(50, seed=8))
    expected = driver.extend([(clean_alone, 50)])
    broken, clean = Row([5, VOCAB_SIZE - 2, *prompt(60, seed=9)]), Row(prompt(50, seed=8))
    driver.extend([(broken, 32), (clean, 20)])
    drawn = driver.extend([(broken, 30), (clean, 30)])
    assert drawn[0] == NON_FINITE
    if dtype == "float32":  # bfloat16 rounds a prompt computed in two chunks differently
        assert drawn[1] == expected[0]
    broken.token_ids.append(1)
    clean.token_ids.append(int(drawn[1]))
    drawn = driver.decode([broken, clean])
    assert drawn[0] == NON_FINITE
    assert drawn[1] != NON_FINITE
