"""Prefill and decode nodes whose pools hold a twentieth of the load: all answers right, nobody starves, nothing is left."""

import numpy as np
import pytest
from pd_nodes import PdNodes, model_nodes
from scheduler_harness import Node, random_prompt
from tiny_models import cached_checkpoint, greedy_oracle

from common.engine.runner import ModelRunner
from common.scheduling import pages as pages_module
from common.scheduling.request import Place
from kvtransfer.memory import MemoryFabric

WAYS = ("swap", "recompute", "auto")
Drawn = tuple[list[int], int, dict[str, object]]  # prompt, number of tokens, sampling


def draw(rng: np.random.Generator, index: int) -> Drawn:
    sampling = {"temperature": 0.8, "seed": index} if index % 3 == 2 else {}
    return rng.integers(0, 256, int(rng.integers(3, 40))).tolist(), int(rng.integers(2, 48)), {"ignore_eos": True, **sampling}


_rng = np.random.default_rng(3)
REQUESTS = [draw(_rng, index) for index in range(48)]


@pytest.fixture(autouse=True)
def _little_growth_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "GROWTH_HORIZON_TOKENS", 3)


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """By one node with pages for all; the first greedy ones are compared with transformers."""
    assert sum(len(prompt) + num_tokens for prompt, num_tokens, _ in REQUESTS) > 20 * 13 * 8
    model_dir = cached_checkpoint("llama")
    runner = ModelRunner(model_dir, dtype="float32", page_size=8, num_pages=400, max_running_requests=8)
    node = Node(runner=runner, num_pages=400, page_size=8, chunk=64, context_length=runner.context_length)  # type: ignore[arg-type]
    rids = [node.submit(prompt, num_tokens, **sampling) for prompt, num_tokens, sampling in REQUESTS]
    node.run_until_answered(*rids)
    assert node.num_retracted() == 0
    for rid, (prompt, num_tokens, sampling) in list(zip(rids, REQUESTS, strict=True))[:8]:
        assert node.answers[rid].token_ids == greedy_oracle(model_dir, prompt, num_tokens) or "seed" in sampling
    return [node.answers[rid].token_ids for rid in rids]


@pytest.mark.parametrize("way", WAYS)
def test_rooms_and_local_requests_on_pools_twenty_times_too_small(way: str) -> None:
    """Six in ten through rooms, the others on D alone, some aborted."""
    rng = np.random.default_rng(WAYS.index(way))
    fabric = MemoryFabric(copy_at="completion")
    with PdNodes() as nodes:
        options = {"num_pages": 33, "chunk": 32, "max_running": 12, "preemption": way, "num_swap_slots": 60}
        prefill, decode = nodes.add("prefill", fabric.backend(), **options), nodes.add("decode", fabric.backend(), **options)
        stems = [random_prompt(rng, 16) for _ in range(3)]
        asked: dict[str, tuple[list[int], int]] = {}
        aborted: set[str] = set()
        waiting: set[str] = set()
        while waiting or len(asked) < 400:
            while len(asked) < 400 and sum(len(asked[rid][0]) + asked[rid][1] for rid in waiting) < 20 * 32 * 4:
                stem = stems[int(rng.integers(3))][: int(rng.integers(0, 17))]
                request = stem + random_prompt(rng, int(rng.integers(1, 30))), int(rng.integers(1, 64))
                rid = (nodes if rng.random() < 0.6 else decode).submit(*request)
                asked[rid] = request
                waiting.add(rid)
            if not nodes.step():
                decode.intake.wait(0.0003)
            if waiting and rng.random() < 0.01:
                rid = sorted(waiting)[int(rng.integers(len(waiting)))]
                aborted.add(rid)
                for node in (prefill, decode):
                    if rid in node.answers:
                        node.abort(rid)
            waiting -= {rid for rid in waiting if decode.answers[rid].over} | aborted
            retracted = [r for r in decode.scheduler._table._by_rid.values() if r.place is Place.WAITING and r.output_ids]
            assert not retracted or decode.work.line.head in retracted, "a new request stands before a retracted one"
            for counts in (node.cache.counts() for node in (prefill, decode)):
                assert counts.free + counts.cached + counts.held + counts.quarantined == counts.total
        for rid in asked.keys() - aborted:
            decode.assert_right(rid, *asked[rid])
        assert decode.num_retracted(way if way != "auto" else "") > 50
        nodes.run_until_idle()


@pytest.mark.parametrize("way", WAYS)
def test_the_model_answers_as_with_a_pool_for_all(way: str, answers: list[list[int]]) -> None:
    fabric = MemoryFabric()
    options = {"num_pages": 14, "max_running": 8, "preemption": way}
    with model_nodes(cached_checkpoint("llama"), (fabric.backend(), fabric.backend()), page_size=8, chunk=32, **options) as nodes:
        decode = nodes.decodes[0]
        rids = [nodes.submit(prompt, num_tokens, **sampling) for prompt, num_tokens, sampling in REQUESTS]
        nodes.run_until_answered(*rids)
        assert [decode.answers[rid].token_ids for rid in rids] == answers
        assert decode.num_retracted(way if way != "auto" else "") > 3
        nodes.run_until_idle()
