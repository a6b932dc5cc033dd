"""A request that ends on D before it was offered ends on P at once, with D's reason."""

from typing import Any

import numpy as np
import pytest
from pd_nodes import PdNodes
from scheduler_harness import Node, random_prompt

from common.errors import Failure
from kvtransfer.memory import MemoryFabric

PROMPT = random_prompt(np.random.default_rng(7), 37)


def failure_on_prefill(nodes: PdNodes, prefill: Node, rid: str) -> Failure:
    nodes.run(lambda: prefill.answers[rid].over)
    failure = prefill.answers[rid].failure
    assert failure is not None
    return failure


def full_pair(nodes: PdNodes) -> tuple[Node, Node, str]:
    """A pair whose decode node has all its pages with a running request, and that one's id."""
    fabric = MemoryFabric()
    prefill, decode = nodes.add("prefill", fabric.backend()), nodes.add("decode", fabric.backend(), num_pages=15)
    running = nodes.submit([20, 21, 22], 50)
    nodes.run(lambda: len(decode.answers[running].token_ids) > 2)
    return prefill, decode, running


def test_refused_at_intake() -> None:
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        prefill = nodes.add("prefill", fabric.backend())
        decode = nodes.add("decode", fabric.backend(), num_pages=8)
        rid = nodes.submit(PROMPT, 5)  # 10 pages never fit into 7
        failure = failure_on_prefill(nodes, prefill, rid)
        assert (failure.status, failure.code) == (400, "context_length_exceeded")
        assert decode.answers[rid].failure == failure
        nodes.run_until_idle()


@pytest.mark.parametrize("end", ["client", "deadline", "drain"])
def test_ended_while_it_waited_for_pages(end: str) -> None:
    with PdNodes() as nodes:
        prefill, decode, running = full_pair(nodes)
        rid = nodes.submit(PROMPT, 5)
        nodes.run(lambda: decode.scheduler.stats()["arriving_requests"] == 1 and prefill.scheduler.stats()["rooms"] == 1)
        if end == "client":
            decode.abort(rid)
        elif end == "deadline":
            request = decode.scheduler._table._by_rid[rid]
            decode.scheduler._table._set_timer(request, -1.0, Failure(504, "late", code="deadline_exceeded"))
        else:
            decode.drain(-1.0)
        decode.scheduler.step()
        assert decode.scheduler.stats()["arriving_requests"] == 0
        assert not decode.answers[running].over or end == "drain"
        failure = failure_on_prefill(nodes, prefill, rid)
        assert failure.code == {"client": "cancelled", "deadline": "deadline_exceeded", "drain": "shutting_down"}[end]
        nodes.run_until_idle()


def test_a_full_table_of_transfers() -> None:
    with PdNodes() as nodes:
        fabric = MemoryFabric()
        prefill, decode = nodes.add("prefill", fabric.backend()), nodes.add("decode", fabric.backend())
        refusal = Failure(503, "0 transfers are open already", code="overloaded", stage="transfer", retry_after_s=1.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode.endpoint, "_enter", lambda room: refusal)
            rid = nodes.submit(PROMPT, 5)
            failure = failure_on_prefill(nodes, prefill, rid)
        assert (failure.status, failure.code) == (503, "overloaded")
        nodes.run_until_idle()


def test_a_duplicate_is_not_withdrawn() -> None:
    """It would end the request that has the room."""
    with PdNodes() as nodes:
        fabric = MemoryFabric()
        _, decode = nodes.add("prefill", fabric.backend()), nodes.add("decode", fabric.backend())
        withdrawn: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode.endpoint, "withdraw", lambda *room: withdrawn.append(room))
            first = nodes.submit(PROMPT, 5)
            nodes._rooms = iter([1])
            second = nodes.submit(PROMPT, 5)
            nodes.run(lambda: decode.answers[first].over and decode.answers[second].over)
        decode.assert_right(first, PROMPT, 5)
        assert withdrawn == []
        nodes.run_until_idle()


def test_a_duplicate_that_leaves_while_both_wait_for_pages_is_not_withdrawn() -> None:
    with PdNodes() as nodes:
        _, decode, running = full_pair(nodes)
        first = nodes.submit(PROMPT, 5)
        nodes._rooms = iter([2])
        second = nodes.submit(PROMPT, 5)
        nodes.run(lambda: decode.scheduler.stats()["arriving_requests"] == 2)
        decode.abort(second)
        nodes.run_until_answered(first, running)
        decode.assert_right(first, PROMPT, 5)
        nodes.run_until_idle()
