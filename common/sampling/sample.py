"""Which token follows: a pure function of logits, parameters and (seed, position), on the device of the logits.

Greedy rows (temperature < GREEDY_TEMPERATURE or top_k 1) take the largest logit, the lowest id on ties. Other rows, in vLLM's order:

    softmax of logits / temperature -> keep the top_k largest -> of these the fewest that reach top_p -> of these those >= min_p * the largest

top_p therefore counts within what top_k left. Logits are ranked before the division; ties are cut in favour of the lower id. Then one
uniform number, a hash of (seed, position) (philox.py), picks from the cumulative distribution of what is kept, in the order of ids.

Weights are relative to the largest, computed in float32, and summed as integers, in units of 2^-40 of the largest: sums are then exact
in any order of addition, so nothing of a row depends on the other rows or on how a device adds. A token is the same in any batch, on either
node, and when it is computed again, as far as the logits are. Only exp() may differ in its last bits from one device to another.

A row whose largest logit is NaN or infinite has no meaningful token: it yields NON_FINITE and leaves the other rows alone. Single
-inf logits are a mask.
"""

import torch

from common.sampling.params import SamplingMix, SamplingRows
from common.sampling.torch import NON_FINITE, sample_by_torch

__all__ = ["NON_FINITE", "sample"]


def sample(logits: torch.Tensor, params: SamplingRows, positions: torch.Tensor, mix: SamplingMix) -> torch.Tensor:
    """logits: float32 or bfloat16 [S, V], contiguous, V < 2^20; not changed.  params: [S].  positions: int64 [S], of the tokens being drawn.
    mix: of these rows, or of more.

    Returns token ids, int64 [S]; NON_FINITE where a row has none. Does not wait for the device.
    """
    if logits.device.type != "cpu":
        return sample_by_torch(logits, params, positions, mix)
    from common.sampling.numba import sample_by_numba  # loads numba, which other devices do without

    return sample_by_numba(logits, params, positions)
