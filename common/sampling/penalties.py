"""What changes a row's logits before it is sampled: penalties on tokens that have occurred, the client's biases, tokens that may not come yet.

A changed logit is, in this order,

    x / repetition_penalty if x > 0 else x * repetition_penalty     where the token occurs in prompt or output
    x - frequency_penalty * count - presence_penalty + bias         count: in the output; presence where count > 0
    -inf                                                            where the token would end the request before min_tokens

repetition_penalty is that of Keskar et al. 2019 and of transformers, vLLM and SGLang; frequency, presence and bias are the OpenAI API's.
The bias comes after the penalties, so that what it forbids or forces does not depend on them. Only tokens that one of these touches are
listed: a step costs what its rows have listed, and Python looks only at the tokens that came since the step before.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.request import SamplingParams

ENTRY = np.dtype([("token_id", np.int32), ("count", np.int32), ("scale", np.float32), ("bias", np.float32)])


class LogitHistory:
    """The tokens of one request whose logits are changed, kept up with its output. Mutable; its request's scheduler owns it."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], eos_token_ids: Collection[int], vocab_size: int) -> None:
        """vocab_size: of the logits; ids beyond it have none and are left out."""
        self._params = params
        self._vocab_size = vocab_size
        self._entries: NDArray[Any] = np.zeros(16, ENTRY)
        self._places: dict[int, int] = {}  # of token ids, in _entries
        self._num_seen = 0  # outputs that are counted
        if params.repetition_penalty != 1.0:
            self._enter_prompt(prompt_ids)
        for token_id, bias in params.logit_bias:
            self._enter(token_id, "bias", bias)
        ending = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)} if params.min_tokens > 0 else set()
        self._ending = np.array([place for token_id in ending if (place := self._place(token_id)) is not None], np.int64)

    def terms(self, output_ids: Sequence[int], num_outputs: int) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
        """Token ids, no one twice; what scales and what is added to their logits; all [n].

        output_ids: those the host knows; only what has come since the last call is looked at.  num_outputs: drawn before this draw.
        """
        if self._params.needs_history:
            assert len(output_ids) == num_outputs >= self._num_seen, f"{len(output_ids)} of {num_outputs} outputs, {self._num_seen} counted"
            self._count(output_ids[self._num_seen :])
        entries = self._entries[: len(self._places)]
        count = entries["count"]
        penalty = self._params.frequency_penalty * count + self._params.presence_penalty * (count > 0)
        added: NDArray[np.float32] = (entries["bias"] - penalty).astype(np.float32)
        if num_outputs < self._params.min_tokens:
            added[self._ending] = -np.inf
        return entries["token_id"], entries["scale"], added

    def _enter_prompt(self, prompt_ids: Sequence[int]) -> None:
        """All at once: token by token, 100,000 took over 100 ms, for which every other request waits."""
        ids = np.unique(np.asarray(prompt_ids, np.int64))
        ids = ids[(ids >= 0) & (ids < self._vocab_size)]
        self._entries = np.zeros(max(16, len(ids)), ENTRY)
        self._entries["token_id"][: len(ids)] = ids
        self._entries["scale"][: len(ids)] = self._params.repetition_penalty
        self._places = dict(zip(ids.tolist(), range(len(ids)), strict=True))

    def _count(self, new_ids: Sequence[int]) -> None:
        for token_id in new_ids:
            place = self._enter(token_id, "scale", self._params.repetition_penalty)
            if place is not None:
                self._entries["count"][place] += 1
        self._num_seen += len(new_ids)

    def _enter(self, token_id: int, field: str, value: float) -> int | None:
        place = self._place(token_id)
        if place is not None:
            self._entries[field][place] = value
        return place

    def _place(self, token_id: int) -> int | None:
        """Where the token is entered, from now on at least; None: it has no logit."""
        place = self._places.get(token_id)
        if place is None and 0 <= token_id < self._vocab_size:
            place = self._places[token_id] = len(self._places)
            if place == len(self._entries):
                self._entries = np.concatenate((self._entries, np.zeros_like(self._entries)))
            self._entries[place] = (token_id, 0, 1.0, 0.0)
        return place


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Logits of a batch that change; no one twice. All are [n], on one device."""

    rows: torch.Tensor  # int64
    token_ids: torch.Tensor  # int64
    scale: torch.Tensor  # float32
    added: torch.Tensor  # float32

    @classmethod
    def build(cls, changed: Sequence[tuple[int, LogitHistory, Sequence[int], int]], device: torch.device) -> "LogitChanges | None":
        """changed: (row of the batch, its history, output ids the host knows, outputs drawn before this draw). None: nothing changes."""
        terms = [(row, *history.terms(output_ids, num_outputs)) for row, history, output_ids, num_outputs in changed]
        ends = np.cumsum([len(token_ids) for _, token_ids, _, _ in terms])
        if len(ends) == 0 or ends[-1] == 0:
            return None
        packed = np.empty((4, ends[-1]), np.int32)  # one copy to the device
        floats = packed.view(np.float32)
        for end, (row, token_ids, scale, added) in zip(ends, terms, strict=True):
            place = slice(end - len(token_ids), end)
            packed[0, place], packed[1, place], floats[2, place], floats[3, place] = row, token_ids, scale, added
        tensor = torch.from_numpy(packed)
        if device.type != "cpu":
            tensor = tensor.pin_memory().to(device, non_blocking=True)
        return cls(tensor[0].long(), tensor[1].long(), tensor[2].view(torch.float32), tensor[3].view(torch.float32))


def change(logits: torch.Tensor, changes: LogitChanges | None) -> torch.Tensor:
    """logits: float32 or bfloat16 [S, V] -> a copy with the changes made, in the same type; without changes, logits. Does not wait for the
    device."""
    if changes is None:
        return logits
    old = logits[changes.rows, changes.token_ids].float()
    new = torch.where(old > 0, old / changes.scale, old * changes.scale) + changes.added
    return logits.index_put((changes.rows, changes.token_ids), new.to(logits.dtype))
