"""The state of every request that extends or runs, one row each, on the device: what a decode step reads, and what it writes back.

The host sends what changed (RowUpdates) with each launch, and no more: a running row costs it nothing from step to step. The last row
belongs to nobody; it pads a decode batch to its bucket, with one token on the padding page.
"""

import torch

from common.engine.batch import KEEP, RowUpdates
from common.kvcache.layout import PADDING_PAGE
from common.layers.arrays import to_device
from common.sampling.params import SamplingRows


class DeviceRows:
    def __init__(self, num_rows: int, max_pages: int, device: torch.device) -> None:
        """num_rows: beside the padding row."""
        self.padding_row = num_rows
        self.page_table = torch.full((num_rows + 1, max_pages), PADDING_PAGE, dtype=torch.int32, device=device)
        self.token_ids = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)  # the last token, whose KV the next decode step writes
        self.context_lens = torch.ones(num_rows + 1, dtype=torch.int32, device=device)  # tokens after the next decode step
        self.sampling = SamplingRows.greedy(num_rows + 1, device)
        self._device = device

    def apply(self, updates: RowUpdates) -> None:
        """In the order of launches: launched steps have run before, as the device sees it."""
        if len(updates.page_rows):
            rows, columns, ids = (to_device(array, self._device) for array in (updates.page_rows, updates.page_columns, updates.page_ids))
            self.page_table[rows, columns] = ids
        if len(updates.new_rows):
            rows, new, old = to_device(updates.new_rows, self._device), updates.sampling, self.sampling
            for target, values in (
                (old.temperature, new.temperature), (old.top_p, new.top_p), (old.top_k, new.top_k), (old.min_p, new.min_p), (old.seed, new.seed),
            ):  # fmt: skip
                target[rows] = to_device(values, self._device)
        if len(updates.joined_rows):
            self.context_lens[to_device(updates.joined_rows, self._device)] = to_device(updates.joined_context_lens, self._device)
            told = updates.joined_token_ids != KEEP
            if told.any():
                self.token_ids[to_device(updates.joined_rows[told], self._device)] = to_device(updates.joined_token_ids[told], self._device)

    def drawn(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Keep the tokens drawn for the rows, for their next step. A row without a token (NON_FINITE) may run once more before the host
        knows; any token will do for it."""
        self.token_ids[rows] = token_ids.clamp(min=0)
