"""From a request to a decode node's reply: two legs race, and the first to fail decides.

    pick a pair, mint rooms, POST to both at once
      D's head comes              that is the answer; P may finish on its own, only its failure is counted
      P fails before that         D is cancelled (its connection closed); retry, or P's error
      D fails                     P is cancelled; retry, or D's error
      nothing in time             TimeoutError

A retry is another pair and another room, and only for what another pair may cure (LegFailed.retryable). When retries are used up
the first cause is answered. Load is counted per leg: prefill's ends with the prefill reply, decode's with the stream.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict

from common.errors import RequestError
from router.legs import LegFailed, NodeClient, broken
from router.metrics import RouterMetrics
from router.nodes import Node
from router.pairing import Pair, Pairing
from router.splice import Head, mint_rooms, splice

PREFILL_GRACE_S = 1.0  # after the decode node's last byte; its prompt was computed elsewhere if prefill still goes on

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What goes to the nodes; `chosen` is told each pair that is tried."""

    path: str
    headers: CIMultiDict[str]
    body: bytes
    head: Head
    num_prompts: int | None
    model: str | None
    end_s: float  # of the running loop's clock: when nothing waits any longer
    chosen: Callable[[Pair], None]


@dataclass(slots=True)
class Answer:
    """A decode node's reply under way; close() when it is not wanted any longer, or complete."""

    pair: Pair
    reply: aiohttp.ClientResponse
    prefill: "asyncio.Task[None]"
    prompt_bytes: int

    def close(self, *, complete: bool) -> None:
        """complete: the reply was read to its end, so the prefill leg gets a moment to end by itself."""
        self.pair.decode.end(self.prompt_bytes)
        if complete:
            self.reply.release()
            if not self.prefill.done():
                asyncio.get_running_loop().call_later(PREFILL_GRACE_S, self.prefill.cancel)
        else:
            self.reply.close()
            self.prefill.cancel()


class Dispatcher:
    def __init__(self, pairing: Pairing, client: NodeClient, metrics: RouterMetrics, *, max_retries: int) -> None:
        self._pairing = pairing
        self._client = client
        self._metrics = metrics
        self._max_retries = max_retries
        self._legs: set[asyncio.Task[None] | asyncio.Task[aiohttp.ClientResponse]] = set()

    async def answer(self, prompt: Prompt) -> Answer:
        """Raises LegFailed, RequestError when there is no pair, or TimeoutError."""
        first: LegFailed | None = None
        tried: set[Node] = set()
        for _ in range(1 + self._max_retries):
            try:
                pair = self._pairing.pick(prompt.model, tried)
            except RequestError:
                if first is not None:
                    raise first from None
                raise
            if first is not None:
                self._metrics.retries.inc()
            tried |= {pair.prefill, pair.decode}
            prompt.chosen(pair)
            try:
                return await self._race(prompt, pair)
            except LegFailed as failed:
                if not failed.retryable:
                    raise
                first = first or failed
        assert first is not None
        raise first

    async def _race(self, prompt: Prompt, pair: Pair) -> Answer:
        body = splice(prompt.body, prompt.head, pair.prefill.bootstrap_host, pair.prefill.bootstrap_port, mint_rooms(prompt.num_prompts))
        prefill = asyncio.create_task(self._prefill(pair.prefill, prompt, body))
        decode = asyncio.create_task(self._client.post(pair.decode, prompt.path, prompt.headers, body))
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
            return Answer(pair, decode.result(), prefill, len(body))
        except BaseException:
            pair.decode.end(len(body))
            prefill.cancel()
            if not decode.cancel() and decode.exception() is None:
                decode.result().close()
            raise

    async def _prefill(self, node: Node, prompt: Prompt, body: bytes) -> None:
        async with asyncio.timeout_at(prompt.end_s):  # its own: the stream may end before it
            reply = await self._client.post(node, prompt.path, prompt.headers, body)
            try:
                while await reply.content.readany():
                    pass
            except (aiohttp.ClientError, OSError) as error:
                raise broken(node, f"its reply is cut short: {error}") from error
            finally:
                reply.close()

    def _watch(self, leg: "asyncio.Task[None] | asyncio.Task[aiohttp.ClientResponse]", node: Node) -> None:
        self._legs.add(leg)  # the loop itself keeps no task alive

        def ended(task: "asyncio.Task[None] | asyncio.Task[aiohttp.ClientResponse]") -> None:
            self._legs.discard(task)
            error = None if task.cancelled() else task.exception()
            if isinstance(error, LegFailed):
                self._metrics.leg_failed(node, error.failure.status)
                log.info("%s", error)

        leg.add_done_callback(ended)


def _is_retryable(error: BaseException) -> bool:
    return isinstance(error, LegFailed) and error.retryable
