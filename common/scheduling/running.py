"""The decode batch: one row a running request, kept from step to step.

Row state lives in arrays; joining and leaving touch only the rows concerned (the last row moves into a hole). A step writes
the KV of each row's last token and draws its next one. A row that needs a page and gets none is made room for by retracting
the newest request (by arrival, never mind when it began to run): line.py has why. Requests that extend or are in a room keep their
pages: they are on their way here, and a prefill node may be writing them.
"""

import numpy as np

from common.engine.batch import DecodeBatch
from common.scheduling import pages as pages_module
from common.scheduling.pages import RequestPages
from common.scheduling.request import Place, Request
from common.scheduling.sampling_rows import empty_sampling, first_rows, move_row, write_sampling


class Running:
    def __init__(self, pages: RequestPages, max_rows: int, context_length: int) -> None:
        self._pages = pages
        self._page_size = pages.page_size
        self.max_rows = max_rows
        self.requests: list[Request] = []  # index is the row
        self._row_of: dict[str, int] = {}
        self._token_ids = np.zeros(max_rows, np.int64)
        self._context_lens = np.zeros(max_rows, np.int32)  # after the coming step
        self._num_pages = np.zeros(max_rows, np.int32)
        self._remaining = np.zeros(max_rows, np.int32)  # tokens until max_new_tokens
        self._page_table = np.zeros((max_rows, pages.num_pages_for(context_length) + 1), np.int32)
        self._sampling = empty_sampling(max_rows)
        self.num_retracted_swap = 0
        self.num_retracted_recompute = 0

    def __len__(self) -> int:
        return len(self.requests)

    def join(self, request: Request) -> None:
        """The request's tokens but the last have their KV in its pages; the last one is written by its first step."""
        assert request.num_computed_tokens == request.num_tokens - 1
        assert len(self.requests) < self.max_rows
        row = len(self.requests)
        self.requests.append(request)
        self._row_of[request.rid] = row
        request.place = Place.RUNNING
        self._token_ids[row] = request.output_ids[-1]
        self._context_lens[row] = request.num_tokens
        self._num_pages[row] = len(request.pages)
        self._remaining[row] = request.max_new_tokens - len(request.output_ids)
        self._page_table[row, : len(request.pages)] = request.pages
        write_sampling(self._sampling, row, request)

    def remove(self, request: Request) -> None:
        """Take the request out; its pages stay with it."""
        row, last = self._row_of.pop(request.rid), len(self.requests) - 1
        if row != last:
            mover = self.requests[last]
            self.requests[row] = mover
            self._row_of[mover.rid] = row
            for array in (self._token_ids, self._context_lens, self._num_pages, self._remaining):
                array[row] = array[last]
            self._page_table[row, : len(mover.pages)] = mover.pages
            move_row(self._sampling, last, row)
        self.requests.pop()

    def growth_pages(self) -> int:
        """Pages the running requests may soon need (RequestPages.growth_pages for all rows)."""
        n = len(self.requests)
        ahead = np.maximum(0, np.minimum(self._remaining[:n], pages_module.GROWTH_HORIZON_TOKENS) - 1)
        return int(np.maximum(0, -(-(self._context_lens[:n] + ahead) // self._page_size) - self._num_pages[:n]).sum())

    def plan(self) -> tuple[DecodeBatch | None, list[Request]]:
        """The next step's batch, and the requests that were retracted to make room for it (they hold no pages now)."""
        retracted = self._grow_rows()
        n = len(self.requests)
        if n == 0:
            return None, retracted
        width = int(self._num_pages[:n].max())
        return DecodeBatch(self._token_ids[:n], self._context_lens[:n], self._page_table[:n, :width], first_rows(self._sampling, n)), retracted

    def computed(self) -> None:
        """The step is done: every row's last token has its KV in the pages."""
        for request in self.requests:
            request.num_computed_tokens = request.num_tokens

    def advance(self, request: Request) -> None:
        """The request took its new token and goes on."""
        row = self._row_of[request.rid]
        self._token_ids[row] = request.output_ids[-1]
        self._context_lens[row] += 1
        self._remaining[row] -= 1
        self._sampling.position[row] += 1

    def _grow_rows(self) -> list[Request]:
        retracted: list[Request] = []
        while True:
            n = len(self.requests)
            needy = np.flatnonzero(self._context_lens[:n] > self._num_pages[:n] * self._page_size)
            if len(needy) == 0:
                return retracted
            for row in needy.tolist():
                request = self.requests[row]
                if not self._pages.grow(request):
                    retracted.append(self._retract_newest())
                    break  # rows have moved
                self._page_table[row, self._num_pages[row]] = request.pages[-1]
                self._num_pages[row] += 1

    def _retract_newest(self) -> Request:
        newest = max(self.requests, key=lambda request: request.order)
        self.remove(newest)
        self._pages.retract(newest)
        newest.place = Place.NOWHERE
        if newest.host_copy is None:
            self.num_retracted_recompute += 1
        else:
            self.num_retracted_swap += 1
        return newest
