"""vLLM: the decode node is told where the prefill node keeps the KV of this prompt, in `kv_transfer_params`.

    nixl       prefill leg first: it answers with the parameters, which go into the decode leg as they are
    mooncake   both legs at once: a transfer id that the router makes up joins them; the decode node also needs the prefill node's
               bootstrap server and engine id, which that server tells (GET /query, asked by health.py)

The prefill leg is the client's request, stopped after one token that nobody reads. Whatever a chat template might put into the prompt stays
(tools, tool_choice, response_format, reasoning_effort, ...): were it taken out, the two nodes could make different prompts of one
request, and the decode node would continue another's pages without an error. What only shapes the answer goes. Sampling cannot end it
before the token limit, because a connector may park pages only then.

What cannot be split is computed by the decode node, as it says: n > 1 and lists of prompts (the parameters name one prompt's pages, which are
released after one reader), prompt log-probabilities and echo (they need the prompt's logits, where the decode node samples), and /v1/responses
(it may run tools and keep what it answered: nothing to be done twice).

Parameters that a client sends are taken out: they name pages of others.

Read: vLLM 0.32, vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py and .../mooncake/mooncake_connector.py,
tests/v1/kv_connector/nixl_integration/toy_proxy_server.py, examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from common.errors import Failure, RequestError
from router.engines.base import LegRequest, Outgoing
from router.splice import Head, num_prompts, splice

if TYPE_CHECKING:
    from router.node import Node

PARAMS = "kv_transfer_params"
NO_PAIR = (PARAMS,)
MOONCAKE_PORT = 8998  # of a bootstrap server, as vLLM has it
# Members of the prefill leg, and what would contradict them or be work for nobody. A request without `stream` is not streamed.
ONE_TOKEN = {"max_tokens": b"1", "ignore_eos": b"true"}
NOT_STREAMED = {"stream": b"false"}
UNWANTED = (
    "max_completion_tokens", "min_tokens", "min_completion_tokens", "stream_options", "stop", "stop_token_ids", "stop_sequences", "logprobs",
    "top_logprobs", "logprob_token_ids", "repetition_detection", "thinking_token_budget",
)  # fmt: skip
# What keeps a request whole, unless it is one of these values.
WHOLE: dict[str, tuple[bytes, ...]] = {
    "n": (b"1", b"null"),
    "best_of": (b"1", b"null"),
    "use_beam_search": (b"false", b"null"),
    "prompt_logprobs": (b"null",),
    "echo": (b"false", b"null"),
    "input": (),  # of /v1/responses
}
NIXL_PARAMS = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None  # with --enable-prompt-tokens-details


class _Reply(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: _Usage | None = None

    @property
    def cached_tokens(self) -> int | None:
        return None if self.usage is None or self.usage.prompt_tokens_details is None else self.usage.prompt_tokens_details.cached_tokens


class _Parked(msgspec.Struct):
    remote_block_ids: list[object] | None = None


class _EngineEntry(msgspec.Struct):
    engine_id: str


_decode_engines = msgspec.json.Decoder(dict[int, _EngineEntry]).decode
_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_parked = msgspec.json.Decoder(_Parked | None).decode


@dataclass(frozen=True, slots=True)
class Nixl:
    name = "vllm"
    decode_computes = True
    sequential = True

    def local_reason(self, head: Head) -> str | None:
        return _local_reason(head)

    def prefill_leg(self, out: Outgoing) -> LegRequest:
        return _one_token(out, NIXL_PARAMS)

    def decode_leg(self, out: Outgoing, prefill_reply: bytes | None) -> LegRequest:
        if prefill_reply is None:
            return LegRequest(splice(out.body, out.head, {}, NO_PAIR))
        params = _parked(prefill_reply)
        if params is None:
            return LegRequest(splice(out.body, out.head, {}, NO_PAIR), local_reason="nothing_parked")
        return LegRequest(splice(out.body, out.head, {PARAMS: params}))


@dataclass(frozen=True, slots=True)
class Mooncake:
    name = "vllm"
    decode_computes = True
    sequential = False

    def local_reason(self, head: Head) -> str | None:
        return _local_reason(head)

    def prefill_leg(self, out: Outgoing) -> LegRequest:
        rank, _ = _engine(out)
        leg = _one_token(out, b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"%s"}' % _transfer_id(out))
        return leg if rank is None else leg._replace(headers=b"x-data-parallel-rank: %d\r\n" % rank)

    def decode_leg(self, out: Outgoing, prefill_reply: bytes | None) -> LegRequest:
        if out.prefill is None:
            return LegRequest(splice(out.body, out.head, {}, NO_PAIR))
        address, engine_id = msgspec.json.encode(mooncake_url(out.prefill)), msgspec.json.encode(_engine(out)[1])
        form = b'{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":%s,"remote_engine_id":%s,"transfer_id":"%s"}'
        return LegRequest(splice(out.body, out.head, {PARAMS: form % (address, engine_id, _transfer_id(out))}))


def mooncake_url(node: "Node") -> str:
    """Of a prefill node's bootstrap server."""
    host = f"[{node.bootstrap_host}]" if ":" in node.bootstrap_host else node.bootstrap_host
    return f"http://{host}:{node.bootstrap_port or MOONCAKE_PORT}"


