"""A runner whose "KV" is the token ids themselves, so that any page mix-up changes the answer.

The pool holds one int64 a token slot: extend and decode write token ids through the page table, and the next token is a hash
of the context *as read back from the pool*. `expected_tokens` computes the same from the token sequence alone: an oracle for
scheduling, paging and transfer without a model. A row that is not greedy adds its seed and the position it draws for, so that a
sampler that does not go on where it was changes the answer too.
"""

import numpy as np

from common.engine.batch import DecodeBatch, ExtendBatch, SamplingBatch

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


def _salts(sampling: SamplingBatch) -> list[int]:
    rows = zip(sampling.temperature.tolist(), sampling.seed.tolist(), sampling.position.tolist(), strict=True)
    return [_salt(seed, position) if temperature else 0 for temperature, seed, position in rows]


class FakeRunner:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.pool = np.full((num_pages, page_size), -1, dtype=np.int64)
        self.page_size = page_size
        self.extend_sizes: list[int] = []
        self.decode_sizes: list[int] = []
        self.kinds: list[str] = []

    def extend(self, batch: ExtendBatch) -> np.ndarray:
        self.kinds.append("extend")
        self.extend_sizes.append(len(batch.token_ids))
        offset = 0
        for row, (num_new, context_len) in enumerate(zip(batch.extend_lens.tolist(), batch.context_lens.tolist(), strict=True)):
            self._write(batch.page_table[row], context_len - num_new, batch.token_ids[offset : offset + num_new])
            offset += num_new
        return self._sample(batch.page_table[batch.sample_rows], batch.context_lens[batch.sample_rows], batch.sampling)

    def decode(self, batch: DecodeBatch) -> np.ndarray:
        self.kinds.append("decode")
        self.decode_sizes.append(len(batch.token_ids))
        for row, context_len in enumerate(batch.context_lens.tolist()):
            self._write(batch.page_table[row], context_len - 1, batch.token_ids[row : row + 1])
        return self._sample(batch.page_table, batch.context_lens, batch.sampling)

    def _sample(self, page_table: np.ndarray, context_lens: np.ndarray, sampling: SamplingBatch) -> np.ndarray:
        rows = zip(page_table, context_lens.tolist(), _salts(sampling), strict=True)
        return np.asarray([next_token(self._read(pages, num_tokens), salt) for pages, num_tokens, salt in rows], dtype=np.int64)

    def _write(self, pages: np.ndarray, start: int, token_ids: np.ndarray) -> None:
        positions = np.arange(start, start + len(token_ids))
        self.pool[pages[positions // self.page_size], positions % self.page_size] = token_ids

    def _read(self, pages: np.ndarray, num_tokens: int) -> np.ndarray:
        positions = np.arange(num_tokens)
        return self.pool[pages[positions // self.page_size], positions % self.page_size]
