"""A node by itself, from prompt to end: batching, chunking, caching, retraction, finishing, deadlines."""

import numpy as np
import pytest
from fake_runner import expected_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Node, random_prompt

from common.scheduling import pages as pages_module

ROLES = ("decode", "prefill")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 15, 16, 17, 40, 64])
@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_tokens_equal_the_oracle_around_page_and_chunk_borders(role: str, num_prompt: int, num_tokens: int) -> None:
    node = Node(role)
    prompt = random_prompt(np.random.default_rng(num_prompt), num_prompt)
    rid = node.submit(prompt, num_tokens)
    node.run_until_answered(rid)
    node.assert_right(rid, prompt, num_tokens)
    assert node.answers[rid].prefill_site == "local"
    node.assert_idle()


def test_second_turn_reuses_prompt_and_answer() -> None:
    node = Node()
    prompt = random_prompt(np.random.default_rng(0), 18)
    first = node.submit(prompt, 7)
    node.run_until_answered(first)
    follow_up = prompt + node.answers[first].token_ids + [11, 12, 13]
    second = node.submit(follow_up, 3)
    node.run_until_answered(second)
    node.assert_right(second, follow_up, 3)
    assert node.answers[second].num_cached_tokens == 24  # 18 + 7 tokens, the last one's KV is never written: 24 is 6 full pages
    node.assert_idle()


def test_same_prompt_again_computes_at_least_its_last_token() -> None:
    node = Node()
    prompt = random_prompt(np.random.default_rng(0), 16)
    for _ in range(2):
        rid = node.submit(prompt, 2)
        node.run_until_answered(rid)
        node.assert_right(rid, prompt, 2)
    assert node.answers[rid].num_cached_tokens == 12


def test_without_prefix_cache_nothing_stays() -> None:
    node = Node(prefix_cache=False)
    rid = node.submit(list(range(10, 40)), 4)
    node.run_until_answered(rid)
    assert node.cache.counts().cached == 0
    node.assert_idle()


def test_short_prompts_share_one_extend_batch() -> None:
    node = Node(chunk=32)
    prompts = [random_prompt(np.random.default_rng(seed), 6) for seed in range(5)]
    rids = [node.submit(prompt, 1) for prompt in prompts]
    node.run_until_answered(*rids)
    assert node.runner.extend_sizes == [30]


def test_long_prompt_is_chunked_to_the_budget() -> None:
    node = Node(chunk=16)
    rid = node.submit(random_prompt(np.random.default_rng(1), 50), 1)
    node.run_until_answered(rid)
    assert node.runner.extend_sizes == [16, 16, 16, 2]


def test_decode_is_delayed_by_a_bounded_number_of_chunks() -> None:
    node = Node(chunk=8, max_decode_delay_steps=2, num_pages=256)
    running = node.submit([20, 21], 60)
    node.scheduler.step()
    long = node.submit(random_prompt(np.random.default_rng(1), 120), 1)
    node.run_until_answered(running, long)
    kinds = "".join(kind[0] for kind in node.runner.kinds)
    assert "eee" not in kinds, kinds
    assert "eed" in kinds


def test_retraction_keeps_every_answer_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "GROWTH_HORIZON_TOKENS", 0)  # admit as if nobody grew
    node = Node(num_pages=17, page_size=4, max_running=8)  # 64 tokens for 4 requests of up to 38
    prompts = [random_prompt(np.random.default_rng(seed), 8) for seed in range(4)]
    rids = [node.submit(prompt, 30) for prompt in prompts]
    node.run_until_answered(*rids)
    for rid, prompt in zip(rids, prompts, strict=True):
        node.assert_right(rid, prompt, 30)
    assert node.num_retracted() > 0
    node.assert_idle()


def test_admission_leaves_running_requests_room_to_grow() -> None:
    node = Node(num_pages=17, page_size=4, max_running=8)
    rids = [node.submit(random_prompt(np.random.default_rng(seed), 8), 30) for seed in range(4)]
    node.run_until_answered(*rids)
    assert node.num_retracted() == 0


def test_request_that_never_fits_is_refused_at_once_and_others_go_on() -> None:
    node = Node(num_pages=9, page_size=4)
    good = node.submit([20, 21, 22], 4)
    bad = node.submit(list(range(30)), 10)
    node.run_until_answered(good, bad)
    failure = node.answers[bad].failure
    assert failure is not None
    assert failure.status == 400
    assert "--max-total-tokens" in failure.message
    node.assert_right(good, [20, 21, 22], 4)
    node.assert_idle()


def test_eos_as_first_token_ends_the_request() -> None:
    prompt = [50, 51, 52]
    (eos,) = expected_tokens(prompt, 1)
    node = Node(eos=(eos,))
    rid, ignoring = node.submit(prompt, 5), node.submit(prompt, 5, ignore_eos=True)
    node.run_until_answered(rid, ignoring)
    assert (node.answers[rid].token_ids, node.answers[rid].finish_reason, node.answers[rid].matched_stop) == ([eos], "stop", eos)
    node.assert_right(ignoring, prompt, 5)


