"""Paged KV bookkeeping as one owner: allocator + radix tree.  (contract; to be implemented)"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

PageIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageCounts:
    """free + cached + held + quarantined == total (R1). Page 0 takes padding writes and is none of these."""

    free: int
    cached: int  # held by the radix tree alone
    held: int  # held by a request or a transfer
    quarantined: int  # a peer may still write it (R2)
    total: int


class OutOfPages(Exception):
    """The pool cannot give that many pages now."""


class KVCache(Protocol):
    page_size: int

    def match(self, token_ids: list[int]) -> PageIds:
        """Pages of the longest cached prefix in full pages, each retained for the caller."""

    def available(self) -> int:
        """Pages alloc() can give now: free ones and those only the tree holds."""

    def alloc(self, n: int) -> PageIds:
        """n pages with one holder, evicting least recently used cached ones. Raises OutOfPages and changes nothing."""

    def insert(self, token_ids: list[int], pages: PageIds) -> None:
        """Offer the full pages of `token_ids` (len(pages) >= len(token_ids) // page_size) to the tree; what the tree has already is
        not inserted again. The caller keeps its own hold."""

    def release(self, pages: PageIds) -> None:
        """Give up one hold of each page."""

    def quarantine(self, pages: PageIds) -> None:
        """Turn one hold of each page into a quarantine; release_quarantined() ends it."""

    def release_quarantined(self, pages: PageIds) -> None: ...

    def counts(self) -> PageCounts: ...
