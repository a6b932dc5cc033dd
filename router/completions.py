"""POST /v1/chat/completions and /v1/completions: a client's request becomes a decode node's reply, as the bytes come.

Plain ASGI, no framework in the way. Whatever ends a request early (the client leaves, the router shuts down) interrupts the
task that serves it, which closes both legs' connections, so that the nodes stop too.

A stream is passed on event by event: what a node sent of an event that never ended is not shown, so that the in-band error after
it can be read. A stream has ended well when it has said [DONE], whatever becomes of its connection; one that ends after an error
event of its own gets the [DONE] it lacks and no second error. A reply that is not streamed is read whole first, so that its status is true.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from common.config import RouterConfig
from common.errors import Failure, RequestError, deadline_exceeded, overloaded
from common.http_exchange import DONE, ID_HEADER, LINGER_S, BodyBudget, ClientLeft, Exchange, Receive, Scope, Send, request_id_of
from router.dispatch import Answer, Dispatcher, Prompt
from router.events import end_of_events, error_in, failure_of, has_done, is_event_stream
from router.legs import CUT_SHORT, MAX_REPLY_BYTES, LegFailed, NodeClient, broken, headers_to_client, headers_to_node, read_whole
from router.metrics import RouterMetrics
from router.pairing import Pair, Pairing
from router.splice import num_prompts, read_head

DEADLINE_GRACE_S = 0.3  # the nodes know the deadline too; theirs says in which stage it passed
SEND_GRACE_S = 0.5  # for the last words to a client that has stopped reading; with LINGER_S for one that still sends its body
CLIENT_LEFT_STATUS = 499  # as nginx counts a request whose client closed the connection before the answer
AFTER_DONE_S = 1.0  # how long a node may take to end a stream in which it has said [DONE]
SHUTTING_DOWN = Failure(503, "this router is shutting down", code="shutting_down", stage="router", retry_after_s=1.0)
INTERNAL_FAILURE = Failure(500, "the router failed on this request; its log has the cause", code="internal_error", stage="router")

log = logging.getLogger(__name__)


class Call:
    """The task that serves one request, and what ended it from outside."""

    def __init__(self, target: bytes) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._open = True
        self.target = target  # path and query
        self.arrived_s = time.monotonic()
        self.pair: Pair | None = None  # the last that was tried
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
        self._bodies = BodyBudget(config.max_body_bytes)
        self.metrics = RouterMetrics(registry, config, pairing.nodes, lambda: self.num_open)
        self._dispatcher = Dispatcher(pairing, client, self.metrics, max_retries=config.max_retries, verdict_timeout_s=config.connect_timeout_s)
        self._num_admitted = 0
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
        exchange = Exchange(scope, receive, send, request_id_of(scope["headers"]))
        exchange.reply_headers = [(ID_HEADER, exchange.request_id.encode())]
        query: bytes = scope["query_string"]
        call = Call(exchange.path.encode() + (b"?" + query if query else b""))
        self._calls.add(call)
        status = CLIENT_LEFT_STATUS
        try:
            await self._answer(exchange, call)
            status = exchange.status or status
        except ClientLeft:
            log.info("%s %s: the client left%s", exchange.request_id, exchange.path, _at(call.pair))
        finally:
            exchange.release_body()
            self._calls.discard(call)
            if self.draining and not self._calls:
                self.idle.set()
            self.metrics.http.answered(exchange.path, status, time.monotonic() - call.arrived_s)

    async def _answer(self, exchange: Exchange, call: Call) -> None:
        """Raises ClientLeft; everything else becomes a reply."""
        try:
            await self._until_interrupted(exchange, call)
        except ClientLeft:
            raise
        except (RequestError, LegFailed) as error:
            level = logging.WARNING if error.failure.status >= 500 else logging.INFO
            log.log(level, "%s %s: %d %s%s", exchange.request_id, exchange.path, error.failure.status, error.failure.message, _at(call.pair))
            await self._refuse(exchange, error)
        except Exception:
            log.exception("%s %s: a fault of the router%s", exchange.request_id, exchange.path, _at(call.pair))
            await self._refuse(exchange, RequestError(INTERNAL_FAILURE))

    async def _until_interrupted(self, exchange: Exchange, call: Call) -> None:
        try:
            await self._admit(exchange, call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if call.ended_by is None or task is None:
                raise
            task.uncancel()
            raise call.ended_by from None
        finally:
            call.close()

    async def _admit(self, exchange: Exchange, call: Call) -> None:
        if self.draining:
            raise RequestError(SHUTTING_DOWN)
        most = self._config.max_concurrent_requests
        if self._num_admitted >= most:
            raise overloaded(f"{most} requests are open in this router, its limit (--max-concurrent-requests); try again", stage="router")
        self._num_admitted += 1
        try:
            await self._serve(exchange, call)
        finally:
            self._num_admitted -= 1

    async def _serve(self, exchange: Exchange, call: Call) -> None:
        body = await exchange.body(self._config.max_body_bytes, self._bodies)
        head = read_head(body)
        deadline_s = exchange.deadline_s(self._config.request_timeout_s)
        model = self._pairing.model_of(head.model)
        headers = headers_to_node(exchange.headers, exchange.request_id, deadline_s)
        end_s = asyncio.get_running_loop().time() + deadline_s - time.time() + DEADLINE_GRACE_S
        prompt = Prompt(call.target, exchange.request_id, headers, body, head, num_prompts(head), model, end_s, _name_pair(exchange, call))
        watcher = asyncio.ensure_future(exchange.wait_disconnect())
        watcher.add_done_callback(lambda watch: None if watch.cancelled() else call.interrupt(ClientLeft()))
        try:
            async with asyncio.timeout_at(end_s):
                answer = await self._dispatcher.answer(prompt)
                complete = False
                try:
                    await self._relay(exchange, call, answer)
                    complete = True
                finally:
                    answer.close(complete=complete)
        except TimeoutError:
            raise RequestError(deadline_exceeded("dispatch" if exchange.status is None else "the stream")) from None
        finally:
            watcher.cancel()

    async def _relay(self, exchange: Exchange, call: Call, answer: Answer) -> None:
        reply = answer.reply
        headers = headers_to_client(reply)
        self.metrics.first_byte_s.observe(time.monotonic() - call.arrived_s)
        if is_event_stream(reply.header(b"content-type")):
            await exchange.start(200, headers)
            await self._relay_events(exchange, answer)
            return
        try:
            body = await read_whole(reply, MAX_REPLY_BYTES, answer.first)
        except OverflowError:
            raise broken(answer.pair.decode, f"its reply is longer than {MAX_REPLY_BYTES} bytes") from None
        except CUT_SHORT as error:
            raise broken(answer.pair.decode, f"its reply is cut short: {error}") from error
        await exchange.reply(200, headers, body)

    async def _relay_events(self, exchange: Exchange, answer: Answer) -> None:
        held, done, failed, node = b"", False, None, answer.pair.decode
        cause = "its stream ended without [DONE]"
        part = answer.first
        try:
            async with asyncio.timeout(None) as limit:
                while part:
                    part = held + part if held else part
                    end = end_of_events(part)
                    events, held = (part, b"") if end == len(part) else (part[:end], part[end:])
                    if has_done(events) and not done:
                        done = True
                        limit.reschedule(asyncio.get_running_loop().time() + AFTER_DONE_S)
                    failed = failed or error_in(events)
                    if events:
                        await exchange.write(events, more=True)
                    part = await answer.reply.read()
        except TimeoutError:
            cause = "its stream goes on after [DONE]"
        except CUT_SHORT as error:
            cause = f"its stream was cut: {error}"
        if done or has_done(held):
            await exchange.write(held, more=False)
        elif failed is not None:
            await exchange.write(DONE, more=False)
        else:
            raise broken(node, cause)
        if failed is not None:
            failure = failure_of(failed, node.leg)
            log.warning("%s %s: in the stream: %d %s%s", exchange.request_id, exchange.path, failure.status, failure.message, _at(answer.pair))

    async def _refuse(self, exchange: Exchange, error: RequestError | LegFailed) -> None:
        try:
            async with asyncio.timeout(SEND_GRACE_S if exchange.status is not None else SEND_GRACE_S + LINGER_S):
                if isinstance(error, LegFailed) and error.reply is not None and exchange.status is None:
                    await exchange.reply(error.reply.status, error.reply.headers, error.reply.body)
                else:
                    await exchange.fail(error.failure)
        except TimeoutError:
            log.warning("%s %s: the client does not read; closing its connection", exchange.request_id, exchange.path)
            exchange.abort()


def _at(pair: Pair | None) -> str:
    return "" if pair is None else f" (prefill {pair.prefill.url}, decode {pair.decode.url})"


def _name_pair(exchange: Exchange, call: Call) -> Callable[[Pair], None]:
    """Write each pair that is tried into the reply's headers; the last one stays."""
    base = list(exchange.reply_headers)

    def chosen(pair: Pair) -> None:
        call.pair = pair
        exchange.reply_headers = [*base, (b"x-pdserve-prefill", pair.prefill.url.encode()), (b"x-pdserve-decode", pair.decode.url.encode())]

    return chosen
