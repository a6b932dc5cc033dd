"""How each row of a batch is sampled: on the device, and what the host knows of it, so that nothing has to ask the device."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from common.request import GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """One entry a row; all on one device. Owners of rows write into the tensors in place."""

    temperature: torch.Tensor  # float32 [R]; < GREEDY_TEMPERATURE: the largest logit
    top_p: torch.Tensor  # float32 [R]
    top_k: torch.Tensor  # int32 [R]; -1: all
    min_p: torch.Tensor  # float32 [R]
    seed: torch.Tensor  # int64 [R]

    @classmethod
    def greedy(cls, num_rows: int, device: torch.device) -> "SamplingRows":
        return cls(
            temperature=torch.zeros(num_rows, device=device),
            top_p=torch.ones(num_rows, device=device),
            top_k=torch.full((num_rows,), -1, dtype=torch.int32, device=device),
            min_p=torch.zeros(num_rows, device=device),
            seed=torch.zeros(num_rows, dtype=torch.int64, device=device),
        )

    def select(self, rows: torch.Tensor) -> "SamplingRows":
        """rows: int32 or int64 [S] -> a copy of these rows."""
        return SamplingRows(*(tensor.index_select(0, rows) for tensor in (self.temperature, self.top_p, self.top_k, self.min_p, self.seed)))


@dataclass(frozen=True, slots=True)
class SamplingMix:
    """Which steps of sampling at least one row of a batch needs. A step that no row needs is not run."""

    any_random: bool = False
    any_top_k: bool = False
    any_top_p: bool = False
    any_min_p: bool = False
    max_top_k: int = 0  # how many of the largest logits must be ranked: the largest top_k; -1: all, a row has top_p and no top_k

    GREEDY: ClassVar["SamplingMix"]

    @classmethod
    def of(cls, temperature: NDArray[Any], top_p: NDArray[Any], top_k: NDArray[Any], min_p: NDArray[Any]) -> "SamplingMix":
        """From the parameters of the batch's rows, each [S]."""
        random = (temperature >= GREEDY_TEMPERATURE) & (top_k != 1)
        if not random.any():
            return cls.GREEDY
        has_top_k, has_top_p = random & (top_k > 0), random & (top_p < 1)
        return cls(
            any_random=True,
            any_top_k=bool(has_top_k.any()),
            any_top_p=bool(has_top_p.any()),
            any_min_p=bool((random & (min_p > 0)).any()),
            max_top_k=-1 if (has_top_p & ~has_top_k).any() else int(np.max(top_k, where=has_top_k, initial=0)),
        )


SamplingMix.GREEDY = SamplingMix()
