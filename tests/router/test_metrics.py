"""What the router's methods of counting become in the text of /metrics."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from mock_node import WHOLE, Received
from prometheus_client import CollectorRegistry
from router_harness import CHAT, rig, until

from common.config import RouterConfig
from router.kv_events import Counts
from router.load import PrefillLoad
from router.metrics import RouterMetrics
from router.node import Node
from router.nodes import NodeTable

P, D = "http://p:1", "http://d:1"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> RouterMetrics:
    config = RouterConfig(prefill=(P,), decode=(D,), policy="least_load", decode_policy="round_robin")
    return RouterMetrics(registry, config, NodeTable.of(config), lambda: 3)


def placed(prefill: Any, **figures: Any) -> Any:
    return SimpleNamespace(prefill=prefill, **{"prefill_score": 0.0, "local_reason": None, **figures})


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_a_retry_is_counted_by_the_leg_that_failed(metrics: RouterMetrics, registry: CollectorRegistry) -> None:
    metrics.retried("decode")
    assert value(registry, "pdserve_router_retries_total", leg="decode") == 1
    assert value(registry, "pdserve_router_retries_total", leg="prefill") == 0


def test_legs_by_status_and_their_failures(metrics: RouterMetrics, registry: CollectorRegistry) -> None:
    for status in (200, 200, 503, 499):
        metrics.leg_ended("decode", D, status)
    for status, times in (("200", 2), ("503", 1), ("499", 1)):
        assert value(registry, "pdserve_router_legs_total", leg="decode", node=D, status=status) == times
    assert value(registry, "pdserve_router_leg_failures_total", leg="decode", node=D, status="503") == 1
    assert value(registry, "pdserve_router_leg_failures_total", leg="decode", node=D, status="499") is None
    assert value(registry, "pdserve_router_leg_failures_total", leg="decode", node=D, status="200") is None


def test_series_of_a_removed_node_end(registry: CollectorRegistry) -> None:
    table = NodeTable.of(RouterConfig(prefill=(P,), decode=(D,)))
    metrics = RouterMetrics(registry, RouterConfig(), table, lambda: 0)
    metrics.leg_ended("prefill", P, 503)
    metrics.leg_ended("decode", D, 503)
    table.remove(table.prefill[0])
    assert value(registry, "pdserve_router_node_up", leg="prefill", node=P) is None
    for name in ("pdserve_router_legs_total", "pdserve_router_leg_failures_total"):
        assert value(registry, name, leg="prefill", node=P, status="503") is None
        assert value(registry, name, leg="decode", node=D, status="503") == 1


def test_nodes(registry: CollectorRegistry) -> None:
    table = NodeTable.of(RouterConfig(prefill=(P,), decode=(D,), cb_failure_threshold=1))
    RouterMetrics(registry, RouterConfig(), table, lambda: 0)
    prefill, decode = table.all
    prefill.prefill_load.begin(700, 0.0)
    decode.blame("failed", answered=True)
    of_p, of_d = {"leg": "prefill", "node": P}, {"leg": "decode", "node": D}
    assert value(registry, "pdserve_router_node_queued_tokens", **of_p) == 700
    assert value(registry, "pdserve_router_node_queued_tokens", **of_d) is None
    assert value(registry, "pdserve_router_node_prefill_tokens_per_second", **of_p) is None
    prefill.prefill_load.end(700, 0.5, computed=True)
    PrefillLoad.fleet([prefill.prefill_load], 0.5)
    assert value(registry, "pdserve_router_node_prefill_tokens_per_second", **of_p) == pytest.approx(1400)
    assert value(registry, "pdserve_router_node_fullness", **of_d) == 0
    states = {state: value(registry, "pdserve_router_node_breaker", **of_d, state=state) for state in ("closed", "open", "half_open")}
    assert states == {"closed": 0, "open": 1, "half_open": 0}


def test_placements(metrics: RouterMetrics, registry: CollectorRegistry) -> None:
    metrics.placed(placed(object(), num_tokens=100, num_hit_tokens=60, prefill_score=0.5, decode_score=2))
    metrics.placed(placed(None, num_tokens=10, num_hit_tokens=8, decode_score=3, local_reason="short"))
    assert value(registry, "pdserve_router_policy_score_sum", policy="least_load", leg="prefill") == 0.5
    assert value(registry, "pdserve_router_policy_score_count", policy="least_load", leg="prefill") == 1
    assert value(registry, "pdserve_router_policy_score_sum", policy="round_robin", leg="decode") == 5
    assert value(registry, "pdserve_router_policy_score_count", policy="round_robin", leg="decode") == 2
    assert value(registry, "pdserve_router_prompt_tokens_total", leg="prefill") == 100
    assert value(registry, "pdserve_router_prefix_hit_tokens_total", leg="prefill") == 60
    assert value(registry, "pdserve_router_prompt_tokens_total", leg="decode") == 10
    assert value(registry, "pdserve_router_prefix_hit_tokens_total", leg="decode") == 8
    assert value(registry, "pdserve_router_local_prefills_total", reason="short") == 1


def test_times(metrics: RouterMetrics, registry: CollectorRegistry) -> None:
    metrics.first_byte(0.3, streamed=True)
    metrics.first_byte(5.0, streamed=False)
    metrics.gap(0.02)
    metrics.ended(7.0)
    metrics.queued(0.0)
    assert value(registry, "pdserve_time_to_first_byte_seconds_count") == 2
    assert value(registry, "pdserve_router_time_to_first_token_seconds_sum") == 0.3
    assert value(registry, "pdserve_router_inter_token_latency_seconds_bucket", le="0.02") == 1
    assert value(registry, "pdserve_router_e2e_request_latency_seconds_sum") == 7
    assert value(registry, "pdserve_router_queue_wait_seconds_bucket", le="0.001") == 1


def test_refusals_and_keys(metrics: RouterMetrics, registry: CollectorRegistry) -> None:
    metrics.refused("queue_full", "team-a")
    metrics.refused("unauthorized")
    metrics.requested("team-a")
    assert value(registry, "pdserve_router_refusals_total", reason="queue_full", key="team-a") == 1
    assert value(registry, "pdserve_router_refusals_total", reason="unauthorized", key="") == 1
    assert value(registry, "pdserve_router_key_requests_total", key="team-a") == 1


def test_what_is_known_from_kv_events(metrics: RouterMetrics, registry: CollectorRegistry) -> None:
    known: Any = SimpleNamespace(num_blocks={Node("prefill", P): 70}, counts=Counts(events=9, gaps=1, not_events=2))
    metrics.watch_kv_events(known)
    assert value(registry, "pdserve_router_kv_event_blocks", node=P) == 70
    assert value(registry, "pdserve_router_kv_events_total") == 9
    assert value(registry, "pdserve_router_kv_event_gaps_total") == 1
    assert value(registry, "pdserve_router_kv_event_errors_total") == 2


def test_gauges_are_read_when_they_are_asked_for(metrics: RouterMetrics, registry: CollectorRegistry) -> None:
    length = 4
    metrics.watch("pdserve_router_queued_requests", lambda: length)
    length = 5
    assert value(registry, "pdserve_router_queued_requests") == 5
    assert value(registry, "pdserve_router_in_flight") == 3


async def test_a_wait_in_vain_is_a_refusal() -> None:
    async with rig(max_concurrent_requests=1, queue_timeout_s=0.05) as made:
        served = asyncio.Event()

        async def later(received: Received) -> None:
            await served.wait()
            await received.reply(200, WHOLE)

        made.decodes[0].behave = later
        first = asyncio.create_task(made.client.post(CHAT, json={}))
        await until(lambda: len(made.decodes[0].posts) == 1, "the first is under way")
        assert (await made.client.post(CHAT, json={})).status_code == 503
        served.set()
        assert (await first).status_code == 200
        assert await made.metric("pdserve_router_refusals_total") == {'{key="",reason="queue_timeout"}': 1}