def mooncake_engines(answer: bytes) -> list[str]:
    """Engine ids by data parallel rank, as GET /query of a bootstrap server answers; none when this is no such answer."""
    try:
        entries = _decode_engines(answer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    return [entries[rank].engine_id for rank in sorted(entries)]


def _engine(out: Outgoing) -> tuple[int | None, str]:
    """Which of the prefill node's engines computes the prompt: its data parallel rank, None when it has one engine only; and its id."""
    assert out.prefill is not None
    ids = out.prefill.info.kv_engine_ids
    if not ids:
        what = f"prefill node {out.prefill.url} cannot be used with Mooncake: its bootstrap server has not told an engine id"
        raise RequestError(Failure(503, what, code="no_engine_id", stage="router", retry_after_s=1.0))
    rank = _room(out) % len(ids)
    return (None if len(ids) == 1 else rank), ids[rank]


def _local_reason(head: Head) -> str | None:
    for name, ordinary in WHOLE.items():
        value = getattr(head, name)
        if value is not msgspec.UNSET and bytes(value) not in ordinary:
            return name
    return "batch" if (num_prompts(head) or 1) > 1 else None


def _one_token(out: Outgoing, params: bytes) -> LegRequest:
    return LegRequest(splice(out.body, out.head, {**ONE_TOKEN, **(NOT_STREAMED if out.head.stream else {}), PARAMS: params}, UNWANTED))


def _transfer_id(out: Outgoing) -> bytes:
    return b"xfer-%x" % _room(out)


def _room(out: Outgoing) -> int:
    return out.rooms if isinstance(out.rooms, int) else out.rooms[0]  # a list has one prompt: longer ones are not split


def _parked(reply: bytes) -> bytes | None:
    """The parameters in a prefill node's reply, with what its cache held of the prompt, which the decode node then reports as usage; else that
    would be all it has read. None when P keeps no pages for anyone: of that a decode node must not be told, its engine stops with an
    assertion. Raises RequestError 502 when this is no such reply."""
    try:
        answer = _decode_reply(reply)
        params = bytes(answer.kv_transfer_params)
        parked = _decode_parked(params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = f"the prefill node's reply is not a vLLM completion: {error}"
        raise RequestError(Failure(502, what, code="node_failed", stage="prefill")) from None
    if parked is None or not parked.remote_block_ids:
        return None
    return params if answer.cached_tokens is None else b'%s,"remote_prefill_cached_tokens":%d}' % (params[:-1], answer.cached_tokens)


NIXL = Nixl()
MOONCAKE = Mooncake()
