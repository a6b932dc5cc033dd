"""Which logit is the largest, when rounding made several so? CPU, bfloat16.

Around 25, where the largest logits of a small model are, neighbouring bfloat16 numbers are 0.125 apart, so two tokens often share the largest
logit, and the lower id would win: of the embedded model's answer to "What is the capital of France?" that is the first token, and a
wrong one. Rounding keeps the order, so the sums that were rounded say which it was; they are taken again, in float32, for the few that tie.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from common.layers.arrays import as_array
from common.layers.vectors import inner, kernel

INFINITE = 0x7F80  # the rank of infinity; NaNs are above


@inner
def _rank(bits: Any) -> Any:
    """An integer that is ordered as the bfloat16 of these bits: a maximum of integers takes vectors, one that minds NaN does not."""
    signed = np.int32(np.int16(bits))
    return signed ^ ((signed >> np.int32(31)) & np.int32(0x7FFF))


@kernel
def count_largest(logits: Any, counts: Any) -> None:
    """logits: bfloat16 [S, V] -> int32 counts [S]: how many of a row's are its largest; 0 where that is no finite number."""
    num_rows, size = logits.shape
    for s in range(num_rows):
        largest, count = np.int32(-0x8000), np.int32(0)
        for v in range(size):
            largest = max(largest, _rank(logits[s, v]))
        for v in range(size):
            count += np.int32(_rank(logits[s, v]) == largest)
        counts[s] = count if -INFINITE - 1 < largest < INFINITE else 0


def break_ties(logits: torch.Tensor, hidden: torch.Tensor, weight_rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise the logit that is the largest before rounding to the next bfloat16, in rows where others equal it.

    logits: bfloat16 [S, V], changed.  hidden: [S, K], what they came of.  weight_rows: ids int64 [n] -> [n, K].
    """
    counts = np.empty(len(logits), np.int32)
    count_largest(as_array(logits), counts)
    for row in np.flatnonzero(counts > 1).tolist():
        largest = logits[row].max()
        ids = (logits[row] == largest).nonzero().flatten()
        winner = ids[(weight_rows(ids).float() @ hidden[row].float()).argmax()]
        logits[row, winner] = torch.nextafter(largest, torch.tensor(torch.inf, dtype=largest.dtype))
