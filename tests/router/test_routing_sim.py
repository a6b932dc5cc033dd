"""What each policy must achieve, with simulated nodes (bench/routing_sim.py): skewed lengths, unequal nodes, hot prefixes, conversations."""

import random
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

import pytest
from routing_sim import BLOCK_TOKENS, Answered, Cluster, DecodeSpec, Job, PrefillSpec, job

from common.config import PolicyName, RouterConfig

FAST = PrefillSpec(tokens_per_s=10_000.0, prompt_s=0.01, cache_tokens=200_000)
SLOW = PrefillSpec(tokens_per_s=2_500.0, prompt_s=0.04, cache_tokens=200_000)
DECODE = DecodeSpec(rows=64, pool_tokens=400_000)


def arrivals(rng: random.Random, number: int, per_s: float) -> list[float]:
    now_s, times = 0.0, []
    for _ in range(number):
        now_s += rng.expovariate(per_s)
        times.append(now_s)
    return times


def skewed(number: int, per_s: float) -> list[Job]:
    """Nine prompts of ten short, the tenth long: 1.3k tokens on average, nothing shared."""
    rng = random.Random(1)
    return [job(at, 10_000 if rng.random() < 0.1 else rng.randint(50, 650), 20) for at in arrivals(rng, number, per_s)]


def conversations(number: int, num_turns: int, per_s: float) -> list[Job]:
    """Each turn repeats all before it and adds 512 tokens; a shared system prompt of 512; turns about 10 s apart."""
    rng, made = random.Random(2), []
    for which, begins_s in enumerate(arrivals(rng, number, per_s / num_turns)):
        at_s, blocks = begins_s, [0, *(1000 * (which + 1) + n for n in range(4))]
        for turn in range(num_turns):
            blocks = [*blocks, 1000 * (which + 1) + 4 + turn]
            made.append(job(at_s, len(blocks) * BLOCK_TOKENS + 30, 20, blocks))
            at_s += rng.uniform(5.0, 15.0)
    return sorted(made, key=lambda each: each.arrives_s)


def hot(number: int, per_s: float) -> list[Job]:
    """All begin with the same 8192 tokens, and go on with 400 of their own; the first comes alone."""
    return [job(0.0, 8192 + 400, 10, range(16)), *(job(2.0 + at, 8192 + 400, 10, range(16)) for at in arrivals(random.Random(3), number, per_s))]


def run(policy: PolicyName, jobs: Sequence[Job], prefills: Sequence[PrefillSpec], decodes: Sequence[DecodeSpec] = (DECODE, DECODE),
        num_routers: int = 1, **config: object) -> list[Answered]:
    random.seed(4)
    cluster = Cluster(prefills, decodes, RouterConfig(policy=policy, **config), num_routers)  # type: ignore[arg-type]
    answered = cluster.run(jobs)
    assert len(answered) == len(jobs)
    for router in cluster.routers:
        for node in router.nodes.all:
            assert (node.num_in_flight, node.prefill_load.queued_tokens, node.decode_load.num_requests) == (0, 0, 0)
    return answered


def ttft_s(answered: Sequence[Answered]) -> float:
    return fmean(each.ttft_s for each in answered)


def hit_rate(answered: Sequence[Answered]) -> float:
    return sum(each.num_cached_tokens for each in answered) / sum(each.job.num_tokens for each in answered)


def tokens_by_prefill(answered: Sequence[Answered]) -> dict[str, float]:
    tokens: Counter[str] = Counter()
    for each in answered:
        assert each.prefill is not None
        tokens[each.prefill] += each.job.num_tokens - each.num_cached_tokens
    return {url: number / sum(tokens.values()) for url, number in tokens.items()}


def test_lengths_that_differ_are_spread_by_work_not_by_number() -> None:
    jobs = skewed(1200, per_s=20.0)  # 65 % of what four nodes can do
    mean_s = {policy: ttft_s(run(policy, jobs, [FAST] * 4)) for policy in ("cost", "least_load", "power_of_two", "round_robin", "random")}
    assert mean_s["cost"] < 0.7 * mean_s["round_robin"]
    assert mean_s["least_load"] < 0.7 * mean_s["round_robin"]
    assert mean_s["power_of_two"] < 0.85 * mean_s["random"]


def test_slow_node_gets_its_share() -> None:
    """Of one at 2500 tokens/s beside two at 10000, 1/9; more would make it the bottleneck."""
    jobs = skewed(1200, per_s=12.0)  # 70 % of what the three can do together
    answered = {policy: run(policy, jobs, [SLOW, FAST, FAST]) for policy in ("cost", "least_load", "round_robin")}
    share = tokens_by_prefill(answered["cost"])["http://p0:1"]
    assert 0.02 < share < 0.16
    assert ttft_s(answered["cost"]) < 0.9 * ttft_s(answered["least_load"])
    assert ttft_s(answered["cost"]) < 0.2 * ttft_s(answered["round_robin"])


