"""Memory pressure: who gives pages up, what becomes of its KV, who gets pages next, and that everybody advances."""

from collections.abc import Sequence

import numpy as np
import pytest
from pd_nodes import PdNodes
from scheduler_harness import Node, random_prompt

from common.kvcache.cache import KVCache
from common.messages import Generate
from common.request import Bootstrap, SamplingParams, TextSpec
from common.scheduling import pages as pages_module
from common.scheduling.host_backup import HostBackup, Rate
from common.scheduling.line import Line
from common.scheduling.pages import RequestPages
from common.scheduling.request import Place, Request, request_from
from kvtransfer.memory import MemoryFabric

PAGE = 4
WAYS = ("swap", "recompute", "auto")


@pytest.fixture(autouse=True)
def _no_growth_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit as if nobody grew, so that retraction comes soon. Tests of admission set it back."""
    monkeypatch.setattr(pages_module, "GROWTH_HORIZON_TOKENS", 0)


def prompts_of(num: int, num_tokens: int = 8) -> list[list[int]]:
    return [random_prompt(np.random.default_rng(seed), num_tokens) for seed in range(num)]


def request_of(num_prompt: int, num_output: int = 0, max_new_tokens: int = 100, order: int = 0) -> Request:
    message = Generate(f"r{order}", list(range(1, num_prompt + 1)), SamplingParams(max_new_tokens), TextSpec(), 0.0)
    request = request_from(message, order)
    request.output_ids = list(range(500, 500 + num_output))
    return request


class FakeMemory:
    """Host pages without bytes: what is copied where, each copy taking its time."""

    page_nbytes = 1_000_000

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.copies: list[tuple[str, list[int], list[int]]] = []
        self.now_s = 0.0
        self.seconds_a_page = 0.0001

    def save(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        self.copies.append(("save", list(pages), list(slots)))
        self.now_s += len(pages) * self.seconds_a_page

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        self.copies.append(("load", list(slots), list(pages)))
        self.now_s += len(pages) * self.seconds_a_page


def backup_of(memory: FakeMemory, *, tokens_per_s: float = 1000.0, always_swap: bool = False) -> HostBackup:
    return HostBackup(memory, extend_prior_tokens_per_s=tokens_per_s, always_swap=always_swap, clock=lambda: memory.now_s)


# ---- answers are the same ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("way", WAYS)
def test_retraction_keeps_every_answer_right_greedy_and_seeded(role: str, way: str) -> None:
    node = Node(role, num_pages=17, preemption=way)  # 64 tokens for 4 requests of up to 38
    prompts = prompts_of(4)
    seeds = [None, 11, None, 12]
    rids = [
        node.submit(prompt, 30) if seed is None else node.submit(prompt, 30, temperature=0.8, seed=seed)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    node.run_until_answered(*rids)
    for rid, prompt, seed in zip(rids, prompts, seeds, strict=True):
        node.assert_right(rid, prompt, 30, seed)
    assert node.num_retracted(way if way != "auto" else "") > 0
    node.assert_idle()


def test_a_swapped_request_returns_without_a_forward() -> None:
    node = Node(num_pages=17, preemption="swap", prefix_cache=False)
    rids = [node.submit(prompt, 30) for prompt in prompts_of(4)]
    node.run_until_answered(*rids)
    assert node.num_retracted("swap") > 0
    assert sum(node.runner.extend_sizes) == 4 * 8
    stats = node.scheduler.stats()
    assert stats["swap_out_seconds_total"] > 0
    assert stats["swap_in_seconds_total"] > 0


def test_full_swap_space_means_recomputing() -> None:
    node = Node(num_pages=17, preemption="swap", num_swap_slots=2, prefix_cache=False)
    prompts = prompts_of(4)
    rids = [node.submit(prompt, 30) for prompt in prompts]
    node.run_until_answered(*rids)
    assert node.num_retracted("recompute") > 0
    for rid, prompt in zip(rids, prompts, strict=True):
        node.assert_right(rid, prompt, 30)
    node.assert_idle()


def test_a_prefix_that_was_lost_runs_again() -> None:
    """What is shared is not copied. When the others are gone and the tree has given it up, the copy is dropped."""
    node = Node(num_pages=17, chunk=32, preemption="swap", late=None)
    stem = prompts_of(1, 16)[0]
    first = node.submit([*stem, 20], 34)
    node.scheduler.step()
    second = node.submit([*stem, 21], 34)
    while not node.backup.num_copies:
        node.scheduler.step()
    node.abort(first)
    node.scheduler._receive()
    node.cache.release(node.cache.alloc(node.cache.available()))  # the tree loses everything
    node.run_until_answered(second)
    node.assert_right(second, [*stem, 21], 34)
    assert node.scheduler.stats()["swap_prefix_lost_total"] == 1
    node.assert_idle()


# ---- what is copied, and when it pays ---------------------------------------------------------------------------------------------


def test_only_private_pages_with_kv_are_copied_and_only_lost_ones_come_back() -> None:
    memory = FakeMemory(8)
    pages = RequestPages(KVCache(33, PAGE), backup_of(memory, always_swap=True))
    sharer, request = request_of(8), request_of(9, num_output=6)
    assert pages.admit(sharer, 8, 0)
    sharer.num_computed_tokens = 8
    pages.share(sharer)
    assert pages.admit(request, 14, 0)
    assert request.pages[:2] == sharer.pages
    request.num_computed_tokens = 14
    pages.grow(request)  # for the coming step: nothing in it yet
    row = list(request.pages)
    pages.retract(request)
    assert memory.copies == [("save", row[2:4], [0, 1])]
    assert (request.pages, pages.backup.nbytes_used) == ([], 2_000_000)
    assert pages.admit(request, request.num_tokens - 1, 0)
    assert pages.restore(request)
    assert memory.copies[1:] == [("load", [0, 1], request.pages[2:4])]
    assert (request.num_computed_tokens, request.host_copy, pages.backup.nbytes_used) == (14, None, 0)
    for holder in (sharer, request):
        pages.release(holder)
    assert pages.cache.counts().held == 0


def test_pages_the_tree_still_has_are_not_copied_back() -> None:
    memory = FakeMemory(8)
    pages = RequestPages(KVCache(33, PAGE), backup_of(memory, always_swap=True))
    request = request_of(9, num_output=2)
    assert pages.admit(request, 10, 0)
    request.num_computed_tokens = 10
    pages.share(request)
    pages.retract(request)
    assert len(memory.copies[0][1]) == 3
    assert pages.admit(request, 10, 0)
    assert pages.restore(request)
    assert memory.copies[1] == ("load", [2], request.pages[2:3])
    pages.release(request)


def test_releasing_a_request_ends_its_copy() -> None:
    memory = FakeMemory(8)
    pages = RequestPages(KVCache(33, PAGE), backup_of(memory, always_swap=True))
    request = request_of(9, num_output=2)
    assert pages.admit(request, 10, 0)
    request.num_computed_tokens = 10
    pages.retract(request)
    assert pages.backup.stats()["swapped_requests"] == 1
    pages.release(request)
    assert (pages.backup.stats()["swapped_requests"], pages.backup.stats()["swap_bytes"]) == (0, 0)


def test_the_cheaper_way_is_taken() -> None:
    """10 pages of 1 MB, both ways, at 10 GB/s: 2 ms. 40 tokens at 1e6 a second: 0.04 ms; at 1000: 40 ms."""
    assert not backup_of(FakeMemory(16), tokens_per_s=1e6).pays(10, 40)
    assert backup_of(FakeMemory(16), tokens_per_s=1e3).pays(10, 40)
    assert backup_of(FakeMemory(16), tokens_per_s=1e6, always_swap=True).pays(10, 40)
    assert not backup_of(FakeMemory(9), tokens_per_s=1e3).pays(10, 40)
    assert not backup_of(FakeMemory(16), always_swap=True).pays(0, 40)


def test_measurements_decide_and_a_way_not_taken_gets_its_chance_again() -> None:
    memory = FakeMemory(100)
    backup = backup_of(memory, tokens_per_s=1000.0)
    assert backup.pays(10, 40)
    memory.seconds_a_page = 0.1  # 10 MB/s: copying 10 pages there and back takes 2 s
    request = request_of(40)
    backup.save(request, 0, list(range(1, 11)))
    assert not backup.pays(10, 40)
    backup.drop(request)
    assert any(backup.pays(10, 40) for _ in range(200))
    for _ in range(20):
        backup.extended(num_tokens=512, seconds=512 / 1e9)
    assert not backup.pays(10, 4)


def test_a_rate_weighs_by_seconds_and_fades_to_its_prior() -> None:
    rate = Rate(100.0)
    assert rate.per_s == 100.0
    rate.measured(50.0, 10.0)
    assert rate.per_s == pytest.approx(5.0, rel=0.1)
    for _ in range(200):
        rate.fade()
    assert rate.per_s == pytest.approx(100.0, rel=0.01)


# ---- ends --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["client_left", "stop_string", "deadline", "shutdown"])
@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_a_retracted_request_that_ends_leaves_nothing(way: str, end: str) -> None:
    node = Node(num_pages=17, preemption=way)
    prompts = prompts_of(3)
    rids = [node.submit(prompt, 40) for prompt in prompts]
    while not node.num_retracted(way):
        node.scheduler.step()
    victim = rids[-1]
    assert node.scheduler.stats()["swapped_requests"] == (way == "swap")
    if end == "deadline":
        table = node.scheduler._table
        table._set_timer(table._by_rid[victim], -1.0, table._timers[0][3])
    elif end == "shutdown":
        node.drain(-1.0)
    else:
        node.abort(victim, end)
    node.scheduler.step()
    assert node.scheduler.stats()["swapped_requests"] == 0
    assert node.answers[victim].num_terminals == (end in ("deadline", "shutdown"))
    if end == "shutdown":
        node.scheduler.run()
    else:
        node.run_until_answered(*rids[:2])
        for rid, prompt in zip(rids[:2], prompts, strict=False):
            node.assert_right(rid, prompt, 40)
    node.assert_idle()


# ---- who goes first -------------------------------------------------------------------------------------------------------------


def test_the_line_serves_those_that_ran_oldest_first_and_then_new_ones_as_they_came() -> None:
    line = Line()
    requests = [request_of(4, order=order) for order in range(6)]
    requests[4].bootstrap = Bootstrap("127.0.0.1", 8998, 77)
    for order in (4, 5):
        line.add(requests[order], Place.ARRIVING if order == 4 else Place.WAITING)
    for order in (2, 0, 3, 1):
        line.add_again(requests[order])
    line.remove(requests[3])
    line.remove(requests[5])
    line.add(requests[5])
    assert (len(line), line.num_arriving) == (5, 1)
    assert line.has_room(77)
    assert [line.pop().order for _ in range(5)] == [0, 1, 2, 4, 5]
    assert not line.has_room(77)
    assert line.num_arriving == 0
    assert line.head is None


def test_the_newest_is_retracted_and_the_oldest_finishes_first() -> None:
    node = Node(num_pages=17, preemption="swap")
    rids = [node.submit(prompt, 40) for prompt in prompts_of(4)]
    order: list[str] = []
    while len(order) < 4:
        node.scheduler.step()
        order += [rid for rid in rids if node.answers[rid].over and rid not in order]
    assert order == rids


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_new_requests_wait_for_retracted_ones(way: str) -> None:
    node = Node(num_pages=17, preemption=way)
    rids = [node.submit(prompt, 40) for prompt in prompts_of(3)]
    while not node.num_retracted():
        node.scheduler.step()
    small = node.submit([33], 1)  # would fit
    while len(node.answers[rids[2]].token_ids) < 40:
        assert not node.answers[small].over
        before = len(node.answers[rids[2]].token_ids)
        while len(node.answers[rids[2]].token_ids) == before:
            node.scheduler.step()
        if node.scheduler._table._by_rid.get(rids[2]) and node.scheduler._table._by_rid[rids[2]].place is Place.RUNNING:
            break  # it is back; now the small one may come
    node.run_until_answered(*rids, small)
    node.assert_idle()


def test_a_large_request_at_the_head_is_not_overtaken_by_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by local ones nor by those that wait to be offered."""
    monkeypatch.setattr(pages_module, "GROWTH_HORIZON_TOKENS", 128)
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        prefill = nodes.add("prefill", fabric.backend())
        decode = nodes.add("decode", fabric.backend(), num_pages=17, chunk=64)
        running = decode.submit([20, 21], 40)
        while not decode.answers[running].token_ids:
            decode.scheduler.step()
        large_prompt = random_prompt(np.random.default_rng(1), 50)
        large = decode.submit(large_prompt, 4)
        smalls = [nodes.submit([30 + i], 2) for i in range(3)] + [decode.submit([40 + i], 2) for i in range(3)]
        nodes.run(lambda: bool(decode.answers[large].token_ids) or any(decode.answers[rid].token_ids for rid in smalls))
        assert decode.answers[large].token_ids
        assert not any(decode.answers[rid].token_ids for rid in smalls)
        nodes.run_until_answered(running, large, *smalls)
        decode.assert_right(large, large_prompt, 4)
        nodes.run_until_idle()
        assert prefill.num_retracted() == 0


