"""Sampling on a CPU as one numba kernel: the rules of sample.py, in few passes over a row.

The first pass finds the largest logit of every block of the row. The k-th largest of these is no larger than the row's k-th largest
logit, so top_k looks only into the few blocks that reach it. For top_p alone the same collects candidates, which suffice unless the
distribution is flat. Where they do not, all the row is. What is kept of the candidates is found by selection on histograms (a radix of
the key's bits), by number for top_k and by weight for top_p: nothing is sorted.

A key is a logit's place in the order as int32, equal for 0.0 and -0.0, NaN the largest: integers are compared where a NaN would be lost.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types

from common.layers.arrays import as_array
from common.layers.vectors import exp2, inner, intrinsic, kernel, widen
from common.request import GREEDY_TEMPERATURE
from common.sampling.params import SamplingRows
from common.sampling.torch import MAX_TEMPERATURE, NON_FINITE, UNITS

I32 = ir.IntType(32)
INFINITY_KEY = 0x7F800000
BLOCK = 64  # logits
CANDIDATES = 4  # of top_p: a quarter of the blocks' largest logits
LEVELS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of a key, most significant first
NUM_BINS = 1 << 11
LOG2_E = np.float32(1.4426950408889634)
# Compiled in. numba's cache sees this file change and vectors.py, not the files that these come from
LEAST_TEMPERATURE, LARGEST_TEMPERATURE = np.float32(GREEDY_TEMPERATURE), np.float32(MAX_TEMPERATURE)
FLOAT_UNITS = np.float32(UNITS)
M0, M1, W0, W1, WORD = (np.uint64(n) for n in (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF))


def sample_by_numba(logits: torch.Tensor, params: SamplingRows, positions: torch.Tensor) -> torch.Tensor:
    """See sample.py."""
    tokens = torch.empty(len(logits), dtype=torch.int64)
    arrays = (tensor.numpy() for tensor in (params.temperature, params.top_p, params.top_k, params.min_p, params.seed, positions, tokens))
    sample_rows(as_array(logits), *arrays)
    return tokens


@intrinsic  # type: ignore[untyped-decorator]
def _key(context: Any, x: Any) -> Any:
    """A stored logit, float32 or the bits of a bfloat16 -> int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], I32) if x == types.float32 else builder.shl(builder.zext(args[0], I32), I32(16))
        magnitude = builder.and_(bits, I32(0x7FFFFFFF))
        ordered = builder.select(builder.icmp_signed("<", bits, I32(0)), builder.neg(magnitude), magnitude)
        return builder.select(builder.icmp_signed(">", magnitude, I32(INFINITY_KEY)), I32(0x7FFFFFFF), ordered)

    return types.int32(x), generate


