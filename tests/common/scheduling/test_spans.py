"""What schedulers say of traced requests: which phases, in which order, how they ended."""

import time

import pytest
from pd_nodes import PdNodes
from scheduler_harness import Node

from common.messages import SpanOut
from common.tracing import CACHED_TOKENS, FINISH_REASONS, INPUT_TOKENS, OUTPUT_TOKENS, TRANSFER_BYTES, TRANSFER_PAGES
from kvtransfer.memory import MemoryBackend, MemoryFabric

TRACEPARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
PROMPT = list(range(1, 11))  # three pages of 4 tokens


def names(node: Node) -> list[str]:
    return [span.name for span in node.spans()]


def the(node: Node, name: str) -> SpanOut:
    (found,) = [span for span in node.spans() if span.name == name]
    return found


@pytest.fixture
def pair() -> PdNodes:
    fabric = MemoryFabric()
    nodes = PdNodes()
    nodes.add("prefill", MemoryBackend(fabric))
    nodes.add("decode", MemoryBackend(fabric))
    return nodes


def test_a_local_request() -> None:
    before_s = time.time()
    node = Node()
    node.run_until_answered(node.submit(PROMPT, 5, traceparent=TRACEPARENT))
    node.scheduler.step()
    assert names(node) == ["queued", "prefill", "decode"]
    queued, prefill, decode = node.spans()
    assert before_s <= queued.start_s <= queued.end_s <= prefill.start_s <= prefill.end_s <= decode.start_s <= decode.end_s <= time.time()
    assert prefill.attributes == {INPUT_TOKENS: 10, CACHED_TOKENS: 0}
    assert decode.attributes == {OUTPUT_TOKENS: 5, FINISH_REASONS: ["length"]}
    assert {span.traceparent for span in node.spans()} == {TRACEPARENT}
    assert not any(span.error for span in node.spans())


