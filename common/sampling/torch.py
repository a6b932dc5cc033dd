"""Sampling in torch operations, for any device: the rules of sample.py with static shapes and no question to the device.

What top_k and top_p keep is the beginning of the row in descending order, so it is described by two numbers: the smallest logit that is
kept, and how many of its equals are. They follow from the ranked values alone; the ids stay in place, and so does the draw.
"""

import torch

from common.request import GREEDY_TEMPERATURE
from common.sampling.params import SamplingMix, SamplingRows
from common.sampling.philox import uniform

NON_FINITE = -1
UNITS = 2.0**40  # of weight in the largest; 2^20 tokens of it fit an int64
MAX_TEMPERATURE = 1e30  # all tokens are as likely long before; -inf / inf would be NaN


def sample_by_torch(logits: torch.Tensor, params: SamplingRows, positions: torch.Tensor, mix: SamplingMix) -> torch.Tensor:
    """See sample.py."""
    largest, tokens = logits.max(dim=1)
    if mix.any_random:
        is_greedy = (params.temperature < GREEDY_TEMPERATURE) | (params.top_k == 1)
        tokens = torch.where(is_greedy, tokens, _draw(logits.float(), largest.float().unsqueeze(1), params, positions, mix))
    return torch.where(largest.isfinite(), tokens, NON_FINITE)


def _draw(logits: torch.Tensor, largest: torch.Tensor, params: SamplingRows, positions: torch.Tensor, mix: SamplingMix) -> torch.Tensor:
    """logits: float32 [S, V]; largest: float32 [S, 1]. Of a row that is not finite, any number."""
    temperature = params.temperature.clamp(GREEDY_TEMPERATURE, MAX_TEMPERATURE).unsqueeze(1)
    weights = ((logits - largest) / temperature).exp()
    if mix.any_top_k or mix.any_top_p:
        vocab = logits.shape[1]
        if mix.max_top_k < 0:
            ranked = logits.sort(dim=1, descending=True).values
        else:
            ranked = logits.topk(min(mix.max_top_k, vocab), dim=1).values
        ranked_weights = ((ranked - largest) / temperature).exp()
        weights = weights.masked_fill(~_in_front(logits, ranked, _num_kept(ranked_weights, params, vocab)), 0)
    if mix.any_min_p:
        weights = weights.masked_fill(weights < params.min_p.unsqueeze(1), 0)
    cumulative = (weights * UNITS).long().cumsum_(dim=1)
    total = cumulative[:, -1:]
    target = (_uniform(params.seed, positions).unsqueeze(1) * total.double()).long()
    return torch.searchsorted(cumulative, torch.minimum(target, total - 1), right=True).squeeze(1)  # never an entry of weight 0


def _uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    if not seed.is_cuda:
        return uniform(seed, position)
    from common.sampling.triton import uniform_by_triton  # CUDA builds of torch bring Triton along

    return uniform_by_triton(seed, position)


def _num_kept(ranked_weights: torch.Tensor, params: SamplingRows, vocab: int) -> torch.Tensor:
    """ranked_weights: float32 [S, D], descending -> int64 [S, 1], how many top_k and top_p keep; vocab: all.

    Of a row that is greedy or not finite, any number from 1 up.
    """
    depth = ranked_weights.shape[1]
    top_k, top_p = params.top_k.long().unsqueeze(1), params.top_p.double().unsqueeze(1)
    top_k = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)
    ranks = torch.arange(depth, device=ranked_weights.device)
    cumulative = (ranked_weights * UNITS).long().masked_fill_(ranks >= top_k, 0).cumsum_(dim=1)
    target = (top_p * cumulative[:, -1:].double()).ceil().long().clamp(min=1)
    reaching = (cumulative < target).sum(dim=1, keepdim=True) + 1
    return torch.where(top_p < 1, reaching, top_k)


def _in_front(logits: torch.Tensor, ranked: torch.Tensor, num_kept: torch.Tensor) -> torch.Tensor:
    """Mask [S, V] of the `num_kept` [S, 1] largest logits, equal ones in the order of ids. ranked: [S, D], descending; num_kept <= D, or V."""
    vocab, depth = logits.shape[1], ranked.shape[1]
    border = ranked.gather(1, num_kept.clamp(max=depth) - 1)  # anything, where all are kept or the row is not finite
    num_equal = num_kept - (ranked > border).sum(dim=1, keepdim=True)
    equal = logits == border
    return (logits > border) | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= num_equal)) | (num_kept >= vocab)
