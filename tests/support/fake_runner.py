"""A runner whose "KV" is the token ids themselves, so that any page mix-up changes the answer.

The pool holds one int64 a token slot: extend and decode write token ids through the page table, and the next token is a hash
of the context *as read back from the pool*. `expected_tokens` computes the same from the token sequence alone: an oracle for
scheduling, paging and transfer without a model. A row that is not greedy adds its seed and the position it draws for, so that a
sampler that does not go on where it was changes the answer too.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from common.engine.batch import KEEP, DecodeBatch, ExtendBatch, RowUpdates

VOCAB_SIZE = 997


def next_token(context: np.ndarray, salt: int = 0) -> int:
    """A function of every token and its place."""
    weights = np.arange(1, len(context) + 1, dtype=np.uint64) * np.uint64(2654435761)
    return int(((context.astype(np.uint64) * weights).sum() + np.uint64(salt)) % np.uint64(VOCAB_SIZE - 10)) + 10


def expected_tokens(prompt_ids: list[int], num_tokens: int, seed: int | None = None) -> list[int]:
    """seed: None for greedy."""
    context = list(prompt_ids)
    for _ in range(num_tokens):
        context.append(next_token(np.asarray(context, dtype=np.int64), 0 if seed is None else _salt(seed, len(context))))
    return context[len(prompt_ids) :]


def _salt(seed: int, position: int) -> int:
    return seed * 7919 + position * 104729


class FakeLaunched:
    """Runs when somebody waits for it, or has asked `patience` times whether it has: behind what was launched before it."""

    def __init__(self, runner: "FakeRunner", run: Callable[[], np.ndarray], patience: int) -> None:
        self._runner, self._run, self._patience = runner, run, patience
        self._tokens: np.ndarray | None = None

    @property
    def ready(self) -> "FakeLaunched | None":
        return None if self._tokens is not None else self

    def query(self) -> bool:
        """As an event that is asked from another thread: says how it is and moves nothing on."""
        return self._tokens is not None

    def done(self) -> bool:
        self._patience -= 1
        if self._patience < 0:
            self._runner.run_until(self)
        return self._tokens is not None

    def tokens(self) -> np.ndarray:
        self._runner.run_until(self)
        assert self._tokens is not None
        return self._tokens

    def run(self) -> None:
        self._tokens = self._run()


class FakeRunner:
    """late: a launch has not run when it returns, so that the next step is planned without its tokens. None: it has run."""

    def __init__(self, num_pages: int, page_size: int, *, late: int | None = None, max_rows: int = 64) -> None:
        self.pool = np.full((num_pages, page_size), -1, dtype=np.int64)
        self.page_size = page_size
        self.late = late
        self.page_table = np.zeros((max_rows, num_pages), np.int64)
        self.token_ids = np.zeros(max_rows, np.int64)
        self.context_lens = np.zeros(max_rows, np.int64)
        self.temperature, self.seed = np.zeros(max_rows), np.zeros(max_rows, np.int64)
        self.extend_sizes: list[int] = []
        self.decode_sizes: list[int] = []
        self.kinds: list[str] = []
        self.under_way: deque[FakeLaunched] = deque()

    def launch(self, batch: ExtendBatch | DecodeBatch) -> FakeLaunched:
        decode = isinstance(batch, DecodeBatch)
        self.kinds.append("decode" if decode else "extend")
        (self.decode_sizes if decode else self.extend_sizes).append(len(batch.rows if isinstance(batch, DecodeBatch) else batch.token_ids))
        launched = FakeLaunched(self, partial(self._decode if decode else self._extend, batch), self.late or 0)
        self.under_way.append(launched)
        if self.late is None:
            self.run_until(launched)
        return launched

    def run_until(self, launched: FakeLaunched) -> None:
        while not launched.query():
            self.under_way.popleft().run()

    def _extend(self, batch: ExtendBatch) -> np.ndarray:
        self._apply(batch.updates)
        offset = 0
        for row, num_new, context_len in zip(batch.rows.tolist(), batch.extend_lens.tolist(), batch.context_lens.tolist(), strict=True):
            self._write(row, context_len - num_new, batch.token_ids[offset : offset + num_new])
            offset += num_new
        rows = batch.rows[batch.sample_rows]
        return self._sample(rows, batch.context_lens[batch.sample_rows])

    def _decode(self, batch: DecodeBatch) -> np.ndarray:
        self._apply(batch.updates)
        assert self.context_lens[batch.rows].tolist() == batch.context_lens.tolist(), "the host's lengths are the device's"
        for row, context_len in zip(batch.rows.tolist(), batch.context_lens.tolist(), strict=True):
            self._write(row, context_len - 1, self.token_ids[row : row + 1])
        self.context_lens[batch.rows] += 1
        return self._sample(batch.rows, batch.context_lens)

    def _apply(self, updates: RowUpdates) -> None:
        self.page_table[updates.page_rows, updates.page_columns] = updates.page_ids
        self.temperature[updates.new_rows], self.seed[updates.new_rows] = updates.sampling.temperature, updates.sampling.seed
        self.context_lens[updates.joined_rows] = updates.joined_context_lens
        told = updates.joined_token_ids != KEEP
        self.token_ids[updates.joined_rows[told]] = updates.joined_token_ids[told]

    def _sample(self, rows: np.ndarray, context_lens: np.ndarray) -> np.ndarray:
        drawn = np.zeros(len(rows), np.int64)
        for i, (row, num_tokens) in enumerate(zip(rows.tolist(), context_lens.tolist(), strict=True)):
            salt = _salt(int(self.seed[row]), num_tokens) if self.temperature[row] else 0
            drawn[i] = next_token(self._read(row, num_tokens), salt)
        self.token_ids[rows] = drawn
        return drawn

    def _write(self, row: int, start: int, token_ids: np.ndarray) -> None:
        positions = np.arange(start, start + len(token_ids))
        self.pool[self.page_table[row, positions // self.page_size], positions % self.page_size] = token_ids

    def _read(self, row: int, num_tokens: int) -> np.ndarray:
        positions = np.arange(num_tokens)
        return self.pool[self.page_table[row, positions // self.page_size], positions % self.page_size]
