"""KVCache: pages are conserved, prefixes are found again, eviction is exact and least recently used first."""

import random

import numpy as np
import pytest

from common.kvcache.cache import KVCache, OutOfPages, PageCounts, PageIds

PAGE = 4


def tokens(num_pages: int, seed: int = 0, extra: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50000) for _ in range(num_pages * PAGE + extra)]


def counts(cache: KVCache) -> tuple[int, int, int, int]:
    c = cache.counts()
    assert c.free + c.cached + c.held + c.quarantined == c.total
    return c.free, c.cached, c.held, c.quarantined


def put(cache: KVCache, token_ids: list[int]) -> PageIds:
    """A request that runs the tokens without looking for a prefix, leaves them in the tree and ends."""
    pages = cache.alloc(-(-len(token_ids) // PAGE))
    cache.insert(token_ids, pages)
    cache.release(pages)
    return pages


def cached_pages(cache: KVCache, token_ids: list[int]) -> int:
    pages = cache.match(token_ids)
    cache.release(pages)
    return len(pages)


def test_page_zero_is_never_handed_out_and_not_counted() -> None:
    cache = KVCache(9, PAGE)
    assert cache.counts() == PageCounts(8, 0, 0, 0, 8)
    pages = cache.alloc(8)
    assert pages.dtype == np.int32
    assert sorted(pages.tolist()) == list(range(1, 9))


def test_alloc_beyond_the_pool_raises_and_changes_nothing() -> None:
    cache = KVCache(9, PAGE)
    put(cache, tokens(3))
    before = cache.counts()
    with pytest.raises(OutOfPages, match="9 pages asked for, 8 of 8"):
        cache.alloc(9)
    assert cache.counts() == before
    assert cached_pages(cache, tokens(3)) == 3


def test_alloc_of_nothing_is_an_empty_row() -> None:
    cache = KVCache(1, PAGE)
    assert cache.alloc(0).tolist() == []
    assert cache.alloc(0).dtype == np.int32
    assert cache.available() == 0


def test_match_finds_what_was_inserted_and_holds_it() -> None:
    cache = KVCache(9, PAGE)
    prompt = tokens(3, extra=2)
    pages = put(cache, prompt)
    assert counts(cache) == (5, 3, 0, 0)
    matched = cache.match(prompt)
    assert matched.tolist() == pages[:3].tolist()
    assert counts(cache) == (5, 0, 3, 0)
    assert cache.available() == 5
    cache.release(matched)
    assert cache.available() == 8


@pytest.mark.parametrize("num_tokens", range(2 * PAGE + 2))
def test_match_returns_full_pages_only(num_tokens: int) -> None:
    cache = KVCache(9, PAGE)
    prompt = tokens(2, extra=1)
    put(cache, prompt)
    assert cached_pages(cache, prompt[:num_tokens]) == num_tokens // PAGE


def test_a_different_first_token_shares_nothing() -> None:
    cache = KVCache(9, PAGE)
    prompt = tokens(2)
    put(cache, prompt)
    assert cached_pages(cache, [prompt[0] + 1, *prompt[1:]]) == 0


def test_equal_pages_under_different_prefixes_are_different_nodes() -> None:
    cache = KVCache(9, PAGE)
    one, two, tail = tokens(1, 1), tokens(1, 2), tokens(1, 3)
    put(cache, one + tail)
    assert cached_pages(cache, two + tail) == 0
    put(cache, two + tail)
    assert counts(cache) == (4, 4, 0, 0)


def test_a_duplicate_is_not_inserted_again() -> None:
    cache = KVCache(9, PAGE)
    prompt = tokens(2)
    first = put(cache, prompt)
    second = cache.alloc(2)
    cache.insert(prompt, second)
    cache.release(second)
    assert counts(cache) == (6, 2, 0, 0)
    assert cache.match(prompt).tolist() == first.tolist()


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    cache = KVCache(9, PAGE, enable_prefix_cache=False)
    put(cache, tokens(3))
    assert counts(cache) == (8, 0, 0, 0)
    assert cache.match(tokens(3)).tolist() == []


def test_a_page_inserted_below_a_twin_keeps_the_twin() -> None:
    """The holder of page 2 owns a copy of page 1; the tree's page 1 is held by nobody, yet must not go before page 2."""
    cache = KVCache(9, PAGE)
    prompt = tokens(2)
    twin = put(cache, prompt[:PAGE])
    row = cache.alloc(2)
    cache.insert(prompt, row)
    assert counts(cache) == (5, 1, 2, 0)
    assert cache.available() == 5
    cache.release(cache.alloc(5))
    with pytest.raises(OutOfPages):
        cache.alloc(6)
    assert cache.match(prompt).tolist() == [twin[0], row[1]]
    cache.release(np.array([twin[0], row[1]], dtype=np.int32))
    cache.release(row)
    assert cache.available() == 8
    assert len(cache.alloc(8)) == 8


def test_least_recently_used_prompts_go_first_and_leaves_before_prefixes() -> None:
    cache = KVCache(9, PAGE)
    shared, a, b, c = tokens(1, 9), tokens(1, 1), tokens(1, 2), tokens(1, 3)
    shared_page, a_page = put(cache, shared + a).tolist()
    b_page = put(cache, shared + b).tolist()[1]
    [c_page] = put(cache, c).tolist()
    assert counts(cache) == (4, 4, 0, 0)  # the second copy of `shared` was a duplicate
    cache.release(cache.match(shared + a))
    cache.alloc(4)
    assert [cache.alloc(1).tolist()[0] for _ in range(4)] == [b_page, c_page, a_page, shared_page]


def test_a_leaf_used_by_a_duplicate_insert_is_still_evictable() -> None:
    cache = KVCache(5, PAGE)
    put(cache, tokens(2))
    put(cache, tokens(2))
    assert len(cache.alloc(4)) == 4


def test_eviction_never_touches_held_pages() -> None:
    cache = KVCache(17, PAGE)
    held_prompt = tokens(4, 1)
    put(cache, held_prompt)
    held = cache.match(held_prompt)
    for seed in range(2, 40):
        assert not set(put(cache, tokens(5, seed)).tolist()) & set(held.tolist())
    assert cached_pages(cache, held_prompt) == 4
    cache.release(held)


def test_quarantined_pages_are_not_given_out_until_released() -> None:
    cache = KVCache(5, PAGE)
    pages = cache.alloc(3)
    cache.quarantine(pages)
    assert counts(cache) == (1, 0, 0, 3)
    assert cache.available() == 1
    with pytest.raises(OutOfPages):
        cache.alloc(2)
    cache.release_quarantined(pages)
    assert counts(cache) == (4, 0, 0, 0)


def test_a_quarantined_page_of_the_tree_is_not_evicted() -> None:
    cache = KVCache(5, PAGE)
    put(cache, tokens(2))
    cache.quarantine(cache.match(tokens(2)))
    assert counts(cache) == (2, 0, 0, 2)
    assert cache.available() == 2
    again = cache.match(tokens(2))
    cache.release_quarantined(again)
    assert counts(cache) == (2, 0, 2, 0)
    cache.release(again)
    assert counts(cache) == (2, 2, 0, 0)


def test_a_retained_row_needs_both_releases() -> None:
    cache = KVCache(5, PAGE)
    row = cache.alloc(2)
    cache.retain(row)
    cache.release(row)
    assert counts(cache) == (2, 0, 2, 0)
    cache.release(row)
    assert counts(cache) == (4, 0, 0, 0)


def test_wrong_use_is_an_assertion() -> None:
    cache = KVCache(9, PAGE)
    row = cache.alloc(2)
    cache.release(row)
    with pytest.raises(AssertionError, match="released but nobody holds it"):
        cache.release(row)
    with pytest.raises(AssertionError, match="quarantined but nobody holds it"):
        cache.quarantine(row)
    with pytest.raises(AssertionError, match="leaves quarantine"):
        cache.release_quarantined(row)
    with pytest.raises(AssertionError, match="free"):
        cache.retain(row)
    with pytest.raises(AssertionError, match="released but nobody holds it"):
        cache.release(np.array([0], dtype=np.int32))
    with pytest.raises(AssertionError, match="does not hold it"):
        cache.insert(tokens(2), row)


def test_quarantining_more_than_is_held_is_an_assertion() -> None:
    cache = KVCache(9, PAGE)
    row = cache.alloc(1)
    with pytest.raises(AssertionError, match="quarantined but nobody holds it"):
        cache.quarantine(np.concatenate([row, row]))


def test_a_page_a_peer_may_write_does_not_enter_the_tree() -> None:
    cache = KVCache(9, PAGE)
    row = cache.alloc(1)
    cache.retain(row)
    cache.quarantine(row)
    with pytest.raises(AssertionError, match="peer may still write"):
        cache.insert(tokens(1), row)


def test_a_very_long_prompt_needs_no_recursion() -> None:
    cache = KVCache(6001, 1)
    prompt = tokens(1500)
    pages = cache.alloc(6000)
    cache.insert(prompt, pages)
    assert cache.match(prompt).tolist() == pages.tolist()
    cache.release(pages)
    cache.release(pages)
    assert len(cache.alloc(6000)) == 6000


def test_ten_thousand_random_operations_leak_nothing() -> None:
    rng = random.Random(7)
    cache = KVCache(129, PAGE)
    prompts = [tokens(4, 0) + tokens(rng.randrange(8), seed, extra=rng.randrange(PAGE)) for seed in range(60)]
    rows: list[PageIds] = []
    fenced: list[PageIds] = []
    for _ in range(10_000):
        action = rng.random()
        prompt = rng.choice(prompts)
        if action < 0.4:
            matched = cache.match(prompt)
            missing = -(-len(prompt) // PAGE) - len(matched)
            if missing > cache.available():
                cache.release(matched)
                continue
            row = np.concatenate([matched, cache.alloc(missing)])
            if rng.random() < 0.7:
                cache.insert(prompt, row)
            rows.append(row)
        elif action < 0.7 and rows:
            cache.release(rows.pop(rng.randrange(len(rows))))
        elif action < 0.8 and rows:
            row = rows.pop(rng.randrange(len(rows)))
            cache.quarantine(row)
            fenced.append(row)
        elif fenced:
            cache.release_quarantined(fenced.pop(0))
        counts(cache)
    for row in rows:
        cache.release(row)
    for row in fenced:
        cache.release_quarantined(row)
    free, _, held, quarantined = counts(cache)
    assert (held, quarantined) == (0, 0)
    assert cache.available() == 128
    assert len(cache._tree._leaves) <= max(64, 2 * cache._tree.num_nodes) + 128
    everything = cache.alloc(128)
    assert sorted(everything.tolist()) == list(range(1, 129))
    cache.release(everything)
    assert counts(cache) == (128, 0, 0, 0)
    assert free < 128  # the tree had been in use
