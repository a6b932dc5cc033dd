"""Drives a ModelRunner as a scheduler would: requests with a row and pages from a shuffled free list, extend batches, decode batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.batch import NO_SAMPLING, DecodeBatch, ExtendBatch, RowUpdates, SamplingBatch
from common.engine.runner import ModelRunner


def greedy(num_rows: int) -> SamplingBatch:
    return sampling(num_rows, temperature=0.0)


def sampling(num_rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0, seed: int = 0) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.full(num_rows, temperature, np.float32),
        top_p=np.full(num_rows, top_p, np.float32),
        top_k=np.full(num_rows, top_k, np.int32),
        min_p=np.full(num_rows, min_p, np.float32),
        seed=np.full(num_rows, seed, np.int64),
    )


@dataclass(eq=False)
class Row:
    """One request: its tokens, how many of them have KV, its pages, and its row of the device's state."""

    token_ids: list[int]
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    number: int = -1
    num_told: int = 0  # pages that the device knows


class PagedDriver:
    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self._free = np.random.default_rng(seed).permutation(np.arange(1, runner.kv.num_pages)).tolist()
        self._free_rows = list(range(runner.rows.padding_row))

    def extend(self, parts: Sequence[tuple[Row, int]]) -> NDArray[np.int64]:
        return self.runner.launch(self.extend_batch(parts)).tokens()

    def decode(self, rows: Sequence[Row]) -> NDArray[np.int64]:
        return self.runner.launch(self.decode_batch(rows)).tokens()

    def extend_batch(self, parts: Sequence[tuple[Row, int]], *, sample_all: bool = False) -> ExtendBatch:
        """The next `n` prompt tokens of each row; rows whose last token is among them sample."""
        ids = [token for row, n in parts for token in row.token_ids[row.num_computed : row.num_computed + n]]
        for row, n in parts:
            row.num_computed += n
        samples = [i for i, (row, _) in enumerate(parts) if sample_all or row.num_computed == len(row.token_ids)]
        rows, lens = [row for row, _ in parts], np.array([n for _, n in parts], np.int32)
        updates = self._updates(rows, joined=False)
        return ExtendBatch(
            updates, _numbers(rows), np.array(ids, np.int64), lens, _context_lens(rows), np.array(samples, np.int32), greedy(len(samples))
        )

    def decode_batch(self, rows: Sequence[Row]) -> DecodeBatch:
        """The last token of each row, which has no KV yet."""
        for row in rows:
            row.num_computed += 1
            assert row.num_computed == len(row.token_ids)
        return DecodeBatch(self._updates(rows, joined=True), _numbers(rows), _context_lens(rows), greedy(len(rows)))

    def generate(self, prompt: list[int], num_new_tokens: int, chunk: int) -> list[int]:
        """Greedy, alone in every batch."""
        row = Row(list(prompt))
        drawn = np.empty(0, np.int64)
        while row.num_computed < len(prompt):
            drawn = self.extend([(row, min(chunk, len(prompt) - row.num_computed))])
        row.token_ids.append(int(drawn[0]))
        for _ in range(num_new_tokens - 1):
            row.token_ids.append(int(self.decode([row])[0]))
        self.release(row)
        return row.token_ids[len(prompt) :]

    def all_logits(self, token_ids: list[int], chunk: int, num_decoded: int) -> torch.Tensor:
        """Logits after each token but those inside chunks: chunks by extend, the last `num_decoded` tokens by decode."""
        row = Row(token_ids[: len(token_ids) - num_decoded])
        found = []
        while row.num_computed < len(row.token_ids):
            batch = self.extend_batch([(row, min(chunk, len(row.token_ids) - row.num_computed))], sample_all=True)
            found.append(self.runner.logits(batch).clone())
        for token in token_ids[len(token_ids) - num_decoded :]:
            row.token_ids.append(token)
            found.append(self.runner.logits(self.decode_batch([row])).clone())
        self.release(row)
        return torch.cat(found)

    def release(self, row: Row) -> None:
        self._free.extend(row.pages)
        self._free_rows.append(row.number)
        row.pages.clear()
        row.number, row.num_told = -1, 0

    def _updates(self, rows: Sequence[Row], *, joined: bool) -> RowUpdates:
        new = []
        for row in rows:
            if row.number < 0:
                row.number = self._free_rows.pop(0)
                new.append(row)
            while len(row.pages) * self.runner.kv.page_size < row.num_computed:
                row.pages.append(self._free.pop(0))
        entries = [(row.number, column, row.pages[column]) for row in rows for column in range(row.num_told, len(row.pages))]
        for row in rows:
            row.num_told = len(row.pages)
        table = np.array(entries, np.int32).reshape(-1, 3)
        joins = rows if joined else []
        return RowUpdates(
            page_rows=table[:, 0].copy(),
            page_columns=table[:, 1].copy(),
            page_ids=table[:, 2].copy(),
            new_rows=_numbers(new),
            sampling=greedy(len(new)) if new else NO_SAMPLING,
            joined_rows=_numbers(joins),
            joined_token_ids=np.array([row.token_ids[-1] for row in joins], np.int64),
            joined_context_lens=_context_lens(joins),
        )


def _numbers(rows: Sequence[Row]) -> NDArray[np.int32]:
    return np.array([row.number for row in rows], np.int32)


def _context_lens(rows: Sequence[Row]) -> NDArray[np.int32]:
    return np.array([row.num_computed for row in rows], np.int32)
