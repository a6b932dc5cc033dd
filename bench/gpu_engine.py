"""Steps of the engine on one device beside what that device was measured to copy and multiply. The parts of bench/gpu.py without a network.

The model is random: drawn on the device, no checkpoint. What is timed is ModelRunner.launch(), with the step before looked at after the
next one was launched, as the overlapped scheduler does it; so the host's work counts where it is not hidden.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu_shapes import LLAMA_3_8B, TINY, Costs, Result
from numpy.typing import NDArray

from common.config import AttentionName, Device
from common.engine.batch import NO_UPDATES, DecodeBatch, ExtendBatch, RowUpdates, SamplingBatch
from common.engine.runner import ModelRunner
from common.models.decoder import Decoder

DECODE_GOAL, PREFILL_GOAL = 0.85, 0.6  # shares of the measured copy bandwidth and of the measured matmul rate
PAGE_SIZE = 16
STEPS = 20  # decode steps in a row, as one measurement


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and how often."""

    model: dict[str, Any]
    copy_nbytes: int
    matmul_size: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    num_pages: int | None = None  # of the pool; None: what the device's memory holds
    rounds: int = 5


FULL = Plan(LLAMA_3_8B, 4 << 30, 8192, (64, 128, 256), (1024, 4096), (2048, 8192))
SMALL = Plan(TINY, 1 << 20, 128, (2, 3), (16, 40), (32, 64), num_pages=16, rounds=2)


