"""POST on a path of the nodes' API (api_paths.py): a client's request becomes a decode node's reply, as the bytes come.

    whose key -> read the body's head -> admit, or wait in the queue -> place and send (dispatch.py) -> relay -> end

No framework in the way: one task a request, which waits for its Call alone. Whatever ends a request early (the client leaves, its
deadline passes, the router shuts down) interrupts the call; then both legs' connections are closed, so that the nodes stop too.

A reply that is not streamed is read whole first, so that its status is true.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from common.config import RouterConfig
from common.errors import Failure, RequestError, deadline_exceeded
from common.http_exchange import BodyBudget, deadline_of
from common.tracing import REQUEST_ID, TRACEPARENT_HEADER, Tracing
from router.admission import Admission
from router.api_paths import PATHS, ApiPath
from router.ask import Ask, read_ask
from router.call import Call, ClientLeft
from router.dispatch import Attempt, Dispatcher, Prompt
from router.events import failure_of, in_one_line, is_event_stream
from router.exchange import INTERNAL_FAILURE, Exchange, header_lines
from router.keys import CHALLENGE_LINE, Client, Keys
from router.legs import MAX_REPLY_BYTES, LegFailed, NodeClient, NodeReply, broken, headers_to_client, headers_to_node
from router.metrics import RouterMetrics
from router.pairing import Pairing, Placement
from router.relay import Relay
from router.splice import num_prompts, read_head

DEADLINE_GRACE_S = 0.1  # the nodes know the deadline too; theirs says in which stage it passed
MAX_REPLIES_BYTES = 256 << 20  # of replies that are not streamed, together, until each is whole
SWEEP_S = 0.05  # how late it may be noticed that a deadline has passed
SEND_GRACE_S = 0.5  # for the last words to a client that has stopped reading
CLIENT_LEFT_STATUS = 499  # as nginx counts a request whose client closed the connection before the answer
SHUTTING_DOWN = Failure(503, "this router is shutting down", code="shutting_down", stage="router", retry_after_s=1.0)
SITE_HEADER = b"x-pdserve-prefill-site"  # a pdserve node says it itself

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeAuthorization:
    """What nodes get to see in place of the client's Authorization."""

    line: bytes = b""
    dropped: Collection[bytes] = ()

    @classmethod
    def of(cls, key: str | None) -> "NodeAuthorization":
        """key: None passes on what the client sent."""
        return cls() if key is None else cls(b"authorization: Bearer %b\r\n" % key.encode(), (b"authorization", b"x-api-key"))


