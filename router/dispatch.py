"""From a request to a decode node's reply: two legs race, and the first to fail decides.

    pick a pair, mint rooms, POST to both at once
      D's first body bytes come   that is the answer; P may finish on its own, only its failure is counted
      P fails before that         D is cancelled (its connection closed); retry, or P's error
      D fails                     P is cancelled; retry, or D's error
      nothing in time             TimeoutError

P also fails by an error event in a stream. A retry is another pair, or the same one when there is no other, and another room; only
for what it may cure (LegFailed.retryable), and never at a node that asked for patience. A node that failed is probed before it is
used again. When retries are used up the first cause is answered.

Load is counted per leg: prefill's ends with the prefill reply, decode's with the stream.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import RequestError
from router.connection import Reply
from router.engines.base import Outgoing
from router.engines.dual import PDSERVE
from router.events import end_of_events, error_in, is_event_stream
from router.legs import CUT_SHORT, LegFailed, NodeClient, broken, failed_in_band
from router.metrics import RouterMetrics
from router.nodes import Node
from router.pairing import Pair, Pairing
from router.splice import Head, mint_rooms

Beginning = tuple[Reply, bytes]  # of a decode node's reply: its head was read, and the body's first bytes
PREFILL_GRACE_S = 1.0  # after the decode node's last byte; its prompt was computed elsewhere if prefill still goes on

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What goes to the nodes; `chosen` is told each pair that is tried."""

    target: bytes  # path and query
    request_id: str
    headers: bytes
    body: bytes
    head: Head
    num_prompts: int | None
    model: str | None
    end_s: float  # of the running loop's clock: when nothing waits any longer
    chosen: Callable[[Pair], None]


@dataclass(slots=True)
class Answer:
    """A decode node's reply under way; close() when it is not wanted any longer, or complete. first: the body's first bytes."""

    pair: Pair
    reply: Reply
    first: bytes
    prefill: "asyncio.Task[None]"
    prompt_bytes: int

    def close(self, *, complete: bool) -> None:
        """complete: the reply was read to its end, so the prefill leg gets a moment to end by itself."""
        self.pair.decode.end(self.prompt_bytes)
        if complete:
            self.reply.close()
            if not self.prefill.done():
                asyncio.get_running_loop().call_later(PREFILL_GRACE_S, self.prefill.cancel)
        else:
            self.reply.close()
            self.prefill.cancel()


class Dispatcher:
    def __init__(self, pairing: Pairing, client: NodeClient, metrics: RouterMetrics, *, max_retries: int, verdict_timeout_s: float) -> None:
        self._pairing = pairing
        self._client = client
        self._metrics = metrics
        self._max_retries = max_retries
        self._verdict_timeout_s = verdict_timeout_s
        self._legs: set[asyncio.Task[None] | asyncio.Task[Beginning]] = set()

    async def answer(self, prompt: Prompt) -> Answer:
        """Raises LegFailed, RequestError when there is no pair, or TimeoutError."""
        first: LegFailed | None = None
        tried: set[Node] = set()
        busy: set[Node] = set()
        for _ in range(1 + self._max_retries):
            try:
                pair = await self._pick(prompt, tried, busy)
            except RequestError:
                if first is not None:
                    raise first from None
                raise
            if first is not None:
                self._metrics.retried(first.node.leg)
                log.info("%s: tried again after %s", prompt.request_id, first)
            tried |= {pair.prefill, pair.decode}
            prompt.chosen(pair)
            try:
                return await self._race(prompt, pair)
            except LegFailed as failed:
                if not failed.retryable:
                    raise
                first = first or failed
                if failed.asks_patience:
                    busy.add(failed.node)
        assert first is not None
        raise first

    async def _pick(self, prompt: Prompt, tried: set[Node], busy: set[Node]) -> Pair:
        try:
            return self._pairing.pick(prompt.model, tried, busy)
        except RequestError:
            if not await self._pairing.settled(self._verdict_timeout_s):
                raise
        return self._pairing.pick(prompt.model, tried, busy)

    async def _race(self, prompt: Prompt, pair: Pair) -> Answer:
        rooms = mint_rooms(prompt.num_prompts)
        body = PDSERVE.prefill_leg(Outgoing(prompt.body, prompt.head, pair.prefill, pair.decode, rooms, prompt.request_id)).body
        prefill = asyncio.create_task(self._prefill(pair.prefill, prompt, body))
        decode = asyncio.create_task(self._decode(pair.decode, prompt, body))
        for leg, node in ((prefill, pair.prefill), (decode, pair.decode)):
            self._watch(leg, node)
        pair.prefill.begin(len(body))
        prefill.add_done_callback(lambda _: pair.prefill.end(len(body)))
        pair.decode.begin(len(body))
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done() and prefill.exception() is None:
                await asyncio.wait((decode,))
            failures = [error for leg in (prefill, decode) if leg.done() and (error := leg.exception()) is not None]
            if failures and not (decode.done() and decode.exception() is None):
                raise min(failures, key=_is_retryable)  # of two at once, the one that speaks of the request itself
            return Answer(pair, *decode.result(), prefill, len(body))
        except BaseException:
            pair.decode.end(len(body))
            prefill.cancel()
            if not decode.cancel() and decode.exception() is None:
                decode.result()[0].close()
            raise

    async def _decode(self, node: Node, prompt: Prompt, body: bytes) -> "Beginning":
        reply = await self._client.post(node, prompt.target, prompt.headers, body)
        try:
            first = await reply.read()
        except CUT_SHORT as error:
            reply.close()
            raise broken(node, f"its reply is cut short: {error}") from error
        except asyncio.CancelledError:
            reply.close()
            raise
        if not first:
            reply.close()
            raise broken(node, "its reply is empty")
        return reply, first

    async def _prefill(self, node: Node, prompt: Prompt, body: bytes) -> None:
        async with asyncio.timeout_at(prompt.end_s):  # its own: the stream may end before it
            reply = await self._client.post(node, prompt.target, prompt.headers, body)
            try:
                await _read_prefill(node, reply)
            except CUT_SHORT as error:
                raise broken(node, f"its reply is cut short: {error}") from error
            finally:
                reply.close()

    def _watch(self, leg: "asyncio.Task[None] | asyncio.Task[Beginning]", node: Node) -> None:
        self._legs.add(leg)  # the loop itself keeps no task alive

        def ended(task: "asyncio.Task[None] | asyncio.Task[Beginning]") -> None:
            self._legs.discard(task)
            error = None if task.cancelled() else task.exception()
            status = error.failure.status if isinstance(error, LegFailed) else 200 if error is None and not task.cancelled() else 499
            self._metrics.leg_ended(node.leg, node.url, status)
            if isinstance(error, LegFailed):
                log.debug("%s", error)

        leg.add_done_callback(ended)


async def _read_prefill(node: Node, reply: Reply) -> None:
    """To its end. Raises LegFailed for an error event, or CUT_SHORT."""
    held, streamed = b"", is_event_stream(reply.header(b"content-type"))
    while part := await reply.read():
        if streamed:
            held += part
            end = end_of_events(held)
            _raise_error_in(node, held[:end])
            held = held[end:]
    _raise_error_in(node, held)


def _raise_error_in(node: Node, events: bytes) -> None:
    if (error := error_in(events)) is not None:
        raise failed_in_band(node, error)


def _is_retryable(error: BaseException) -> bool:
    return isinstance(error, LegFailed) and error.retryable