def engine_results(plan: Plan, device: Device, attention_backend: AttentionName) -> Iterator[Result]:
    """One after the other, as they are measured."""
    copied = copy_nbytes_s(plan, device)
    yield Result("memory, copied (read + written)", f"{copied / 1e9:.0f} GB/s")
    multiplied = matmul_flops_s(plan, device)
    yield Result(f"bfloat16 matmul, {plan.matmul_size} cubed", f"{multiplied / 1e12:.1f} TFLOP/s")
    runner = random_runner(plan, device, attention_backend)
    costs = Costs(runner.model_config, runner.dtype.itemsize)
    for num_rows in plan.batches:
        for context_len in plan.contexts:
            what = f"decode, batch {num_rows} at context {context_len}"
            if num_rows * pages_for(context_len + STEPS, runner) >= runner.kv.num_pages:
                yield Result(what, "no room for its KV")
                continue
            step_s = decode_step_s(runner, num_rows, context_len, plan.rounds)
            rate = costs.decode_nbytes(num_rows, context_len + STEPS // 2) / step_s
            yield Result(what, f"{step_s * 1e3:.2f} ms, {rate / 1e9:.0f} GB/s", rate / copied, DECODE_GOAL)
    for num_tokens in plan.chunks:
        step_s = extend_step_s(runner, num_tokens, plan.rounds)
        rate = costs.prefill_flops(num_tokens) / step_s
        yield Result(f"prefill, {num_tokens} tokens", f"{step_s * 1e3:.1f} ms, {rate / 1e12:.1f} TFLOP/s", rate / multiplied, PREFILL_GOAL)


def copy_nbytes_s(plan: Plan, device: Device) -> float:
    source = torch.ones(plan.copy_nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * plan.copy_nbytes / median_s(lambda: target.copy_(source), device, plan.rounds)


def matmul_flops_s(plan: Plan, device: Device) -> float:
    a, b = (torch.randn(plan.matmul_size, plan.matmul_size, device=device).bfloat16() for _ in range(2))
    return float(2 * plan.matmul_size**3 / median_s(lambda: a @ b, device, plan.rounds))


def median_s(run: Callable[[], object], device: Device, rounds: int, repeats: int = 10) -> float:
    """Of one run, when it is repeated without a pause."""
    taken_s = []
    for _ in range(rounds + 1):
        synchronize(device)
        start_s = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize(device)
        taken_s.append((time.perf_counter() - start_s) / repeats)
    return statistics.median(taken_s[1:])  # the first one warms up


def synchronize(device: Device) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def random_runner(plan: Plan, device: Device, attention_backend: AttentionName) -> ModelRunner:
    """An engine on a model that is nowhere on disk but for its config.json, warmed up."""
    if device == "cuda":
        torch.cuda.empty_cache()  # of what was copied and multiplied
    with tempfile.TemporaryDirectory() as directory, mock.patch("common.engine.runner.load_weights", random_weights):
        (Path(directory) / "config.json").write_text(json.dumps(plan.model))
        runner = ModelRunner(
            Path(directory),
            device=device,
            page_size=PAGE_SIZE,
            num_pages=plan.num_pages,
            mem_fraction=0.93,  # the rest holds a prompt's activations and what graphs and libraries take
            max_running_requests=max(plan.batches),
            attention_backend=attention_backend,
        )
    runner.kv.tensor.normal_()  # zeros would take less power than KV does
    runner.warmup()
    return runner


def random_weights(model: Decoder, *_: object, **__: object) -> None:
    """In place of the loader."""
    for name, tensor in model.tensors().items():
        tensor.normal_(1.0 if "norm" in name else 0.0, 0.02)
    model.pack()


def decode_step_s(runner: ModelRunner, num_rows: int, context_len: int, rounds: int) -> float:
    """One of STEPS steps in a row, the rows attending context_len tokens at first. A step before them, untimed, brings the rows their pages."""
    rows, sampling, taken_s = np.arange(num_rows, dtype=np.int32), greedy(num_rows), []
    for _ in range(rounds + 1):
        updates = given_rows(runner, num_rows, context_len + STEPS, context_len - 1)
        before = runner.launch(DecodeBatch(updates, rows, np.full(num_rows, context_len - 1, np.int32), sampling))
        before.tokens()
        start_s = time.perf_counter()
        for step in range(STEPS):
            launched = runner.launch(DecodeBatch(NO_UPDATES, rows, np.full(num_rows, context_len + step, np.int32), sampling))
            before.tokens()
            before = launched
        drawn = before.tokens()
        taken_s.append((time.perf_counter() - start_s) / STEPS)
        assert (drawn >= 0).all(), "logits that are not finite"
    return statistics.median(taken_s[1:])


def extend_step_s(runner: ModelRunner, num_tokens: int, rounds: int) -> float:
    """One prompt as one chunk, nothing cached, its first token drawn."""
    one, lens = np.zeros(1, np.int32), np.array([num_tokens], np.int32)
    ids = np.random.default_rng(0).integers(0, runner.model_config.vocab_size, num_tokens)
    taken_s = []
    for _ in range(rounds + 1):
        updates = given_rows(runner, 1, num_tokens, None)
        synchronize_runner(runner)
        start_s = time.perf_counter()
        drawn = runner.launch(ExtendBatch(updates, one, ids, lens, lens, one, greedy(1))).tokens()
        assert drawn[0] >= 0, "logits that are not finite"
        taken_s.append(time.perf_counter() - start_s)
    return statistics.median(taken_s[1:])


def synchronize_runner(runner: ModelRunner) -> None:
    synchronize("cuda" if runner.device.type == "cuda" else "cpu")


def given_rows(runner: ModelRunner, num_rows: int, num_tokens: int, context_len: int | None) -> RowUpdates:
    """Rows 0 to num_rows - 1 get pages for num_tokens each, scattered over the pool as a long-running node's are. They decode, attending
    context_len tokens in the first step, unless that is None."""
    rows, per_row = np.arange(num_rows, dtype=np.int32), pages_for(num_tokens, runner)
    pages = np.random.default_rng(0).permutation(runner.kv.num_pages - 1)[: num_rows * per_row].astype(np.int32) + 1
    joined = rows if context_len is not None else rows[:0]
    return RowUpdates(
        page_rows=np.repeat(rows, per_row),
        page_columns=np.tile(np.arange(per_row, dtype=np.int32), num_rows),
        page_ids=pages,
        new_rows=rows,
        sampling=greedy(num_rows),
        joined_rows=joined,
        joined_token_ids=joined.astype(np.int64),
        joined_context_lens=np.full(len(joined), context_len or 0, np.int32),
    )


def pages_for(num_tokens: int, runner: ModelRunner) -> int:
    return -(-num_tokens // runner.kv.page_size)


def greedy(num_rows: int) -> SamplingBatch:
    zeros, ones = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
    top_k: NDArray[np.int32] = np.full(num_rows, -1, np.int32)
    return SamplingBatch(zeros, ones, top_k, zeros, np.zeros(num_rows, np.int64))
