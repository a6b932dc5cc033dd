"""Which nodes make a pair, what a placement counts, and where prompts stay on the decode node."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import RouterConfig
from common.errors import RequestError
from router.ask import Ask, block_hashes, read_ask
from router.breaker import State
from router.node import NodeInfo, PageCounts
from router.nodes import NodeTable
from router.pairing import Pairing, Placement
from router.splice import read_head

ALL_POLICIES = ("cost", "cache_aware", "least_load", "power_of_two", "round_robin", "random")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def table(num_prefill: int, num_decode: int, **config: object) -> tuple[NodeTable, RouterConfig]:
    prefill, decode = (tuple(f"http://{letter}{n}:1" for n in range(number)) for letter, number in (("p", num_prefill), ("d", num_decode)))
    made = RouterConfig(prefill=prefill, decode=decode, **config)  # type: ignore[arg-type]
    nodes = NodeTable.of(made)
    for node in nodes.all:
        node.probe_succeeded(NodeInfo(), 0)
    return nodes, made


def pairing(num_prefill: int, num_decode: int, clock: Clock | None = None, **config: object) -> Pairing:
    return Pairing(*table(num_prefill, num_decode, **config), clock or Clock())


def ask(num_tokens: int = 100, text: str = "", max_output_tokens: int = 10, model: str | None = None) -> Ask:
    raw = text.encode()
    return Ask(model, num_tokens, max_output_tokens, block_hashes(raw, 0), len(raw))


def idle(made: Pairing) -> bool:
    return all(
        node.num_in_flight == node.prefill_load.num_queued == node.prefill_load.queued_tokens == node.decode_load.num_requests == 0
        for node in made.nodes.all
    )


@pytest.mark.parametrize("policy", ["cost", "cache_aware", "least_load", "round_robin"])
def test_idle_nodes_take_turns_and_all_pairs_form(policy: str) -> None:
    made = pairing(2, 2, policy=policy)
    counts: Counter[tuple[str, str]] = Counter()
    for _ in range(8):
        placement = made.place(ask())
        assert placement.prefill is not None
        counts[placement.prefill.url, placement.decode.url] += 1
        placement.prefill_ended(True)
        placement.decode_ended()
    assert set(counts.values()) == {2}
    assert len(counts) == 4


@pytest.mark.parametrize("policy", ["random", "power_of_two"])
def test_chance_reaches_every_pair(policy: str) -> None:
    made = pairing(2, 3, policy=policy)
    pairs = set()
    for _ in range(300):
        placement = made.place(ask())
        pairs.add((placement.prefill, placement.decode))
        placement.decode_ended()
    assert len(pairs) == 6


def test_each_role_may_have_its_own_policy() -> None:
    made = pairing(2, 2, policy="random", prefill_policy="round_robin", decode_policy="least_load")
    held = made.place(ask())
    for _ in range(4):
        placement = made.place(ask())
        assert placement.decode is not held.decode
        placement.decode_ended()
    urls = [placement.prefill.url for placement in (made.place(ask()) for _ in range(4)) if placement.prefill is not None]
    assert urls[0] == urls[2] != urls[1] == urls[3]


def test_prefill_load_ends_with_the_prompt_and_decode_load_with_the_stream() -> None:
    made = pairing(1, 1)
    placement = made.place(ask(1000))
    prefill, decode = made.nodes.all
    assert (prefill.prefill_load.queued_tokens, prefill.num_in_flight, decode.decode_load.num_requests) == (1000, 1, 1)
    placement.prefill_ended(True)
    assert (prefill.prefill_load.queued_tokens, prefill.num_in_flight, decode.decode_load.num_requests) == (0, 0, 1)
    placement.prefill_ended(False)  # said again, as when the leg ends after D's first byte
    placement.decode_ended()
    placement.decode_ended()
    assert idle(made)


@given(st.lists(st.tuples(st.sampled_from("pPdDrv"), st.integers(0, 30)), max_size=60), st.sampled_from(ALL_POLICIES),
       st.sampled_from(["require", "prefer", "never"]))
@settings(max_examples=150, deadline=None)
def test_whatever_happens_all_load_is_given_back(events: list[tuple[str, int]], policy: str, disaggregation: str) -> None:
    clock = Clock()
    made = pairing(3, 3, clock, policy=policy, disaggregation=disaggregation)
    everybody, held = made.nodes.all, list[Placement]()
    for event, number in events:
        clock.now_s += number / 10
        if event == "p":
            with suppress(RequestError):  # when all of a role are gone
                held.append(made.place(ask(50 * number, max_output_tokens=number)))
        elif event in "PD" and held:
            placement = held[number % len(held)]
            placement.prefill_ended(bool(number % 2)) if event == "P" else placement.decode_ended()
        elif event == "r":
            made.nodes.remove(everybody[number % 6])
        elif event == "v":
            info = NodeInfo(page_size=16, pages=PageCounts(number, 2, 40), running=number, waiting=1, max_running_requests=8)
            everybody[number % 6].probe_succeeded(info, 0)
        assert all(node.prefill_load.queued_tokens >= 0 and node.decode_load.num_requests >= 0 for node in everybody)
    for placement in held:
        placement.decode_ended()
    assert idle(made)
    for node in everybody:
        load = node.prefill_load
        assert (node.num_in_flight, load.num_queued, load.queued_tokens, node.decode_load.num_requests) == (0, 0, 0, 0)
        assert load.token_s > 0
        assert load.prompt_s >= 0


def test_removed_node_is_never_picked_and_takes_its_numbers_along() -> None:
    made = pairing(2, 1, policy="cost")
    first = made.place(ask(500))
    assert first.prefill is not None
    made.nodes.remove(first.prefill)
    for _ in range(4):
        placement = made.place(ask())
        assert placement.prefill is not first.prefill
        placement.decode_ended()
    first.decode_ended()
    again = made.nodes.add("prefill", first.prefill.url)
    assert again is not first.prefill
    assert again.prefill_load.queued_tokens == 0


def test_drained_node_gets_nothing_new() -> None:
    made = pairing(2, 2)
    prefill, decode = made.nodes.prefill[0], made.nodes.decode[1]
    for node in (prefill, decode):
        made.nodes.drain(node)
    for _ in range(4):
        placement = made.place(ask())
        assert (placement.prefill, placement.decode) == (made.nodes.prefill[1], made.nodes.decode[0])
    made.nodes.drain(made.nodes.prefill[1])
    assert made.missing() == "no usable prefill node: http://p0:1 is drained; http://p1:1 is drained"


def test_tried_nodes_come_last_and_busy_ones_not_at_all() -> None:
    made = pairing(2, 2)
    tried = {made.nodes.prefill[0], made.nodes.decode[1]}
    held = [made.place(ask(10**6), tried) for _ in range(3)]
    for placement in held:
        assert (placement.prefill, placement.decode) == (made.nodes.prefill[1], made.nodes.decode[0])
    made.nodes.prefill[1].blame("gone")
    assert made.place(ask(), tried).prefill is made.nodes.prefill[0]
    with pytest.raises(RequestError) as error:
        made.place(ask(), tried, busy={made.nodes.prefill[0]})
    assert error.value.failure.status == 503


def test_node_of_an_open_breaker_is_left_alone_until_its_trial() -> None:
    now_s = 0.0
    clock = lambda: now_s  # noqa: E731
    nodes = NodeTable.of(RouterConfig(prefill=("http://p0:1", "http://p1:1"), decode=("http://d0:1",)), clock)
    for node in nodes.all:
        node.probe_succeeded(NodeInfo(), 0)
    made = Pairing(nodes, RouterConfig(), clock)
    failing = nodes.prefill[0]
    for _ in range(5):
        failing.blame("answers 500", answered=True)
    assert {made.place(ask()).prefill for _ in range(6)} == {nodes.prefill[1]}
    now_s += 2.5
    assert [made.place(ask()).prefill for _ in range(6)].count(failing) == 1


@pytest.mark.parametrize(("num_prefill", "num_decode", "role"), [(0, 1, "prefill"), (1, 0, "decode")])
def test_role_that_is_not_configured(num_prefill: int, num_decode: int, role: str) -> None:
    with pytest.raises(RequestError, match=f"no {role} node is configured; start the router with --{role} URL"):
        pairing(num_prefill, num_decode, policy="random").place(ask())


def test_only_nodes_that_agree_pair_and_models_do_not_meet() -> None:
    made = pairing(4, 4, policy="round_robin")
    kinds = (("a", "x"), ("a", "y"), ("b", "x"), ("b", "x"))
    for nodes in (made.nodes.prefill, made.nodes.decode):
        for node, (model, dtype) in zip(nodes, kinds, strict=True):
            node.probe_succeeded(NodeInfo(served_model_name=model, dtype=dtype), node.num_blames)
    for model, pairs in (("a", {(0, 0), (1, 1)}), ("b", {(2, 2), (2, 3), (3, 2), (3, 3)})):
        placed = [made.place(ask(model=model)) for _ in range(8)]
        assert {(made.nodes.prefill.index(p.prefill), made.nodes.decode.index(p.decode)) for p in placed if p.prefill is not None} == pairs


def test_engines_do_not_mix() -> None:
    made = pairing(1, 2)
    for node, engine in zip(made.nodes.all, ("sglang", "vllm", "sglang"), strict=True):
        node.probe_succeeded(NodeInfo(), 0, engine)
    assert {made.place(ask()).decode for _ in range(4)} == {made.nodes.decode[1]}


def test_made_up_model_names_leave_nothing_behind() -> None:
    made = pairing(1, 1)
    for number in range(1000):
        made.place(ask(model=str(number))).decode_ended()
    assert len(made._fleets) <= 256


def test_decode_node_without_pages_is_passed_over_until_all_are_full() -> None:
    made = pairing(1, 3, policy="cost")
    for node, free in zip(made.nodes.decode, (10, 40, 20), strict=True):
        node.probe_succeeded(NodeInfo(page_size=16, pages=PageCounts(free, 0, 100)), 0)
    urls = [made.place(ask(140, max_output_tokens=180)).decode.url for _ in range(4)]  # 20 pages each
    assert urls == ["http://d1:1", "http://d2:1", "http://d1:1", "http://d0:1"]  # the last: nobody has 20 any more, d0 has most


def test_no_answer_takes_more_pages_than_the_context_has() -> None:
    made = pairing(1, 2, policy="cost")
    for node in made.nodes.decode:
        node.probe_succeeded(NodeInfo(page_size=16, pages=PageCounts(100, 0, 100), context_length=200), 0)
    one, other = made.nodes.decode
    assert [made.place(ask(100, max_output_tokens=10**11)).decode for _ in range(4)] == [one, other, other, one]
    assert [node.decode_load.room_tokens for node in (one, other)] == [1200, 1200]


def test_a_prompt_that_cannot_be_split_leaves_no_trace_at_a_prefill_node() -> None:
    made = pairing(1, 1)
    for _ in range(5):
        made.nodes.prefill[0].blame("error", answered=True)  # its breaker is open, and it is the last
    placement = made.place(ask(1000, "x" * 4000), why_whole=lambda decode: "n" if decode.leg == "decode" else None)
    assert (placement.prefill, placement.local_reason) == (None, "n")
    assert made.knowledge.match(ask(1000, "x" * 4000)) == {made.nodes.decode[0]: 960}
    assert made.nodes.prefill[0].breaker.state is State.OPEN
    placement.decode_ended()
    assert idle(made)


def test_pages_come_back_with_a_request_that_was_placed_since_the_probe() -> None:
    made = pairing(1, 1, policy="cost")
    decode = made.nodes.decode[0]
    info = NodeInfo(page_size=16, pages=PageCounts(5, 5, 100), max_running_requests=10)
    decode.probe_succeeded(info, 0)
    early = made.place(ask(60, max_output_tokens=20))
    assert decode.decode_load.room_tokens == 80
    decode.probe_succeeded(info, 0)  # counts `early`, and will until the next one
    late = made.place(ask(60, max_output_tokens=20))
    late.decode_ended()
    early.decode_ended()
    assert decode.decode_load.room_tokens == 160


def test_requests_of_other_routers_count_from_the_probes() -> None:
    made = pairing(1, 2, policy="cost")
    ours = [made.place(ask()) for _ in range(4)]
    busy, free = made.nodes.decode
    busy.probe_succeeded(NodeInfo(running=5, waiting=2), 0)
    assert busy.decode_load.num_others == 5
    free.probe_succeeded(NodeInfo(running=2, waiting=0), 0)
    assert [made.place(ask()).decode for _ in range(5)] == [free] * 5
    for placement in ours:
        placement.decode_ended()


def local(made: Pairing, **kwargs: object) -> str | None:
    placement = made.place(ask(**kwargs))  # type: ignore[arg-type]
    assert (placement.prefill is None) == (placement.local_reason is not None)
    placement.decode_ended()
    return placement.local_reason


def test_never_needs_no_prefill_node() -> None:
    made = pairing(2, 1, disaggregation="never")
    assert local(made, num_tokens=10**5) == "never"
    bare = pairing(0, 1, disaggregation="never")
    assert bare.missing() is None
    assert local(bare) == "never"
    assert pairing(2, 0, disaggregation="never").missing() == "no decode node is configured; start the router with --decode URL"
    assert pairing(0, 0, service_discovery=True).missing() == "no prefill node is configured; no pod of --prefill-selector has one"


def test_prefer_keeps_short_prompts_and_those_that_are_cached() -> None:
    made = pairing(1, 2, disaggregation="prefer", min_uncached_tokens=64)
    assert local(made, num_tokens=63) == "short"
    assert local(made, num_tokens=64) is None
    text = "".join(f"fact {n}, " for n in range(2000))
    first = made.place(ask(1000, text[:4000]))
    assert first.prefill is not None
    first.prefill_ended(True)
    first.decode_ended()
    second = made.place(ask(1020, text[:4080]))
    assert (second.prefill, second.decode, second.local_reason) == (None, first.decode, "short")
    assert 1020 - second.num_hit_tokens < 64
    third = made.place(ask(2000, text[:8000]))
    assert third.prefill is not None


def test_prefer_keeps_the_next_turn_where_the_last_was_answered() -> None:
    made = pairing(1, 3, disaggregation="prefer", min_uncached_tokens=64)

    def turn(*messages: str) -> Placement:
        roles = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(messages)]
        placement = made.place(read_ask(read_head(json.dumps({"messages": roles}).encode()), None))
        placement.decode_ended()
        return placement

    question, answer = "a long question " * 60, "a long answer " * 200
    first = turn(question)
    assert first.prefill is not None
    second = turn(question, answer, "and then?")
    assert (second.local_reason, second.decode) == ("short", first.decode)
    third = turn(question, answer, "and then?", answer, "why?")
    assert (third.local_reason, third.decode) == ("short", first.decode)
    assert turn(question, answer, "and then?", answer, "why? " * 100).prefill is not None  # a long new message
    assert turn("another " + question, answer, "and then?").prefill is not None


def test_prefer_sends_short_prompts_away_from_a_full_decode_node() -> None:
    made = pairing(1, 1, disaggregation="prefer", min_uncached_tokens=64)
    made.nodes.decode[0].probe_succeeded(NodeInfo(max_running_requests=2), 0)
    assert [made.place(ask(10)).local_reason for _ in range(3)] == ["short", "short", None]


def test_prefer_without_a_prefill_node() -> None:
    made = pairing(1, 1, disaggregation="prefer", min_uncached_tokens=0)
    assert local(made, num_tokens=1) is None
    made.nodes.prefill[0].blame("gone")
    assert made.missing() is None
    assert local(made, num_tokens=5000) == "no_prefill_node"
    made.nodes.decode[0].blame("gone")
    with pytest.raises(RequestError, match="no usable decode node"):
        made.place(ask())


def test_require_answers_503_without_a_prefill_node() -> None:
    made = pairing(1, 1)
    made.nodes.prefill[0].blame("gone")
    with pytest.raises(RequestError, match="no usable prefill node: http://p0:1 gone") as error:
        made.place(ask())
    assert error.value.failure.retry_after_s == 1.0


def test_no_prefill_node_is_asked_how_soon_a_decode_node_computes_a_prompt() -> None:
    made = pairing(1, 1, disaggregation="prefer", min_uncached_tokens=64)
    for placement in [made.place(ask(5000)) for _ in range(3)]:
        placement.prefill_ended(True)
        placement.decode_ended()
    waiting = made.place(ask(100_000))
    assert made.predicted_ttft_s(ask(5000)) is not None
    assert made.predicted_ttft_s(ask(10)) is None
    waiting.decode_ended()


def test_ttft_is_predicted_once_a_rate_is_known() -> None:
    clock = Clock()
    made = pairing(2, 1, clock, policy="cost")
    assert made.predicted_ttft_s(ask(1000)) is None
    first = made.place(ask(1000))
    clock.now_s += 0.5
    first.prefill_ended(True)
    assert made.predicted_ttft_s(ask(1000)) == pytest.approx(0.5)
    for _ in range(4):
        made.place(ask(2000))  # 2 s of work on each node
    assert made.predicted_ttft_s(ask(1000)) == pytest.approx(2.5)


@pytest.fixture(autouse=True)
def _fair_chance() -> Iterator[None]:
    import random

    state = random.getstate()
    random.seed(1)
    yield
    random.setstate(state)
