"""Decode attention on CPU beside the time that copying the same K and V once takes.

    python bench/attention_cpu.py [--heads 9] [--kv-heads 3] [--head-dim 64] [--page-size 16] [--dtype bfloat16]

Microseconds a layer, one thread. A pool of several layers with scattered pages is walked layer by layer, as a decode step does, so
K and V come from memory and not from the first caches. The copy reads a layer's bytes in one piece and writes them as often as it
reads them. Attention and copy take turns; medians over the turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from common.attention.numba_decode import paged_decode_attention
from common.kvcache.layout import ITEM_NBYTES, KVLayout, KVPool
from common.layers.arrays import as_array

BATCH_SIZES, CONTEXTS = (1, 8, 32), (256, 1024, 4096)
POOL_NBYTES = 1 << 28  # beyond any cache, reached by layers
MAX_LAYERS = 64
TURNS = 9


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    def kv_nbytes(self, num_tokens: int) -> int:
        """Of one layer."""
        return num_tokens * 2 * self.kv_heads * self.head_dim * ITEM_NBYTES[self.dtype]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", type=int, default=9, help="query heads (default: 9)")
    parser.add_argument("--kv-heads", type=int, default=3, help="default: 3")
    parser.add_argument("--head-dim", type=int, default=64, help="default: 64")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page (default: 16)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="default: bfloat16")
    options = parser.parse_args()
    shape = Shape(options.heads, options.kv_heads, options.head_dim, options.page_size, getattr(torch, options.dtype))
    print(f"{'batch':>5} {'context':>7} {'us/layer':>9} {'copy us':>9} {'ratio':>6} {'GB/s':>6}   (medians)")
    for batch_size in BATCH_SIZES:
        for context in CONTEXTS:
            attention_us, copy_us = measure(shape, batch_size, context)
            rate = shape.kv_nbytes(batch_size * context) / attention_us / 1e3
            print(f"{batch_size:5} {context:7} {attention_us:9.1f} {copy_us:9.1f} {attention_us / copy_us:6.2f} {rate:6.1f}", flush=True)


def measure(shape: Shape, batch_size: int, context: int) -> tuple[float, float]:
    """(attention, copy) in microseconds a layer."""
    num_layers = min(MAX_LAYERS, max(2, POOL_NBYTES // shape.kv_nbytes(batch_size * context)))
    pages_per_row = -(-context // shape.page_size)
    page_table = np.random.default_rng(0).permutation(batch_size * pages_per_row).astype(np.int32).reshape(batch_size, pages_per_row)
    layout = KVLayout(shape.kv_heads, num_layers, shape.page_size, shape.head_dim, shape.dtype)
    pool = as_array(KVPool(layout, page_table.size, torch.device("cpu")).tensor.normal_())
    q = as_array(torch.randn(batch_size, shape.heads, shape.head_dim).to(shape.dtype))
    out, context_lens = np.empty_like(q), np.full(batch_size, context, np.int32)
    rows = np.arange(batch_size, dtype=np.int32)
    layer_of_pool = pool.reshape(num_layers, -1)
    copied = np.empty_like(layer_of_pool[0])

    def attend(layer: int) -> None:
        paged_decode_attention(q, pool, layer, page_table, rows, rows, context_lens, 0, shape.head_dim**-0.5, 0.0, out)

    def copy(layer: int) -> None:
        np.copyto(copied, layer_of_pool[layer])

    times_us: tuple[list[float], list[float]] = ([], [])
    for turn in range(TURNS + 1):
        for run, taken_us in zip((attend, copy), times_us, strict=True):
            taken = time_layers(run, num_layers)
            if turn:  # the first turn compiles and touches the memory
                taken_us.append(taken)
    return statistics.median(times_us[0]), statistics.median(times_us[1])


def time_layers(run: Callable[[int], None], num_layers: int) -> float:
    """Microseconds a layer."""
    start_s = time.perf_counter()
    for layer in range(num_layers):
        run(layer)
    return (time.perf_counter() - start_s) * 1e6 / num_layers


if __name__ == "__main__":
    main()
