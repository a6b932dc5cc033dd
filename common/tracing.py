"""Traces of requests, across router and nodes: what the product uses of them, without OpenTelemetry (common/otel.py has that).

    POST /v1/completions        router, SERVER; its parent is the client's span, if the client sent a `traceparent`
      queue                     admission, for those that wait
      prefill leg               CLIENT; one for each try
        POST /v1/completions    prefill node, SERVER
          queued                until it got pages
          prefill               until token 1 is known
          transfer              from the first pages posted to all of them delivered
      decode leg
        POST /v1/completions    decode node, SERVER
          queued
          waiting for KV        from the offer to the last page
          decode                from token 1 to the last one

A node alone, or a decode node that computes the prompt, has `queued`, `prefill` and `decode`; `recompute` is a prompt's KV made again.
Without --otlp-traces-endpoint there is no Tracing, nothing is imported, and a client's traceparent goes to the nodes as it came.

Attributes have the names of OpenTelemetry's semantic conventions where these know them (HTTP, and GenAI of
https://github.com/open-telemetry/semantic-conventions-genai, in development there), else pdserve's own. Spans hold no text of prompts or
answers, no keys, and no rooms: a room names memory.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from common.errors import StartupError

if TYPE_CHECKING:
    from common.messages import SpanOut

Value = str | int | float | Sequence[str]

TRACEPARENT_HEADER = b"traceparent"
MODEL = "gen_ai.request.model"
OPERATION = "gen_ai.operation.name"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
NODE_URL = "pdserve.node.url"
STATUS = "http.response.status_code"
REQUEST_ID = "pdserve.request_id"
TRANSFER_PAGES = "pdserve.transfer.pages"
TRANSFER_BYTES = "pdserve.transfer.bytes"


class Span(Protocol):
    """One span that has begun. No method raises; after end() they do nothing."""

    @property
    def traceparent(self) -> bytes:
        """The header's value (https://www.w3.org/TR/trace-context/) that makes this span the parent of what another process begins."""

    @property
    def recording(self) -> bool:
        """False: the sampler left this trace out. Its traceparent says so."""

    def child(self, name: str, *, client: bool = False, **attributes: Value) -> "Span":
        """client: it stands for a request to another process. Attributes whose names have dots: `**{NODE_URL: url}`."""

    def set(self, **attributes: Value) -> None: ...

    def end(self, status: int | None = None, error: str = "") -> None:
        """status: of HTTP; from 500 on, and on a client's span from 400 on, the span is marked as failed, and so it is with an `error`;
        499 is neither: somebody left."""


class Tracing(Protocol):
    """Sends spans in the background. A collector that is away costs spans, never requests."""

    def begin(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> Span:
        """The span of an incoming request. headers: lower-case names; a `traceparent` among them names its parent."""

    def emit(self, span: "SpanOut") -> None:
        """A span that has ended elsewhere in this node."""

    def close(self) -> None:
        """Send what is left, for at most otel.CLOSE_TIMEOUT_S; blocks."""


def start_tracing(endpoint: str | None, service: str) -> Tracing | None:
    """None without an endpoint. service: `service.name` of the spans, unless OTEL_SERVICE_NAME is set; the SDK's other variables
    (https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/) count too, so sampling is set by
    OTEL_TRACES_SAMPLER. Raises StartupError."""
    if endpoint is None:
        return None
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname:
        raise StartupError(f"--otlp-traces-endpoint {endpoint!r} is no URL of a collector; give one like http://collector:4318/v1/traces")
    try:
        from common.otel import OtelTracing
    except ImportError as error:
        raise StartupError(f"--otlp-traces-endpoint needs the OpenTelemetry SDK ({error}): pip install 'pdserve[otel]', or leave it out") from None
    return OtelTracing(endpoint, service)
