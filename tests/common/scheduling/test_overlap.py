"""Planning a step while the one before it is under way changes nothing but the time: same answers, no token too many, no page too early."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_runner import FakeRunner, expected_tokens
from pd_nodes import PdNodes
from scheduler_harness import Node, random_prompt

from common.engine.batch import DecodeBatch
from common.engine.launched import Finished
from common.scheduling import pages as pages_module
from common.scheduling.pipeline import Pipeline
from kvtransfer.memory import MemoryFabric

EOS = tuple(range(10, 997, 23))  # one token in 23 ends an answer
CONTEXT_LENGTH = 100
FORMS = [(None, True), (None, False), (0, True), (0, False), (1, True), (3, True), (1000, True), (1000, False)]  # late, overlap


def until_eos(prompt: list[int], num_tokens: int, seed: int | None = None) -> list[int]:
    tokens = expected_tokens(prompt, min(num_tokens, CONTEXT_LENGTH - len(prompt)), seed)
    ends = [i for i, token in enumerate(tokens) if token in EOS]
    return tokens[: ends[0] + 1] if ends else tokens


def workload(seed: int) -> Iterator[tuple[list[int], int, dict[str, Any]]]:
    """Prompts that share beginnings, long and short, greedy and drawn, answers of one token to many."""
    rng = np.random.default_rng(seed)
    stems = [random_prompt(rng, 24) for _ in range(3)]
    for _ in range(40):
        prompt = [*stems[rng.integers(3)][: rng.integers(0, 25)], *random_prompt(rng, int(rng.integers(1, 40)))]
        drawn = {"temperature": 1.0, "seed": int(rng.integers(1000))} if rng.random() < 0.4 else {}
        yield prompt, int(rng.choice([1, 2, 5, 40])), drawn


@pytest.mark.parametrize(("late", "overlap"), FORMS)
@pytest.mark.parametrize("num_pages", [200, 28])
def test_answers_are_the_same_in_every_form(late: int | None, overlap: bool, num_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room, and in a pool in which requests are retracted all the time."""
    monkeypatch.setattr(pages_module, "GROWTH_HORIZON_TOKENS", 2)
    node = Node(num_pages=num_pages, eos=EOS, late=late, overlap=overlap, context_length=CONTEXT_LENGTH)
    rng = np.random.default_rng(1)
    asked = list(workload(0))
    rids = []
    for prompt, num_tokens, drawn in asked:
        rids.append(node.submit(prompt, num_tokens, **drawn))
        for _ in range(rng.integers(4)):
            node.scheduler.step()
    node.run_until_answered(*rids)
    for rid, (prompt, num_tokens, drawn) in zip(rids, asked, strict=True):
        assert node.answers[rid].token_ids == until_eos(prompt, num_tokens, drawn.get("seed"))
        assert node.answers[rid].num_terminals == 1
    drain(node)
    node.assert_idle()
    if num_pages == 28:
        assert node.num_retracted() > 0


@pytest.mark.parametrize("late", [None, 1, 1000])
def test_answers_through_a_pair_are_the_same(late: int | None) -> None:
    """P writes into pages of D that requests gave up a step ago, and D decodes on."""
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        for role in ("prefill", "decode"):
            nodes.add(role, fabric.backend(), eos=EOS, late=late, num_pages=40, chunk=8, context_length=CONTEXT_LENGTH)
        asked = list(workload(2))
        rids = []
        for prompt, num_tokens, drawn in asked:
            rids.append(nodes.submit(prompt, num_tokens, **drawn))
            nodes.step()
        nodes.run_until_answered(*rids)
        for rid, (prompt, num_tokens, drawn) in zip(rids, asked, strict=True):
            assert nodes.decodes[0].answers[rid].token_ids == until_eos(prompt, num_tokens, drawn.get("seed"))
        nodes.run_until_idle()


def test_the_next_step_is_launched_before_the_last_is_processed() -> None:
    node = Node(late=1000)
    prompt = [20, 21, 22]
    rid = node.submit(prompt, 6)
    for num_launched in range(1, 7):
        node.scheduler.step()
        assert len(node.runner.kinds) == num_launched
        assert len(node.runner.under_way) == 1, "the step launched last"
        assert len(node.answers[rid].token_ids) == num_launched - 1
    assert node.scheduler.step(), "nothing is planned beyond the last token, and what is under way is waited for"
    assert len(node.runner.kinds) == 6
    node.assert_right(rid, prompt, 6)
    assert not node.scheduler.step()
    node.assert_idle()