def test_equal_nodes_get_equal_shares_under_every_policy() -> None:
    jobs = skewed(1200, per_s=15.0)
    for policy in ("cost", "cache_aware", "least_load", "power_of_two", "round_robin", "random"):
        shares = tokens_by_prefill(run(policy, jobs, [FAST] * 3)).values()  # type: ignore[arg-type]
        assert max(shares) < 0.43


def test_conversations_return_to_the_node_that_holds_them() -> None:
    jobs = conversations(120, 6, per_s=4.0)
    answered = {policy: run(policy, jobs, [FAST] * 4) for policy in ("cost", "cache_aware", "round_robin")}
    for policy in ("cost", "cache_aware"):
        assert hit_rate(answered[policy]) > 0.6
        assert ttft_s(answered[policy]) < 0.7 * ttft_s(answered["round_robin"])
    assert hit_rate(answered["round_robin"]) < 0.5
    predicted = sum(each.num_predicted_tokens for each in answered["cost"])
    assert predicted == pytest.approx(sum(each.num_cached_tokens for each in answered["cost"]), rel=0.1)


def test_predicted_hits_happen_also_when_caches_overflow() -> None:
    small = PrefillSpec(10_000.0, 0.01, cache_tokens=30_000)
    answered = run("cost", conversations(120, 6, per_s=4.0), [small] * 4)
    happened, predicted = (sum(getattr(each, name) for each in answered) for name in ("num_cached_tokens", "num_predicted_tokens"))
    assert 0.05 < hit_rate(answered) < 0.5
    assert 0.7 * happened < predicted < 1.3 * happened


@pytest.mark.parametrize("policy", ["cost", "cache_aware"])
def test_hot_prefix_stays_where_it_is_until_that_node_has_too_much(policy: PolicyName) -> None:
    calm = run(policy, hot(60, per_s=2.0), [FAST] * 3)
    assert len(Counter(each.prefill for each in calm)) == 1
    assert hit_rate(calm) > 0.9
    crowded = run(policy, hot(1500, per_s=45.0), [FAST] * 3)  # 50 ms each where it is cached: more than two nodes' worth
    counts = Counter(each.prefill for each in crowded)
    assert len(counts) == 3
    assert max(counts.values()) < 0.6 * len(crowded)
    assert hit_rate(crowded) > 0.9
    assert ttft_s(crowded) < 1.5


def test_requests_go_where_pages_are() -> None:
    """One decode node has a tenth of the others' pages: nobody waits there while there is room elsewhere."""
    tiny = DecodeSpec(rows=64, pool_tokens=12_000)
    jobs = [job(at, 2000, 200) for at in arrivals(random.Random(5), 400, 4.0)]
    fast = PrefillSpec(200_000.0, 0.001)  # here decode nodes are scarce
    answered = {policy: run(policy, jobs, [fast], [tiny, DECODE, DECODE]) for policy in ("cost", "least_load", "round_robin")}
    assert max(each.ttft_s for each in answered["cost"]) < 0.2
    assert Counter(each.decode for each in answered["cost"])["http://d0:1"] > 0
    assert max(each.ttft_s for each in answered["round_robin"]) > 1.0


def test_slow_decode_node_gets_fewer_requests() -> None:
    slow = DecodeSpec(step_s=0.08)
    answered = run("cost", [job(at, 100, 100) for at in arrivals(random.Random(6), 600, 10.0)], [FAST] * 2, [slow, DECODE])
    counts = Counter(each.decode for each in answered)
    assert 0.1 < counts["http://d0:1"] / counts["http://d1:1"] < 0.5


def test_routers_that_share_nodes_do_nearly_as_well_as_one() -> None:
    jobs = skewed(1200, per_s=20.0)
    alone, several, blind = run("cost", jobs, [FAST] * 4), run("cost", jobs, [FAST] * 4, num_routers=3), run("random", jobs, [FAST] * 4)
    assert ttft_s(alone) < ttft_s(several) < 0.9 * ttft_s(blind)


def test_prefer_computes_little_on_the_decode_node_and_much_elsewhere() -> None:
    jobs = conversations(60, 6, per_s=2.0)
    answered = run("cost", jobs, [FAST] * 2, disaggregation="prefer", min_uncached_tokens=1024)
    local = [each for each in answered if each.prefill is None]
    assert 0.2 < len(local) / len(answered) < 0.9
    assert fmean(each.job.num_tokens - each.num_cached_tokens for each in local) < 1024
    assert all(each.prefill is None for each in run("cost", jobs, [FAST] * 2, disaggregation="never"))
