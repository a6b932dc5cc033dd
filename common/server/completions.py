"""POST /v1/chat/completions and /v1/completions: from a request's bytes to the last byte of its reply.

    read and parse -> open in the TokenizerManager -> first output or failure -> status line -> increments -> end

A client may leave at any point: a watcher on the connection wakes the reply, and whatever is still open is aborted.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

from common.errors import Failure, RequestError, deadline_exceeded
from common.http_exchange import JSON_HEADERS, BodyBudget, ClientLeft, Exchange, Headers, Receive, Scope, Send
from common.messages import TextOut
from common.metrics import TextMetrics
from common.server.access import CLIENT_LEFT_STATUS
from common.server.openai_schema import ApiRequest
from common.server.openai_stream import Reply
from common.server.tokenizer_manager import Stream, TokenizerManager
from common.tracing import MODEL, OPERATION, REQUEST_ID, Span, Tracing

PREFILL_SITE_HEADER = b"x-pdserve-prefill-site"
STREAM_HEADERS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
OPERATION_NAMES = {"chat": "chat", "completion": "text_completion"}  # of the GenAI conventions
SEND_GRACE_S = 2.0  # after the deadline: for a client that stopped reading; its connection is then closed
INTERNAL_FAILURE = Failure(500, "the server failed on this request; its log has the cause", code="internal_error")

log = logging.getLogger(__name__)


class CompletionEndpoint:
    """ASGI app of one completion endpoint."""

    def __init__(self, parse: Callable[[bytes], ApiRequest], manager: TokenizerManager, metrics: TextMetrics, served_model: str, *,
                 max_body_bytes: int, bodies: BodyBudget, request_timeout_s: float, tracing: Tracing | None = None) -> None:
        self._parse = parse
        self._manager = manager
        self._metrics = metrics
        self._served_model = served_model
        self._max_body_bytes = max_body_bytes
        self._bodies = bodies
        self._request_timeout_s = request_timeout_s
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, scope["state"]["request_id"])
        span = None if self._tracing is None else self._tracing.begin(f"POST {exchange.path}", exchange.headers)
        failure: Failure | None = None
        try:
            await self._serve(exchange, span)
        except ClientLeft:
            log.info("%s %s: the client left", exchange.request_id, exchange.path)
        except RequestError as error:
            failure = error.failure
            await self._fail(exchange, failure)
        except Exception:
            log.exception("%s %s: a fault of the server", exchange.request_id, exchange.path)
            failure = INTERNAL_FAILURE
            await self._fail(exchange, failure)
        finally:
            if span is not None:
                span.end(exchange.status or CLIENT_LEFT_STATUS if failure is None else failure.status, failure.message if failure else "")

    async def _serve(self, exchange: Exchange, span: Span | None) -> None:
        meter = Meter(self._metrics)
        try:
            request = self._parse(await exchange.body(self._max_body_bytes, self._bodies))
        finally:
            exchange.release_body()
        deadline_s = exchange.deadline_s(self._request_timeout_s)
        traceparent = ""
        if span is not None and span.recording:
            traceparent = span.traceparent.decode()
            span.set(**{OPERATION: OPERATION_NAMES[request.kind], MODEL: self._served_model, REQUEST_ID: exchange.request_id})
        # the client's id may repeat; the random part keeps rids apart
        stream = await self._manager.open(request, f"{exchange.request_id}.{secrets.token_hex(4)}", deadline_s, traceparent)
        watcher = asyncio.ensure_future(_watch_client(exchange, stream))
        try:
            async with asyncio.timeout(deadline_s - time.time() + SEND_GRACE_S):
                reply = Reply(request, self._served_model)
                await (self._send_stream(exchange, reply, stream, meter) if request.stream else self._send_whole(exchange, reply, stream, meter))
        except TimeoutError:
            if not exchange.started:
                raise RequestError(deadline_exceeded("generation")) from None
            log.warning("%s %s: the client stopped reading; closing its connection", exchange.request_id, exchange.path)
        finally:
            watcher.cancel()
            self._manager.close(stream)

    async def _send_stream(self, exchange: Exchange, reply: Reply, stream: Stream, meter: "Meter") -> None:
        while True:
            events, failure = b"", None
            for index, out in await stream.next():
                if out.failure is not None:
                    failure = out.failure  # the last of its batch
                else:
                    events += reply.chunk(index, out)
                    meter.took(index, out)
            if not exchange.started:
                if failure is not None:
                    raise RequestError(failure)
                await exchange.start(200, [*STREAM_HEADERS, (PREFILL_SITE_HEADER, reply.prefill_site.encode())])
            if reply.finished:
                meter.answered(reply)
                await exchange.write(events + reply.tail(), more=False)
                return
            if events:
                await exchange.write(events, more=True)
            if failure is not None:
                raise RequestError(failure)

    async def _send_whole(self, exchange: Exchange, reply: Reply, stream: Stream, meter: "Meter") -> None:
        while not reply.finished:
            for index, out in await stream.next():
                if out.failure is not None:
                    raise RequestError(out.failure)
                reply.add(index, out)
                meter.took(index, out)
        meter.answered(reply)
        await exchange.reply(200, [*JSON_HEADERS, (PREFILL_SITE_HEADER, reply.prefill_site.encode())], reply.body())

    async def _fail(self, exchange: Exchange, failure: Failure) -> None:
        log.log(logging.WARNING if failure.status >= 500 else logging.INFO, "%s %s: %d %s (stage %s)",
                exchange.request_id, exchange.path, failure.status, failure.message, failure.stage)
        await exchange.fail(failure)


class Meter:
    """Times one request for /metrics."""

    def __init__(self, metrics: TextMetrics) -> None:
        self._metrics = metrics
        self._arrived_s = time.monotonic()
        self._last_out_s: dict[int, float] = {}

    def took(self, index: int, out: TextOut) -> None:
        now_s = time.monotonic()
        last_s = self._last_out_s.get(index)
        self._last_out_s[index] = now_s
        if last_s is not None and out.num_new_tokens:
            self._metrics.inter_token_s.observe((now_s - last_s) / out.num_new_tokens)
        elif last_s is None and len(self._last_out_s) == 1:
            self._metrics.first_token_s.observe(now_s - self._arrived_s)

    def answered(self, reply: Reply) -> None:
        self._metrics.request_s.observe(time.monotonic() - self._arrived_s)
        for choice in reply.choices:
            self._metrics.prompt_tokens.inc(choice.num_prompt_tokens)
            self._metrics.cached_tokens.inc(choice.num_cached_tokens)
            self._metrics.generated_tokens.inc(choice.num_tokens)
            self._metrics.prefill_site.labels(choice.prefill_site).inc()


async def _watch_client(exchange: Exchange, stream: Stream) -> None:
    await exchange.wait_disconnect()
    stream.client_left()
