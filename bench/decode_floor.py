"""How far a whole step of ModelRunner is from its bare linear layers, measured in the same run.

    python bench/decode_floor.py MODEL_DIR [--threads 1] [--rounds 30]

For each step (decode batches at a context, an extend batch) three things take turns: the step, the engine's own linears alone (blocked
weights, head only for the rows that sample), and F.linear on plain weights of the same shapes. Other load on the machine then hits
all three alike. Ratios are of medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from common.engine.batch import NO_SAMPLING, NO_UPDATES, DecodeBatch, ExtendBatch, RowUpdates, SamplingBatch
from common.engine.runner import ModelRunner
from common.layers.linear import Linear

Step = Callable[[], object]
Int32s = NDArray[np.int32]
WARM_TURNS = 2  # not counted: they fill caches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model_dir", type=Path, help="directory of safetensors")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default: 1)")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each step (default: 30; extend a third of it)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="default: bfloat16")
    parser.add_argument("--attention-backend", default="auto", choices=["auto", "numba", "torch"], help="default: auto")
    parser.add_argument("--context", type=int, default=320, help="tokens before the first decode step (default: 320)")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32], help="decode batch sizes (default: 1 8 32)")
    parser.add_argument("--extend", type=int, nargs="*", default=[256], help="prompt lengths of extend steps (default: 256)")
    options = parser.parse_args()
    page_size, max_rows = 16, max([1, *options.batches])
    pages_per_row = -(-max(options.context + options.rounds + WARM_TURNS, *options.extend, 1) // page_size)
    runner = ModelRunner(
        options.model_dir,
        dtype=options.dtype,
        page_size=page_size,
        num_pages=1 + max_rows * pages_per_row,
        max_running_requests=max_rows,
        threads=options.threads,
        attention_backend=options.attention_backend,
    )
    runner.warmup()
    floors = Floors(runner)
    print(f"{'step':24} {'ms':>8} {'linears':>8} {'ratio':>6} {'F.linear':>9} {'ratio':>6}   (medians; best of step {'/'} linears)")
    for batch_size in options.batches:
        decode = DecodeSteps(runner, batch_size, options.context, pages_per_row)
        report(f"decode {batch_size} at {options.context}", decode.step, floors, batch_size, batch_size, options.rounds)
    for num_tokens in options.extend:
        step = partial(runner.launch, extend_batch(num_tokens, pages_per_row))
        report(f"extend {num_tokens}", step, floors, num_tokens, 1, max(3, options.rounds // 3))


class Floors:
    """The linears of one step, alone."""

    def __init__(self, runner: ModelRunner) -> None:
        model = runner.model
        self._dtype = runner.dtype
        self._linears = model.linears()
        self._shapes = [(linear.num_in, linear.num_out) for linear in self._linears]
        self._plain = [torch.randn(num_out, num_in).to(runner.dtype) for num_in, num_out in self._shapes]

    def engine(self, num_rows: int, num_sampled: int) -> Step:
        inputs = self._inputs(num_rows, num_sampled)
        return lambda: _run_all(self._linears, inputs)

    def plain(self, num_rows: int, num_sampled: int) -> Step:
        inputs = self._inputs(num_rows, num_sampled)

        def run() -> None:
            for weight, x in zip(self._plain, inputs, strict=True):
                F.linear(x, weight)

        return run

    def _inputs(self, num_rows: int, num_sampled: int) -> list[torch.Tensor]:
        rows = [num_rows] * (len(self._shapes) - 1) + [num_sampled]
        return [torch.randn(n, num_in).to(self._dtype) for n, (num_in, _) in zip(rows, self._shapes, strict=True)]


def _run_all(linears: list[Linear], inputs: list[torch.Tensor]) -> None:
    for linear, x in zip(linears, inputs, strict=True):
        linear(x)


@torch.inference_mode()
def report(name: str, step: Step, floors: Floors, num_rows: int, num_sampled: int, rounds: int) -> None:
    steps = (step, floors.engine(num_rows, num_sampled), floors.plain(num_rows, num_sampled))
    times_ms: tuple[list[float], ...] = ([], [], [])
    for turn in range(rounds + WARM_TURNS):
        for run, taken_ms in zip(steps, times_ms, strict=True):
            start_s = time.perf_counter()
            run()
            if turn >= WARM_TURNS:
                taken_ms.append((time.perf_counter() - start_s) * 1e3)
    whole, engine, plain = (statistics.median(taken) for taken in times_ms)
    best = f"{min(times_ms[0]):.2f} / {min(times_ms[1]):.2f} = {min(times_ms[0]) / min(times_ms[1]):.2f}"
    print(f"{name:24} {whole:8.2f} {engine:8.2f} {whole / engine:6.2f} {plain:9.2f} {whole / plain:6.2f}   ({best})", flush=True)


class DecodeSteps:
    """Rows that begin at `context` tokens and get longer by one a step."""

    def __init__(self, runner: ModelRunner, num_rows: int, context: int, pages_per_row: int) -> None:
        self._runner, self._rows = runner, np.arange(num_rows, dtype=np.int32)
        self._context_lens, self._sampling = np.full(num_rows, context, np.int32), greedy(num_rows)
        self._updates = updates(num_rows, pages_per_row, self._rows, self._context_lens)

    def step(self) -> None:
        self._runner.launch(DecodeBatch(self._updates, self._rows, self._context_lens, self._sampling)).tokens()
        self._updates, self._context_lens = NO_UPDATES, self._context_lens + 1


def extend_batch(num_tokens: int, pages_per_row: int) -> ExtendBatch:
    nobody, lens, rows = np.empty(0, np.int32), np.array([num_tokens], np.int32), np.zeros(1, np.int32)
    ids = np.arange(num_tokens, dtype=np.int64) + 100
    return ExtendBatch(updates(1, pages_per_row, nobody, nobody), rows, ids, lens, lens, np.zeros(1, np.int32), greedy(1))


def updates(num_rows: int, pages_per_row: int, joined_rows: Int32s, context_lens: Int32s) -> RowUpdates:
    """Pages scattered over the pool, as a long-running node's are; rows that start to decode."""
    pages = (np.random.default_rng(0).permutation(num_rows * pages_per_row) + 1).astype(np.int32)
    rows, columns = np.divmod(np.arange(len(pages), dtype=np.int32), np.int32(pages_per_row))
    token_ids = np.arange(len(joined_rows), dtype=np.int64) + 100
    return RowUpdates(rows, columns, pages, np.empty(0, np.int32), NO_SAMPLING, joined_rows, token_ids, context_lens)


def greedy(num_rows: int) -> SamplingBatch:
    zeros, ones = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
    return SamplingBatch(zeros, ones, np.full(num_rows, -1, np.int32), zeros, np.zeros(num_rows, np.int64))


if __name__ == "__main__":
    main()