@kernel
def sample_rows(logits: Any, temperature: Any, top_p: Any, top_k: Any, min_p: Any, seed: Any, position: Any, tokens: Any) -> None:
    """logits [S, V], the others [S] -> tokens [S]."""
    num_rows, vocab = logits.shape
    block_keys = np.empty((vocab + BLOCK - 1) // BLOCK, np.int32)
    for s in range(num_rows):
        row = logits[s]
        largest = _block_maxima(row, block_keys)
        if not -INFINITY_KEY < largest < INFINITY_KEY:
            tokens[s] = NON_FINITE
            continue
        best = _first(row, block_keys, largest)
        if temperature[s] < LEAST_TEMPERATURE or top_k[s] == 1:
            tokens[s] = best
        else:
            u = _uniform(np.uint64(seed[s]), np.uint64(position[s]))
            tokens[s] = _draw(row, block_keys, widen(row[best]), temperature[s], top_p[s], top_k[s], min_p[s], u)


@inner
def _block_maxima(row: Any, block_keys: Any) -> Any:
    """Fills block_keys; returns the largest."""
    vocab, largest = len(row), np.int32(-0x7FFFFFFF)
    for block in range(vocab // BLOCK):
        in_block = np.int32(-0x7FFFFFFF)
        for i in range(block * BLOCK, block * BLOCK + BLOCK):
            key = _key(row[i])
            in_block = key if key > in_block else in_block
        block_keys[block] = in_block
        largest = in_block if in_block > largest else largest
    if vocab % BLOCK:
        in_block = np.int32(-0x7FFFFFFF)
        for i in range(vocab // BLOCK * BLOCK, vocab):
            key = _key(row[i])
            in_block = key if key > in_block else in_block
        block_keys[-1] = in_block
        largest = in_block if in_block > largest else largest
    return largest


@inner
def _first(row: Any, block_keys: Any, key: Any) -> Any:
    """The lowest id of the largest key."""
    block = 0
    while block_keys[block] != key:
        block += 1
    i = block * BLOCK
    while _key(row[i]) != key:
        i += 1
    return i


@inner
def _draw(row: Any, block_keys: Any, largest: Any, temperature: Any, top_p: Any, top_k: Any, min_p: Any, u: float) -> Any:
    vocab, num_blocks = len(row), len(block_keys)
    scale = LOG2_E / min(max(temperature, LEAST_TEMPERATURE), LARGEST_TEMPERATURE)
    limited = 0 < top_k < vocab
    weights, keys, ids = np.empty(vocab, np.float32), np.empty(vocab, np.int32), np.empty(vocab, np.int32)
    sums, bins = np.empty(num_blocks, np.int64), np.empty(NUM_BINS, np.int64)
    n = vocab  # candidates; all of them: candidate i is token i
    if limited and top_k < num_blocks:
        border, _ = _reach(block_keys, weights, num_blocks, top_k, True, bins)
        n = _collect(row, block_keys, border, keys, ids)
        for j in range(n):
            weights[j] = exp2((widen(row[ids[j]]) - largest) * scale)
    else:
        for i in range(vocab):
            weights[i] = exp2((widen(row[i]) - largest) * scale)
    if limited:
        if n == vocab:
            _all_keys(row, keys)
        border, num_equal = _reach(keys, weights, n, top_k, True, bins)
        _keep(keys, weights, n, border, num_equal)
    if top_p < np.float32(1.0):
        target = max(1, np.int64(np.ceil(np.float64(top_p) * np.float64(_sum(weights, n, sums)))))
        if not limited:
            n = _likely(row, block_keys, target, weights, keys, ids, bins)
        border, num_equal = _reach(keys, weights, n, target, False, bins)
        _keep(keys, weights, n, border, num_equal)
    if min_p > np.float32(0.0):
        for j in range(n):
            weights[j] = np.float32(0.0) if weights[j] < min_p else weights[j]
    drawn = _pick(weights, n, sums, u)
    return drawn if n == vocab else ids[drawn]


@inner
def _likely(row: Any, block_keys: Any, target: Any, weights: Any, keys: Any, ids: Any, bins: Any) -> Any:
    """Candidates that reach `target` units of weight, their weights moved to the front; all tokens where a few do not do."""
    num_wanted = len(block_keys) // CANDIDATES
    if num_wanted > 0:
        border, _ = _reach(block_keys, weights, len(block_keys), num_wanted, True, bins)
        n = _collect(row, block_keys, border, keys, ids)
        reached = 0
        for j in range(n):
            reached += _units(weights[ids[j]])
        if reached >= target:
            for j in range(n):
                weights[j] = weights[ids[j]]  # j <= ids[j]
            return n
    _all_keys(row, keys)
    return len(row)


@inner
def _all_keys(row: Any, keys: Any) -> None:
    for i in range(len(row)):
        keys[i] = _key(row[i])


@inner
def _collect(row: Any, block_keys: Any, border: Any, keys: Any, ids: Any) -> Any:
    """Keys and ids of all logits from `border` up, in the order of ids; returns their number."""
    n = 0
    for block in range(len(block_keys)):
        if block_keys[block] >= border:
            for i in range(block * BLOCK, min(block * BLOCK + BLOCK, len(row))):
                key = _key(row[i])
                if key >= border:
                    keys[n], ids[n] = key, i
                    n += 1
    return n


@inner
def _reach(keys: Any, weights: Any, n: int, target: int, by_number: bool, bins: Any) -> Any:
    """Down from the largest key, the key at which `target` is reached, and how many of its equals that takes.

    target: at least 1; a number of entries, or units of weight; not more than there are.
    """
    border, above = 0, 0
    for shift, num_bits in LEVELS:
        bins[:] = 0
        for j in range(n):
            unsigned = np.int64(keys[j]) + 0x80000000
            if unsigned >> (shift + num_bits) == border:
                bins[(unsigned >> shift) & (1 << num_bits) - 1] += 1 if by_number else _units(weights[j])
        found = (1 << num_bits) - 1
        while above + bins[found] < target:
            above += bins[found]
            found -= 1
        border = border << num_bits | found
    border -= 0x80000000
    if by_number:
        return border, target - above
    j = 0
    while keys[j] != border:
        j += 1
    each = _units(weights[j])
    return border, (target - above + each - 1) // each


@inner
def _keep(keys: Any, weights: Any, n: int, border: int, num_equal: int) -> None:
    """Weight 0 for all below the border, and for its equals beyond the first num_equal."""
    for j in range(n):
        if keys[j] <= border:
            if keys[j] == border and num_equal > 0:
                num_equal -= 1
            else:
                weights[j] = np.float32(0.0)


@inner
def _units(weight: Any) -> Any:
    return np.int64(weight * FLOAT_UNITS)


@inner
def _sum(weights: Any, n: int, sums: Any) -> Any:
    """Units of all weights, and of every block of them -> sums."""
    total = 0
    for block in range(n // BLOCK):
        in_block = 0
        for j in range(block * BLOCK, block * BLOCK + BLOCK):
            in_block += _units(weights[j])
        sums[block] = in_block
        total += in_block
    if n % BLOCK:
        in_block = 0
        for j in range(n // BLOCK * BLOCK, n):
            in_block += _units(weights[j])
        sums[n // BLOCK] = in_block
        total += in_block
    return total


@inner
def _pick(weights: Any, n: int, sums: Any, u: float) -> Any:
    total = _sum(weights, n, sums)
    left = min(np.int64(u * np.float64(total)), total - 1)
    block = 0
    while left >= sums[block]:
        left -= sums[block]
        block += 1
    j = block * BLOCK
    while left >= _units(weights[j]):
        left -= _units(weights[j])
        j += 1
    return j


@inner
def _uniform(seed: Any, position: Any) -> Any:
    """uint64 each -> [0, 1): philox.py."""
    c0, c1, c2, c3 = position & WORD, position >> np.uint64(32), np.uint64(0), np.uint64(0)
    k0, k1 = seed & WORD, seed >> np.uint64(32)
    for _ in range(10):
        first, second = c0 * M0, c2 * M1
        c0, c1, c2, c3 = (second >> np.uint64(32)) ^ c1 ^ k0, second & WORD, (first >> np.uint64(32)) ^ c3 ^ k1, first & WORD
        k0, k1 = (k0 + W0) & WORD, (k1 + W1) & WORD
    return np.float64((c0 << np.uint64(21)) | (c1 >> np.uint64(11))) * 2.0**-53
