"""What the index knows, and that it stays as large as it may be."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import RouterConfig
from router.ask import Ask, block_end, block_hashes
from router.node import Node, NodeInfo, PageCounts
from router.nodes import NodeTable
from router.pairing import Pairing
from router.prefix_index import SPANS, PrefixIndex


def ask(text: str) -> Ask:
    raw = text.encode()
    return Ask(None, len(raw) // 4, 10, block_hashes(raw, 0), len(raw))


def words(topic: str, num_bytes: int) -> str:
    return "".join(f"{topic} {n} " for n in range(num_bytes // 4))[:num_bytes]


def nodes(number: int) -> list[Node]:
    return [Node("prefill", f"http://p{n}:1") for n in range(number)]


def test_each_node_holds_the_prefix_that_was_sent_to_it() -> None:
    index = PrefixIndex(10_000)
    a, b, c = nodes(3)
    text = words("x", 8192)
    index.placed([a], ask(text))
    index.placed([b], ask(text[:2048]))
    index.placed([c], ask(words("y", 8192)))
    assert index.match(ask(text)) == {a: 2048, b: 512}
    assert index.match(ask(text[:1024])) == {a: 256, b: 256}
    assert index.match(ask(text[:3000] + words("z", 5000))) == {a: block_end(11) // 4, b: 512}
    assert index.match(ask(words("z", 5000))) == {}
    assert index.match(ask("short")) == {}


def test_match_changes_nothing() -> None:
    index = PrefixIndex(1024)
    (a,) = nodes(1)
    index.placed([a], ask(words("x", 4096)))
    before = list(index._blocks.items())
    index.match(ask(words("x", 4096)))
    assert list(index._blocks.items()) == before


def test_least_recently_sent_go_first_and_of_a_prompt_its_end() -> None:
    index = PrefixIndex(1024)
    (a,) = nodes(1)
    hot = words("hot", 4096)
    for number in range(200):
        index.placed([a], ask(hot))
        index.placed([a], ask(words(f"cold {number}", 4096)))
    assert index.match(ask(hot)) == {a: 1024}
    assert index.match(ask(words("cold 199", 4096))) == {a: 1024}
    assert index.match(ask(words("cold 3", 4096))) == {}
    for number in itertools.count():
        index.placed([a], ask(words(f"more {number}", 4096)))
        if (left := index.match(ask(hot)).get(a, 0)) < 1024:
            break
    assert left == 0 or left * 4 in {block_end(n) for n in range(16)}


@given(st.lists(st.tuples(st.sampled_from("pfr"), st.integers(0, 5), st.integers(0, 40), st.integers(0, 12_000)), max_size=80))
@settings(max_examples=100, deadline=None)
def test_never_larger_than_allowed_and_never_claims_what_was_not_sent(events: list[tuple[str, int, int, int]]) -> None:
    """A node's claim is at most the longest common prefix with what was sent to it since it was new."""
    index = PrefixIndex(64)
    everybody = nodes(6)
    sent: dict[Node, list[str]] = {node: [] for node in everybody}
    for what, which, topic, length in events:
        node, text = everybody[which], words(str(topic), length)
        if what == "p":
            index.placed([node], ask(text))
            sent[node].append(text)
        elif what == "f":
            index.forget(node)
            sent[node].clear()
        claims = index.match(ask(text))
        for other, num_tokens in claims.items():
            assert num_tokens <= len(text) // 4
            longest = max(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, old, strict=False))) for old in sent[other])
            assert num_tokens * 4 <= longest
        assert len(index) <= 64 + 1


def test_bits_of_nodes_that_come_and_go_do_not_pile_up() -> None:
    index = PrefixIndex(1024)
    for number in range(500):
        (node,) = nodes(1)
        index.placed([node], ask(words(str(number), 4096)))
        assert index.match(ask(words(str(number), 4096))) == {node: 1024}
        assert index.match(ask(words(str(number - 1), 4096))) == {}
        index.forget(node)
    assert max(bits.bit_length() for bits, _ in index._blocks.values()) < 80  # 1024 blocks are 64 such prompts


def test_prompts_that_come_again_and_again_leave_nothing_behind() -> None:
    index = PrefixIndex(1024)
    (node,) = nodes(1)
    node.info = NodeInfo(page_size=16, pages=PageCounts(total=2000))
    prompts = [ask(words(f"{topic}", 4096)) for topic in range(10)]
    for number in range(3000):
        index.placed([node], prompts[number % 10])
    assert len(index._holders[node]._spans) <= 5 * SPANS
    assert all(index.match(prompt) == {node: 1024} for prompt in prompts)  # a third of its pool
    for number in range(32):
        index.placed([node], ask(words(f"other {number}", 4096)))
    assert not any(index.match(prompt) for prompt in prompts)  # and of what it was sent since then the last 32 000 tokens


def test_prefixes_go_with_a_node_that_leaves_or_restarts() -> None:
    table = NodeTable.of(RouterConfig(prefill=("http://p0:1", "http://p1:1"), decode=("http://d0:1",)))
    for number, node in enumerate(table.all):
        node.probe_succeeded(NodeInfo(incarnation=number), 0)
    pairing = Pairing(table, RouterConfig(policy="round_robin"))
    prompt = ask(words("x", 4096))
    for _ in range(2):
        pairing.place(prompt).decode_ended()
    first, second = table.prefill
    assert pairing.knowledge.match(prompt) == {first: 1024, second: 1024, table.decode[0]: 1024}
    first.probe_succeeded(NodeInfo(incarnation=77), 0)
    assert pairing.knowledge.match(prompt) == {second: 1024, table.decode[0]: 1024}
    table.remove(second)
    assert pairing.knowledge.match(prompt) == {table.decode[0]: 1024}
