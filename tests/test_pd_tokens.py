"""The answer through a prefill and a decode node is transformers' answer, token for token (R11)."""

import numpy as np
import pytest
from pd_nodes import PdNodes, model_nodes
from tiny_models import CHECKPOINTS, cached_checkpoint, greedy_oracle

from kvtransfer.memory import MemoryFabric
from kvtransfer.tcp import TcpBackend

PAGE, CHUNK = 8, 24
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(3, 250, length).tolist()


def check(nodes: PdNodes, name: str, requests: list[tuple[list[int], int]], **where: int) -> list[str]:
    rids = [nodes.submit(prompt, num_tokens, ignore_eos=True, **where) for prompt, num_tokens in requests]
    nodes.run_until_answered(*rids)
    for rid, (prompt, num_tokens) in zip(rids, requests, strict=True):
        answers = [node.answers[rid] for node in nodes.decodes if rid in node.answers]
        assert [(answer.token_ids, answer.failure) for answer in answers] == [(greedy_oracle(cached_checkpoint(name), prompt, num_tokens), None)]
        assert answers[0].prefill_site == "remote"
    nodes.run_until_idle()
    return rids


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_architecture_at_every_border(name: str) -> None:
    fabric = MemoryFabric()
    with model_nodes(cached_checkpoint(name), (fabric.backend(), fabric.backend()), page_size=PAGE, chunk=CHUNK) as nodes:
        check(nodes, name, [(prompt_of(length), num_tokens) for length, num_tokens in zip(LENGTHS, (1, 2, 20, 3, 1, 2, 9, 12), strict=True)])


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_warm_caches(num_tokens: int) -> None:
    """P warm, D warm, both: the same prompt and its continuations again, with what each side has cached."""
    with model_nodes(cached_checkpoint("llama"), (TcpBackend(), TcpBackend()), page_size=PAGE, chunk=CHUNK) as nodes:
        prompt = prompt_of(40)
        cold = check(nodes, "llama", [(prompt, num_tokens)])
        assert nodes.decodes[0].answers[cold[0]].num_cached_tokens == 0
        both = check(nodes, "llama", [(prompt, num_tokens)])
        assert nodes.decodes[0].answers[both[0]].num_cached_tokens == 32  # P computes the page of the last token again
        follow_up = prompt + nodes.decodes[0].answers[cold[0]].token_ids + [5, 6, 7]
        check(nodes, "llama", [(follow_up, num_tokens)])
        forget(nodes.decodes[0])
        check(nodes, "llama", [(prompt, num_tokens)])  # P alone is warm
        forget(nodes.prefills[0])
        check(nodes, "llama", [(prompt, num_tokens)])  # D alone is warm
        sent_before = nodes.prefills[0].endpoint.stats()["transfer_bytes_written_total"]
        check(nodes, "llama", [(prompt, num_tokens)])
        sent = nodes.prefills[0].endpoint.stats()["transfer_bytes_written_total"] - sent_before
        assert sent == 0  # D had all five pages of the prompt


def test_penalties_see_prompt_and_output_on_both_nodes() -> None:
    """Token 1 is drawn by P, the others by D; a neighbour without penalties is as it would be alone."""
    fabric = MemoryFabric()
    with model_nodes(cached_checkpoint("llama"), (fabric.backend(), fabric.backend()), page_size=PAGE, chunk=CHUNK) as nodes:
        prompts = [prompt_of(length, seed=6) for length in (30, 7, 45)]
        penalties = [1.3, None, 1.8]
        options = [{} if penalty is None else {"repetition_penalty": penalty} for penalty in penalties]
        rids = [nodes.submit(prompt, 25, ignore_eos=True, **option) for prompt, option in zip(prompts, options, strict=True)]
        nodes.run_until_answered(*rids)
        for rid, prompt, penalty in zip(rids, prompts, penalties, strict=True):
            expected = greedy_oracle(cached_checkpoint("llama"), prompt, 25, repetition_penalty=penalty)
            assert nodes.decodes[0].answers[rid].token_ids == expected
            assert (expected == greedy_oracle(cached_checkpoint("llama"), prompt, 25)) == (penalty is None)
        nodes.run_until_idle()


