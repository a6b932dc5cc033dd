"""Which prompt tokens are computed next? First come, first served, packed to a token budget.

waiting   producer: the role's scheduler, and retraction (at the front); consumer: plan(), which admits by pages and rows.
extending requests that hold pages and have tokens left to compute; they go on before anybody is admitted.
A prompt longer than the budget is computed in chunks over several batches (Sarathi: Agrawal et al., OSDI'24).
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from common.engine.batch import ExtendBatch
from common.scheduling.pages import RequestPages
from common.scheduling.request import Place, Request
from common.scheduling.sampling_rows import sampling_batch


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of one request in one extend batch. `last`: its next token is sampled."""

    request: Request
    start: int
    stop: int
    last: bool


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    chunks: list[Chunk]
    admitted: list[Request]  # requests that got their pages with this plan
    batch: ExtendBatch


class Extending:
    def __init__(self, pages: RequestPages, chunked_prefill_size: int) -> None:
        self._pages = pages
        self._budget_tokens = chunked_prefill_size
        self.waiting: deque[Request] = deque()
        self.extending: list[Request] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self.extending)

    def add(self, request: Request) -> None:
        request.place = Place.WAITING
        self.waiting.append(request)

    def add_first(self, request: Request) -> None:
        """For requests that were running before: they go before new ones, so that none starves."""
        request.place = Place.WAITING
        self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        if request.place is Place.WAITING:
            self.waiting.remove(request)
        elif request.place is Place.EXTENDING:
            self.extending.remove(request)

    def plan(self, num_free_rows: int, reserve_pages: int) -> ExtendPlan | None:
        """The next extend batch, or None when nothing can be computed now.

        num_free_rows: how many more requests may hold pages. reserve_pages: left for others to grow."""
        chunks: list[Chunk] = []
        admitted: list[Request] = []
        budget = self._budget_tokens
        for request in self.extending:
            if budget == 0:
                break
            budget -= self._take(request, budget, chunks)
        while budget > 0 and self.waiting and num_free_rows > 0:
            request = self.waiting[0]
            # one token at least must be computed: its logits give the next token
            if not self._pages.admit(request, request.num_tokens - 1, reserve_pages):
                break
            self.waiting.popleft()
            request.place = Place.EXTENDING
            self.extending.append(request)
            admitted.append(request)
            num_free_rows -= 1
            reserve_pages += self._pages.growth_pages(request)
            budget -= self._take(request, budget, chunks)
        return ExtendPlan(chunks, admitted, self._batch(chunks)) if chunks else None

    def computed(self, plan: ExtendPlan) -> None:
        """The plan's forward is done: its tokens' KV is in the pages. Finished prompts leave this queue (place ROOM until the
        caller puts them elsewhere)."""
        for chunk in plan.chunks:
            chunk.request.num_computed_tokens = chunk.stop
            if chunk.last:
                self.extending.remove(chunk.request)
                chunk.request.place = Place.ROOM

    def _take(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        start = request.num_computed_tokens
        stop = min(request.num_tokens, start + budget)
        chunks.append(Chunk(request, start, stop, stop == request.num_tokens))
        return stop - start

    def _batch(self, chunks: list[Chunk]) -> ExtendBatch:
        token_ids: list[int] = []
        for chunk in chunks:
            token_ids += chunk.request.tokens_between(chunk.start, chunk.stop)
        page_table = np.zeros((len(chunks), max(len(chunk.request.pages) for chunk in chunks)), dtype=np.int32)
        for row, chunk in enumerate(chunks):
            page_table[row, : len(chunk.request.pages)] = chunk.request.pages
        last = [row for row, chunk in enumerate(chunks) if chunk.last]
        return ExtendBatch(
            token_ids=np.asarray(token_ids, dtype=np.int64),
            extend_lens=np.asarray([chunk.stop - chunk.start for chunk in chunks], dtype=np.int32),
            context_lens=np.asarray([chunk.stop for chunk in chunks], dtype=np.int32),
            page_table=page_table,
            sample_rows=np.asarray(last, dtype=np.int32),
            sampling=sampling_batch([chunks[row].request for row in last]),
        )