def test_computing_is_prefill_and_no_queueing(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(late=None)  # a launch that computes, as on CPU
    launch, times_s = node.runner.launch, list[float]()
    monkeypatch.setattr(node.runner, "launch", lambda batch: (times_s.append(time.time()), launch(batch), times_s.append(time.time()))[1])
    node.run_until_answered(node.submit(PROMPT, 5, traceparent=TRACEPARENT))
    assert the(node, "queued").end_s <= times_s[0]
    assert the(node, "prefill").start_s <= times_s[0]
    assert the(node, "prefill").end_s >= times_s[1]


def test_nothing_is_said_of_a_request_that_nobody_traces() -> None:
    node = Node()
    node.run_until_answered(node.submit(PROMPT, 5))
    assert node.spans() == []


def test_one_token_needs_no_decode() -> None:
    node = Node()
    node.run_until_answered(node.submit(PROMPT, 1, traceparent=TRACEPARENT))
    assert names(node) == ["queued", "prefill"]


def test_a_pair(pair: PdNodes) -> None:
    with pair:
        rid = pair.submit(PROMPT, 5, traceparent=TRACEPARENT)
        pair.run_until_answered(rid)
        pair.run_until_idle()
        prefill, decode = pair.prefills[0], pair.decodes[0]
        assert sorted(names(prefill)) == ["prefill", "queued", "transfer"]
        assert sorted(names(decode)) == ["decode", "queued", "waiting for KV"]
        transfer, computing, waiting = the(prefill, "transfer"), the(prefill, "prefill"), the(decode, "waiting for KV")
        assert transfer.attributes == {TRANSFER_PAGES: 3, TRANSFER_BYTES: 3 * pair.prefills[0].endpoint.page_nbytes}
        assert computing.start_s <= transfer.start_s
        assert computing.end_s <= transfer.end_s
        assert waiting.start_s <= transfer.start_s
        assert the(decode, "decode").start_s <= waiting.end_s
        assert not any(span.error for span in prefill.spans() + decode.spans())


def test_pages_that_the_decode_node_has_are_not_transferred(pair: PdNodes) -> None:
    with pair:
        pair.run_until_answered(pair.submit(PROMPT, 5))
        pair.run_until_answered(pair.submit(PROMPT, 5, traceparent=TRACEPARENT))
        pair.run_until_idle()
        assert the(pair.prefills[0], "transfer").attributes[TRANSFER_PAGES] == 1
        assert the(pair.prefills[0], "prefill").attributes[CACHED_TOKENS] == 8


def test_a_request_that_ends_with_token_1_still_waits_for_its_pages(pair: PdNodes) -> None:
    with pair:
        pair.run_until_answered(pair.submit(PROMPT, 1, traceparent=TRACEPARENT))
        pair.run_until_idle()
        assert sorted(names(pair.decodes[0])) == ["queued", "waiting for KV"]
        assert the(pair.decodes[0], "waiting for KV").error == ""


@pytest.mark.parametrize(("cause", "error"), [("client_left", "client_left"), ("stop_string", "")])
def test_an_abort_ends_what_has_begun(cause: str, error: str) -> None:
    node = Node()
    rid = node.submit(PROMPT, 200, traceparent=TRACEPARENT)
    for _ in range(20):
        node.scheduler.step()
    node.abort(rid, cause)
    node.scheduler.step()
    assert names(node) == ["queued", "prefill", "decode"]
    assert the(node, "decode").error == error


def test_a_request_that_never_met_its_other_half(pair: PdNodes) -> None:
    with pair:
        decode = pair.decodes[0]
        rid = pair.submit(PROMPT, 5, traceparent=TRACEPARENT)
        pair.prefills[0].intake.pending.clear()  # its leg is lost
        pair.run(lambda: decode.scheduler.stats()["rooms"] == 1)
        decode.abort(rid)
        pair.run(lambda: len(decode.spans()) == 2)
        assert the(decode, "queued").error == ""
        assert the(decode, "waiting for KV").error == "client_left"
        pair.run_until_idle()


def test_a_deadline_says_in_which_phase_it_passed() -> None:
    node = Node(max_running=1)
    first = node.submit(PROMPT, 200)
    late = node.submit(PROMPT, 5, traceparent=TRACEPARENT, timeout_s=0.0)
    node.run_until_answered(late)
    assert names(node) == ["queued"]
    assert the(node, "queued").error == node.answers[late].failure.message  # type: ignore[union-attr]
    node.run_until_answered(first)


def test_a_transfer_lost_before_token_1_ends_the_phases_of_both() -> None:
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        prefill, decode = (nodes.add(role, fabric.backend(), chunk=4, late=None) for role in ("prefill", "decode"))
        rid = nodes.submit(PROMPT, 5, traceparent=TRACEPARENT)
        fabric.fail_completions(1)
        nodes.run(lambda: bool(prefill.runner.extend_sizes))
        nodes.wait(lambda: prefill.endpoint.stats()["transfer_failed_total"] == 1)
        nodes.run_until_answered(rid)
        nodes.run_until_idle()
        assert {span.name: bool(span.error) for span in prefill.spans()} == {"queued": False, "prefill": True, "transfer": True}
        assert {span.name: bool(span.error) for span in decode.spans()} == {"queued": False, "waiting for KV": True}


def test_a_transfer_lost_after_token_1_shows_that_the_prompt_was_computed_again() -> None:
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        prefill, decode = (nodes.add(role, fabric.backend()) for role in ("prefill", "decode"))
        fabric.hold()
        rid = nodes.submit(PROMPT, 9, traceparent=TRACEPARENT)
        nodes.run(lambda: len(decode.answers[rid].token_ids) == 1)
        fabric.kill(prefill.endpoint._backend)
        nodes.prefills.remove(prefill)
        prefill.endpoint.close()
        fabric.resume()
        nodes.run_until_answered(rid)
        nodes.run_until_idle()
        assert names(decode) == ["queued", "waiting for KV", "recompute", "decode"]
        assert [bool(span.error) for span in decode.spans()] == [False, True, False, False]
        assert the(decode, "decode").attributes[OUTPUT_TOKENS] == 9


def test_a_stop_string_in_token_1_ends_the_wait_for_pages() -> None:
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        _, decode = (nodes.add(role, fabric.backend()) for role in ("prefill", "decode"))
        fabric.hold()
        rid = nodes.submit(PROMPT, 9, traceparent=TRACEPARENT)
        nodes.run(lambda: len(decode.answers[rid].token_ids) == 1)
        decode.abort(rid, "stop_string")
        nodes.run(lambda: len(decode.spans()) == 3)
        assert {span.name: span.error for span in decode.spans()} == {"queued": "", "waiting for KV": "", "decode": ""}
        fabric.resume()
        nodes.prefills[0].abort(rid)
        nodes.run_until_idle()