class CompletionProxy:
    """Handles every exchange on a path of the nodes' API."""

    def __init__(self, config: RouterConfig, pairing: Pairing, client: NodeClient, metrics: RouterMetrics, keys: Keys, admission: Admission,
                 node_authorization: NodeAuthorization, tracing: Tracing | None, read_prompt: Callable[[Ask], Awaitable[None]] | None) -> None:
        """read_prompt: finds the tokens of a prompt before it is placed, where placing needs them (kv_events.py)."""
        self._config = config
        self._pairing = pairing
        self._keys = keys
        self._admission = admission
        self._node_authorization = node_authorization
        self._tracing = tracing
        self._read_prompt = read_prompt
        self._own_headers = (*node_authorization.dropped, *((TRACEPARENT_HEADER,) if tracing is not None else ()))
        self._calls: set[Call] = set()
        self._replies = BodyBudget(MAX_REPLY_BYTES, MAX_REPLIES_BYTES, "replies that are being gathered")
        self._loop = asyncio.get_running_loop()  # asking for it each time costs a system call (getpid, before Python 3.12)
        self.metrics = metrics
        self._dispatcher = Dispatcher(pairing, client, metrics, config)
        self._sweeping: asyncio.TimerHandle | None = None
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

    def __call__(self, exchange: Exchange) -> None:
        call = Call(exchange, self._loop)
        exchange.on_left = lambda: call.interrupt(ClientLeft())  # from now on: the task begins a moment later
        self._calls.add(call)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(SWEEP_S, self._sweep)
        self._loop.create_task(self._run(call))

    async def _run(self, call: Call) -> None:
        exchange = call.exchange
        api, said = PATHS[exchange.path], ""
        if self._tracing is not None:
            call.span = self._tracing.begin(f"POST {api.name}", exchange.headers)
            call.span.set(**{REQUEST_ID: exchange.request_id})
        try:
            await self._serve(call, api)
        except ClientLeft:
            log.info("%s %s: the client left%s", exchange.request_id, api.name, _at(call.placement))
        except (RequestError, LegFailed) as error:
            failure = error.failure
            said = in_one_line(failure.message)
            log.log(_level(failure, call), "%s %s: %d %s%s", exchange.request_id, api.name, failure.status, said, _at(call.placement))
            _refuse(exchange, api, failure, error.reply if isinstance(error, LegFailed) else None)
        except Exception:
            log.exception("%s %s: a fault of the router%s", exchange.request_id, api.name, _at(call.placement))
            said = INTERNAL_FAILURE.message
            _refuse(exchange, api, INTERNAL_FAILURE, None)
        finally:
            self._calls.discard(call)
            exchange.on_left = None
            if self.draining and not self._calls:
                self.idle.set()
            status = exchange.status if exchange.ended and exchange.status is not None else CLIENT_LEFT_STATUS
            self.metrics.http.answered(api.name, status, time.monotonic() - call.arrived_s)
            if call.span is not None:
                call.span.end(status, said if status in (200, *range(500, 600)) else "")

    async def _serve(self, call: Call, api: ApiPath) -> None:
        exchange = call.exchange
        if exchange.refusal is not None:
            raise RequestError(exchange.refusal)
        if self.draining:
            raise RequestError(SHUTTING_DOWN)
        client = self._client_of(exchange)
        prompt = self._prompt(call, api)
        try:
            await self._admit(call, client, prompt)
        finally:
            call.close()

    def _prompt(self, call: Call, api: ApiPath) -> Prompt:
        exchange = call.exchange
        head = read_head(exchange.body)
        unix_deadline_s = deadline_of(exchange.header, self._config.request_timeout_s)
        ask = read_ask(head, self._pairing.model_of(head.model))
        lines = headers_to_node(exchange.headers, exchange.request_id, unix_deadline_s, but=self._own_headers) + self._node_authorization.line
        call.end_s = time.monotonic() + unix_deadline_s - time.time() + DEADLINE_GRACE_S
        return Prompt(api, exchange.target, exchange.request_id, lines, exchange.body, head, ask, bool(head.stream), num_prompts(head))

    async def _admit(self, call: Call, client: Client, prompt: Prompt) -> None:
        try:
            ticket = call.ticket = self._admission.enter(client, prompt.ask, prompt.head.priority, call.end_s)
        except RequestError as error:
            self.metrics.refused(error.failure.code or "overloaded", client.name)
            raise
        try:
            if ticket.granted is not None:
                span = call.span.child("queue") if call.span is not None else None
                try:
                    await call.wait(ticket.granted)
                except RequestError as error:
                    self.metrics.refused(error.failure.code or "overloaded", client.name)
                    raise
                finally:
                    if span is not None:
                        span.end()
                self.metrics.queued(ticket.waited_s)
            if self._read_prompt is not None:
                await call.wait(asyncio.ensure_future(self._read_prompt(prompt.ask)))
            attempt = await self._dispatcher.answer(call, prompt)
            ttft_s = time.monotonic() - call.arrived_s
            complete = False
            try:
                await self._relay(call, prompt.api, attempt, ttft_s)
                complete = True
            finally:
                attempt.close(complete=complete)
        finally:
            ticket.leave()
        self.metrics.ended(time.monotonic() - call.arrived_s)

    async def _relay(self, call: Call, api: ApiPath, attempt: Attempt, ttft_s: float) -> None:
        exchange, placement = call.exchange, attempt.placement
        leg, reply = attempt.answer()
        headers = headers_to_client(reply)
        streamed = is_event_stream(reply.header(b"content-type"))
        self.metrics.first_byte(ttft_s, streamed)
        lines = header_lines(headers) + _placement_lines(placement, attempt.local_reason, any(name == SITE_HEADER for name, _ in headers))
        if not streamed:
            exchange.reply(200, lines, await self._whole(call, attempt))
            leg.node.succeeded(leg.began_s)
            return
        exchange.start(200, lines)
        relay = Relay(exchange, reply, api.form, self.metrics.gap, call.wake)
        try:
            leg.on_progress = relay.progress
            relay.progress()
            while not relay.ended:
                await call.progress()
        except RequestError as error:
            relay.end(error.failure.message)
            if relay.cause is not None:  # else the client has the last word already
                raise
        finally:
            relay.close()
            leg.on_progress = call.wake
        if relay.cause is not None:
            leg.failure = broken(leg.node, relay.cause, leg.began_s)
            raise leg.failure
        exchange.end()
        leg.node.succeeded(leg.began_s)
        if relay.error is not None:
            failure = failure_of(relay.error, leg.node.leg)
            said = in_one_line(failure.message)
            log.warning("%s %s: in the stream: %d %s%s", exchange.request_id, api.name, failure.status, said, _at(placement))

    async def _whole(self, call: Call, attempt: Attempt) -> bytes:
        """The body of a reply that is not streamed."""
        leg, reply = attempt.answer()
        parts, num_bytes = list[bytes](), 0
        try:
            while True:
                if part := reply.take():
                    self._replies.take(len(part))
                    parts.append(part)
                    num_bytes += len(part)
                    if num_bytes > MAX_REPLY_BYTES:
                        leg.failure = broken(leg.node, f"its reply is longer than {MAX_REPLY_BYTES} bytes", leg.began_s)
                        raise leg.failure
                elif reply.complete:
                    return parts[0] if len(parts) == 1 else b"".join(parts)
                elif reply.error is not None:
                    leg.failure = broken(leg.node, f"its reply is cut short: {reply.error}", leg.began_s)
                    raise leg.failure
                else:
                    await call.progress()
        finally:
            self._replies.give_back(num_bytes)

    def _client_of(self, exchange: Exchange) -> Client:
        try:
            client = self._keys.client_of(exchange.headers)
        except RequestError:
            self.metrics.refused("unauthorized")
            raise
        if client.name is not None:
            self.metrics.requested(client.name)
        return client

    def _sweep(self) -> None:
        """End the calls whose deadline has passed; again while there are any. A timer for each would cost a request 6 us."""
        now_s = time.monotonic()
        for call in self._calls:
            if call.end_s <= now_s:
                call.interrupt(RequestError(deadline_exceeded("the stream" if call.exchange.started else "dispatch")))
        self._sweeping = self._loop.call_later(SWEEP_S, self._sweep) if self._calls else None


