"""One request through real processes, and the spans that a collector gets of it."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster import Cluster, running_cluster
from otlp_collector import INTERNAL, SERVER, Collector, Got, collecting

from common.tracing import CACHED_TOKENS, FINISH_REASONS, INPUT_TOKENS, MODEL, OPERATION, OUTPUT_TOKENS, REQUEST_ID, STATUS, TRANSFER_PAGES

pytestmark = pytest.mark.system

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
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


def ask(cluster: Cluster, **headers: str) -> None:
    body = {"model": "tiny", "prompt": [5] * 40, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    headers = {"x-request-id": "traced", **headers}
    assert httpx.post(f"{cluster.router.url}/v1/completions", json=body, headers=headers, timeout=30).status_code == 200


def wait_for(cluster: Cluster, collector: Collector, service: str) -> Got:
    """The node's span of the request, once all that belongs below it is there."""
    cluster.wait_until(lambda: bool(collector.named("POST /v1/completions", service)), f"a request span of {service}")
    (request,) = collector.named("POST /v1/completions", service)
    cluster.wait_until(lambda: len(collector.children(request)) == NUM_PHASES[service], f"the phases of {service}")
    return request


def test_nodes_continue_the_clients_trace(cluster: Cluster, collector: Collector) -> None:
    """The router has no flag: what the client sent goes to both nodes."""
    began_s = time.time()
    ask(cluster, traceparent=f"00-{TRACE}-{PARENT}-01")
    prefill, decode = (wait_for(cluster, collector, service) for service in NUM_PHASES)
    assert {span.trace for span in collector.spans} == {TRACE}
    for request in (prefill, decode):
        assert (request.parent, request.kind, request.error) == (PARENT, SERVER, None)
        assert request.attributes == {STATUS: 200, MODEL: "tiny", OPERATION: "text_completion", REQUEST_ID: "traced"}
    on_prefill = {span.name: span for span in collector.children(prefill)}
    on_decode = {span.name: span for span in collector.children(decode)}
    assert set(on_prefill) == {"queued", "prefill", "transfer"}
    assert set(on_decode) == {"queued", "waiting for KV", "decode"}
    assert on_prefill["prefill"].attributes == {INPUT_TOKENS: 40, CACHED_TOKENS: 0}
    assert on_prefill["transfer"].attributes[TRANSFER_PAGES] == 3
    assert on_decode["decode"].attributes == {OUTPUT_TOKENS: 6, FINISH_REASONS: ["length"]}
    for request, phases in ((prefill, on_prefill), (decode, on_decode)):
        for phase in phases.values():
            assert (phase.kind, phase.error) == (INTERNAL, None)
            assert began_s <= request.start_s <= phase.start_s <= phase.end_s <= time.time()
    # the clock is one host's
    assert on_decode["waiting for KV"].start_s <= on_prefill["prefill"].end_s <= on_decode["decode"].start_s
    assert on_prefill["transfer"].start_s <= on_prefill["transfer"].end_s
    assert on_decode["decode"].end_s - on_decode["decode"].start_s > 0
