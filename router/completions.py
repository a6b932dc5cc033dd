"""POST /v1/chat/completions and /v1/completions: a client's request becomes a decode node's reply, as the bytes come.

Plain ASGI, no framework in the way. Whatever ends a request early (the client leaves, the router shuts down) interrupts the
task that serves it, which closes both legs' connections, so that the nodes stop too.

A stream is passed on event by event: what a node sent of an event that never ended is not shown, so that the in-band error after
it can be read. A reply that is not streamed is read whole first, so that its status is true.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp
from prometheus_client import CollectorRegistry

from common.config import RouterConfig
from common.errors import Failure, RequestError, deadline_exceeded
from router.dispatch import Answer, Dispatcher, Prompt
from router.exchange import LINGER_S, ClientLeft, Exchange, Receive, Scope, Send
from router.legs import MAX_REPLY_BYTES, LegFailed, NodeClient, broken, headers_to_client, headers_to_node, read_whole
from router.metrics import RouterMetrics
from router.pairing import Pair, Pairing
from router.splice import num_prompts, read_head

DEADLINE_GRACE_S = 0.3  # the nodes know the deadline too; theirs says in which stage it passed
SEND_GRACE_S = 0.5  # for the last words to a client that has stopped reading; with LINGER_S for one that still sends its body
CLIENT_LEFT_STATUS = 499  # as nginx counts a request whose client closed the connection before the answer
MAX_HELD_BYTES = 1 << 20  # of an event that has not ended; more is passed on as it is
SHUTTING_DOWN = Failure(503, "this router is shutting down", code="shutting_down", stage="router", retry_after_s=1.0)
INTERNAL_FAILURE = Failure(500, "the router failed on this request; its log has the cause", code="internal_error", stage="router")
DONE_MARK = b"data: [DONE]"

log = logging.getLogger(__name__)


class Call:
    """The task that serves one request, and what ended it from outside."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._open = True
        self.ended_by: Exception | None = None

    def interrupt(self, error: Exception) -> None:
        """The task's next await raises; `error` is what it then stands for."""
        if self._open and self.ended_by is None:
            self.ended_by = error
            self._task.cancel()

    def close(self) -> None:
        self._open = False


