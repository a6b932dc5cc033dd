"""From a request to a decode node's reply: two legs race, and the first to fail decides.

    place it, mint rooms, POST to both at once (a sequential engine: to P, then to D with what P answered)
      D's first body bytes come   that is the answer; P may finish on its own, only its failure is counted
      P fails before that         D is cancelled (its connection closed); retry, or P's error
      D fails                     P is cancelled; retry, or D's error
      nothing in time             the call is interrupted (call.py)

P also fails by an error event in a stream. A retry is another pair, or the same one when there is no other, and another room; only
for what it may cure (LegFailed.retryable), and never at a node that asked for patience or let a connection time out. When retries are
used up the first cause is answered.

Load is counted per leg: prefill's ends when the prompt is computed, decode's with the stream.
"""

import asyncio
import logging
from dataclasses import dataclass

from common.config import RouterConfig
from common.errors import RequestError
from common.tracing import NODE_URL, TRACEPARENT_HEADER, Span
from router.api_paths import ApiPath
from router.ask import Ask
from router.call import Call
from router.connection import Reply
from router.engines import Engine, LegRequest, Outgoing, engines_for
from router.legs import Leg, LegFailed, NodeClient, PrefillLeg, broken, message_head
from router.metrics import RouterMetrics
from router.node import Node
from router.pairing import Pairing, Placement
from router.splice import Head, mint_rooms

PREFILL_GRACE_S = 1.0  # after the decode node's last byte; its prompt was computed elsewhere if prefill still goes on
NO_HEAD = Head()
GIVEN_UP = 499  # the status of a leg that nobody waits for any more

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Prompt:
    """What goes to the nodes. Not frozen: that would make it dearer to make, once a request."""

    api: ApiPath
    target: bytes  # path and query
    request_id: str
    lines: bytes  # header lines for both nodes
    body: bytes
    head: Head
    ask: Ask
    stream: bool
    num_prompts: int | None

    def forget_body(self) -> None:
        """And what is a view of it."""
        self.body, self.head, self.ask.head = b"", NO_HEAD, None


class Attempt:
    """The legs of one try. close() when its answer is not wanted any longer, or complete; owed in every case."""

    __slots__ = ("_closed", "_counted", "_metrics", "_out", "_pool", "_prompt", "_spans", "call", "decode", "engine", "local_reason", "placement",
                 "prefill")  # fmt: skip

    def __init__(self, call: Call, prompt: Prompt, placement: Placement, engine: Engine, client: NodeClient, metrics: RouterMetrics) -> None:
        self.call = call
        self.placement = placement
        self.engine = engine
        self.local_reason = placement.local_reason if prompt.api.pair else None  # why the decode node computes the prompt, if it does
        self.prefill: PrefillLeg | None = None
        self.decode: Leg | None = None
        self._prompt = prompt
        self._pool = client.pool
        self._metrics = metrics
        self._out = Outgoing(prompt.body, prompt.head, placement.prefill, placement.decode, mint_rooms(prompt.num_prompts), prompt.request_id)
        self._closed = False
        self._counted = False
        self._spans: dict[str, Span] = {}

    def start(self) -> None:
        if self.placement.prefill is not None:
            request = self.engine.prefill_leg(self._out)
            head = self._head(self.placement.prefill, request)
            self.prefill = PrefillLeg(self._pool, self.placement.prefill, self._prompt.request_id, head, request.body, self._prompt.api.form,
                                      self._on_prefill)
            self.prefill.start()
        elif not self._prompt.stream and self.call.ticket is not None:
            self.call.ticket.untimed()
        if self.prefill is None or not self.engine.sequential:
            self._start_decode(None)

    def answered(self) -> bool:
        """The decode node's first body bytes are there. Raises LegFailed, RequestError."""
        prefill, decode = self.prefill, self.decode
        if decode is None:
            assert prefill is not None
            if prefill.failure is None and prefill.ended:
                self._start_decode(prefill.body)
            elif prefill.failure is not None:
                raise prefill.failure
            return False
        if decode.failure is None and decode.answered and decode.reply is not None:
            reply = decode.reply
            if reply.has_parts:
                return True
            if reply.complete or reply.error is not None:  # else only its head has come, and somebody else woke us
                what = "its reply is empty" if reply.complete else f"its reply is cut short: {reply.error}"
                decode.fail(broken(decode.node, what, decode.began_s))
        failures = [leg.failure for leg in (prefill, decode) if leg is not None and leg.failure is not None]
        if failures:
            raise min(failures, key=lambda failure: failure.retryable)  # of two at once, the one that speaks of the request itself
        return False

    def answer(self) -> tuple[Leg, Reply]:
        """The decode leg and its reply, once answered() was True."""
        assert self.decode is not None
        assert self.decode.reply is not None
        return self.decode, self.decode.reply

    def forget_body(self) -> None:
        """The decode node answers, so nothing is sent again: prompts are long, and answers last."""
        self._out.body, self._out.head, self._out.dual = b"", NO_HEAD, None
        for leg in (self.prefill, self.decode):
            if leg is not None:
                leg.forget_body()
        self._prompt.forget_body()
        self.call.exchange.release_body()

    def close(self, *, complete: bool) -> None:
        """complete: the reply was read to its end, so the prefill leg gets a moment to end by itself."""
        if self._closed:
            return
        self._closed = True
        if self.decode is not None:
            self.decode.cancel()
            status = 200 if complete else GIVEN_UP if self.decode.failure is None else self.decode.failure.failure.status
            self._leg_ended(self.decode, status)
            self.decode.on_progress = _nothing  # a leg and its owner hold one another: not for the collector to find
        self.placement.decode_ended()
        if self.prefill is None or self.prefill.ended:
            self._count_prefill()
        elif complete:
            asyncio.get_running_loop().call_later(PREFILL_GRACE_S, self._give_up_prefill)
        else:
            self._give_up_prefill()

    def _start_decode(self, prefill_reply: bytes | None) -> None:
        try:
            request = self.engine.decode_leg(self._out, prefill_reply)
        except RequestError as error:  # of what the prefill node answered
            raise broken(self.placement.prefill or self.placement.decode, error.failure.message) from None
        if request.local_reason is not None:
            self.local_reason = request.local_reason
            self._metrics.local(request.local_reason)
        node = self.placement.decode
        self.decode = Leg(self._pool, node, self._prompt.request_id, self._head(node, request), request.body, self._prompt.api.form, self.call.wake)
        self.decode.start()

    def _head(self, node: Node, request: LegRequest) -> bytes:
        lines = self._prompt.lines + request.headers
        if self.call.span is not None:
            span = self._spans[node.leg] = self.call.span.child(f"{node.leg} leg", client=True, **{NODE_URL: node.url})
            lines += b"%b: %b\r\n" % (TRACEPARENT_HEADER, span.traceparent)
        return message_head(b"POST", node, self._prompt.target, b"%bcontent-length: %d\r\n" % (lines, len(request.body)))

    def _leg_ended(self, leg: Leg, status: int) -> None:
        self._metrics.leg_ended(leg.node.leg, leg.node.url, status)
        if (span := self._spans.pop(leg.node.leg, None)) is not None:
            span.end(status)

    def _on_prefill(self) -> None:
        if self.prefill is not None and self.prefill.ended:
            self._count_prefill()
            if self.prefill.failure is None and not self.engine.sequential:
                return  # the decode node's answer decides
        self.call.wake()

    def _give_up_prefill(self) -> None:
        if self.prefill is not None:
            self.prefill.cancel()
        self._count_prefill()

    def _count_prefill(self) -> None:
        if self._counted:
            return
        self._counted = True
        if self.prefill is None:
            return
        self.prefill.on_progress = _nothing
        failed = self.prefill.failure
        whole = failed is None and self.prefill.reply is not None and self.prefill.reply.complete
        self.placement.prefill_ended(whole)
        if whole and not self._prompt.stream:  # of a stream it is the first byte, which also waits for what the decode node has too little of
            self.call.prompt_computed()
        self._leg_ended(self.prefill, failed.failure.status if failed is not None else 200 if whole else GIVEN_UP)


