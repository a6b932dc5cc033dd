"""What one launch of the model works on. Arrays are on the host (numpy); the runner copies them to its static buffers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of the rows that sample, one entry a row. All are [B]."""

    temperature: NDArray[np.float32]  # < GREEDY_TEMPERATURE: argmax
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]  # -1: all
    min_p: NDArray[np.float32]
    seed: NDArray[np.int64]
    position: NDArray[np.int64]  # of the token being drawn: prompt length + outputs so far; (seed, position) fixes the draw


@dataclass(frozen=True, slots=True)
class ExtendBatch:
    """New tokens of B requests, packed. Request i attends its first context_lens[i] tokens, of which the last
    extend_lens[i] are in this batch; the others' KV is in its pages already."""

    token_ids: NDArray[np.int64]  # [T] = sum(extend_lens)
    extend_lens: NDArray[np.int32]  # [B]
    context_lens: NDArray[np.int32]  # [B] tokens after this batch, new ones included
    page_table: NDArray[np.int32]  # [B, max_pages] pages of each request, 0-padded
    sample_rows: NDArray[np.int32]  # [S] requests of the batch whose last token yields logits
    sampling: SamplingBatch  # [S]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One new token for each of B requests."""

    token_ids: NDArray[np.int64]  # [B] the last token, whose KV this step writes
    context_lens: NDArray[np.int32]  # [B] tokens after this step: the new token sits at context_lens - 1
    page_table: NDArray[np.int32]  # [B, max_pages]
    sampling: SamplingBatch  # [B]
