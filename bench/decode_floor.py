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
from torch.nn import functional as F

from common.engine.batch import DecodeBatch, ExtendBatch, SamplingBatch
from common.engine.runner import ModelRunner
from common.layers.linear import Linear

Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model_dir", type=Path, help="directory of safetensors")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default: 1)")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each step (default: 30; extend a third of it)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="default: bfloat16")
    parser.add_argument("--attention-backend", default="auto", choices=["auto", "numba", "torch"], help="default: auto")
    parser.add_argument("--context", type=int, default=320, help="tokens before each decode step (default: 320)")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8], help="decode batch sizes (default: 1 8)")
    parser.add_argument("--extend", type=int, nargs="*", default=[256], help="prompt lengths of extend steps (default: 256)")
    options = parser.parse_args()
    page_size = 16
    num_pages = 2 + max(options.batches, default=1) * (options.context // page_size + 1) + max(options.extend, default=0) // page_size
    runner = ModelRunner(
        options.model_dir,
        dtype=options.dtype,
        page_size=page_size,
        num_pages=num_pages,
        threads=options.threads,
        attention_backend=options.attention_backend,
    )
    runner.warmup()
    floors = Floors(runner)
    print(f"{'step':24} {'ms':>8} {'linears':>8} {'ratio':>6} {'F.linear':>9} {'ratio':>6}   (medians; best of step {'/'} linears)")
    for batch_size in options.batches:
        batch = decode_batch(batch_size, options.context, page_size)
        report(f"decode {batch_size} at {options.context}", partial(runner.decode, batch), floors, batch_size, batch_size, options.rounds)
    for num_tokens in options.extend:
        extend = extend_batch(num_tokens, page_size)
        report(f"extend {num_tokens}", partial(runner.extend, extend), floors, num_tokens, 1, max(3, options.rounds // 3))


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
    for turn in range(rounds + 2):
        for run, taken_ms in zip(steps, times_ms, strict=True):
            start_s = time.perf_counter()
            run()
            if turn >= 2:  # the first turns fill caches
                taken_ms.append((time.perf_counter() - start_s) * 1e3)
    whole, engine, plain = (statistics.median(taken) for taken in times_ms)
    best = f"{min(times_ms[0]):.2f} / {min(times_ms[1]):.2f} = {min(times_ms[0]) / min(times_ms[1]):.2f}"
    print(f"{name:24} {whole:8.2f} {engine:8.2f} {whole / engine:6.2f} {plain:9.2f} {whole / plain:6.2f}   ({best})", flush=True)


def greedy(num_rows: int) -> SamplingBatch:
    zeros, ones = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
    return SamplingBatch(zeros, ones, np.full(num_rows, -1, np.int32), zeros, np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64))


def page_table(num_rows: int, num_tokens: int, page_size: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Pages scattered over the pool, as a long-running node's are."""
    pages_per_row = -(-num_tokens // page_size)
    pages = np.random.default_rng(0).permutation(num_rows * pages_per_row) + 1
    return pages.astype(np.int32).reshape(num_rows, pages_per_row)


def decode_batch(num_rows: int, context: int, page_size: int) -> DecodeBatch:
    ids = np.arange(num_rows, dtype=np.int64) + 100
    return DecodeBatch(ids, np.full(num_rows, context, np.int32), page_table(num_rows, context, page_size), greedy(num_rows))


def extend_batch(num_tokens: int, page_size: int) -> ExtendBatch:
    lens = np.array([num_tokens], np.int32)
    ids = np.arange(num_tokens, dtype=np.int64) + 100
    return ExtendBatch(ids, lens, lens, page_table(1, num_tokens, page_size), np.zeros(1, np.int32), greedy(1))


if __name__ == "__main__":
    main()
