"""Spans as a collector gets them: parents, times, errors; and what happens without one."""

import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from otlp_collector import CLIENT, INTERNAL, SERVER, Collector, Got, collecting

from common.errors import StartupError
from common.messages import SpanOut
from common.tracing import MODEL, STATUS, Tracing, start_tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = [(b"host", b"h"), (b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(autouse=True)
def _own_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logger = logging.getLogger("opentelemetry.exporter")
    yield
    logger.handlers.clear()
    logger.propagate = True


def tracing_to(url: str) -> Tracing:
    tracing = start_tracing(url, "pdserve-test")
    assert tracing is not None
    return tracing


def the(collector: Collector, name: str) -> Got:
    (found,) = collector.named(name)
    return found


def test_a_tree_under_the_clients_span(collector: Collector) -> None:
    tracing = tracing_to(collector.url)
    before_s = time.time()
    request = tracing.begin("request", HEADERS)
    leg = request.child("leg decode", client=True, **{"pdserve.node.url": "http://d:1"})
    queue = request.child("queue")
    queue.end()
    request.set(**{MODEL: "tiny"})
    leg.end(200)
    request.end(200)
    tracing.close()
    got = {span.name: span for span in collector.spans}
    assert {span.trace for span in got.values()} == {TRACE}
    assert got["request"].parent == PARENT
    assert got["leg decode"].parent == got["queue"].parent == got["request"].id
    assert [got[name].kind for name in ("request", "leg decode", "queue")] == [SERVER, CLIENT, INTERNAL]
    assert got["request"].attributes == {MODEL: "tiny", STATUS: 200}
    assert got["leg decode"].attributes == {"pdserve.node.url": "http://d:1", STATUS: 200}
    assert before_s <= got["request"].start_s <= got["leg decode"].start_s <= got["leg decode"].end_s <= got["request"].end_s <= time.time()
    assert {span.service for span in got.values()} == {"pdserve-test"}
    assert not any(span.error for span in got.values())


def test_a_span_of_another_process_continues(collector: Collector) -> None:
    router, node = tracing_to(collector.url), tracing_to(collector.url)
    leg = router.begin("request", []).child("leg prefill", client=True)
    request = node.begin("request", [(b"traceparent", leg.traceparent)])
    start_s = time.time() - 1.5
    node.emit(SpanOut(request.traceparent.decode(), "prefill", start_s, start_s + 0.25, {"gen_ai.usage.input_tokens": 7}))
    node.emit(SpanOut(request.traceparent.decode(), "transfer", start_s, start_s + 0.5, error="peer lost"))
    request.end(200)
    leg.end(200)
    router.close()
    node.close()
    prefill, transfer, served = the(collector, "prefill"), the(collector, "transfer"), the(collector, "request")
    assert served.parent == the(collector, "leg prefill").id
    assert prefill.parent == transfer.parent == served.id
    assert len({span.trace for span in collector.spans}) == 1
    assert prefill.start_s == pytest.approx(start_s, abs=1e-6)
    assert prefill.end_s - prefill.start_s == pytest.approx(0.25, abs=1e-6)
    assert prefill.attributes == {"gen_ai.usage.input_tokens": 7}
    assert (prefill.error, transfer.error) == (None, "peer lost")


@pytest.mark.parametrize("value", [b"", b"00-zz-zz-01", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"\xff\xfe", b"a" * 10_000])
def test_a_traceparent_that_is_none_begins_a_new_trace(collector: Collector, value: bytes) -> None:
    tracing = tracing_to(collector.url)
    span = tracing.begin("request", [(b"traceparent", value)])
    assert re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", span.traceparent)
    span.end(200)
    tracing.close()
    assert the(collector, "request").parent == ""


@pytest.mark.parametrize(("client", "status", "error"), [
    (False, 404, None), (False, 503, "status 503"), (True, 404, "status 404"), (True, 499, None), (False, 499, None), (False, 200, None),
])  # fmt: skip
def test_which_status_is_an_error(collector: Collector, client: bool, status: int, error: str | None) -> None:
    tracing = tracing_to(collector.url)
    request = tracing.begin("request", [])
    span = request.child("leg", client=True) if client else request
    span.end(status)
    tracing.close()
    assert collector.spans[0].error == error
    assert collector.spans[0].attributes == {STATUS: status}


def test_a_trace_that_is_left_out_says_so_to_nodes(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracing = tracing_to(collector.url)
    request = tracing.begin("request", [])
    leg = request.child("leg decode", client=True)
    assert not request.recording
    assert int(leg.traceparent[-2:], 16) & 1 == 0  # "sampled"; the other bits are not of interest
    for span in (leg, request):
        span.set(**{MODEL: "tiny"})
        span.end(503, "why")
    asked = tracing.begin("asked", HEADERS)  # its client wants it
    asked.end(200)
    tracing.close()
    assert [span.name for span in collector.spans] == ["asked"]


def test_spans_after_their_end_do_nothing(collector: Collector) -> None:
    tracing = tracing_to(collector.url)
    span = tracing.begin("request", [])
    span.end(200)
    span.set(**{MODEL: "tiny"})
    span.end(503)
    tracing.close()
    tracing.begin("late", []).end(200)
    tracing.close()
    assert the(collector, "request").attributes == {STATUS: 200}
    assert not collector.named("late")


def test_a_collector_that_is_away_costs_spans_and_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "5")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    with collecting() as collector:
        collector.status = 400  # not retried
        tracing = tracing_to(collector.url)
        for number in range(1, 4):
            tracing.begin("lost", []).end(200)
            while collector.num_posts < number:
                time.sleep(0.002)
        collector.status = 200
        tracing.begin("taken", []).end(200)
        while not collector.spans:
            time.sleep(0.002)
        tracing.close()
        lines = [record.getMessage() for record in caplog.records if record.name == "common.otel"]
        assert lines[0].startswith(f"traces: {collector.url} takes no spans, they are lost: Failed to export")
        assert "code: 400" in lines[0]
        assert [line for line in lines if "takes no spans" in line] == lines[:1]
        assert [span.name for span in collector.spans] == ["taken"]


def test_close_ends_though_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    from common import otel

    monkeypatch.setattr(otel, "CLOSE_TIMEOUT_S", 0.05)
    with collecting() as collector:
        collector.status = 503  # retried for ten seconds
        tracing = tracing_to(collector.url)
        tracing.begin("request", []).end(200)
        began_s = time.monotonic()
        tracing.close()
        assert time.monotonic() - began_s < 5


def test_no_endpoint_no_tracing_and_nothing_of_the_sdk() -> None:
    code = """
import sys
import common.server.node, router.main
from common.tracing import start_tracing
assert start_tracing(None, "x") is None
loaded = [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter", "requests", "google.protobuf"))]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector/v1/traces", "http://", ""])
def test_what_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(StartupError, match=re.escape(repr(endpoint))):
        start_tracing(endpoint, "x")


def test_without_the_sdk_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "common.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(StartupError, match=r"pip install 'pdserve\[otel\]'"):
        start_tracing("http://127.0.0.1:4318/v1/traces", "x")