def _nothing() -> None:
    """Nobody waits any longer."""


class Dispatcher:
    def __init__(self, pairing: Pairing, client: NodeClient, metrics: RouterMetrics, config: RouterConfig) -> None:
        self._engines = engines_for(config.kv_connector)
        self._pairing = pairing
        self._client = client
        self._metrics = metrics
        self._max_retries = config.max_retries
        self._verdict_timeout_s = config.connect_timeout_s  # of a probe

    async def answer(self, call: Call, prompt: Prompt) -> Attempt:
        """An attempt whose decode node has begun to answer. Raises LegFailed, RequestError when there is no pair, or what interrupts
        the call."""
        first: LegFailed | None = None
        tried: set[Node] = set()
        busy: set[Node] = set()
        for _ in range(1 + self._max_retries):
            try:
                placement = await self._place(call, prompt, tried, busy, waits=first is None or not first.timed_out)
            except RequestError:
                if first is not None:
                    raise first from None
                raise
            if first is not None:
                self._metrics.retried(first.node.leg)
                log.info("%s: tried again after %s", prompt.request_id, first)
            call.placement = placement
            if prompt.api.pair:
                self._metrics.placed(placement)
            try:
                return await self._try(call, prompt, placement)
            except LegFailed as failed:
                if not failed.retryable:
                    raise
                first = first or failed
                tried |= {placement.decode} | ({placement.prefill} if placement.prefill is not None else set())
                if failed.asks_patience or failed.timed_out:
                    busy.add(failed.node)
        assert first is not None
        raise first

    async def _place(self, call: Call, prompt: Prompt, tried: set[Node], busy: set[Node], *, waits: bool) -> Placement:
        """Of nodes that this request has tried only when there is no other, of busy ones never. waits: for the verdict on suspects."""
        try:
            return self._place_now(prompt, tried, busy)
        except RequestError:
            if not waits or not self._pairing.has_suspects:  # asked now: before the task below begins the verdict may have come
                raise
            await call.wait(asyncio.ensure_future(self._pairing.settled(self._verdict_timeout_s)))
        return self._place_now(prompt, tried, busy)

    def _place_now(self, prompt: Prompt, tried: set[Node], busy: set[Node]) -> Placement:
        if not prompt.api.pair:
            return self._pairing.place(prompt.ask, tried, busy, local_reason="no_prompt")
        return self._pairing.place(prompt.ask, tried, busy, why_whole=lambda decode: self._engines[decode.engine].local_reason(prompt.head))

    async def _try(self, call: Call, prompt: Prompt, placement: Placement) -> Attempt:
        attempt = Attempt(call, prompt, placement, self._engines[placement.decode.engine], self._client, self._metrics)
        try:
            attempt.start()
            while not attempt.answered():
                await call.progress()
            placement.decode.answered(attempt.answer()[0].began_s)
            placement.prefill_ended(True)  # there is a token, so the prompt is computed
            if prompt.stream:
                call.prompt_computed()
            attempt.forget_body()
            return attempt
        except BaseException:
            attempt.close(complete=False)
            raise
