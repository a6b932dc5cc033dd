"""What each policy picks, from loads and hits that are put there by hand."""

import random

import pytest

from router.ask import Ask
from router.node import Leg, Node
from router.policy import POLICIES


def nodes(leg: Leg, number: int) -> list[Node]:
    return [Node(leg, f"http://{leg[0]}{n}:1") for n in range(number)]


def ask(num_tokens: int = 1000) -> Ask:
    return Ask(None, num_tokens, 100)


def queue(node: Node, *prompts: int) -> None:
    for num_tokens in prompts:
        node.prefill_load.begin(num_tokens, 0.0)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("policy", ["cost", "cache_aware", "least_load", "round_robin"])
def test_among_equals_the_first_in_turn(leg: Leg, policy: str) -> None:
    some = nodes(leg, 4)
    for turn in range(4):
        rotated = [*some[turn:], *some[:turn]]
        assert POLICIES[leg][policy](rotated, ask(), {})[0] is some[turn]  # type: ignore[index]


def test_cost_weighs_the_queue_against_the_cache() -> None:
    cached, idle = nodes("prefill", 2)
    pick, hits = POLICIES["prefill"]["cost"], {cached: 800}
    assert pick([idle, cached], ask(), hits) == (cached, 200.0)
    queue(cached, 700)
    assert pick([idle, cached], ask(), hits) == (cached, 900.0)
    queue(cached, 200)
    assert pick([idle, cached], ask(), hits) == (idle, 1000.0)


def test_cost_takes_the_faster_node_until_its_queue_is_longer() -> None:
    slow, fast = nodes("prefill", 2)
    for load, rate in ((slow.prefill_load, 100.0), (fast.prefill_load, 1000.0)):
        load.token_s = load.new_token_s = 1 / rate
    pick = POLICIES["prefill"]["cost"]
    assert pick([slow, fast], ask(), {}) == (fast, pytest.approx(1.0))
    queue(fast, 8000)
    assert pick([slow, fast], ask(), {}) == (fast, pytest.approx(9.0))
    queue(fast, 2000)
    assert pick([slow, fast], ask(), {}) == (slow, pytest.approx(10.0))


def test_cache_aware_follows_the_prefix_unless_load_is_uneven() -> None:
    a, b, c = nodes("prefill", 3)
    pick = POLICIES["prefill"]["cache_aware"]
    queue(a, *[100] * 5)
    assert pick([c, b, a], ask(), {a: 600, b: 500})[0] is a
    assert pick([c, b, a], ask(), {a: 200, b: 100})[0] is c  # too little to be worth it: the least loaded
    queue(a, *[100] * 4)
    assert pick([c, b, a], ask(), {a: 600, b: 500})[0] is c  # 9 against none
    for node in (b, c):
        queue(node, *[100] * 8)
    assert pick([c, b, a], ask(), {a: 600, b: 500})[0] is a


def test_least_load_counts_tokens_on_prefill_and_requests_on_decode() -> None:
    few, many = nodes("prefill", 2)
    queue(few, 10_000)
    queue(many, 10, 10, 10)
    assert POLICIES["prefill"]["least_load"]([few, many], ask(), {})[0] is many
    few, many = nodes("decode", 2)
    few.decode_load.begin(10_000)
    for _ in range(3):
        many.decode_load.begin(1)
    assert POLICIES["decode"]["least_load"]([many, few], ask(), {})[0] is few


def test_power_of_two_never_takes_the_worst_and_not_always_the_best() -> None:
    random.seed(7)
    some = nodes("decode", 4)
    for number, node in enumerate(some):
        for _ in range(number):
            node.decode_load.begin(1)
    picked = [POLICIES["decode"]["power_of_two"](some, ask(), {})[0] for _ in range(400)]
    counts = [picked.count(node) for node in some]
    assert counts[3] == 0
    assert counts[0] > counts[1] > counts[2] > 0
    assert POLICIES["decode"]["power_of_two"](some[:1], ask(), {})[0] is some[0]


def test_cost_of_decode_is_rows_and_pages_together() -> None:
    rows, pages = nodes("decode", 2)
    rows.decode_load.probed(40, 0, 64, 90_000, 100_000)  # 0.63 + 0.1
    pages.decode_load.probed(6, 0, 64, 30_000, 100_000)  # 0.09 + 0.7
    assert POLICIES["decode"]["cost"]([pages, rows], ask(), {})[0] is rows
    for policy in ("cost", "cache_aware"):
        assert POLICIES["decode"][policy]([rows, pages], ask(95_000), {})[0] is rows  # type: ignore[index]
