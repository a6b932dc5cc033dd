"""Which prompt tokens are computed next? First come, first served, packed to a token budget.

extending  requests that hold pages and have tokens left to compute; they go on before anybody is admitted. Producers: plan(), which
           admits the head of the line by pages and rows, and go_on(); consumer: computed().
A prompt longer than the budget is computed in chunks over several batches (Sarathi: Agrawal et al., OSDI'24).
"""

from dataclasses import dataclass

import numpy as np

from common.engine.batch import ExtendBatch
from common.scheduling.line import Line
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
    def __init__(self, pages: RequestPages, line: Line, chunked_prefill_size: int) -> None:
        self._pages = pages
        self._line = line
        self._budget_tokens = chunked_prefill_size
        self.requests: list[Request] = []

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        """A new request to compute here; it stands in the line until it has pages."""
        self._line.add(request)

    def go_on(self, request: Request) -> None:
        """The request has its pages, and tokens left to compute."""
        request.place = Place.EXTENDING
        self.requests.append(request)

    def remove(self, request: Request) -> None:
        self.requests.remove(request)

    def plan(self, num_free_rows: int, reserve_pages: int) -> ExtendPlan | None:
        """The next extend batch, or None when nothing can be computed now.

        num_free_rows: how many more requests may hold pages. reserve_pages: left for others to grow."""
        chunks: list[Chunk] = []
        admitted: list[Request] = []
        budget = self._budget_tokens
        for request in self.requests:
            if budget == 0:
                break
            budget -= self._take(request, budget, chunks)
        while budget > 0 and num_free_rows > 0 and (head := self._next()):
            # one token at least must be computed: its logits give the next token
            if not self._pages.admit(head, head.num_tokens - 1, reserve_pages):
                break
            self._line.pop()
            self.go_on(head)
            admitted.append(head)
            num_free_rows -= 1
            reserve_pages += self._pages.growth_pages(head)
            budget -= self._take(head, budget, chunks)
        return ExtendPlan(chunks, admitted, self._batch(chunks)) if chunks else None

    def computed(self, plan: ExtendPlan) -> None:
        """The plan's forward is done: its tokens' KV is in the pages. Finished prompts leave; where to, the caller
        says."""
        for chunk in plan.chunks:
            chunk.request.num_computed_tokens = chunk.stop
            if chunk.last:
                self.requests.remove(chunk.request)
                chunk.request.place = Place.NOWHERE

    def _next(self) -> Request | None:
        """The head of the line if it is for here: not one that is to be offered, nor one whose KV is in host memory."""
        head = self._line.head
        return head if head and head.place is Place.WAITING and head.host_copy is None else None

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
