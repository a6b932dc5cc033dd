"""What the scheduler asks of the engine: one launch's batch, and what changed in the rows since the launch before. All on the host.

Every request that extends or runs has a row of the device's state (rows.py): its pages, its last token, its length, its sampling
parameters. That state stays on the device; a batch names rows, and brings along only what is new. A token that was drawn on the
device goes from step to step there and need not be known here (KEEP).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from common.sampling.penalties import LogitHistory

KEEP = -1  # the row's token is the one that the device drew last
NON_FINITE = -1  # what a row yields whose logits are not finite


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of B rows. All are [B]."""

    temperature: NDArray[np.float32]  # 0: the largest logit
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]  # -1: all
    min_p: NDArray[np.float32]
    seed: NDArray[np.int64]  # with the number of tokens so far it fixes the draw


@dataclass(frozen=True, slots=True)
class LogitChange:
    """A row whose logits are changed before it samples (common/sampling/penalties.py)."""

    row: int  # among the batch's rows that sample
    history: "LogitHistory"
    output_ids: list[int]  # of the request, as far as known
    num_outputs: int  # drawn before this draw, those under way included


@dataclass(frozen=True, slots=True)
class RowUpdates:
    """In the order of application; no entry comes twice."""

    page_rows: NDArray[np.int32]  # [P] entries of the page table:
    page_columns: NDArray[np.int32]  # [P]
    page_ids: NDArray[np.int32]  # [P]
    new_rows: NDArray[np.int32]  # [N] rows given to another request,
    sampling: SamplingBatch  # [N] and how it samples
    joined_rows: NDArray[np.int32]  # [J] rows that decode from now on:
    joined_token_ids: NDArray[np.int64]  # [J] their last token, or KEEP
    joined_context_lens: NDArray[np.int32]  # [J] tokens after their first decode step


def _none(dtype: type[np.generic]) -> NDArray[Any]:
    return np.empty(0, dtype)


NO_SAMPLING = SamplingBatch(_none(np.float32), _none(np.float32), _none(np.int32), _none(np.float32), _none(np.int64))
NO_UPDATES = RowUpdates(
    _none(np.int32), _none(np.int32), _none(np.int32), _none(np.int32), NO_SAMPLING, _none(np.int32), _none(np.int64), _none(np.int32)
)


@dataclass(frozen=True, slots=True)
class ExtendBatch:
    """New tokens of B requests, packed. Request i attends its first context_lens[i] tokens, of which the last extend_lens[i] are in
    this batch; the others' KV is in its pages already, or will be when the launches before this one have run."""

    updates: RowUpdates
    rows: NDArray[np.int32]  # [B]
    token_ids: NDArray[np.int64]  # [T] = sum(extend_lens)
    extend_lens: NDArray[np.int32]  # [B]
    context_lens: NDArray[np.int32]  # [B] tokens after this batch, new ones included
    sample_rows: NDArray[np.int32]  # [S] requests of the batch whose next token is drawn
    sampling: SamplingBatch  # [S] as the rows have it: what the host knows without asking the device
    changes: Sequence[LogitChange] = ()


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One new token for each of B requests."""

    updates: RowUpdates
    rows: NDArray[np.int32]  # [B]
    context_lens: NDArray[np.int32]  # [B] tokens after this step: the new token sits at context_lens - 1. The device counts too
    sampling: SamplingBatch  # [B] as the rows have it
    changes: Sequence[LogitChange] = ()


Batch = ExtendBatch | DecodeBatch
