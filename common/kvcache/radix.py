"""Which cached pages start with these tokens, and which of them goes first?

A trie with one node a page: an edge is the bytes of a page's token ids, so two prompts share exactly their common full pages
(partial pages are never shared). A node *is* its page: nodes are page ids, fields are arrays indexed by them, and the reserved
page 0 is the root.

Eviction takes leaves, least recently used first, so a node never outlives the prefix that gives it its meaning. A node can go
once no node of its subtree is pinned (held by a request or quarantined). Usually a request that holds a page holds its whole
prefix, but not always: a request keeps its own copy of a page whose twin came into the tree first (rows are never remapped),
and its next page is then inserted below the twin, which nobody holds. So every node counts what pins it:

    pins[node] = (1 if the node's page is pinned) + (children whose pins > 0)

and is evictable iff pins == 0. A change moves towards the root only while a count leaves or reaches zero: a row of n pages
costs O(n) in all, plus at most one walk to the root. Time is the number of calls seen; used means matched, inserted, or let go
by the last holder.

Evictable leaves wait in a heap by (last use, page). Entries are not removed when they go stale, but passed over when popped;
the heap is rebuilt when it has grown to more than twice the nodes.
"""

import heapq
import struct
from collections.abc import Collection
from typing import Protocol

ROOT = 0  # the padding page: never a node of its own
MIN_HEAP_REBUILD = 64  # below this many entries stale ones cost nothing


def page_keys(token_ids: list[int], page_size: int) -> list[bytes]:
    """The edge of each full page of the tokens. struct.pack takes half the time of array.array or numpy on a list."""
    num_tokens = len(token_ids) // page_size * page_size
    packed = struct.pack(f"{num_tokens}i", *(token_ids if num_tokens == len(token_ids) else token_ids[:num_tokens]))
    key_nbytes = 4 * page_size
    return [packed[start : start + key_nbytes] for start in range(0, len(packed), key_nbytes)]


class TreeObserver(Protocol):
    """Hears of every change of what the tree holds, after it was made (events.py publishes it)."""

    def stored(self, parent: int, pages: list[int], edges: list[bytes]) -> None:
        """pages[0] became a child of `parent` by edges[0], each further one a child of the one before it."""

    def evicted(self, pages: list[int]) -> None:
        """These pages are no nodes any more, children before their parents."""


class RadixTree:
    def __init__(self, num_pages: int) -> None:
        self.observer: TreeObserver | None = None
        self.num_nodes = 0
        self.num_evictable = 0
        self._parent = [ROOT] * num_pages
        self._edge: list[bytes | None] = [None] * num_pages  # None: not a node
        self._children: list[dict[bytes, int]] = [{} for _ in range(num_pages)]
        self._pins = [0] * num_pages
        self._last_used = [0] * num_pages
        self._clock = 0
        self._leaves: list[tuple[int, int]] = []  # heap of (last_used, page); see _is_evictable_leaf for the live ones

    def children(self, page: int) -> Collection[int]:
        """Nodes one page longer than this one, or than ROOT."""
        return self._children[page].values()

    def parent(self, page: int) -> int | None:
        """None: the page is no node."""
        return None if self._edge[page] is None else self._parent[page]

    def edge(self, page: int) -> bytes:
        """The token ids of a node's page, int32 each."""
        edge = self._edge[page]
        assert edge is not None, f"page {page} is no node"
        return edge

    def match(self, keys: list[bytes]) -> list[int]:
        """Pages of the longest cached prefix, root first; marks them used. The caller pins them."""
        self._clock += 1
        children, last_used, clock = self._children, self._last_used, self._clock
        pages: list[int] = []
        node = ROOT
        for key in keys:
            child = children[node].get(key)
            if child is None:
                break
            last_used[child] = clock
            pages.append(child)
            node = child
        return pages

    def insert(self, keys: list[bytes], pages: list[int]) -> list[int]:
        """Make pages[i] the node of keys[:i + 1] where there is none; marks the whole path used. New nodes are pinned.

        Returns the pages that became nodes: a tail of `pages`. The twins of the others stay what they are.
        """
        self._clock += 1
        children, last_used, clock = self._children, self._last_used, self._clock
        path: list[int] = []
        node = ROOT
        for key in keys:
            child = children[node].get(key)
            if child is None:
                break
            last_used[child] = clock
            path.append(child)
            node = child
        if len(path) == len(keys):
            self._offer_leaf(node)  # its old heap entry went stale with the new last use
            return []
        parent, new_keys, added = node, keys[len(path) :], pages[len(path) : len(keys)]
        for key, page in zip(new_keys, added, strict=True):
            self._parent[page], self._edge[page], self._pins[page] = node, key, 0
            last_used[page] = clock
            children[node][key] = page
            node = page
        self.num_nodes += len(added)
        self.num_evictable += len(added)
        self.pin(added)
        if self.observer is not None:
            self.observer.stored(parent, added, new_keys)
        return added

    def pin(self, pages: list[int]) -> None:
        """These nodes' pages became pinned; each at most once until unpin()."""
        pins, parent = self._pins, self._parent
        for page in pages:
            node = page
            while node != ROOT:
                pins[node] += 1
                if pins[node] > 1:
                    break
                self.num_evictable -= 1
                node = parent[node]

    def unpin(self, pages: list[int]) -> None:
        """These nodes' pages are not pinned any more: the last holder let go, which is a use."""
        self._clock += 1
        pins, parent, last_used, children, clock = self._pins, self._parent, self._last_used, self._children, self._clock
        for page in pages:
            last_used[page] = clock
            node = page
            while node != ROOT:
                pins[node] -= 1
                if pins[node] > 0:
                    break
                self.num_evictable += 1
                if not children[node]:
                    self._push_leaf(node)
                node = parent[node]

    def evict(self, n: int) -> list[int]:
        """Take the n least recently used nodes out, leaves first; n <= num_evictable. Returns their pages."""
        assert n <= self.num_evictable, f"{n} pages to evict, {self.num_evictable} evictable"
        evicted: list[int] = []
        while len(evicted) < n:
            last_used, page = heapq.heappop(self._leaves)
            if not self._is_evictable_leaf(page, last_used):
                continue
            parent, edge = self._parent[page], self._edge[page]
            assert edge is not None
            del self._children[parent][edge]
            self._edge[page] = None
            evicted.append(page)
            self._offer_leaf(parent)
        self.num_nodes -= n
        self.num_evictable -= n
        if self.observer is not None:
            self.observer.evicted(evicted)
        return evicted

    def _is_evictable_leaf(self, page: int, last_used: int) -> bool:
        return self._edge[page] is not None and self._pins[page] == 0 and not self._children[page] and self._last_used[page] == last_used

    def _offer_leaf(self, node: int) -> None:
        if node != ROOT and self._pins[node] == 0 and not self._children[node]:
            self._push_leaf(node)

    def _push_leaf(self, page: int) -> None:
        heapq.heappush(self._leaves, (self._last_used[page], page))
        if len(self._leaves) > max(MIN_HEAP_REBUILD, 2 * self.num_nodes):
            self._leaves = [entry for entry in set(self._leaves) if self._is_evictable_leaf(entry[1], entry[0])]
            heapq.heapify(self._leaves)
