"""CPU attention alone: decode beside the time that reading or copying the same K and V once takes, extend by new and cached tokens.

    python bench/attention_cpu.py [--heads 9] [--kv-heads 3] [--head-dim 64] [--page-size 16] [--dtype bfloat16]

Microseconds a layer, one thread. A pool of POOL_NBYTES with scattered pages is walked layer by layer, as a step does, so K and V come
from memory and not from a cache. Reading adds up a layer's bytes in one piece as integers; the copy also writes them, mostly to a cache. The
three take turns; ratios are medians of each turn's.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from common.attention.numba_decode import paged_decode_attention
from common.attention.numba_extend import paged_extend_attention
from common.kvcache.layout import ITEM_NBYTES, KVLayout, KVPool
from common.layers.arrays import Array, as_array
from common.layers.vectors import njit

BATCH_SIZES, CONTEXTS = (1, 8, 32), (256, 1024, 4096)
NEW_TOKENS, CACHED = (16, 64, 256), (0, 1024, 4096)
POOL_NBYTES = 1 << 28  # beyond any cache, reached by layers
EXTEND_LAYERS = 8
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

    def pool(self, num_layers: int, num_pages: int) -> Array:
        layout = KVLayout(self.kv_heads, num_layers, self.page_size, self.head_dim, self.dtype)
        return as_array(KVPool(layout, num_pages, torch.device("cpu")).tensor.normal_())

    def queries(self, num_tokens: int) -> Array:
        return as_array(torch.randn(num_tokens, self.heads, self.head_dim).to(self.dtype))

    def page_table(self, num_rows: int, context: int) -> NDArray[np.int32]:
        pages_per_row = -(-context // self.page_size)
        return np.random.default_rng(0).permutation(num_rows * pages_per_row).astype(np.int32).reshape(num_rows, pages_per_row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", type=int, default=9, help="query heads (default: 9)")
    parser.add_argument("--kv-heads", type=int, default=3, help="default: 3")
    parser.add_argument("--head-dim", type=int, default=64, help="default: 64")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page (default: 16)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="default: bfloat16")
    options = parser.parse_args()
    shape = Shape(options.heads, options.kv_heads, options.head_dim, options.page_size, getattr(torch, options.dtype))
    print(f"{'batch':>5} {'context':>7} {'us/layer':>9} {'GB/s':>6} {'read us':>9} {'ratio':>6} {'copy us':>9} {'ratio':>6}")
    for batch_size in BATCH_SIZES:
        for context in CONTEXTS:
            attention_us, read_us, copy_us = decode(shape, batch_size, context)
            rate = shape.kv_nbytes(batch_size * context) / statistics.median(attention_us) / 1e3
            beside = "".join(f" {statistics.median(floor_us):9.1f} {ratio(attention_us, floor_us):6.2f}" for floor_us in (read_us, copy_us))
            print(f"{batch_size:5} {context:7} {statistics.median(attention_us):9.1f} {rate:6.1f}{beside}", flush=True)
    print(f"{'new':>5} {'cached':>7} {'us/layer':>9} {'GFLOP/s':>8}")
    for num_new in NEW_TOKENS:
        for num_cached in CACHED:
            extend_us = extend(shape, num_new, num_cached)
            products = 2 * 2 * shape.heads * shape.head_dim * (num_new * num_cached + num_new * (num_new + 1) // 2)
            print(f"{num_new:5} {num_cached:7} {extend_us:9.1f} {products / extend_us / 1e3:8.1f}", flush=True)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def add_up(words: Array) -> int:
    total = 0
    for i in range(len(words)):
        total += words[i]
    return total


def decode(shape: Shape, batch_size: int, context: int) -> list[list[float]]:
    """Microseconds a layer of each turn: attention, reading, copying."""
    num_layers = max(2, POOL_NBYTES // shape.kv_nbytes(batch_size * context))
    page_table = shape.page_table(batch_size, context)
    pool, q = shape.pool(num_layers, page_table.size), shape.queries(batch_size)
    out, context_lens, rows = np.empty_like(q), np.full(batch_size, context, np.int32), np.arange(batch_size, dtype=np.int32)
    layer_of_pool = pool.reshape(num_layers, -1)
    words, copied = layer_of_pool.view(np.int64), np.empty_like(layer_of_pool[0])

    def attend(layer: int) -> None:
        paged_decode_attention(q, pool, layer, page_table, rows, rows, context_lens, 0, shape.head_dim**-0.5, 0.0, out)

    def read(layer: int) -> None:
        add_up(words[layer])

    def copy(layer: int) -> None:
        np.copyto(copied, layer_of_pool[layer])

    turns = [[time_layers(run, num_layers) for run in (attend, read, copy)] for _ in range(TURNS + 1)]
    return [list(times_us) for times_us in zip(*turns[1:], strict=True)]  # the first turn compiles and touches the memory


def extend(shape: Shape, num_new: int, num_cached: int) -> float:
    """Microseconds a layer: one request."""
    context = num_cached + num_new
    page_table = shape.page_table(1, context)
    pool, q = shape.pool(EXTEND_LAYERS, page_table.size + 1), shape.queries(num_new)
    out, requests = np.empty_like(q), np.array([[0, 0, num_new, context]], np.int32)

    def attend(layer: int) -> None:
        paged_extend_attention(q, pool, layer, page_table, requests, 0, shape.head_dim**-0.5, 0.0, out)

    return statistics.median([time_layers(attend, EXTEND_LAYERS) for _ in range(TURNS + 1)][1:])


def ratio(times_us: list[float], floor_us: list[float]) -> float:
    return statistics.median(time_us / floor for time_us, floor in zip(times_us, floor_us, strict=True))


def time_layers(run: Callable[[int], None], num_layers: int) -> float:
    """Microseconds a layer."""
    start_s = time.perf_counter()
    for layer in range(num_layers):
        run(layer)
    return (time.perf_counter() - start_s) * 1e6 / num_layers


if __name__ == "__main__":
    main()
