"""What is known of a node's blocks is never more than it published, and gives the length of its longest prefix."""

import random

from hypothesis import given
from hypothesis import strategies as st

from router import exact_index
from router.exact_index import EXPECTED_S, ExactPrompt, HeldBlocks, pack
from router.kv_event_wire import Removed, Stored

SIZE = 4


def prompt(*token_ids: int) -> ExactPrompt:
    return ExactPrompt(pack(token_ids))


def stored(names: list[int], tokens: list[int], parent: int | None = None, size: int = SIZE, **more: object) -> Stored:
    return Stored(block_hashes=list(names), parent_block_hash=parent, token_ids=tokens, block_size=size, **more)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_hits_end_where_the_blocks_do_and_leave_a_token_to_run() -> None:
    held = HeldBlocks(Clock())
    assert held.num_hit_tokens(prompt(*range(20))) == 0
    held.stored(stored([1, 2], list(range(8))))
    held.stored(stored([3], [8, 9, 10, 11], parent=2))
    assert held.num_hit_tokens(prompt(*range(20))) == 12
    assert held.num_hit_tokens(prompt(*range(13))) == 12
    assert held.num_hit_tokens(prompt(*range(12))) == 8  # its last token has to run
    assert held.num_hit_tokens(prompt(*range(6), 99, 99, 99)) == 4
    assert held.num_hit_tokens(prompt(99, *range(20))) == 0
    assert held.num_hit_tokens(prompt()) == 0
    held.removed(Removed(block_hashes=[3, 77]))
    assert held.num_hit_tokens(prompt(*range(20))) == 8
    held.clear(complete=True)
    assert held.num_hit_tokens(prompt(*range(20))) == 0
    assert len(held) == 0


def test_blocks_whose_parent_or_kv_is_not_known_are_left_out_with_what_follows() -> None:
    held = HeldBlocks(Clock())
    held.stored(stored([5], [1] * SIZE, parent=4))
    held.stored(stored([6], [1] * SIZE, parent=5))
    held.stored(stored([1], [1] * SIZE, lora_id=3))
    held.stored(stored([2], [1] * SIZE, parent=1))
    assert (len(held), held.num_left_out) == (0, 4)
    assert held.num_hit_tokens(prompt(*[1] * 20)) == 0


def test_equal_tokens_in_blocks_of_other_sizes_are_other_blocks() -> None:
    held = HeldBlocks(Clock())
    held.stored(stored([1], list(range(8)), size=8))
    assert held.num_hit_tokens(prompt(*range(9))) == 8
    held.stored(stored([2], list(range(50, 54)), size=4))
    assert held.num_hit_tokens(prompt(*range(9))) == 0


def test_what_was_sent_to_a_node_counts_until_it_should_have_come() -> None:
    clock = Clock()
    held = HeldBlocks(clock)
    held.expect(prompt(*range(20)))
    assert held.num_hit_tokens(prompt(*range(20))) == 0  # in blocks of which size?
    held.stored(stored([1], [0, 1, 2, 3]))
    held.expect(prompt(*range(12)))
    assert held.num_hit_tokens(prompt(*range(20))) == 8
    clock.now_s += EXPECTED_S
    assert held.num_hit_tokens(prompt(*range(20))) == 4
    held.expect(prompt(*range(12)))
    held.clear(complete=False)
    assert held.num_hit_tokens(prompt(*range(20))) == 0


def test_memory_is_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(exact_index, "MAX_BLOCKS", 10)
    monkeypatch.setattr(exact_index, "MAX_EXPECTED", 10)
    held = HeldBlocks(Clock())
    for name in range(30):
        held.stored(stored([name], [name] * SIZE))
        held.expect(prompt(*[1000 + name] * 17))
    assert len(held) == len(held._chains) == 10
    assert len(held._expected) <= 10 + 4


@given(seed=st.integers(0, 1 << 30))
def test_the_hit_is_the_longest_prefix_under_any_events(seed: int) -> None:
    """Against a set of prefixes. Leaves are removed first, as engines do."""
    rng = random.Random(seed)
    held, model = HeldBlocks(Clock()), {}
    names = iter(range(1, 1000))
    for _ in range(40):
        above: tuple[int, ...] = rng.choice([(), *model])
        if rng.random() < 0.6:
            tokens = [rng.randrange(2) for _ in range(SIZE * rng.randrange(1, 4))]
            new = [(*above, *tokens[: (i + 1) * SIZE]) for i in range(len(tokens) // SIZE)]
            if any(prefix in model for prefix in new):
                continue
            given_names = [next(names) for _ in new]
            held.stored(stored(given_names, tokens, parent=model.get(above)))
            model.update(zip(new, given_names, strict=True))
        elif model:
            leaf = max((p for p in model if p[: len(above)] == above), key=len)
            held.removed(Removed(block_hashes=[model.pop(leaf)]))
        asked = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 30)))
        longest = max((len(p) for p in model if p == asked[: len(p)] and len(p) < len(asked)), default=0)
        assert held.num_hit_tokens(prompt(*asked)) == longest
