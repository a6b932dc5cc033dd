"""Thousands of requests on a pool that holds a twentieth of them: all are answered right, in bounded time, and nothing is left.

While it runs, every admission and retraction is watched from outside:
    nobody gets pages while an older request waits that held some before
    the newest running request is retracted, and when it is retracted again it has advanced since
"""

from collections import Counter

import numpy as np
import pytest
from scheduler_harness import Node, random_prompt

from common.scheduling import pages as pages_module
from common.scheduling.request import Place, Request

HORIZON = 3  # tokens; short, so that more is admitted than can stay
WAYS = ("swap", "recompute", "mixed")
NUM_PAGES, PAGE, MAX_TOKENS = 33, 4, 64
NUM_REQUESTS = 1000
POOL_TOKENS = (NUM_PAGES - 1) * PAGE


class Watch:
    """Between a scheduler and its page accounting."""

    def __init__(self, node: Node, patch: pytest.MonkeyPatch) -> None:
        self._node = node
        self._admit, self._retract = node.pages.admit, node.pages.retract
        self.advanced_to: dict[str, int] = {}  # outputs at the last retraction
        self.times_retracted: Counter[str] = Counter()
        patch.setattr(node.pages, "admit", self.admit)
        patch.setattr(node.pages, "retract", self.retract)

    def admit(self, request: Request, max_matched_tokens: int, reserve_pages: int) -> bool:
        admitted = self._admit(request, max_matched_tokens, reserve_pages)
        if admitted:
            were_here = [r.order for r in self._node.scheduler._table._by_rid.values() if r.place is Place.WAITING and r.output_ids]
            assert not were_here or request.order == min(were_here), f"{request.rid} was served before a retracted request"
        return admitted

    def retract(self, request: Request) -> None:
        assert request.order == max(r.order for r in [request, *self._node.work.running.requests]), "an older request was retracted"
        num_outputs = len(request.output_ids)
        assert num_outputs > self.advanced_to.get(request.rid, 0), f"{request.rid} was retracted twice without a token between"
        self.advanced_to[request.rid] = num_outputs
        self.times_retracted[request.rid] += 1
        self._retract(request)


def draw(rng: np.random.Generator, stems: list[list[int]]) -> tuple[list[int], int, int | None]:
    """Prompt, number of tokens, seed (None: greedy)."""
    stem = stems[int(rng.integers(len(stems)))][: int(rng.integers(0, 17))] if rng.random() < 0.5 else []
    prompt = stem + random_prompt(rng, int(rng.integers(1, 30)))
    return prompt, int(rng.integers(1, MAX_TOKENS)), int(rng.integers(1, 1000)) if rng.random() < 0.3 else None


def submit(node: Node, prompt: list[int], num_tokens: int, seed: int | None) -> str:
    return node.submit(prompt, num_tokens) if seed is None else node.submit(prompt, num_tokens, temperature=0.7, seed=seed)


@pytest.mark.parametrize(("role", "way"), [*(("decode", way) for way in WAYS), ("prefill", "mixed")])
def test_a_pool_twenty_times_too_small(role: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "GROWTH_HORIZON_TOKENS", HORIZON)
    rng = np.random.default_rng(WAYS.index(way))
    preemption = "recompute" if way == "recompute" else "swap"
    node = Node(role, num_pages=NUM_PAGES, page_size=PAGE, chunk=32, max_running=12, context_length=512, preemption=preemption, num_swap_slots=60)
    watch = Watch(node, monkeypatch)
    if way == "mixed":
        pays = node.backup.pays
        monkeypatch.setattr(node.backup, "pays", lambda num_pages, num_tokens: rng.random() < 0.5 and pays(num_pages, num_tokens))
    stems = [random_prompt(rng, 16) for _ in range(3)]
    asked: dict[str, tuple[list[int], int, int | None]] = {}
    submitted_at: dict[str, tuple[int, int]] = {}  # step, requests open then
    open_rids: list[str] = []
    aborted: set[str] = set()
    step = most_open_tokens = 0
    while len(asked) < NUM_REQUESTS or open_rids:
        step += 1
        while len(asked) < NUM_REQUESTS and sum(len(asked[rid][0]) + asked[rid][1] for rid in open_rids) < 20 * POOL_TOKENS:
            request = draw(rng, stems)
            rid = submit(node, *request)
            asked[rid], submitted_at[rid] = request, (step, len(open_rids))
            open_rids.append(rid)
        most_open_tokens = max(most_open_tokens, sum(len(asked[rid][0]) + asked[rid][1] for rid in open_rids))
        if rng.random() < 0.02:
            rid = open_rids[int(rng.integers(len(open_rids)))]
            node.abort(rid, "client_left" if rng.random() < 0.5 else "stop_string")
            aborted.add(rid)
        node.scheduler.step()
        counts = node.cache.counts()
        assert counts.free + counts.cached + counts.held + counts.quarantined == counts.total
        for rid in [rid for rid in open_rids if node.answers[rid].over or rid in aborted]:
            open_rids.remove(rid)
            began, num_before = submitted_at[rid]
            assert step - began <= (num_before + 1) * 2 * MAX_TOKENS, f"{rid} starved"
    node.scheduler.step()
    node.assert_idle()
    assert most_open_tokens >= 20 * POOL_TOKENS
    for rid in asked.keys() - aborted:
        prompt, num_tokens, seed = asked[rid]
        node.assert_right(rid, prompt, num_tokens, seed)
    assert node.num_retracted() > 300
    assert all(node.num_retracted(taken) > 150 for taken in (("swap", "recompute") if way == "mixed" else (way,)))
    assert max(watch.times_retracted.values()) > 1
