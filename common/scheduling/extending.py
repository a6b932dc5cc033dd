"""Which prompt tokens are computed next? First come, first served, packed to a token budget.

extending  requests that hold pages and have tokens left to compute; they go on before anybody is admitted. Producers: plan(), which
           admits the head of the line by pages and rows, and go_on(); consumer: computed().
A prompt longer than the budget is computed in chunks over several batches (Sarathi: Agrawal et al., OSDI'24).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.engine.batch import ExtendBatch
from common.scheduling.line import Line
from common.scheduling.logit_changes import LogitChangesOf
from common.scheduling.pages import RequestPages
from common.scheduling.request import Place, Request
from common.scheduling.rows import Rows


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
    def __init__(self, pages: RequestPages, line: Line, rows: Rows, changes: LogitChangesOf, chunked_prefill_size: int) -> None:
        self._pages = pages
        self._line = line
        self._rows = rows
        self._changes = changes
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
        self._rows.take(request)
        self.requests.append(request)

    def remove(self, request: Request) -> None:
        self.requests.remove(request)
        self._rows.give_back(request)

    def plan(self, num_free_rows: int, reserve_pages: Callable[[], int]) -> ExtendPlan | None:
        """The next extend batch, or None when nothing can be computed now.

        num_free_rows: how many more requests may hold pages. reserve_pages: to be left for others to grow."""
        chunks: list[Chunk] = []
        admitted: list[Request] = []
        budget = self._budget_tokens
        for request in self.requests:
            if budget == 0:
                break
            budget -= self._take(request, budget, chunks)
        while budget > 0 and num_free_rows > 0 and (head := self._next()):
            # one token at least must be computed: its logits give the next token
            if not self._pages.admit(head, head.num_tokens - 1, reserve_pages()):
                break
            self._line.pop()
            self.go_on(head)
            admitted.append(head)
            num_free_rows -= 1
            budget -= self._take(head, budget, chunks)
        return ExtendPlan(chunks, admitted, self._batch(chunks)) if chunks else None

    def launched(self, plan: ExtendPlan, step: int) -> list[Request]:
        """The plan is under way as that step: its tokens' KV will be in the pages. Returns the requests whose prompt is done with it: they
        leave, with their row; where to, the caller says."""
        done: list[Request] = []
        for chunk in plan.chunks:
            chunk.request.num_computed_tokens, chunk.request.last_step = chunk.stop, step
            if chunk.last:
                self.requests.remove(chunk.request)
                chunk.request.place = Place.NOWHERE
                done.append(chunk.request)
        return done

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
        rows = np.asarray([chunk.request.row for chunk in chunks], dtype=np.int32)
        last = np.flatnonzero([chunk.last for chunk in chunks]).astype(np.int32)
        return ExtendBatch(
            updates=self._rows.take_updates(),
            rows=rows,
            token_ids=np.asarray(token_ids, dtype=np.int64),
            extend_lens=np.asarray([chunk.stop - chunk.start for chunk in chunks], dtype=np.int32),
            context_lens=np.asarray([chunk.stop for chunk in chunks], dtype=np.int32),
            sample_rows=last,
            sampling=self._rows.sampling(rows[last]),
            changes=[
                self._changes.of(request, index, len(request.output_ids))
                for index, request in enumerate(chunks[chunk].request for chunk in last.tolist())
                if request.sampling.changes_logits
            ],
        )