def _refuse(exchange: Exchange, api: ApiPath, failure: Failure, reply: NodeReply | None) -> None:
    """The failure, as the reply or as the stream's end. A client that does not read it is cut off, so that it holds nothing."""
    if exchange.ended or exchange.left:
        return
    if exchange.started:
        if exchange.num_unsent_bytes:
            exchange.keep_alive = False  # so that it is this reply which is cut off, and none that comes after it
            asyncio.get_running_loop().call_later(SEND_GRACE_S, _cut_off, exchange)
        exchange.end(api.form.error(failure))
    elif reply is not None:
        exchange.reply(reply.status, header_lines(reply.headers), reply.body)
    else:
        exchange.fail(failure, CHALLENGE_LINE if failure.status == 401 else b"")


def _cut_off(exchange: Exchange) -> None:
    if exchange.num_unsent_bytes and not exchange.left:
        log.warning("%s: the client does not read; closing its connection", exchange.request_id)
        exchange.abort()


def _placement_lines(placement: Placement, local_reason: str | None, site_is_said: bool) -> bytes:
    """Which nodes serve it; and that the decode node computes the prompt, when it does, and why."""
    prefill = b"" if placement.prefill is None else b"x-pdserve-prefill: %b\r\n" % placement.prefill.url.encode()
    decode = b"x-pdserve-decode: %b\r\n" % placement.decode.url.encode()
    if local_reason is None:
        return prefill + decode
    site = b"" if site_is_said else b"%b: local\r\n" % SITE_HEADER
    return b"%b%b%bx-pdserve-local-prefill: %b\r\n" % (prefill, decode, site, local_reason.encode())


def _level(failure: Failure, call: Call) -> int:
    """Load that is shed is counted (pdserve_router_refusals_total), not logged: there may be thousands a second."""
    if failure.status >= 500:
        return logging.WARNING
    return logging.DEBUG if call.placement is None and failure.status in (401, 429) else logging.INFO


def _at(placement: Placement | None) -> str:
    if placement is None:
        return ""
    return f" (prefill {placement.prefill.url if placement.prefill is not None else 'local'}, decode {placement.decode.url})"
