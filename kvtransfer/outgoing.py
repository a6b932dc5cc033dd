"""Pages of one room on P between the scheduler's hand-over and the post: gathered into batches, and held until they may be read.

A batch is sealed when its pages are worth post_tokens, or when nothing more will come; it is posted as one write. So a long prompt
costs few posts, whatever its chunks are, and in fresh pools, where pages lie side by side on both nodes, few descriptors. Batches leave
in order, each when the events of all its pages have passed: until then a kernel may still be writing them.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvtransfer.backend import PageIds


class Ready(Protocol):
    """A device event recorded after the kernels that write the pages, such as torch.cuda.Event."""

    def query(self) -> bool:
        """It has passed. Never blocks."""


@dataclass(slots=True)
class Batch:
    local_pages: PageIds
    slots: PageIds  # places of these pages in the offer's list
    ready: list[Ready]  # those that have not passed, as far as known
    digested: bool = False

    def is_ready(self) -> bool:
        while self.ready:
            if not self.ready[-1].query():  # the newest first: on one stream it is the last to pass
                return False
            self.ready.pop()
        return True


class Outgoing:
    def __init__(self, pages_per_post: int) -> None:
        self._pages_per_post = pages_per_post
        self._gathered: list[tuple[PageIds, PageIds]] = []  # local pages, slots
        self._num_gathered = 0
        self._ready: list[Ready] = []  # of the gathered pages
        self._sealed: deque[Batch] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._gathered and not self._sealed

    @property
    def first(self) -> Batch | None:
        """The next batch to be posted, ready or not."""
        return self._sealed[0] if self._sealed else None

    def add(self, local_pages: PageIds, first_slot: int, ready: Ready | None) -> None:
        self._gathered.append((local_pages, np.arange(first_slot, first_slot + len(local_pages), dtype=np.int32)))
        self._num_gathered += len(local_pages)
        if ready is not None:
            self._ready.append(ready)
        if self._num_gathered >= self._pages_per_post:
            self.seal()

    def seal(self) -> None:
        """What was gathered is a batch."""
        if self._gathered:
            local_pages, slots = map(np.concatenate, zip(*self._gathered, strict=True))
            self._sealed.append(Batch(local_pages, slots, self._ready))
            self._gathered, self._num_gathered, self._ready = [], 0, []

    def take(self) -> None:
        """The first batch leaves."""
        self._sealed.popleft()

    def drop(self) -> None:
        """The room is over: nothing of it is posted any more."""
        self._gathered, self._num_gathered, self._ready = [], 0, []
        self._sealed.clear()
