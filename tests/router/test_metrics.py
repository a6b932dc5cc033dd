"""What the router's methods of counting become in the text of /metrics."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from common.config import RouterConfig
from router.metrics import RouterMetrics
from router.nodes import Node, NodeTable

P, D = "http://p:1", "http://d:1"


@dataclass
class Placed:
    prefill: Any = None
    num_tokens: int = 0
    num_hit_tokens: int = 0
    prefill_score: float = 0.0
    decode_score: float = 0.0
    local_reason: str | None = None


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> RouterMetrics:
    config = RouterConfig(prefill=(P,), decode=(D,), policy="least_load", decode_policy="round_robin")
    return RouterMetrics(registry, config, NodeTable.of(config), lambda: 3)


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
    table = SimpleNamespace(all=(Node("prefill", P), Node("decode", D)))
    metrics = RouterMetrics(registry, RouterConfig(), table, lambda: 0)  # type: ignore[arg-type]
    metrics.leg_ended("prefill", P, 503)
    metrics.leg_ended("decode", D, 503)
    table.all = table.all[1:]
    assert value(registry, "pdserve_router_node_up", leg="prefill", node=P) is None
    for name in ("pdserve_router_legs_total", "pdserve_router_leg_failures_total"):
        assert value(registry, name, leg="prefill", node=P, status="503") is None
        assert value(registry, name, leg="decode", node=D, status="503") == 1


def test_placements(metrics: RouterMetrics, registry: CollectorRegistry) -> None:
    metrics.placed(Placed(object(), num_tokens=100, num_hit_tokens=60, prefill_score=0.5, decode_score=2))
    metrics.placed(Placed(None, num_tokens=10, num_hit_tokens=8, decode_score=3, local_reason="short"))
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


def test_gauges_are_read_when_they_are_asked_for(metrics: RouterMetrics, registry: CollectorRegistry) -> None:
    length = 4
    metrics.watch("pdserve_router_queued_requests", "help", lambda: length)
    length = 5
    assert value(registry, "pdserve_router_queued_requests") == 5
    assert value(registry, "pdserve_router_in_flight") == 3
