"""Decode steps of a few fixed sizes, on buffers that stay where they are: what a CUDA graph needs, and what spares a CPU the choice of
kernels for a size not seen before.

A batch of n rows runs in the smallest bucket that holds it; the rest is padding rows, which compute one token on the padding page and
are looked at by nobody. What a step does on the device, from the rows' state back to it, is one function of the bucket, so that it can
be captured once and replayed:

    token, length, pages of each row -> model -> logits;  length += 1 of each real row

Sampling follows outside, on as many rows as are real: it depends on what the batch asks for (common/sampling).
"""

import numpy as np
import torch
from numpy.typing import NDArray

from common.attention.backend import AttentionBackend, AttentionBatch, HostLens
from common.engine.rows import DeviceRows
from common.layers.arrays import to_device
from common.models.decoder import Decoder


def bucket_sizes(max_rows: int) -> list[int]:
    """All sizes up to 8, then four to an octave: less than a quarter of a batch is padding, a tenth on average."""
    sizes = [size for size in range(1, 9) if size < max_rows]
    step = 2
    while sizes and sizes[-1] + step < max_rows and len(sizes) >= 8:
        sizes.append(sizes[-1] + step)
        if sizes[-1] >= 8 * step:
            step *= 2
    return [*sizes, max_rows]


class DecodeBuckets:
    """One set of buffers of the largest size; smaller buckets use their first rows."""

    def __init__(self, sizes: list[int], rows: DeviceRows, model: Decoder, attention: AttentionBackend, page_size: int, device: torch.device) -> None:
        self.sizes = sizes
        self._rows, self._model, self._attention, self._page_size = rows, model, attention, page_size
        self._device = device
        largest = sizes[-1]

        def ints(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(largest, dtype=dtype, device=device)

        self._batch_rows, self._context_lens = ints(torch.int32), ints(torch.int32)
        self._positions, self._slots = ints(torch.int64), ints(torch.int64)
        self._real = ints(torch.int32)  # 1 for a row of a request, 0 for padding
        self._size, self._host_rows, self._long_rows = 0, np.empty(0, np.int32), torch.empty(0, dtype=torch.int64, device=device)
        self._query_starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._batches = {size: self._batch(size) for size in sizes}

    def size_for(self, num_rows: int) -> int:
        return next(size for size in self.sizes if size >= num_rows)

    def set_rows(self, rows: NDArray[np.int32], size: int) -> torch.Tensor:
        """Who takes part: row numbers, at most `size`. Returns them on the device, int64 [len(rows)]; where nobody joined or left since the
        last step, nothing is sent."""
        if size != self._size or not np.array_equal(rows, self._host_rows):
            self._size, self._host_rows, n = size, rows, len(rows)
            self._batch_rows[:n].copy_(to_device(rows, self._device), non_blocking=True)
            self._batch_rows[n:size].fill_(self._rows.padding_row)
            torch.ne(self._batch_rows[:size], self._rows.padding_row, out=self._real[:size])  # warm-up runs padding rows alone
            self._long_rows = self._batch_rows[:n].to(torch.int64)
        return self._long_rows

    def plan(self, size: int, lens: HostLens) -> None:
        """The host's part of a step. lens: of the bucket's rows, padding included."""
        self._attention.plan(self._batches[size], lens)

    def run(self, size: int) -> torch.Tensor:
        """The device's part. Returns the logits [size, vocab]."""
        batch, state = self._batches[size], self._rows
        rows = batch.rows.to(torch.int64)
        torch.index_select(state.context_lens, 0, rows, out=batch.context_lens)
        torch.sub(batch.context_lens, 1, out=batch.positions)
        pages = state.page_table[rows, torch.div(batch.positions, self._page_size, rounding_mode="floor")]
        torch.add(pages.to(torch.int64) * self._page_size, batch.positions % self._page_size, out=batch.slots)
        logits = self._model.logits(self._model(state.token_ids[rows], self._attention))
        state.context_lens.index_add_(0, rows, self._real[:size])
        return logits

    def num_tokens(self, num_rows: int) -> torch.Tensor:
        """After run(): the tokens that each of the first rows had when it was to draw its next one, int64 [num_rows]."""
        return self._context_lens[:num_rows].to(torch.int64)

    def _batch(self, size: int) -> AttentionBatch:
        return AttentionBatch(
            page_table=self._rows.page_table,
            rows=self._batch_rows[:size],
            context_lens=self._context_lens[:size],
            query_starts=self._query_starts[: size + 1],
            positions=self._positions[:size],
            slots=self._slots[:size],
            is_decode=True,
        )
