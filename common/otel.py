"""Spans through the OpenTelemetry SDK: the one module that imports it.

The SDK's global provider is not set: nobody else's instrumentation in this process writes into these traces. A span that the sampler
left out has no children of its own: they would say the same and cost the same. When the collector does not take spans, one line says
so, and one that it does again; the exporter's own lines, several for each batch, are kept back. When spans come faster than they are sent,
the SDK drops some and says so itself.
"""

import logging
import os
import threading
from collections.abc import Sequence
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.messages import SpanOut
from common.tracing import STATUS, Value

CLOSE_TIMEOUT_S = 1.0  # within what a supervisor grants after SIGTERM, behind the drain
CLIENT_LEFT_STATUS = 499
PROPAGATED = {b"traceparent": "traceparent", b"tracestate": "tracestate"}

log = logging.getLogger(__name__)


class OtelTracing:
    def __init__(self, endpoint: str, service: str) -> None:
        self._keep_back_logs()
        self._exporter = _Exporter(endpoint)
        resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", service), SERVICE_VERSION: version("pdserve")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("pdserve")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> "OtelSpan":
        carrier = {PROPAGATED[key]: value.decode("latin-1") for key, value in headers if key in PROPAGATED}
        parent = self._propagator.extract(carrier, Context())
        return OtelSpan(self._tracer, self._tracer.start_span(name, parent, SpanKind.SERVER), SpanKind.SERVER)

    def emit(self, span: SpanOut) -> None:
        parent = self._propagator.extract({"traceparent": span.traceparent}, Context())
        made = self._tracer.start_span(span.name, parent, attributes=span.attributes, start_time=int(span.start_s * 1e9))
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(int(span.end_s * 1e9))

    def close(self) -> None:
        # the SDK takes up to 30 s for it, and its bound cannot be set
        closing = threading.Thread(target=self._provider.shutdown, name="close-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        if closing.is_alive():
            self._exporter.shutdown()

    @staticmethod
    def _keep_back_logs() -> None:
        logger = logging.getLogger("opentelemetry.exporter")
        logger.propagate = False
        logger.handlers[:] = [_LAST_WORDS]


class OtelSpan:
    __slots__ = ("_kind", "_span", "_tracer")

    def __init__(self, tracer: trace.Tracer, span: trace.Span, kind: SpanKind) -> None:
        self._tracer = tracer
        self._span = span
        self._kind = kind

    @property
    def traceparent(self) -> bytes:
        context = self._span.get_span_context()
        return b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, context.trace_flags)

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    def child(self, name: str, *, client: bool = False, **attributes: Value) -> "OtelSpan":
        if not self._span.get_span_context().trace_flags.sampled:
            return self
        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        span = self._tracer.start_span(name, trace.set_span_in_context(self._span, Context()), kind, attributes)
        return OtelSpan(self._tracer, span, kind)

    def set(self, **attributes: Value) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def end(self, status: int | None = None, error: str = "") -> None:
        if not self._span.is_recording():
            return
        if status is not None:
            self._span.set_attribute(STATUS, status)
            if status != CLIENT_LEFT_STATUS and status >= (400 if self._kind is SpanKind.CLIENT else 500):
                error = error or f"status {status}"
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class _Exporter(SpanExporter):
    """OTLP over HTTP that says when the collector stops taking spans, and when it takes them again."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._otlp = OTLPSpanExporter(endpoint)
        self._num_lost = 0  # since it last took some

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._otlp.export(spans)
        except OSError as error:  # of its HTTP client; 1.36 lets it through
            result, _LAST_WORDS.text = SpanExportResult.FAILURE, str(error)
        if result is SpanExportResult.SUCCESS:
            if self._num_lost:
                log.info("traces: %s takes spans again; about %d were lost", self._endpoint, self._num_lost)
            self._num_lost = 0
        else:
            if not self._num_lost:
                log.warning("traces: %s takes no spans, they are lost: %s", self._endpoint, _LAST_WORDS.text)
            self._num_lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._otlp.shutdown()  # type: ignore[no-untyped-call]


class _LastWords(logging.Handler):
    """Keeps the last reason that the SDK had for a warning."""

    text = "for a reason that the SDK did not give"

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


_LAST_WORDS = _LastWords()
