"""When is a page free?

A page is free iff nobody holds it (R1). Three kinds of holder, counted apart because they end differently:

    hold        a request or a transfer; any number a page; ends with release()
    tree        the radix tree, at most once a page; ends with uncache() (eviction)
    quarantine  a peer that may still write the page (R2); a hold is turned into it, and only end_quarantine() ends it

`pinned` means held or quarantined: such a page must not be evicted. Each page counts once, by its strongest holder:
quarantined, else held, else cached (the tree alone), else free. The four are counted by their own transitions, not derived
from one another, so that their sum being `total` is evidence and not arithmetic. Page 0 takes padding writes: it is never
handed out and belongs to none of the four.

The methods work on lists: one call a row, not one a page. Wrong use (releasing a free page, quarantining more than is held)
is an error of ours: AssertionError.
"""

from collections.abc import Iterable


class PageAllocator:
    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 1, f"a pool needs its padding page; got num_pages={num_pages}"
        self.total = num_pages - 1
        self.num_cached = 0  # held by the tree alone
        self.num_held = 0  # held, not quarantined
        self.num_quarantined = 0
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: pages freed last are still in the processor's caches
        self._holds = [0] * num_pages
        self._quarantines = [0] * num_pages
        self._in_tree = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """n free pages, each with one hold; the caller has seen that so many are free."""
        assert 0 <= n <= len(self._free), f"{n} pages asked of {len(self._free)} free ones"
        first = len(self._free) - n
        taken = self._free[:first - 1:-1] if first else self._free[::-1]  # as popping one by one would give them
        del self._free[first:]
        for page in taken:
            self._holds[page] = 1
        self.num_held += n
        return taken

    def hold(self, pages: Iterable[int]) -> list[int]:
        """One more hold of pages that are held, quarantined or in the tree. Returns those that were not pinned before."""
        holds, quarantines = self._holds, self._quarantines
        newly_pinned = []
        for page in pages:
            if holds[page] == 0 and quarantines[page] == 0:
                assert self._in_tree[page], f"page {page} is free; only alloc() hands out free pages"
                newly_pinned.append(page)
            holds[page] += 1
        self.num_held += len(newly_pinned)
        self.num_cached -= len(newly_pinned)
        return newly_pinned

    def release(self, pages: list[int]) -> list[int]:
        """One hold less of each page, last page first. Returns the pages of the tree that are not pinned any more."""
        holds, quarantines, in_tree, free = self._holds, self._quarantines, self._in_tree, self._free
        unpinned = []
        for page in reversed(pages):
            count = holds[page]
            assert count > 0, f"page {page} is released but nobody holds it"
            holds[page] = count - 1
            if count == 1 and quarantines[page] == 0:
                self.num_held -= 1
                if in_tree[page]:
                    self.num_cached += 1
                    unpinned.append(page)
                else:
                    free.append(page)
        return unpinned

    def num_shared(self, pages: Iterable[int]) -> int:
        """How many of the first of these held pages somebody else holds too, and the tree has."""
        num = 0
        for page in pages:
            if self._holds[page] < 2 or not self._in_tree[page]:
                break
            num += 1
        return num

    def quarantine(self, pages: list[int]) -> None:
        """Turn one hold of each page into one quarantine. The page stays pinned."""
        for page in pages:
            assert self._holds[page] > 0, f"page {page} is quarantined but nobody holds it"
            self._holds[page] -= 1
            self._quarantines[page] += 1
            if self._quarantines[page] == 1:
                self.num_held -= 1
                self.num_quarantined += 1

    def end_quarantine(self, pages: list[int]) -> list[int]:
        """One quarantine less of each page, last page first. Returns the pages of the tree that are not pinned any more."""
        unpinned = []
        for page in reversed(pages):
            assert self._quarantines[page] > 0, f"page {page} leaves quarantine but is not in it"
            self._quarantines[page] -= 1
            if self._quarantines[page]:
                continue
            self.num_quarantined -= 1
            if self._holds[page]:
                self.num_held += 1
            elif self._in_tree[page]:
                self.num_cached += 1
                unpinned.append(page)
            else:
                self._free.append(page)
        return unpinned

    def cache(self, page: int) -> None:
        """The tree takes a page that a request holds."""
        assert self._holds[page] > 0, f"page {page} is inserted but its inserter does not hold it"
        assert not self._quarantines[page], f"page {page} is inserted while a peer may still write it"
        assert not self._in_tree[page], f"page {page} is in the tree already, under another prefix"
        self._in_tree[page] = 1

    def uncache(self, pages: list[int]) -> None:
        """The tree gives up pages that only it holds: they become free."""
        for page in pages:
            assert self._in_tree[page], f"page {page} is evicted but not in the tree"
            assert not self._holds[page], f"page {page} is evicted while held"
            assert not self._quarantines[page], f"page {page} is evicted while a peer may still write it"
            self._in_tree[page] = 0
        self._free.extend(pages)
        self.num_cached -= len(pages)