class CompletionProxy:
    """ASGI app of both completion endpoints."""

    def __init__(self, config: RouterConfig, pairing: Pairing, client: NodeClient, registry: CollectorRegistry) -> None:
        self._config = config
        self._pairing = pairing
        self._calls: set[Call] = set()
        self.metrics = RouterMetrics(registry, pairing.nodes, lambda: self.num_open)
        self._dispatcher = Dispatcher(pairing, client, self.metrics, max_retries=config.max_retries)
        self.draining = False
        self.idle = asyncio.Event()  # draining, and no request is open

    @property
    def num_open(self) -> int:
        return len(self._calls)

    def drain(self) -> None:
        """Refuse new requests."""
        self.draining = True
        if not self._calls:
            self.idle.set()

    def fail_all(self) -> None:
        for call in tuple(self._calls):
            call.interrupt(RequestError(SHUTTING_DOWN))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        call = Call()
        self._calls.add(call)
        status = CLIENT_LEFT_STATUS
        try:
            await self._answer(exchange, call)
            status = exchange.status or status
        except ClientLeft:
            log.info("%s %s: the client left", exchange.request_id.decode(), exchange.path)
        finally:
            self._calls.discard(call)
            if self.draining and not self._calls:
                self.idle.set()
            self.metrics.http.answered(exchange.path, status, time.monotonic() - exchange.arrived_s)

    async def _answer(self, exchange: Exchange, call: Call) -> None:
        """Raises ClientLeft; everything else becomes a reply."""
        try:
            await self._until_interrupted(exchange, call)
        except ClientLeft:
            raise
        except (RequestError, LegFailed) as error:
            await self._refuse(exchange, error)
        except Exception:
            log.exception("%s %s: a fault of the router", exchange.request_id.decode(), exchange.path)
            await self._refuse(exchange, RequestError(INTERNAL_FAILURE))

    async def _until_interrupted(self, exchange: Exchange, call: Call) -> None:
        try:
            await self._serve(exchange, call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if call.ended_by is None or task is None:
                raise
            task.uncancel()
            raise call.ended_by from None
        finally:
            call.close()

    async def _serve(self, exchange: Exchange, call: Call) -> None:
        if self.draining:
            raise RequestError(SHUTTING_DOWN)
        body = await exchange.body(self._config.max_body_bytes)
        head = read_head(body)
        deadline_s = exchange.deadline_s(self._config.request_timeout_s)
        model = self._pairing.model_of(head.model)
        headers = headers_to_node(exchange.headers, exchange.request_id, deadline_s)
        end_s = asyncio.get_running_loop().time() + deadline_s - time.time() + DEADLINE_GRACE_S
        prompt = Prompt(exchange.path, headers, body, head, num_prompts(head), model, end_s, _name_pair(exchange))
        watcher = asyncio.ensure_future(exchange.wait_left())
        watcher.add_done_callback(lambda watch: None if watch.cancelled() else call.interrupt(ClientLeft()))
        try:
            async with asyncio.timeout_at(end_s):
                answer = await self._dispatcher.answer(prompt)
                complete = False
                try:
                    await self._relay(exchange, answer)
                    complete = True
                finally:
                    answer.close(complete=complete)
        except TimeoutError:
            raise RequestError(deadline_exceeded("dispatch" if exchange.status is None else "the stream")) from None
        finally:
            watcher.cancel()

    async def _relay(self, exchange: Exchange, answer: Answer) -> None:
        reply = answer.reply
        headers = headers_to_client(reply)
        if reply.headers.get("content-type", "").startswith("text/event-stream"):
            await exchange.start(reply.status, headers)
            await self._relay_events(exchange, answer)
            return
        try:
            body = await read_whole(reply, MAX_REPLY_BYTES)
        except OverflowError:
            raise broken(answer.pair.decode, f"its reply is longer than {MAX_REPLY_BYTES} bytes") from None
        except (aiohttp.ClientError, OSError) as error:
            raise broken(answer.pair.decode, f"its reply is cut short: {error}") from error
        self.metrics.first_byte_s.observe(time.monotonic() - exchange.arrived_s)
        await exchange.reply(reply.status, headers, body)

    async def _relay_events(self, exchange: Exchange, answer: Answer) -> None:
        held, last, begun = b"", b"", False
        read = answer.reply.content.readany
        try:
            while part := await read():
                if held:
                    part = held + part
                end = _end_of_events(part)
                events, held = (part, b"") if end == len(part) else (part[:end], part[end:])
                if events:
                    if not begun:
                        begun = True
                        self.metrics.first_byte_s.observe(time.monotonic() - exchange.arrived_s)
                    last = events[-64:]
                    await exchange.write(events, more=True)
            cause = "its stream ended without [DONE]"
        except (aiohttp.ClientError, OSError) as error:
            cause = f"its stream was cut: {error}"
        if not last.rstrip().endswith(DONE_MARK) and not held.rstrip().endswith(DONE_MARK):
            raise broken(answer.pair.decode, cause)
        await exchange.write(held, more=False)

    async def _refuse(self, exchange: Exchange, error: RequestError | LegFailed) -> None:
        failure = error.failure
        level = logging.WARNING if failure.status >= 500 else logging.INFO
        log.log(level, "%s %s: %d %s", exchange.request_id.decode(), exchange.path, failure.status, failure.message)
        try:
            async with asyncio.timeout(SEND_GRACE_S if exchange.status is not None else SEND_GRACE_S + LINGER_S):
                if isinstance(error, LegFailed) and error.reply is not None and exchange.status is None:
                    await exchange.reply(error.reply.status, error.reply.headers, error.reply.body)
                else:
                    await exchange.fail(failure)
        except TimeoutError:
            log.warning("%s %s: the client does not read; closing its connection", exchange.request_id.decode(), exchange.path)
            exchange.abort()


def _name_pair(exchange: Exchange) -> Callable[[Pair], None]:
    """Write each pair that is tried into the reply's headers; the last one stays."""
    base = list(exchange.reply_headers)

    def chosen(pair: Pair) -> None:
        exchange.reply_headers = [*base, (b"x-pdserve-prefill", pair.prefill.url.encode()), (b"x-pdserve-decode", pair.decode.url.encode())]

    return chosen


def _end_of_events(part: bytes) -> int:
    """Where the last complete event in `part` ends."""
    if part.endswith(b"\n\n") or len(part) > MAX_HELD_BYTES:
        return len(part)
    newline, both = part.rfind(b"\n\n"), part.rfind(b"\r\n\r\n")
    return max(newline + 2 if newline >= 0 else 0, both + 4 if both >= 0 else 0)
