"""Which token follows: a pure function of logits, parameters and (seed, position).

Greedy rows (temperature < GREEDY_TEMPERATURE or top_k 1) take the largest logit, the lowest id on ties. Other rows, in vLLM's order:

    logits / temperature -> keep the top_k largest -> softmax, keep the fewest that reach top_p -> keep those >= min_p * the largest

top_p therefore counts within what top_k left. Ties are cut in favour of the lower id. Then one uniform number, from a counter-based
generator keyed by (seed, position), picks from the cumulative distribution of what is kept, in the order of ids. Nothing of a row
depends on the other rows, so a token is the same in any batch, on either node, and when it is computed again.

A row whose largest logit is NaN or infinite has no meaningful token: it yields NON_FINITE and leaves the other rows alone. Single
-inf logits are a mask.
"""

import numpy as np
from numpy.typing import NDArray

from common.engine.batch import SamplingBatch
from common.request import GREEDY_TEMPERATURE

NON_FINITE = -1
Logits = NDArray[np.float32]  # [vocab]
TokenIds = NDArray[np.int64]


def sample(logits: NDArray[np.float32], sampling: SamplingBatch) -> TokenIds:
    """logits: [S, vocab] -> token ids [S]; NON_FINITE where the row has none."""
    tokens: TokenIds = logits.argmax(axis=1)  # numpy: the first of equals, and the first NaN if there is one
    for row, best in enumerate(tokens.tolist()):
        largest = logits[row, best]
        if not np.isfinite(largest):
            tokens[row] = NON_FINITE
        elif sampling.temperature[row] >= GREEDY_TEMPERATURE and sampling.top_k[row] != 1:
            tokens[row] = _draw(logits[row], float(largest), sampling, row)
    return tokens


def _draw(logits: Logits, largest: float, sampling: SamplingBatch, row: int) -> int:
    top_k, top_p, min_p = int(sampling.top_k[row]), float(sampling.top_p[row]), float(sampling.min_p[row])
    with np.errstate(over="ignore"):  # a difference too large for float32 is -inf: never drawn, which is right
        scaled = (logits - np.float32(largest)) / sampling.temperature[row]  # <= 0, so exp() cannot overflow
    ids = _largest(scaled, top_k) if 0 < top_k < len(scaled) else None
    weights = np.exp(scaled if ids is None else scaled[ids])  # the largest weighs 1
    if top_p < 1.0:
        weights[~_nucleus(weights, top_p)] = 0.0
    if min_p > 0.0:
        weights[weights < min_p] = 0.0
    cumulative = np.cumsum(weights, dtype=np.float64)
    u = _uniform(int(sampling.seed[row]), int(sampling.position[row]))
    drawn = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))  # never an entry of weight 0
    return drawn if ids is None else int(ids[drawn])


def _largest(scaled: Logits, count: int) -> TokenIds:
    """Ids of the `count` largest, in rising order."""
    threshold = np.partition(scaled, len(scaled) - count)[len(scaled) - count]
    above = np.flatnonzero(scaled > threshold)
    equal = np.flatnonzero(scaled == threshold)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.bool_]:
    """Mask of the fewest entries that reach top_p of the sum; at least one.

    The upper half of a positive float's bits orders it to 8 bits of precision, so a histogram over them finds the value where the sum
    is reached, and only the entries that share those bits are sorted: 0.3 ms for 49152 entries however flat, where sorting takes 6.
    """
    keys = weights.view(np.uint32) >> 16
    mass_from_top = np.cumsum(np.bincount(keys, weights=weights)[::-1])
    target = top_p * mass_from_top[-1]
    depth = min(int(np.searchsorted(mass_from_top, target)), len(mass_from_top) - 1)
    border = len(mass_from_top) - 1 - depth
    keep: NDArray[np.bool_] = keys > border
    members = np.flatnonzero(keys == border)
    members = members[np.argsort(-weights[members], kind="stable")]
    reached = (mass_from_top[depth - 1] if depth else 0.0) + np.cumsum(weights[members], dtype=np.float64)
    keep[members[: int(np.searchsorted(reached, target)) + 1]] = True
    return keep


def _uniform(seed: int, position: int) -> float:
    """In [0, 1), from Philox (Salmon et al. 2011): a hash of its key, so there is no state to carry between nodes."""
    key = np.array([seed, position], dtype=np.int64).view(np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())
