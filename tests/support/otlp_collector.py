"""A collector that takes spans over OTLP/HTTP (https://opentelemetry.io/docs/specs/otlp/#otlphttp) and keeps them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ERROR = 2  # of a span's status
SERVER, CLIENT, INTERNAL = 2, 3, 1  # kinds


@dataclass(frozen=True)
class Got:
    service: str
    name: str
    kind: int
    trace: str
    id: str
    parent: str  # empty: none
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    error: str | None


@dataclass
class Collector:
    url: str = ""
    status: int = 200  # what it answers
    spans: list[Got] = field(default_factory=list)
    num_posts: int = 0

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            (service,) = [one.value.string_value for one in resource.resource.attributes if one.key == "service.name"]
            for scope in resource.scope_spans:
                self.spans += [_got(service, span) for span in scope.spans]

    def named(self, name: str, service: str = "") -> list[Got]:
        return [span for span in self.spans if span.name == name and service in ("", span.service)]

    def children(self, parent: Got) -> list[Got]:
        return [span for span in self.spans if span.parent == parent.id and span.trace == parent.trace]


def _got(service: str, span: Any) -> Got:
    error = span.status.message if span.status.code == ERROR else None
    return Got(service, span.name, span.kind, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.start_time_unix_nano / 1e9,
               span.end_time_unix_nano / 1e9, {one.key: _value(one.value) for one in span.attributes}, error)  # fmt: skip


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.num_posts += 1
            if collector.status == 200:
                collector.take(body)
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
