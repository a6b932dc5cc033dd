"""Paged KV bookkeeping as one owner: the allocator says which pages are free, the radix tree which hold a known prefix.

This is where the two meet, and the only place that may: a page that becomes pinned is pinned in the tree in the same call, an
evicted one is freed in the same call. The scheduler's thread alone calls it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.kvcache.allocator import PageAllocator
from common.kvcache.radix import RadixTree, page_keys

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


class KVCache:
    def __init__(
        self, num_pages: int, page_size: int, enable_prefix_cache: bool = True, *, on_alloc: Callable[[PageIds], None] = lambda pages: None
    ) -> None:
        """num_pages: pages of the pool, the padding page 0 included. page_size: tokens a page. on_alloc: hears of pages before they are used."""
        assert page_size >= 1, f"page_size is {page_size}"
        self.page_size = page_size
        self._prefix_cache = enable_prefix_cache
        self._allocator = PageAllocator(num_pages)
        self._tree = RadixTree(num_pages)
        self._on_alloc = on_alloc

    @property
    def tree(self) -> RadixTree:
        """What is kept for reuse, to look at and to observe; only this object changes it."""
        return self._tree

    def match(self, token_ids: list[int]) -> PageIds:
        """Pages of the longest cached prefix in full pages, each retained for the caller.

        A prompt of whole pages can match to its end: who needs a token to run passes token_ids[:-1].
        """
        if not self._prefix_cache or len(token_ids) < self.page_size:
            return _page_ids([])
        pages = self._tree.match(page_keys(token_ids, self.page_size))
        self._tree.pin(self._allocator.hold(pages))
        return _page_ids(pages)

    def available(self) -> int:
        """Pages alloc() can give now: free ones and those only the tree holds.

        A page that only the tree holds, but above a held one, does not count: it cannot go before it.
        """
        return self._allocator.num_free + self._tree.num_evictable

    def alloc(self, n: int) -> PageIds:
        """n pages with one holder, evicting least recently used cached ones. Raises OutOfPages and changes nothing."""
        if n > self.available():
            raise OutOfPages(f"{n} pages asked for, {self.available()} of {self._allocator.total} can be given now; raise --max-total-tokens")
        missing = n - self._allocator.num_free
        if missing > 0:
            self._allocator.uncache(self._tree.evict(missing))
        pages = _page_ids(self._allocator.take(n))
        self._on_alloc(pages)
        return pages

    def insert(self, token_ids: list[int], pages: PageIds) -> None:
        """Offer the full pages of `token_ids` (len(pages) >= len(token_ids) // page_size) to the tree; what the tree has already is
        not inserted again. The caller keeps its own hold."""
        num_pages = len(token_ids) // self.page_size
        assert len(pages) >= num_pages, f"{len(token_ids)} tokens fill {num_pages} pages; {len(pages)} offered"
        if not self._prefix_cache or num_pages == 0:
            return
        for page in self._tree.insert(page_keys(token_ids, self.page_size), pages.tolist()):
            self._allocator.cache(page)

    def retain(self, pages: PageIds) -> None:
        """One more hold of pages that somebody holds already: a forked row, a transfer."""
        self._tree.pin(self._allocator.hold(pages.tolist()))

    def num_shared(self, row: PageIds) -> int:
        """Length of the row's beginning that stays in the tree, for match() to find, when its holder lets go: others hold it too."""
        return self._allocator.num_shared(row.tolist())

    def release(self, pages: PageIds) -> None:
        """Give up one hold of each page."""
        self._tree.unpin(self._allocator.release(pages.tolist()))

    def quarantine(self, pages: PageIds) -> None:
        """Turn one hold of each page into a quarantine; release_quarantined() ends it."""
        self._allocator.quarantine(pages.tolist())

    def release_quarantined(self, pages: PageIds) -> None:
        """The peer has said Closed, or is known dead and fenced (R2): give up one quarantine of each page."""
        self._tree.unpin(self._allocator.end_quarantine(pages.tolist()))

    def counts(self) -> PageCounts:
        allocator = self._allocator
        return PageCounts(allocator.num_free, allocator.num_cached, allocator.num_held, allocator.num_quarantined, allocator.total)


def _page_ids(pages: list[int]) -> PageIds:
    return np.array(pages, dtype=np.int32)
