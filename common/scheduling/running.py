"""The decode batch: which rows take part in the next step, and in which order.

Joining and leaving touch the rows concerned only (the last of the batch moves into a hole). A step writes the KV of each row's last
token and draws its next one. What a step will do to lengths is known when it is launched, so it is written down then: a request whose
last token is being drawn is not in the next batch. What it draws is known later: a request that ends by a stop token may have been
launched once more by then, and that token is dropped.

A row that needs a page and gets none is made room for by retracting the newest request (by arrival, never mind when it began to run):
line.py has why. That needs to know what was drawn, so nothing may be in flight. Requests that extend or are in a room keep their
pages: they are on their way here, and a prefill node may be writing them.
"""

import numpy as np
from numpy.typing import NDArray

from common.engine.batch import KEEP, DecodeBatch, LogitChange
from common.scheduling import pages as pages_module
from common.scheduling.logit_changes import LogitChangesOf
from common.scheduling.pages import RequestPages
from common.scheduling.request import NO_ROW, Place, Request
from common.scheduling.rows import Rows


class Running:
    def __init__(self, pages: RequestPages, rows: Rows, changes: LogitChangesOf, context_length: int) -> None:
        self._pages = pages
        self._page_size = pages.page_size
        self._rows = rows
        self._changes = changes
        self._context_length = context_length
        self.requests: list[Request] = []  # in the order of the batch
        self._batch = np.zeros(len(rows.requests), np.int32)  # their rows
        self._index_of = np.zeros(len(rows.requests), np.int32)  # row -> place in the batch
        self._changing: dict[Request, None] = {}  # those whose logits are changed before they sample
        self.num_retracted_swap = 0
        self.num_retracted_recompute = 0

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def _active(self) -> NDArray[np.int32]:
        """The rows of the batch, a view."""
        return self._batch[: len(self.requests)]

    @property
    def need_history(self) -> bool:
        """Does some row's next draw depend on the values of those before it?"""
        return any(request.sampling.needs_history for request in self._changing)

    def next_batch(self) -> DecodeBatch:
        rows = self._active.copy()
        context_lens = self._rows.context_lens[rows]
        changes = [self._change(request) for request in self._changing]
        return DecodeBatch(self._rows.take_updates(), rows, context_lens, self._rows.sampling(rows), changes)

    def join(self, request: Request, *, being_drawn: int = 0) -> None:
        """All tokens of the request but the last have their KV in its pages, or will have; the last one is written by its first step.
        being_drawn: 1 when its newest token is still being drawn by a launched step."""
        remaining = min(request.max_new_tokens - len(request.output_ids), self._context_length - request.num_tokens) - being_drawn
        assert request.num_computed_tokens == request.num_tokens + being_drawn - 1
        if remaining <= 0:
            request.place = Place.FINISHING
            if request.row != NO_ROW:
                self._rows.give_back(request)
            return
        if request.row == NO_ROW:
            self._rows.take(request)
        index, row = len(self.requests), request.row
        request.place = Place.RUNNING
        self.requests.append(request)
        self._batch[index], self._index_of[row] = row, index
        if request.sampling.changes_logits:
            self._changing[request] = None
        self._rows.join(row, KEEP if being_drawn else request.output_ids[-1], request.num_tokens + being_drawn, remaining)

    def remove(self, request: Request) -> None:
        """Take the request out; its pages stay with it."""
        row, index, last = request.row, int(self._index_of[request.row]), len(self.requests) - 1
        mover = self.requests[last]
        self.requests[index], self._batch[index], self._index_of[mover.row] = mover, mover.row, index
        self.requests.pop()
        self._changing.pop(request, None)
        request.num_computed_tokens = int(self._rows.context_lens[row]) - 1
        request.last_step = max(request.last_step, self._pages.num_launched)
        request.place = Place.NOWHERE
        self._rows.give_back(request)

    def growth_pages(self) -> int:
        """Pages the running requests may soon need (RequestPages.growth_pages for all rows)."""
        rows, batch = self._rows, self._active
        ahead = np.maximum(0, np.minimum(rows.remaining[batch], pages_module.GROWTH_HORIZON_TOKENS) - 1)
        return int(np.maximum(0, -(-(rows.context_lens[batch] + ahead) // self._page_size) - rows.num_pages[batch]).sum())

    def grow(self) -> bool:
        """Give every row the page that its next token needs. False: there are too few; some rows may have got theirs."""
        rows, batch = self._rows, self._active
        needy = batch[rows.context_lens[batch] > rows.num_pages[batch] * self._page_size]
        for row in needy.tolist():
            request = self.requests[self._index_of[row]]
            if not self._pages.grow(request):
                return False
            rows.add_page(row, request.pages[-1])
        return True

    def retract_newest(self) -> Request:
        """Take the newest request's pages for the others; nothing is in flight."""
        newest = max(self.requests, key=lambda request: request.order)
        self.remove(newest)
        self._pages.retract(newest)
        if newest.host_copy is None:
            self.num_retracted_recompute += 1
        else:
            self.num_retracted_swap += 1
        return newest

    def launched(self) -> None:
        """A step of the whole batch is under way: every row's last token is being written, its next one drawn."""
        rows, batch = self._rows, self._active
        rows.context_lens[batch] += 1
        rows.remaining[batch] -= 1
        for row in batch[rows.remaining[batch] == 0].tolist():
            request = self.requests[self._index_of[row]]
            self.remove(request)
            request.place = Place.FINISHING

    def _change(self, request: Request) -> LogitChange:
        num_outputs = int(self._rows.context_lens[request.row]) - len(request.prompt_ids)
        return self._changes.of(request, int(self._index_of[request.row]), num_outputs)
