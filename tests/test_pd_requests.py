"""Prefill and decode schedulers together, on a faked model whose KV is the token ids: what one page mix-up anywhere would change."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pd_nodes import PdNodes
from scheduler_harness import Node, random_prompt

from common.metrics import HELP
from common.scheduling import pages as pages_module
from kvtransfer.memory import MemoryFabric
from kvtransfer.tcp import TcpBackend

PROMPT = random_prompt(np.random.default_rng(7), 37)


def pair(nodes: PdNodes, fabric: MemoryFabric, **options: object) -> tuple[Node, Node]:
    return nodes.add("prefill", fabric.backend(), **options), nodes.add("decode", fabric.backend(), **options)



def test_figures_of_pages_swap_and_transfer_say_what_they_are() -> None:
    with PdNodes() as nodes:
        names = {key.partition("{")[0] for node in pair(nodes, MemoryFabric()) for key in node.scheduler.stats()}
    assert {name for name in names if name.startswith(("pages", "retracted", "swap", "transfer"))} == set(HELP)


def test_first_token_is_streamed_before_the_transfer_ends() -> None:
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        _, decode = pair(nodes, fabric)
        fabric.hold()
        rid = nodes.submit(PROMPT, 5)
        nodes.run(lambda: len(decode.answers[rid].token_ids) == 1)
        for _ in range(50):
            nodes.step()
        assert len(decode.answers[rid].token_ids) == 1
        fabric.resume()
        nodes.run_until_answered(rid)
        decode.assert_right(rid, PROMPT, 5)
        nodes.run_until_idle()


def test_pages_leave_while_later_chunks_are_computed() -> None:
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        prefill, _ = pair(nodes, fabric, chunk=8, late=None)
        rid = nodes.submit(PROMPT, 2)
        nodes.run(lambda: bool(prefill.runner.extend_sizes))
        nodes.wait(lambda: prefill.endpoint.stats()["transfer_bytes_written_total"] == 2 * 4 * 8)  # 2 pages of 4 int64
        assert len(prefill.runner.extend_sizes) == 1
        nodes.run_until_answered(rid)
        nodes.run_until_idle()


@pytest.mark.parametrize("gone_on", ["both", "decode", "prefill"])
@pytest.mark.parametrize("phase", ["queued", "offered", "computing", "sending", "decoding"])
def test_client_gone_in_every_phase(phase: str, gone_on: str) -> None:
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        prefill, decode = pair(nodes, fabric, chunk=8)
        bystander = nodes.submit([20, 21, 22], 30)
        nodes.run(lambda: len(decode.answers[bystander].token_ids) > 2)
        if phase == "sending":
            fabric.hold()
        rid = nodes.submit(PROMPT, 40)
        reached = {
            "queued": lambda: True,
            "offered": lambda: decode.scheduler.stats()["rooms"] > 0,
            "computing": lambda: prefill.scheduler.stats()["extending_requests"] > 0,
            "sending": lambda: len(fabric.in_flight) > 0,
            "decoding": lambda: len(decode.answers[rid].token_ids) > 3,
        }[phase]
        nodes.run(reached)
        for node, name in ((prefill, "prefill"), (decode, "decode")):
            if gone_on in ("both", name):
                node.abort(rid)
        for _ in range(30):
            nodes.step()
        fabric.resume()
        nodes.run_until_answered(bystander)
        decode.assert_right(bystander, [20, 21, 22], 30)
        if gone_on == "prefill" and phase != "queued":
            nodes.run(lambda: decode.answers[rid].over)  # told, or served because the transfer was past recall or token 1 was out
        nodes.run_until_idle()


def test_pages_of_an_aborted_transfer_are_not_reused_before_it_is_closed() -> None:
    """The next request gets other pages, and its own KV, while a write of the first is still in flight."""
    fabric = MemoryFabric(copy_at="completion")
    with PdNodes() as nodes:
        prefill, decode = pair(nodes, fabric, num_pages=24, prefix_cache=False)
        fabric.hold()
        first = nodes.submit(PROMPT, 5)
        nodes.run(lambda: len(decode.answers[first].token_ids) == 1)
        decode.abort(first)
        prefill.abort(first)
        for _ in range(20):
            nodes.step()
        assert decode.cache.counts().quarantined == 10
        local = decode.submit(random_prompt(np.random.default_rng(1), 40), 8)
        decode.run_until_answered(local)
        fabric.resume()
        nodes.run_until_idle()
        decode.assert_right(local, random_prompt(np.random.default_rng(1), 40), 8)


def test_transfer_lost_before_token_1_fails_the_request_with_503() -> None:
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        prefill, decode = pair(nodes, fabric, chunk=8, late=None)
        rid = nodes.submit(PROMPT, 5)
        fabric.fail_completions(1)
        nodes.run(lambda: bool(prefill.runner.extend_sizes))
        nodes.wait(lambda: prefill.endpoint.stats()["transfer_failed_total"] == 1)
        nodes.run_until_answered(rid)
        failure = decode.answers[rid].failure
        assert failure is not None
        assert failure.status in (502, 503)
        nodes.run_until_idle()


def test_transfer_lost_after_token_1_is_computed_on_the_decode_node() -> None:
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        prefill, decode = pair(nodes, fabric)
        fabric.hold()
        rid = nodes.submit(PROMPT, 9)
        nodes.run(lambda: len(decode.answers[rid].token_ids) == 1)
        fabric.kill(prefill.endpoint._backend)
        nodes.prefills.remove(prefill)
        prefill.endpoint.close()
        fabric.resume()
        nodes.run_until_answered(rid)
        decode.assert_right(rid, PROMPT, 9)
        assert decode.answers[rid].prefill_site == "local"
        assert decode.scheduler.stats()["recomputed_requests_total"] == 1
        nodes.run_until_idle()


def test_prefill_node_that_refuses_tells_the_decode_node_at_once() -> None:
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        nodes.add("prefill", fabric.backend(), num_pages=8)
        decode = nodes.add("decode", fabric.backend())
        rid = nodes.submit(PROMPT, 5)  # 10 pages never fit into 7
        nodes.run_until_answered(rid)
        failure = decode.answers[rid].failure
        assert failure is not None
        assert failure.status == 400
        assert "--max-total-tokens" in failure.message
        nodes.run_until_idle()


def test_duplicate_room_is_refused_and_the_first_is_served() -> None:
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        prefill, decode = pair(nodes, fabric)
        first = nodes.submit(PROMPT, 5)
        nodes._rooms = iter([1])
        second = nodes.submit(PROMPT, 5)
        nodes.run(lambda: decode.answers[first].over and decode.answers[second].over and prefill.answers[second].over)
        decode.assert_right(first, PROMPT, 5)
        failure = decode.answers[second].failure
        assert failure is not None
        assert (failure.status, failure.code) == (400, "duplicate_room")
        nodes.run_until_idle()


def test_deadline_while_waiting_for_the_offer_or_the_pages() -> None:
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        prefill, decode = pair(nodes, fabric, num_pages=24)
        fabric.hold()
        late = nodes.submit(PROMPT, 5, timeout_s=0.3)
        nodes.run_until_answered(late)
        # token 1 was streamed before the pages came: the deadline ends the answer all the same
        for node in (prefill, decode):
            failure = node.answers[late].failure
            assert failure is not None
            assert failure.status == 504
        assert decode.cache.counts().quarantined > 0
        fabric.resume()
        nodes.run_until_idle()


def test_decode_node_without_pages_makes_requests_wait_their_turn() -> None:
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        nodes.add("prefill", fabric.backend())
        decode = nodes.add("decode", fabric.backend(), num_pages=14)
        prompts = [random_prompt(np.random.default_rng(seed), 20) for seed in range(6)]
        rids = [nodes.submit(prompt, 12) for prompt in prompts]
        nodes.run_until_answered(*rids)
        for rid, prompt in zip(rids, prompts, strict=True):
            decode.assert_right(rid, prompt, 12)
        nodes.run_until_idle()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 100_000), real=st.booleans(), horizon=st.sampled_from([0, 128]))
def test_random_load_over_two_by_two_nodes(seed: int, real: bool, horizon: int) -> None:
    """Shared prefixes, tight pools, aborts on either side, failing writes: right tokens or a clear failure, pages conserved."""
    rng = np.random.default_rng(seed)
    fabric = MemoryFabric(copy_at="completion")
    with pytest.MonkeyPatch.context() as patch, PdNodes() as nodes:
        patch.setattr(pages_module, "GROWTH_HORIZON_TOKENS", horizon)
        for role in ("prefill", "decode") * 2:
            backend = TcpBackend() if real else fabric.backend()
            nodes.add(role, backend, num_pages=int(rng.integers(24, 40)), chunk=int(rng.integers(5, 20)), max_running=int(rng.integers(2, 6)))
        stems = [random_prompt(rng, 16) for _ in range(2)]
        asked: dict[str, tuple[list[int], int, int]] = {}
        aborted: set[str] = set()
        failing = not real and rng.random() < 0.5
        for _ in range(120):
            if rng.random() < 0.2:
                num_tokens = int(rng.integers(1, 16))
                prompt = stems[int(rng.integers(2))][: int(rng.integers(0, 17))] + random_prompt(rng, int(rng.integers(1, 30)))
                decode = int(rng.integers(2))
                rid = nodes.submit(prompt, num_tokens, prefill=int(rng.integers(2)), decode=decode)
                asked[rid] = (prompt, num_tokens, decode)
            if asked and rng.random() < 0.06:
                rid = list(asked)[int(rng.integers(len(asked)))]
                for node in (*nodes.prefills, *nodes.decodes):
                    if rid in node.answers and (node in nodes.prefills or rng.random() < 0.7):
                        node.abort(rid)
                        aborted.add(rid)
            if failing and rng.random() < 0.1:
                fabric.fail_completions(1)
            if not real and rng.random() < 0.1:
                (fabric.hold if rng.random() < 0.5 else fabric.resume)()
            nodes.step()
            for node in (*nodes.prefills, *nodes.decodes):
                counts = node.cache.counts()
                assert counts.free + counts.cached + counts.held + counts.quarantined == counts.total
        fabric.resume()
        waited_for = [rid for rid in asked if rid not in aborted]
        nodes.run(lambda: all(nodes.decodes[asked[rid][2]].answers[rid].over for rid in waited_for))
        for rid in waited_for:
            prompt, num_tokens, decode = asked[rid]
            answer = nodes.decodes[decode].answers[rid]
            if failing and answer.failure is not None:
                assert answer.failure.status in (502, 503)
            else:
                nodes.decodes[decode].assert_right(rid, prompt, num_tokens)
        nodes.run_until_idle()
