"""One request through real processes, and the spans that a collector gets of it."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster import Cluster, running_cluster
from otlp_collector import CLIENT, INTERNAL, SERVER, Collector, Got, collecting

from common.tracing import (
    CACHED_TOKENS,
    FINISH_REASONS,
    INPUT_TOKENS,
    MODEL,
    NODE_URL,
    OPERATION,
    OUTPUT_TOKENS,
    REQUEST_ID,
    STATUS,
    TRANSFER_PAGES,
)

pytestmark = pytest.mark.system

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NAME = "POST /v1/completions"
NUM_PHASES = {"pdserve-prefill": 3, "pdserve-decode": 3}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        with running_cluster(tiny_model, tmp_path_factory.mktemp("traces"), "--otlp-traces-endpoint", collector.url) as made:
            yield made


def ask(url: str, request_id: str, **headers: str) -> None:
    body = {"model": "tiny", "prompt": [5] * 40, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    headers = {"x-request-id": request_id, **headers}
    assert httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30).status_code == 200


def served(cluster: Cluster, collector: Collector, service: str, parent: str) -> Got:
    """The node's span of the request, once all that belongs below it is there."""

    def found() -> list[Got]:
        return [span for span in collector.named(NAME, service) if span.parent == parent]

    cluster.wait_until(lambda: len(found()) == 1, f"a request span of {service}")
    (request,) = found()
    cluster.wait_until(lambda: len(collector.children(request)) == NUM_PHASES[service], f"the phases of {service}")
    return request


def check_nodes(collector: Collector, prefill: Got, decode: Got, request_id: str, num_cached_tokens: int) -> None:
    for request in (prefill, decode):
        assert (request.kind, request.error) == (SERVER, None)
        assert request.attributes == {STATUS: 200, MODEL: "tiny", OPERATION: "text_completion", REQUEST_ID: request_id}
    on_prefill = {span.name: span for span in collector.children(prefill)}
    on_decode = {span.name: span for span in collector.children(decode)}
    assert set(on_prefill) == {"queued", "prefill", "transfer"}
    assert set(on_decode) == {"queued", "waiting for KV", "decode"}
    assert on_prefill["prefill"].attributes == {INPUT_TOKENS: 40, CACHED_TOKENS: num_cached_tokens}
    assert on_prefill["transfer"].attributes[TRANSFER_PAGES] == 3 - num_cached_tokens // 16
    assert on_decode["decode"].attributes == {OUTPUT_TOKENS: 6, FINISH_REASONS: ["length"]}
    for request, phases in ((prefill, on_prefill), (decode, on_decode)):
        for phase in phases.values():
            assert (phase.kind, phase.error) == (INTERNAL, None)
            assert request.start_s <= phase.start_s <= phase.end_s <= time.time()
    # one host's clock
    assert on_decode["waiting for KV"].start_s <= on_prefill["prefill"].end_s <= on_decode["decode"].start_s
    assert on_decode["decode"].start_s < on_decode["decode"].end_s


def test_nodes_continue_the_clients_trace(cluster: Cluster, collector: Collector) -> None:
    """The router has no flag: what the client sent goes to both nodes."""
    ask(cluster.router.url, "plain", traceparent=f"00-{TRACE}-{PARENT}-01")
    prefill, decode = (served(cluster, collector, service, PARENT) for service in NUM_PHASES)
    assert prefill.trace == decode.trace == TRACE
    check_nodes(collector, prefill, decode, "plain", 0)


def test_one_tree_from_the_client_through_the_router_to_both_nodes(cluster: Cluster, collector: Collector) -> None:
    router = cluster.launch_router("--otlp-traces-endpoint", collector.url)
    cluster.wait_until(lambda: httpx.get(f"{router.url}/ready").status_code == 200, "router ready")
    trace, parent = TRACE[::-1], PARENT[::-1]
    ask(router.url, "routed", traceparent=f"00-{trace}-{parent}-01")
    cluster.wait_until(lambda: len(collector.named(NAME, "pdserve-router")) == 1, "the router's span")
    (request,) = collector.named(NAME, "pdserve-router")
    assert (request.trace, request.parent, request.kind, request.error) == (trace, parent, SERVER, None)
    assert request.attributes[STATUS] == 200
    assert request.attributes[REQUEST_ID] == "routed"
    cluster.wait_until(lambda: len(collector.children(request)) == 2, "both legs")
    legs = {span.name: span for span in collector.children(request)}
    prefill_leg, decode_leg = legs["prefill leg"], legs["decode leg"]
    for leg, node in ((prefill_leg, cluster.prefills[0]), (decode_leg, cluster.decodes[0])):
        assert (leg.kind, leg.error, leg.attributes[NODE_URL], leg.attributes[STATUS]) == (CLIENT, None, node.url, 200)
        assert request.start_s <= leg.start_s <= leg.end_s <= time.time()
    prefill = served(cluster, collector, "pdserve-prefill", prefill_leg.id)
    decode = served(cluster, collector, "pdserve-decode", decode_leg.id)
    assert {span.trace for span in collector.spans if span.start_s >= request.start_s} == {trace}
    assert prefill_leg.start_s <= prefill.start_s
    assert decode_leg.start_s <= decode.start_s
    check_nodes(collector, prefill, decode, "routed", 32)
    assert router.stop() == 0