def test_serial_form_processes_a_step_before_it_plans_the_next() -> None:
    node = Node(late=1000, overlap=False)
    rid = node.submit([20, 21, 22], 6)
    for num_tokens in range(1, 7):
        node.scheduler.step()
        assert not node.runner.under_way
        assert len(node.answers[rid].token_ids) == num_tokens


def test_a_request_that_ended_keeps_its_pages_until_the_step_that_names_it_has_run() -> None:
    prompt = next(p for p in ([20 + i, 30] for i in range(500)) if len(until_eos(p, 30)) == 7)
    node = Node(late=1000, eos=EOS)
    rid = node.submit(prompt, 30)
    while not node.answers[rid].over:
        node.scheduler.step()
    assert node.answers[rid].token_ids == until_eos(prompt, 30)
    assert len(node.runner.under_way) == 1
    assert node.cache.counts().held == 3  # 9 tokens, pages of 4
    assert node.scheduler.step()
    assert node.scheduler.stats()["dropped_tokens_total"] == 1
    node.assert_idle()


@pytest.mark.parametrize("cause", ["client_left", "stop_string"])
def test_an_abort_leaves_the_pages_to_the_step_under_way(cause: str) -> None:
    node = Node(late=1000, chunk=8)
    running, extending = node.submit([20, 21, 22], 30), node.submit([*range(100, 130)], 5)
    for _ in range(4):
        node.scheduler.step()
    for rid in (running, extending):
        node.abort(rid, cause)
    node.scheduler._receive()
    assert node.cache.counts().held > 0
    drain(node)
    assert node.answers[running].num_terminals == node.answers[extending].num_terminals == 0
    node.assert_idle()


def test_a_row_is_used_again_while_a_step_still_names_it() -> None:
    prompt = next(p for p in ([20 + i, 30] for i in range(500)) if len(until_eos(p, 30)) == 5)
    node = Node(late=1000, eos=EOS, max_running=1)
    first, second = node.submit(prompt, 30), node.submit([200, 201], 1)
    node.run_until_answered(first, second)
    assert node.answers[second].token_ids == until_eos([200, 201], 1)
    drain(node)
    node.assert_idle()


def test_only_batches_that_look_at_history_wait_for_it() -> None:
    waits: list[tuple[bool, bool]] = []

    class Watched(FakeRunner):
        def launch(self, batch: Any) -> Any:
            if isinstance(batch, DecodeBatch):
                waits.append((any(change.history._params.needs_history for change in batch.changes), bool(self.under_way)))
            return super().launch(batch)

    node = Node(runner=Watched(64, 4, late=1000))
    plain = node.submit([20, 21, 22], 40)
    biased = node.submit([30, 31], 12, logit_bias=((5, 1.0),))
    penalised = node.submit([40, 41, 42], 8, presence_penalty=0.5)
    node.run_until_answered(plain, biased, penalised)
    with_history = [under_way for needs, under_way in waits if needs]
    assert with_history == [False] * 7
    assert [under_way for needs, under_way in waits if not needs].count(True) > 20
    node.assert_right(plain, [20, 21, 22], 40)


def test_a_penalised_row_sees_all_tokens_before_it() -> None:
    seen: list[tuple[list[int], int]] = []

    class Watched(FakeRunner):
        def launch(self, batch: Any) -> Any:
            seen.extend((list(change.output_ids), change.num_outputs) for change in batch.changes)
            return super().launch(batch)

    node = Node(runner=Watched(64, 4, late=1000))
    rid = node.submit([40, 41, 42], 6, frequency_penalty=0.5)
    node.run_until_answered(rid)
    tokens = node.answers[rid].token_ids
    assert seen == [(tokens[:n], n) for n in range(6)]


def test_pipeline_waits_for_the_oldest_only_beyond_its_depth() -> None:
    class Launch(Finished):
        def done(self) -> bool:
            return False

    for depth in (0, 1, 2):
        pipeline: Pipeline[int] = Pipeline(depth, clock=iter(range(100)).__next__)
        landed: list[int] = []
        for step in range(5):
            pipeline.add(step, Launch(np.zeros(0, np.int64)), 0.0)
            landed += [one.plan for one in pipeline.landed(wait=False)]
        assert landed == list(range(5 - depth))
        assert len(pipeline) == depth
        assert [one.plan for one in pipeline.landed(wait=True)] == ([5 - depth] if depth else [])


def drain(node: Node) -> None:
    while node.scheduler.step():
        pass
