"""Which row of the device's state has each request, and what has the device not been told yet?

A row belongs to one request from the time it extends or runs until it does neither. It is given to the next one at once, also while a
launched step still names it: the device applies what it is told in the order of launches, so that step runs first.

The host keeps, by row, what it needs for planning as arrays: a step costs vector operations, not a loop over requests.
"""

import numpy as np
from numpy.typing import NDArray

from common.engine.batch import NO_UPDATES, RowUpdates, SamplingBatch
from common.scheduling.request import NO_ROW, Request

IndexArray = NDArray[np.int32]


class Rows:
    def __init__(self, num_rows: int) -> None:
        self.requests: list[Request | None] = [None] * num_rows
        self.context_lens = np.zeros(num_rows, np.int32)  # after the coming decode step
        self.num_pages = np.zeros(num_rows, np.int32)
        self.remaining = np.zeros(num_rows, np.int32)  # tokens that may still be drawn, the coming step's included
        self._sampling = _empty_sampling(num_rows)
        self._free = list(range(num_rows - 1, -1, -1))
        self._pages: list[tuple[int, int, int]] = []
        self._new: list[int] = []
        self._joined: dict[int, tuple[int, int]] = {}

    def take(self, request: Request) -> None:
        """Give the request, which holds its pages, a row."""
        assert request.row == NO_ROW, f"{request.rid} has row {request.row} already"
        row = request.row = self._free.pop()
        self.requests[row] = request
        self.num_pages[row] = len(request.pages)
        self._pages += [(row, column, page) for column, page in enumerate(request.pages)]
        _write_sampling(self._sampling, row, request)
        self._new.append(row)

    def give_back(self, request: Request) -> None:
        self.requests[request.row] = None
        self._joined.pop(request.row, None)
        self._free.append(request.row)
        request.row = NO_ROW

    def add_page(self, row: int, page: int) -> None:
        self._pages.append((row, int(self.num_pages[row]), page))
        self.num_pages[row] += 1

    def join(self, row: int, token_id: int, context_len: int, remaining: int) -> None:
        """The row decodes from now on. token_id: its last one, or KEEP."""
        self.context_lens[row], self.remaining[row] = context_len, remaining
        self._joined[row] = (token_id, context_len)

    def sampling(self, rows: IndexArray) -> SamplingBatch:
        s = self._sampling
        return SamplingBatch(s.temperature[rows], s.top_p[rows], s.top_k[rows], s.min_p[rows], s.seed[rows])

    def take_updates(self) -> RowUpdates:
        """What changed since the last call; to be sent with the next launch."""
        if not (self._pages or self._new or self._joined):
            return NO_UPDATES
        updates = self._updates()
        self._pages.clear()
        self._new.clear()
        self._joined.clear()
        return updates

    def _updates(self) -> RowUpdates:
        # a row that changed hands since then is told of once: entries of the request before are overwritten by those that follow
        pages = {(row, column): page for row, column, page in self._pages} if self._pages else {}
        places = np.array(list(pages), np.int32).reshape(-1, 2)
        new_rows = np.array(list(dict.fromkeys(self._new)), np.int32)
        joined = np.array(list(self._joined.values()), np.int64).reshape(-1, 2)
        return RowUpdates(
            page_rows=np.ascontiguousarray(places[:, 0]),
            page_columns=np.ascontiguousarray(places[:, 1]),
            page_ids=np.fromiter(pages.values(), np.int32, len(pages)),
            new_rows=new_rows,
            sampling=self.sampling(new_rows),
            joined_rows=np.fromiter(self._joined, np.int32, len(self._joined)),
            joined_token_ids=np.ascontiguousarray(joined[:, 0]),
            joined_context_lens=joined[:, 1].astype(np.int32),
        )


def _empty_sampling(num_rows: int) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.zeros(num_rows, np.float32),
        top_p=np.ones(num_rows, np.float32),
        top_k=np.full(num_rows, -1, np.int32),
        min_p=np.zeros(num_rows, np.float32),
        seed=np.zeros(num_rows, np.int64),
    )


def _write_sampling(rows: SamplingBatch, row: int, request: Request) -> None:
    params = request.sampling
    rows.temperature[row] = 0.0 if params.greedy else params.temperature
    rows.top_p[row] = params.top_p
    rows.top_k[row] = params.top_k
    rows.min_p[row] = params.min_p
    rows.seed[row] = params.seed