def test_retracting_the_last_running_request_does_not_put_the_node_to_sleep() -> None:
    """A prompt that is being computed holds the other pages; it goes on in the same step."""
    node = Node(num_pages=13, chunk=4, max_decode_delay_steps=1)
    oldest = node.submit([20, 21], 30)
    node.scheduler.step()
    prompt = prompts_of(1, 40)[0]
    newer = node.submit(prompt, 3)
    while not node.num_retracted():
        assert node.scheduler.step()
    assert len(node.work.running) == 0
    assert len(node.work.extending) == 1
    assert node.runner.kinds[-1] == "extend"
    node.run_until_answered(oldest, newer)
    node.assert_right(oldest, [20, 21], 30)
    node.assert_right(newer, prompt, 3)
    node.assert_idle()


# ---- admission ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_prompt", "num_output", "max_new_tokens", "expected"), [
    (8, 0, 1, 0),  # its only token is never written
    (8, 0, 2, 1),
    (8, 0, 5, 1),
    (8, 0, 6, 2),
    (8, 1, 2, 1),  # in a room, token 1 streamed: the pages are those of the prompt
    (7, 0, 2, 0),
    (8, 0, 1000, 32),  # the horizon: 127 tokens
])
def test_growth_is_bounded_by_what_can_come(
    monkeypatch: pytest.MonkeyPatch, num_prompt: int, num_output: int, max_new_tokens: int, expected: int
) -> None:
    monkeypatch.setattr(pages_module, "GROWTH_HORIZON_TOKENS", 128)
    pages = RequestPages(KVCache(100, PAGE), backup_of(FakeMemory(0)))
    request = request_of(num_prompt, max_new_tokens=max_new_tokens)
    assert pages.admit(request, num_prompt, 0)
    request.output_ids = list(range(num_output))
    assert pages.growth_pages(request) == expected
    request.place = Place.OVER
    assert pages.growth_pages(request) == 0


