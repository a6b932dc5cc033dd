"""Which pages leave together, in which order, and when."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.outgoing import Outgoing
from kvtransfer.pages import merged_runs

PAGE_SIZE, POST_TOKENS = 16, 1024
PAGES_PER_POST = POST_TOKENS // PAGE_SIZE


class Event:
    def __init__(self) -> None:
        self.passed = False
        self.num_asked = 0

    def query(self) -> bool:
        self.num_asked += 1
        return self.passed


def add(outgoing: Outgoing, first: int, count: int, ready: Event | None = None) -> None:
    outgoing.add(np.arange(100 + first, 100 + first + count, dtype=np.int32), first, ready)


def drained(outgoing: Outgoing) -> list[tuple[list[int], list[int]]]:
    """Local pages and slots of each batch that may leave."""
    batches = []
    while (batch := outgoing.first) and batch.is_ready():
        batches.append((batch.local_pages.tolist(), batch.slots.tolist()))
        outgoing.take()
    return batches


def test_pages_gather_until_they_are_worth_a_post() -> None:
    outgoing = Outgoing(4)
    add(outgoing, 0, 3)
    assert outgoing.first is None
    assert not outgoing.is_empty
    add(outgoing, 3, 2)
    assert drained(outgoing) == [([100, 101, 102, 103, 104], [0, 1, 2, 3, 4])]
    assert outgoing.is_empty


def test_what_is_left_leaves_at_the_end() -> None:
    outgoing = Outgoing(4)
    add(outgoing, 0, 1)
    outgoing.seal()
    outgoing.seal()
    assert drained(outgoing) == [([100], [0])]


def test_a_batch_waits_for_all_its_events_and_the_next_one_for_it() -> None:
    outgoing = Outgoing(2)
    first, second, later = Event(), Event(), Event()
    add(outgoing, 0, 1, first)
    add(outgoing, 1, 1, second)
    add(outgoing, 2, 2, later)
    later.passed = second.passed = True
    assert drained(outgoing) == []
    first.passed = True
    assert drained(outgoing) == [([100, 101], [0, 1]), ([102, 103], [2, 3])]


def test_an_event_that_has_passed_is_not_asked_again() -> None:
    outgoing = Outgoing(1)
    event = Event()
    add(outgoing, 0, 1, event)
    event.passed = True
    batch = outgoing.first
    assert batch is not None
    assert [batch.is_ready(), batch.is_ready()] == [True, True]
    assert event.num_asked == 1


def test_dropped_pages_never_leave() -> None:
    outgoing = Outgoing(2)
    add(outgoing, 0, 2, Event())
    add(outgoing, 2, 1)
    outgoing.drop()
    outgoing.seal()
    assert outgoing.is_empty


@given(st.lists(st.integers(1, 90), min_size=1, max_size=40))
def test_a_prompt_of_4096_tokens_is_at_most_four_posts_and_four_descriptors_whatever_its_chunks(chunks: list[int]) -> None:
    num_pages = 4096 // PAGE_SIZE
    outgoing, done = Outgoing(PAGES_PER_POST), 0
    while done < num_pages:
        for chunk in chunks:
            count = min(chunk, num_pages - done)
            if count:
                add(outgoing, done, count)
            done += count
    outgoing.seal()
    batches = drained(outgoing)
    assert len(batches) <= 4
    dst = np.arange(500, 500 + num_pages, dtype=np.int32)
    assert sum(len(merged_runs(np.array(local, np.int32), dst[slots])[0]) for local, slots in batches) <= 4
    assert [slot for _, slots in batches for slot in slots] == list(range(num_pages))
