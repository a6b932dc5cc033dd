"""The engine on a CUDA device: its tokens are those of float32 on a CPU, in graphs and without, overlapped and not; it never waits in a launch."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from no_waiting import no_waiting
from paged_driver import PagedDriver, Row
from scheduler_harness import Node
from tiny_models import CHECKPOINTS, cached_checkpoint, greedy_oracle, oracle_logits
from transformers import LlamaConfig, LlamaForCausalLM

from common.config import AttentionName, DType
from common.engine.runner import ModelRunner

PAGE, MAX_ROWS = 16, 9
tiny_models._RECIPES["llama_head_64"] = (LlamaForCausalLM, LlamaConfig, {"head_dim": 64})  # the smallest that FlashInfer has
compiles = pytest.mark.timeout(900)  # FlashInfer's kernels, by nvcc, when they are met for the first time


@cache
def runner_of(
    checkpoint: str, *, graphs: bool = True, attention_backend: AttentionName = "triton", dtype: DType = "float32", num_pages: int = 96
) -> ModelRunner:
    """Kept for the session. Warmed up; with `graphs` every bucket is a graph."""
    if attention_backend == "flashinfer":
        pytest.importorskip("flashinfer")
    runner = ModelRunner(
        cached_checkpoint(checkpoint),
        device="cuda",
        dtype=dtype,
        page_size=PAGE,
        num_pages=num_pages,
        max_running_requests=MAX_ROWS,
        attention_backend=attention_backend,
        cuda_graph_max_bs=None if graphs else 0,
    )
    runner.warmup()
    return runner


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((seed, num_tokens)).integers(0, 256, num_tokens).tolist()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_greedy_tokens_equal_transformers_on_a_cpu(checkpoint: str, graphs: bool) -> None:
    driver = PagedDriver(runner_of(checkpoint, graphs=graphs))
    for num_tokens, chunk in ((1, 8), (PAGE - 1, 8), (PAGE, 64), (PAGE + 1, 16), (5 * PAGE + 3, 23), (200, 200)):
        tokens = prompt(num_tokens, seed=1)
        assert driver.generate(tokens, PAGE + 2, chunk) == greedy_oracle(cached_checkpoint(checkpoint), tokens, PAGE + 2), num_tokens


@pytest.mark.parametrize("checkpoint", ["llama", "qwen2_sliding"])
@pytest.mark.parametrize("attention_backend", ["triton", "torch"])
def test_rows_come_and_go_in_buckets(checkpoint: str, attention_backend: AttentionName) -> None:
    """From one row to all and back: every bucket is used full and padded, and each row gets what it would get alone."""
    driver = PagedDriver(runner_of(checkpoint, graphs=attention_backend == "triton", attention_backend=attention_backend), seed=2)
    rows = [Row(prompt(5 + 9 * place, seed=3)) for place in range(MAX_ROWS)]
    outputs: list[list[int]] = [[] for _ in rows]
    for step in range(2 * MAX_ROWS):
        live = [place for place in range(MAX_ROWS) if place <= step < 2 * MAX_ROWS - place]
        if step < MAX_ROWS:
            drawn = driver.extend([(rows[step], len(rows[step].token_ids))])
            live.remove(step)
            outputs[step].append(int(drawn[0]))
        if live:
            for place in live:
                rows[place].token_ids.append(outputs[place][-1])
            for place, token in zip(live, driver.decode([rows[place] for place in live]).tolist(), strict=True):
                outputs[place].append(token)
    for row, output in zip(rows, outputs, strict=True):
        asked = row.token_ids[: len(row.token_ids) - len(output) + 1]
        assert output == greedy_oracle(cached_checkpoint(checkpoint), asked, len(output))
        driver.release(row)


@compiles
@pytest.mark.parametrize("attention_backend", ["triton", "flashinfer"])
def test_bfloat16_logits_stay_near_float32(attention_backend: AttentionName) -> None:
    """Not a quarter further off than transformers in bfloat16 is, on a CPU."""
    tokens, num_decoded, model_dir = prompt(90, seed=5), 30, cached_checkpoint("llama_head_64", dtype="bfloat16")
    exact, rounded = (oracle_logits(model_dir, tokens, dtype)[len(tokens) - num_decoded :].float() for dtype in (torch.float32, torch.bfloat16))
    runner = runner_of("llama_head_64", attention_backend=attention_backend, dtype="bfloat16")
    found = PagedDriver(runner).all_logits(tokens, 60, num_decoded)[1:].float().cpu()
    assert (found - exact).abs().mean() < 1.25 * (rounded - exact).abs().mean()


@compiles
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("attention_backend", ["triton", "flashinfer"])
def test_a_launch_does_not_wait_for_the_device(attention_backend: AttentionName, graphs: bool) -> None:
    """Extend and decode, one behind the other; their tokens are had later, and are no others than without."""
    runner = runner_of("llama_head_64", attention_backend=attention_backend, dtype="bfloat16", graphs=graphs)
    driver, row, other = PagedDriver(runner, seed=4), Row(prompt(20)), Row(prompt(30))
    for each in (row, other):
        each.token_ids.append(int(driver.extend([(each, len(each.token_ids))])[0]))
    driver.decode([row])
    row.token_ids.append(7)
    with no_waiting():
        launched = runner.launch(driver.decode_batch([row]))
        assert not launched.done()
        assert launched.ready is not None
        assert not launched.ready.query()
    first = launched.tokens()
    assert launched.done()
    third = Row(prompt(25, seed=8))
    batch = driver.extend_batch([(third, 25)])
    with no_waiting():
        launched = runner.launch(batch)
    drawn = launched.tokens()
    assert (len(first), len(drawn)) == (1, 1)
    assert min(first[0], drawn[0]) >= 0


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_node_answers_as_transformers_do(overlap: bool, graphs: bool) -> None:
    """More requests than rows, of all lengths: greedy ones get transformers' tokens, drawn ones the same in every form of the loop."""
    node = Node(
        page_size=PAGE, num_pages=96, chunk=24, max_running=MAX_ROWS, context_length=512, runner=runner_of("llama", graphs=graphs), overlap=overlap
    )  # type: ignore[arg-type]
    lengths = (1, PAGE - 1, PAGE, PAGE + 1, 23, 24, 25, 75, 100, 33, 60, 7)
    greedy = [node.submit(prompt(length, seed=6), 20, ignore_eos=True) for length in lengths]
    drawn = [node.submit(prompt(length, seed=7), 20, ignore_eos=True, temperature=1.0, top_p=0.9, seed=length) for length in lengths]
    node.run_until_answered(*greedy, *drawn)
    for rid, length in zip(greedy, lengths, strict=True):
        assert node.answers[rid].token_ids == greedy_oracle(cached_checkpoint("llama"), prompt(length, seed=6), 20)
    assert [node.answers[rid].token_ids for rid in drawn] == drawn_serially()