def test_admission_never_makes_a_retraction_necessary_within_the_horizon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "GROWTH_HORIZON_TOKENS", 10)
    node = Node(num_pages=33, max_running=8, context_length=512)
    rng = np.random.default_rng(0)
    rids = [node.submit(random_prompt(rng, int(rng.integers(1, 30))), int(rng.integers(1, 90))) for _ in range(40)]
    since = 0  # decode steps since somebody got pages
    num_held_before: set[str] = set()
    while not all(node.answers[rid].over for rid in rids):
        retracted_before = node.num_retracted()
        node.scheduler.step()
        held = {r.rid for r in (*node.work.running.requests, *node.work.extending.requests)}
        since = 0 if held - num_held_before else since + (node.runner.kinds[-1] == "decode")
        num_held_before = held
        if node.num_retracted() > retracted_before:
            assert since >= 9, since
    assert node.num_retracted() > 0
    node.assert_idle()


def test_rooms_count_and_are_not_retracted() -> None:
    """P writes their pages. They are counted in free_rows(), and the running ones make room."""
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        nodes.add("prefill", fabric.backend())
        decode = nodes.add("decode", fabric.backend(), num_pages=17, preemption="swap")
        fabric.hold()
        roomed = nodes.submit(prompts_of(1, 20)[0], 12)
        nodes.run(lambda: decode.scheduler.stats()["rooms"] == 1)
        local = [decode.submit(prompt, 30) for prompt in prompts_of(2)]
        while not decode.num_retracted():
            decode.scheduler.step()
        assert decode.scheduler.stats()["rooms"] == 1
        assert decode.work.free_rows(decode.scheduler._rooms.values()) == 8 - 1 - len(decode.work.running)
        fabric.resume()
        nodes.run_until_answered(roomed, *local)
        decode.assert_right(roomed, prompts_of(1, 20)[0], 12)
        nodes.run_until_idle()


def test_requests_that_came_through_a_room_are_retracted_as_others() -> None:
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        nodes.add("prefill", fabric.backend())
        decode = nodes.add("decode", fabric.backend(), num_pages=17, preemption="recompute")
        prompts = prompts_of(4)
        rids = [nodes.submit(prompt, 30) for prompt in prompts]
        nodes.run_until_answered(*rids)
        assert decode.num_retracted("recompute") > 0
        for rid, prompt in zip(rids, prompts, strict=True):
            decode.assert_right(rid, prompt, 30)
            assert decode.answers[rid].prefill_site == "remote"
        nodes.run_until_idle()
