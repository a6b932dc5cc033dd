"""KVCache against a model of it that is too naive to be wrong: dictionaries of prefixes, everything recounted each step."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.kvcache.cache import KVCache, OutOfPages, PageIds

NUM_PAGES, PAGE = 14, 2
Tokens = tuple[int, ...]
page_tokens = st.sampled_from([[0, 0], [0, 1]])  # two kinds of page and short prompts: prefixes collide all the time
prompts = st.tuples(st.lists(page_tokens, max_size=4), st.sampled_from([[], [0]])).map(lambda drawn: [*chain(*drawn[0]), *drawn[1]])


@dataclass
class Model:
    """The tree is {prefix: page}; time is the step in which a prefix was last used."""

    tree: dict[Tokens, int] = field(default_factory=dict)
    used: dict[Tokens, int] = field(default_factory=dict)
    holds: Counter[int] = field(default_factory=Counter)
    quarantines: Counter[int] = field(default_factory=Counter)
    now: int = 0

    def pinned(self, page: int) -> bool:
        return self.holds[page] > 0 or self.quarantines[page] > 0

    def free(self) -> set[int]:
        return {page for page in range(1, NUM_PAGES) if not self.pinned(page) and page not in self.tree.values()}

    def evictable(self) -> list[Tokens]:
        """Prefixes below which, and at which, nothing is pinned."""
        return [p for p in self.tree if not any(self.pinned(page) for q, page in self.tree.items() if q[: len(p)] == p)]

    def next_victim(self) -> Tokens:
        leaves = [p for p in self.evictable() if not any(len(q) > len(p) and q[: len(p)] == p for q in self.tree)]
        return min(leaves, key=lambda p: (self.used[p], self.tree[p]))

    def prefixes(self, tokens: list[int]) -> list[Tokens]:
        return [tuple(tokens[: (i + 1) * PAGE]) for i in range(len(tokens) // PAGE)]


@dataclass
class Row:
    tokens: list[int]
    pages: list[int]


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(NUM_PAGES, PAGE)
        self.model = Model()
        self.rows: list[Row] = []
        self.fenced: list[list[int]] = []

    def pick(self, at: int) -> Row:
        return self.rows.pop(at % len(self.rows))

    def array(self, pages: list[int]) -> PageIds:
        return np.array(pages, dtype=np.int32)

    def let_go(self, pages: list[int], holders: Counter[int]) -> None:
        """One holder less of each page; a page of the tree whose last holder went counts as used now."""
        model = self.model
        model.now += 1
        holders.subtract(pages)
        for prefix, page in model.tree.items():
            if page in pages and not model.pinned(page):
                model.used[prefix] = model.now

    def evict_in_model(self, n: int) -> list[int]:
        evicted = []
        for _ in range(n):
            victim = self.model.next_victim()
            evicted.append(self.model.tree.pop(victim))
        return evicted

    @rule(tokens=prompts, reuse=st.booleans(), extra=st.integers(0, 2))
    def admit(self, tokens: list[int], reuse: bool, extra: int) -> None:
        """A request looks for its prefix (or, as a twin would, does not) and takes the pages it misses."""
        model = self.model
        model.now += 1
        matched: list[int] = []
        if reuse:
            matched = self.cache.match(tokens).tolist()
            expected = []
            for prefix in model.prefixes(tokens):
                if prefix not in model.tree:
                    break
                expected.append(model.tree[prefix])
                model.used[prefix] = model.now
            assert matched == expected
            model.holds.update(matched)
        n = max(0, -(-len(tokens) // PAGE) - len(matched)) + extra
        before = self.cache.counts()
        if n > self.cache.available():
            with pytest.raises(OutOfPages):
                self.cache.alloc(n)
            assert self.cache.counts() == before
            self.rows.append(Row(tokens, matched))
            return
        free = model.free()
        pages = self.cache.alloc(n).tolist()
        evicted = self.evict_in_model(max(0, n - len(free)))
        assert len(set(pages)) == n
        assert set(pages) <= free | set(evicted)
        assert set(evicted) <= set(pages)
        model.holds.update(pages)
        self.rows.append(Row(tokens, matched + pages))

    @precondition(lambda self: self.rows)
    @rule(at=st.integers(0, 99), look=st.booleans())
    def insert(self, at: int, look: bool) -> None:
        row = self.rows[at % len(self.rows)]
        model = self.model
        full = min(len(row.pages), len(row.tokens) // PAGE)
        prefixes = model.prefixes(row.tokens[: full * PAGE])
        model.now += 1
        self.cache.insert(row.tokens[: full * PAGE], self.array(row.pages))
        for prefix, page in zip(prefixes, row.pages, strict=False):
            model.tree.setdefault(prefix, page)
            model.used[prefix] = model.now
        if not look:
            return
        found = self.cache.match(row.tokens[: full * PAGE]).tolist()
        model.now += 1
        assert found == [model.tree[prefix] for prefix in prefixes]
        model.used.update(dict.fromkeys(prefixes, model.now))
        model.holds.update(found)
        self.let_go(found, model.holds)
        self.cache.release(self.array(found))

    @precondition(lambda self: self.rows)
    @rule(at=st.integers(0, 99))
    def finish(self, at: int) -> None:
        row = self.pick(at)
        self.cache.release(self.array(row.pages))
        self.let_go(row.pages, self.model.holds)

    @precondition(lambda self: self.rows)
    @rule(at=st.integers(0, 99))
    def fork(self, at: int) -> None:
        row = self.rows[at % len(self.rows)]
        self.cache.retain(self.array(row.pages))
        self.model.holds.update(row.pages)
        self.rows.append(Row(row.tokens, list(row.pages)))

    @precondition(lambda self: self.rows)
    @rule(at=st.integers(0, 99))
    def lose_peer(self, at: int) -> None:
        """Only a row nobody shares may be written by a peer."""
        row = self.rows[at % len(self.rows)]
        if any(self.model.holds[page] > 1 and page not in self.model.tree.values() for page in row.pages):
            return
        self.rows.remove(row)
        self.cache.quarantine(self.array(row.pages))
        self.model.holds.subtract(row.pages)
        self.model.quarantines.update(row.pages)
        self.fenced.append(row.pages)

    @precondition(lambda self: self.fenced)
    @rule(at=st.integers(0, 99))
    def fence(self, at: int) -> None:
        pages = self.fenced.pop(at % len(self.fenced))
        self.cache.release_quarantined(self.array(pages))
        self.let_go(pages, self.model.quarantines)

    @invariant()
    def conserves_pages(self) -> None:
        model, counts = self.model, self.cache.counts()
        in_tree = set(model.tree.values())
        quarantined = {p for p in range(1, NUM_PAGES) if model.quarantines[p]}
        held = {p for p in range(1, NUM_PAGES) if model.holds[p]} - quarantined
        assert counts.free + counts.cached + counts.held + counts.quarantined == counts.total == NUM_PAGES - 1
        assert (counts.free, counts.cached, counts.held, counts.quarantined) == (
            len(model.free()), len(in_tree - held - quarantined), len(held), len(quarantined))

    @invariant()
    def available_is_honest(self) -> None:
        assert self.cache.available() == len(self.model.free()) + len(self.model.evictable())

    @invariant()
    def shared_beginnings_are_what_others_hold_in_the_tree(self) -> None:
        for row in self.rows:
            kept = [page in self.model.tree.values() and self.model.holds[page] > 1 for page in row.pages]
            assert self.cache.num_shared(self.array(row.pages)) == [*kept, False].index(False)

    @invariant()
    def no_page_is_both_free_and_in_the_tree(self) -> None:
        free = self.cache._allocator._free
        nodes = {page for page, edge in enumerate(self.cache._tree._edge) if edge is not None}
        assert len(set(free)) == len(free)
        assert set(free) == self.model.free()
        assert nodes == set(self.model.tree.values())

    def teardown(self) -> None:
        for row in self.rows:
            self.cache.release(self.array(row.pages))
        for pages in self.fenced:
            self.cache.release_quarantined(self.array(pages))
        assert self.cache.available() == NUM_PAGES - 1
        assert sorted(self.cache.alloc(NUM_PAGES - 1).tolist()) == list(range(1, NUM_PAGES))


CacheMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestCache = CacheMachine.TestCase