def test_changed_logits_give_the_tokens_of_a_cpu() -> None:
    """Penalties, biases and a minimum of tokens, in one batch with rows that have none."""
    penalties = ({"repetition_penalty": 1.3}, {"presence_penalty": 0.7, "frequency_penalty": 0.4})
    changes: tuple[dict[str, Any], ...] = ({}, *penalties, {"logit_bias": ((5, 4.0), (9, -100.0))}, {"min_tokens": 12})
    answers = []
    for runner in (runner_of("llama"), ModelRunner(cached_checkpoint("llama"), page_size=PAGE, num_pages=96, max_running_requests=MAX_ROWS)):
        node = Node(page_size=PAGE, num_pages=96, chunk=24, max_running=MAX_ROWS, context_length=512, runner=runner)  # type: ignore[arg-type]
        rids = [node.submit(prompt(30 + place, seed=9), 24, **change) for place, change in enumerate(changes)]
        node.run_until_answered(*rids)
        answers.append([node.answers[rid].token_ids for rid in rids])
    assert answers[0] == answers[1]


@cache
def drawn_serially() -> list[list[int]]:
    """One at a time, without graphs and overlap."""
    node = Node(
        page_size=PAGE, num_pages=96, chunk=24, max_running=MAX_ROWS, context_length=512, runner=runner_of("llama", graphs=False), overlap=False
    )  # type: ignore[arg-type]
    answers = []
    for length in (1, PAGE - 1, PAGE, PAGE + 1, 23, 24, 25, 75, 100, 33, 60, 7):
        rid = node.submit(prompt(length, seed=7), 20, ignore_eos=True, temperature=1.0, top_p=0.9, seed=length)
        node.run_until_answered(rid)
        answers.append(node.answers[rid].token_ids)
    return answers