def test_stop_token_ids_end_the_request_even_if_eos_is_ignored() -> None:
    prompt = [50, 51, 52]
    tokens = expected_tokens(prompt, 4)
    node = Node()
    rid = node.submit(prompt, 9, stop_token_ids=(tokens[3],), ignore_eos=True)
    node.run_until_answered(rid)
    assert node.answers[rid].token_ids == tokens
    assert node.answers[rid].matched_stop == tokens[3]


def test_context_length_ends_the_request() -> None:
    node = Node(context_length=20)
    rid = node.submit(list(range(10, 25)), 100)
    node.run_until_answered(rid)
    assert len(node.answers[rid].token_ids) == 5
    assert node.answers[rid].finish_reason == "length"


@pytest.mark.parametrize("steps_before", [0, 1, 2, 6])
def test_abort_in_every_phase_frees_pages_and_says_nothing_more(steps_before: int) -> None:
    node = Node(chunk=8)
    rid = node.submit(random_prompt(np.random.default_rng(3), 20), 50)
    other = node.submit([33, 34, 35], 12)
    for _ in range(steps_before):
        node.scheduler.step()
    node.abort(rid)
    num_tokens = len(node.answers[rid].token_ids)
    node.run_until_answered(other)
    assert not node.answers[rid].over
    assert len(node.answers[rid].token_ids) == num_tokens
    node.assert_right(other, [33, 34, 35], 12)
    node.assert_idle()


def test_deadline_ends_a_request_with_504_and_frees_it() -> None:
    node = Node()
    late = node.submit([20, 21, 22], 200, timeout_s=-1.0)
    fine = node.submit([20, 21, 22], 5)
    node.run_until_answered(late, fine)
    failure = node.answers[late].failure
    assert failure is not None
    assert (failure.status, failure.code) == (504, "deadline_exceeded")
    node.assert_right(fine, [20, 21, 22], 5)
    node.assert_idle()


def test_drain_finishes_what_it_can_and_fails_the_rest() -> None:
    node = Node()
    short = node.submit([20, 21], 3)
    node.drain(30.0)
    node.scheduler.run()
    node.assert_right(short, [20, 21], 3)
    node = Node()
    long = node.submit([20, 21], 200)
    node.scheduler.step()
    node.drain(-1.0)
    node.scheduler.run()
    failure = node.answers[long].failure
    assert failure is not None
    assert failure.status == 503
    node.assert_idle()


def test_heartbeat_carries_page_counts() -> None:
    node = Node(num_pages=10)
    node.scheduler.step()
    stats = node.statuses[0].stats
    assert stats["pages_free"] == stats["pages"] == 9


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_pages=st.integers(20, 60),
    chunk=st.sampled_from([4, 7, 16, 64]),
    page_size=st.sampled_from([1, 4, 8]),
    role=st.sampled_from(ROLES),
)
def test_random_load_is_answered_right_with_pages_conserved(seed: int, num_pages: int, chunk: int, page_size: int, role: str) -> None:
    """Shared prefixes, tight pool, aborts and arrivals in between: answers equal the oracle, pages add up after every step."""
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages_module, "GROWTH_HORIZON_TOKENS", int(rng.choice([0, 128])))
        check_random_load(rng, num_pages, chunk, page_size, role)


def check_random_load(rng: np.random.Generator, num_pages: int, chunk: int, page_size: int, role: str) -> None:
    preemption = ("auto", "recompute", "swap")[int(rng.integers(3))]
    max_running, num_swap_slots = int(rng.integers(1, 7)), int(rng.integers(1, 60))
    node = Node(
        role, num_pages=num_pages, page_size=page_size, chunk=chunk, max_running=max_running, preemption=preemption, num_swap_slots=num_swap_slots,
    )  # type: ignore[arg-type]  # fmt: skip
    stems = [random_prompt(rng, 12) for _ in range(2)]
    expected: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    room = min(60, (num_pages - 1) * page_size)
    for _ in range(60):
        if rng.random() < 0.35:
            num_tokens = int(rng.integers(1, 8))
            stem = stems[int(rng.integers(2))][: int(rng.integers(0, 13))]
            prompt = (stem + random_prompt(rng, int(rng.integers(1, 20))))[: max(1, room - num_tokens)]
            expected[node.submit(prompt, num_tokens)] = (prompt, num_tokens)
        if expected and rng.random() < 0.1:
            rid = list(expected)[int(rng.integers(len(expected)))]
            if not node.answers[rid].over:
                node.abort(rid)
                aborted.add(rid)
        node.scheduler.step()
        counts = node.cache.counts()
        assert counts.free + counts.cached + counts.held + counts.quarantined == counts.total
    waited_for = [rid for rid in expected if rid not in aborted]
    node.run_until_answered(*waited_for)
    for rid in waited_for:
        node.assert_right(rid, *expected[rid])
    node.scheduler.step()
    node.assert_idle()
