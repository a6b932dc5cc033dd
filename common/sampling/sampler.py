"""Which token follows: a pure function of logits, parameters and (seed, position).

Greedy rows (temperature < GREEDY_TEMPERATURE or top_k 1) take the largest logit, the lowest id on ties. Other rows, in vLLM's order:

    logits / temperature -> keep the top_k largest -> softmax, keep the fewest that reach top_p -> keep those >= min_p * the largest

top_p therefore counts within what top_k left. Ties are cut in favour of the lower id. Then one uniform number, from a counter-based
generator keyed by (seed, position), picks from the cumulative distribution, likeliest first where something was cut, else in the order
of ids. Nothing of a row depends on the other rows, so a token is the same in any batch, on either node, and when it is computed again.

A row whose largest logit is NaN or infinite has no meaningful token: it yields NON_FINITE and leaves the other rows alone. Single
-inf logits are a mask.
"""

import numpy as np
from numpy.typing import NDArray

from common.engine.batch import SamplingBatch
from common.request import GREEDY_TEMPERATURE

NON_FINITE = -1
FIRST_CANDIDATES = 256  # top_p nearly always ends within these; sorting a whole vocabulary costs 50 times as much

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
    scaled = (logits - np.float32(largest)) / sampling.temperature[row]  # <= 0, so exp() cannot overflow
    top_k, top_p, min_p = int(sampling.top_k[row]), float(sampling.top_p[row]), float(sampling.min_p[row])
    u = _uniform(int(sampling.seed[row]), int(sampling.position[row]))
    if top_k <= 0 and top_p >= 1.0:
        if min_p > 0.0:
            scaled[scaled < np.log(min_p)] = -np.inf
        return _inverse_cdf(np.exp(scaled), u)
    ids, probs = _top_k(scaled, top_k) if 0 < top_k < len(scaled) else _top_p(scaled, top_p)
    keep = _num_reaching(probs, top_p)
    if min_p > 0.0:
        keep = min(keep, int(np.count_nonzero(probs[:keep] >= min_p * probs[0])))
    return int(ids[_inverse_cdf(probs[:keep], u)])


def _top_k(scaled: Logits, top_k: int) -> tuple[TokenIds, NDArray[np.float64]]:
    """The top_k likeliest, likeliest first, with probabilities that sum to 1."""
    ids = _likeliest(scaled, top_k)
    weights = np.exp(scaled[ids].astype(np.float64))
    return ids, weights / weights.sum()


def _top_p(scaled: Logits, top_p: float) -> tuple[TokenIds, NDArray[np.float64]]:
    """At least the tokens that reach top_p, likeliest first, with their probabilities in the whole vocabulary."""
    total = np.exp(scaled).sum(dtype=np.float64)
    count = FIRST_CANDIDATES
    while True:
        ids = _likeliest(scaled, min(count, len(scaled)))
        probs = np.exp(scaled[ids].astype(np.float64)) / total
        if len(ids) == len(scaled) or probs.sum() >= top_p:
            return ids, probs
        count *= 16


def _likeliest(scaled: Logits, count: int) -> TokenIds:
    """Ids of the `count` largest, largest first, lower ids first among equals."""
    threshold = np.partition(scaled, len(scaled) - count)[len(scaled) - count]
    ids = np.flatnonzero(scaled >= threshold)
    return ids[np.argsort(-scaled[ids], kind="stable")][:count]


def _num_reaching(probs: NDArray[np.float64], top_p: float) -> int:
    """How many of the likeliest it takes for their sum to reach top_p; at least one."""
    if top_p >= 1.0:
        return len(probs)
    return min(int(np.searchsorted(np.cumsum(probs), top_p)) + 1, len(probs))


def _inverse_cdf(weights: NDArray[np.floating], u: float) -> int:
    """The entry that a uniform u in [0, 1) falls on; entries of weight 0 are never hit."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def _uniform(seed: int, position: int) -> float:
    """In [0, 1), from Philox (Salmon et al. 2011): a hash of its key, so there is no state to carry between nodes."""
    key = np.array([seed, position], dtype=np.int64).view(np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())
