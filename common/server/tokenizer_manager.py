"""Between HTTP and the scheduler: a request goes in as text, its outputs come back to whoever awaits them.

Ownership. `open` registers one Stream per HTTP request, with one rid per prompt. A rid leaves the table exactly once: at its
terminal output, when its client leaves, when its deadline has passed (a backstop, slightly after the scheduler's own), or when
the node ends. What still arrives for it later finds nobody and is dropped. So every request ends once (R5), and whatever does not
end by itself is aborted in the scheduler and forgotten by the detokenizer.

Bound (R7): at most max_queued_requests + max_running_requests prompts are open, those being tokenised included.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import zmq

from common.config import NodeAddresses
from common.errors import Failure, RequestError, deadline_exceeded, invalid, overloaded
from common.http_exchange import ClientLeft
from common.messages import (
    Abort,
    AbortCause,
    Drain,
    DropStream,
    Generate,
    NodeStatus,
    SpanOuts,
    TextOut,
    TextOuts,
    ToDetokenizer,
    ToScheduler,
    ToTokenizer,
)
from common.request import Bootstrap, SamplingParams
from common.server.health import NodeHealth
from common.server.openai_schema import DEFAULT_COMPLETION_TOKENS, ApiRequest
from common.server.tokenizer import Tokenizer
from common.sockets import Receiver, Sender
from common.tracing import Tracing

INLINE_CHARACTERS = 20_000  # text tokenised on the event loop: about 5 ms; longer text goes to a thread
PROBED_CHARACTERS_A_TOKEN = 12  # ordinary text has 3 to 5
DEADLINE_GRACE_S = 0.5  # the scheduler ends a request at its deadline and knows the stage; this is for when it does not
MESSAGES_A_TURN = 64  # messages handled before other callbacks of the event loop get their turn


@dataclass(frozen=True, slots=True)
class Limits:
    """What can never be served is refused at intake (R7)."""

    context_length: int  # tokens of one request, prompt and output together
    pool_tokens: int  # tokens the KV pool holds
    vocab_size: int
    max_open_prompts: int
    outputs_elsewhere: bool  # prefill node: the output of a prompt with a room takes no page of this pool

    def max_tokens(self, bootstrap: Bootstrap | None) -> int:
        """Most tokens of one request, prompt and output together."""
        if self.outputs_elsewhere and bootstrap is not None:
            return self.context_length
        return min(self.context_length, self.pool_tokens)

    def too_long(self, num_prompt_tokens: str, field: str) -> RequestError:
        sentence = f"the prompt has {num_prompt_tokens} tokens; this node takes {self.max_tokens(None)}, prompt and answer together"
        return invalid(f"{sentence}: shorten it, or raise {self.flag}", param=field, code="context_length_exceeded")

    @property
    def flag(self) -> str:
        """What sets max_tokens."""
        return "--context-length" if self.context_length <= self.pool_tokens else "--max-total-tokens"


class Stream:
    """Outputs of one HTTP request in order of arrival. One task awaits `next`; the TokenizerManager feeds it."""

    def __init__(self, rids: list[str], deadline_s: float, rooms: frozenset[int]) -> None:
        self.rids = rids
        self.deadline_s = deadline_s  # unix time
        self.rooms = rooms
        self.num_open = len(rids)
        self.backstop: asyncio.TimerHandle | None = None
        self._arrived: list[tuple[int, TextOut]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._client_left = False

    async def next(self) -> list[tuple[int, TextOut]]:
        """(prompt index, output) of everything that arrived since the last call; at least one. Raises ClientLeft.

        After an output with a failure nothing more follows for any prompt.
        """
        while not self._arrived:
            if self._client_left:
                raise ClientLeft
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        arrived, self._arrived = self._arrived, []
        return arrived

    def client_left(self) -> None:
        self._client_left = True
        self._arrived.clear()
        self._wake()

    def put(self, index: int, out: TextOut) -> None:
        self._arrived.append((index, out))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class TokenizerManager:
    def __init__(self, health: NodeHealth, context: zmq.Context[zmq.Socket[bytes]], addresses: NodeAddresses, tracing: Tracing | None = None) -> None:
        """Binds the socket that outputs arrive on; `load` and then `listen` before requests are opened."""
        self._health = health
        self._tracing = tracing
        self._receiver: Receiver[ToTokenizer] = Receiver(context, addresses.tokenizer, ToTokenizer)
        self._scheduler: Sender[ToScheduler] = Sender(context, addresses.scheduler)
        self._detokenizer: Sender[ToDetokenizer] = Sender(context, addresses.detokenizer)
        self._open: dict[str, tuple[Stream, int]] = {}
        self._rooms: set[int] = set()
        self._num_tokenising = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tokenizer: Tokenizer | None = None
        self._limits: Limits | None = None

    def load(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    def listen(self) -> None:
        """Take outputs and heartbeats from now on."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._receiver.socket.fileno(), self._receive)
        self._loop.call_soon(self._receive)  # the descriptor tells of changes: what came before was no change

    @property
    def num_open(self) -> int:
        """Prompts whose answer is not complete."""
        return len(self._open) + self._num_tokenising

    async def open(self, request: ApiRequest, request_id: str, deadline_s: float, traceparent: str = "") -> Stream:
        """Validate, tokenise, register and send a request. Raises RequestError; then nothing of it is left here.

        traceparent: of the span to which the scheduler's belong, if there is one."""
        refusal = self._health.refusal()
        if refusal is not None:
            raise RequestError(refusal)
        limits = self._limits
        assert limits is not None
        self._admit(request.num_prompts, limits)
        self._num_tokenising += request.num_prompts
        try:
            prompts = await self._prompt_ids(request, limits)
        finally:
            self._num_tokenising -= request.num_prompts
        refusal = self._health.refusal()
        if refusal is not None:
            raise RequestError(refusal)
        if deadline_s <= time.time():
            raise RequestError(deadline_exceeded("intake"))
        generates = [self._generate(request, f"{request_id}.{i}", i, ids, limits, deadline_s, traceparent) for i, ids in enumerate(prompts)]
        return self._register(generates, deadline_s)

    def close(self, stream: Stream) -> None:
        """Nobody awaits this stream any more: abort what is still open of it."""
        self._end(stream, "client_left")

    def fail_all(self, failure: Failure, cause: AbortCause = "shutdown") -> None:
        """End every open request with `failure`."""
        for stream in {id(stream): stream for stream, _ in self._open.values()}.values():
            self._end(stream, cause, failure)

    def drain(self, deadline_s: float) -> None:
        """Tell the scheduler to finish what it has until `deadline_s` (unix time), then exit."""
        self._scheduler.send(Drain(deadline_s))

    def shut(self) -> None:
        """Close the sockets."""
        if self._loop is not None:
            self._loop.remove_reader(self._receiver.socket.fileno())
            self._loop = None
        for end in (self._receiver, self._scheduler, self._detokenizer):
            end.close()

    # ---- intake ---------------------------------------------------------------------------------------------------------

    def _admit(self, num_prompts: int, limits: Limits) -> None:
        if num_prompts > limits.max_open_prompts:
            raise invalid(f"{num_prompts} prompts in one request; at most {limits.max_open_prompts} may be open at once: split it", param="prompt")
        if self.num_open + num_prompts > limits.max_open_prompts:
            limit_text = f"the limit of {limits.max_open_prompts} (--max-queued-requests + --max-running-requests)"
            raise overloaded(f"{self.num_open} requests are open; with this one they pass {limit_text}", stage="intake")

    async def _prompt_ids(self, request: ApiRequest, limits: Limits) -> list[list[int]]:
        """Token ids of every prompt, each checked to be in the vocabulary and at least one token long."""
        if request.num_characters <= INLINE_CHARACTERS:
            prompts = self._tokenise(request, limits)
        else:
            prompts = await asyncio.to_thread(self._tokenise, request, limits)
        for ids in prompts:
            if not ids:
                raise invalid("the prompt has no tokens; an answer needs at least one token to follow", param=request.prompt_field)
            _check_vocabulary(ids, limits.vocab_size, request.prompt_field)
        _check_vocabulary(request.sampling.stop_token_ids, limits.vocab_size, "stop_token_ids")
        _check_vocabulary([token_id for token_id, _ in request.sampling.logit_bias], limits.vocab_size, "logit_bias")
        return prompts

    def _tokenise(self, request: ApiRequest, limits: Limits) -> list[list[int]]:
        tokenizer = self._tokenizer
        assert tokenizer is not None

        def encode(text: str, add_special_tokens: bool) -> list[int]:
            """A text far beyond the limit is refused after a look at its beginning: tokenising megabytes takes seconds."""
            beginning = text[: limits.context_length * PROBED_CHARACTERS_A_TOKEN]
            if len(beginning) < len(text):
                num_tokens = len(tokenizer.encode(beginning, add_special_tokens)) - 1  # the cut may have split the last one
                if num_tokens >= limits.context_length:
                    raise limits.too_long(f"more than {num_tokens}", request.prompt_field)
            return tokenizer.encode(text, add_special_tokens)

        if request.conversation is not None:
            text = tokenizer.apply_chat_template(request.conversation.messages, **request.conversation.template_arguments)
            return [encode(text, add_special_tokens=False)]
        return [encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt for prompt in request.prompts]

    def _generate(self, request: ApiRequest, rid: str, index: int, ids: list[int], limits: Limits, deadline_s: float, traceparent: str) -> Generate:
        bootstrap = None if request.bootstraps is None else request.bootstraps[index]
        sampling = _with_length(request, len(ids), limits, limits.max_tokens(bootstrap))
        return Generate(rid, ids, sampling, request.text, deadline_s, bootstrap, traceparent)

    def _register(self, generates: list[Generate], deadline_s: float) -> Stream:
        rooms = frozenset(generate.bootstrap.room for generate in generates if generate.bootstrap is not None)
        if not rooms.isdisjoint(self._rooms):
            raise invalid("`bootstrap_room` names a room that another open request has; every request needs its own", param="bootstrap_room")
        rids = [generate.rid for generate in generates]
        assert self._open.keys().isdisjoint(rids), f"rid {rids[0]} is open"
        stream = Stream(rids, deadline_s, rooms)
        self._rooms |= rooms
        self._open.update((rid, (stream, i)) for i, rid in enumerate(rids))
        loop = asyncio.get_running_loop()
        stream.backstop = loop.call_later(max(0.0, deadline_s - time.time()) + DEADLINE_GRACE_S, self._backstop, stream)
        for generate in generates:
            self._scheduler.send(generate)
        return stream

    # ---- outputs --------------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        if self._loop is None:
            return  # closed between the event and this call
        for _ in range(MESSAGES_A_TURN):
            message = self._receiver.recv()
            if message is None:
                return
            if isinstance(message, NodeStatus):
                self._health.heartbeat(message)
            elif isinstance(message, SpanOuts):
                if self._tracing is not None:
                    for span in message.spans:
                        self._tracing.emit(span)
            else:
                self._deliver(message)
        self._loop.call_soon(self._receive)

    def _deliver(self, message: TextOuts) -> None:
        for out in message.outs:
            entry = self._open.get(out.rid)
            if entry is None:
                continue
            stream, index = entry
            stream.put(index, out)
            if out.failure is not None:
                self._forget(stream, out.rid)
                self._end(stream, "client_left")  # the other prompts of the same request: one failure is the reply
            elif out.finish_reason is not None:
                self._forget(stream, out.rid)
                if isinstance(out.matched_stop, str):  # found in the text: the scheduler does not know yet
                    self._scheduler.send(Abort(out.rid, "stop_string"))

    def _backstop(self, stream: Stream) -> None:
        self._end(stream, "deadline", deadline_exceeded("generation"))

    def _end(self, stream: Stream, cause: AbortCause, failure: Failure | None = None) -> None:
        """Abort what is open of a stream; with `failure`, say so to whoever awaits it. Does nothing when all has ended."""
        open_rids = [rid for rid in stream.rids if rid in self._open]
        if failure is not None and open_rids:
            rid = open_rids[0]
            stream.put(self._open[rid][1], TextOut(rid=rid, failure=failure))
        for rid in open_rids:
            self._forget(stream, rid)
            self._scheduler.send(Abort(rid, cause))
            self._detokenizer.send(DropStream(rid))

    def _forget(self, stream: Stream, rid: str) -> None:
        del self._open[rid]
        stream.num_open -= 1
        if stream.num_open == 0:
            self._rooms -= stream.rooms
            if stream.backstop is not None:
                stream.backstop.cancel()


def _check_vocabulary(ids: Iterable[int], vocab_size: int, param: str) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise invalid(f"token id {repr(wrong)[:40]} is outside the vocabulary of {vocab_size} tokens", param=param)


def _with_length(request: ApiRequest, num_prompt_tokens: int, limits: Limits, max_tokens: int) -> SamplingParams:
    """The request's sampling parameters with the number of tokens it may generate."""
    num_left = max_tokens - num_prompt_tokens
    if num_left < 1:
        raise limits.too_long(str(num_prompt_tokens), request.prompt_field)
    asked = request.max_new_tokens
    if asked is not None and asked > num_left:
        sentence = f"{num_prompt_tokens} prompt tokens and `max_tokens` {repr(asked)[:40]} are more than this node takes, {max_tokens} together"
        raise invalid(f"{sentence}: lower max_tokens to {num_left}, or raise {limits.flag}", param="max_tokens", code="context_length_exceeded")
    default = num_left if request.kind == "chat" else min(num_left, DEFAULT_COMPLETION_TOKENS)
    return msgspec.structs.replace(request.sampling, max_new_tokens=default if asked is None else asked)