def test_a_biased_token_is_drawn_or_never() -> None:
    with model_nodes(cached_checkpoint("llama"), (TcpBackend(), TcpBackend()), page_size=PAGE, chunk=CHUNK) as nodes:
        prompt = prompt_of(20, seed=7)
        plain = greedy_oracle(cached_checkpoint("llama"), prompt, 6)
        wanted = nodes.submit(prompt, 6, ignore_eos=True, logit_bias=((77, 100.0),))
        unwanted = nodes.submit(prompt, 6, ignore_eos=True, logit_bias=tuple((token, -100.0) for token in plain))
        nodes.run_until_answered(wanted, unwanted)
        assert nodes.decodes[0].answers[wanted].token_ids == [77] * 6
        assert not set(nodes.decodes[0].answers[unwanted].token_ids) & set(plain)
        nodes.run_until_idle()


def forget(node: object) -> None:
    """Empty a node's radix tree by taking every page once."""
    cache = node.cache  # type: ignore[attr-defined]
    cache.release(cache.alloc(cache.available()))


def test_eos_as_first_token() -> None:
    prompt = prompt_of(21)
    (eos,) = greedy_oracle(cached_checkpoint("llama"), prompt, 1)
    with model_nodes(cached_checkpoint("llama"), (TcpBackend(), TcpBackend()), page_size=PAGE, chunk=CHUNK, eos=(eos,)) as nodes:
        rid = nodes.submit(prompt, 9)
        nodes.run_until_answered(rid)
        answer = nodes.decodes[0].answers[rid]
        assert (answer.token_ids, answer.finish_reason, answer.matched_stop) == ([eos], "stop", eos)
        nodes.run_until_idle()


def test_mixed_batches_across_two_by_two_nodes() -> None:
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        for _ in range(2):
            pair = model_nodes(cached_checkpoint("qwen3"), (fabric.backend(), fabric.backend()), page_size=PAGE, chunk=CHUNK)
            nodes._open.enter_context(pair)
            nodes.prefills += pair.prefills
            nodes.decodes += pair.decodes
        rng = np.random.default_rng(5)
        requests = [(prompt_of(int(rng.integers(1, 60)), seed), int(rng.integers(1, 14))) for seed in range(16)]
        rids = [nodes.submit(*request, prefill=i % 2, decode=i // 2 % 2, ignore_eos=True) for i, request in enumerate(requests)]
        nodes.run_until_answered(*rids)
        for i, (rid, request) in enumerate(zip(rids, requests, strict=True)):
            assert nodes.decodes[i // 2 % 2].answers[rid].token_ids == greedy_oracle(cached_checkpoint("qwen3"), *request)
        nodes.run_until_idle()
        assert len(nodes.prefills[0].endpoint.peers()) == 2


def test_right_after_retraction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.scheduling.pages.GROWTH_HORIZON_TOKENS", 0)
    fabric = MemoryFabric()
    with model_nodes(cached_checkpoint("llama"), (fabric.backend(), fabric.backend()), page_size=PAGE, chunk=CHUNK, num_pages=14) as nodes:
        requests = [(prompt_of(20, seed), 40) for seed in range(5)]
        rids = [nodes.submit(*request, ignore_eos=True) for request in requests]
        nodes.run_until_answered(*rids)
        for rid, request in zip(rids, requests, strict=True):
            assert nodes.decodes[0].answers[rid].token_ids == greedy_oracle(cached_checkpoint("llama"), *request)
        assert nodes.decodes[0].num_retracted() > 0
        nodes.run_until_idle()


def test_near_the_context_limit() -> None:
    fabric = MemoryFabric()
    with model_nodes(cached_checkpoint("llama"), (fabric.backend(), fabric.backend()), page_size=PAGE, chunk=128) as nodes:
        limit = nodes.decodes[0].work._limits.context_length
        prompt = prompt_of(limit - 3)
        rid = nodes.submit(prompt, 3, ignore_eos=True)
        nodes.run_until_answered(rid)
        assert nodes.decodes[0].answers[rid].token_ids == greedy_oracle(cached_checkpoint("llama"), prompt, 3)
