"""The two legs of a request as each engine wants them, against nodes that are as strict as theirs."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import msgspec
import pytest
from mock_node import DONE, INFO, WHOLE, MockNode, Rooms, mock_nodes
from mock_sglang import GENERATE, MockSglang
from mock_vllm import ONE_TOKEN, REFUSED, MockVllm, Parked

from common.config import RouterConfig
from common.errors import RequestError
from router.engines import DETECT_PATHS, ENGINES, Engine, Outgoing, detect, engines_for, facts
from router.engines.vllm import mooncake_engines
from router.health import Prober
from router.legs import NodeClient
from router.node import Node
from router.nodes import NodeTable
from router.splice import mint_rooms, num_prompts, read_head

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MOONCAKE = engines_for("mooncake")["vllm"]
NIXL = engines_for("nixl")["vllm"]


@dataclass
class Pair:
    """A prefill and a decode mock, and a router reduced to what an engine says of the legs."""

    prefill: MockNode
    decode: MockNode
    engine: Engine
    client: httpx.AsyncClient
    local: str | None = None  # why the last answer's prompt was computed by the decode node

    async def ask(self, path: str, body: dict[str, Any] | bytes, *, without_prefill: bool = False) -> tuple[int, bytes]:
        """The decode node's answer, or the prefill node's when it refuses."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = read_head(raw)
        self.local = "asked" if without_prefill else self.engine.local_reason(head)
        prefill, decode = Node("prefill", self.prefill.url), Node("decode", self.decode.url)
        if isinstance(self.prefill, MockVllm) and self.prefill.connector == "mooncake":
            prefill = Node("prefill", self.prefill.url, configured_bootstrap_port=self.prefill.port)
            prefill.info = msgspec.structs.replace(prefill.info, kv_engine_ids=(self.prefill.engine_id,))
        out = Outgoing(raw, head, None if self.local else prefill, decode, mint_rooms(num_prompts(head)), "id-1")
        if out.prefill is None:
            return await self._post(self.decode, path, self.engine.decode_leg(out, None).body)
        if not self.engine.sequential:
            first, second = self.engine.prefill_leg(out), self.engine.decode_leg(out, None)
            (status, reply), answer = await asyncio.gather(self._post(self.prefill, path, first.body), self._post(self.decode, path, second.body))
            return answer if status == 200 else (status, reply)
        status, reply = await self._post(self.prefill, path, self.engine.prefill_leg(out).body)
        if status != 200:
            return status, reply
        leg = self.engine.decode_leg(out, reply)
        self.local = leg.local_reason
        return await self._post(self.decode, path, leg.body)

    async def _post(self, node: MockNode, path: str, body: bytes) -> tuple[int, bytes]:
        reply = await self.client.post(node.url + path, content=body)
        return reply.status_code, reply.content


@asynccontextmanager
async def pair(prefill: MockNode, decode: MockNode, engine: Engine) -> AsyncIterator[Pair]:
    for node in (prefill, decode):
        await node.start()
    try:
        async with httpx.AsyncClient(timeout=5, trust_env=False, verify=False) as client:
            yield Pair(prefill, decode, engine, client)
    finally:
        for node in (prefill, decode):
            await node.stop()


@asynccontextmanager
async def vllm(connector: str = "nixl") -> AsyncIterator[Pair]:
    """At the end: no fault, and whatever was parked has been read."""
    parked = Parked()
    async with pair(MockVllm("prefill", parked, connector), MockVllm("decode", parked, connector), engines_for(connector)["vllm"]) as made:
        yield made
        assert parked.faults == []
        assert parked.pages == {}


def sglang() -> Any:
    rooms, used = Rooms(), set[tuple[str, int]]()
    return pair(MockSglang("prefill", rooms, used), MockSglang("decode", rooms, used), ENGINES["sglang"])


def parked_of(made: Pair) -> Parked:
    assert isinstance(made.decode, MockVllm)
    return made.decode.parked


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
# Bodies that break a prefill leg that is no more than the client's own with max_tokens changed.
SPLIT = {
    "plain": (CHAT, {"messages": [{"role": "user", "content": "é"}]}),
    "stream": (CHAT, {"messages": [{}], "stream": True, "stream_options": {"include_usage": True}}),
    "max_completion_tokens": (CHAT, {"messages": [{}], "max_completion_tokens": 99}),
    "both limits": (CHAT, {"messages": [{}], "max_tokens": 99, "max_completion_tokens": 98, "min_tokens": 7}),
    "null limits": (CHAT, {"messages": [{}], "max_tokens": None, "stream": None}),
    "min_tokens": (COMPLETIONS, {"prompt": "a", "max_tokens": 99, "min_tokens": 50, "stop": ["a"], "stop_token_ids": [1]}),
    "logprobs": (CHAT, {"messages": [{}], "logprobs": True, "top_logprobs": 3, "ignore_eos": False}),
    "tools": (CHAT, {"messages": [{}], "tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}),
    "one of one": (COMPLETIONS, {"prompt": ["a"], "n": 1, "echo": False, "best_of": None}),
    "token ids": (COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 1}),
    "messages": ("/v1/messages", {"messages": [{}], "max_tokens": 9, "system": "s", "stop_sequences": ["a"], "stream": True}),
}
WHOLE_ONLY = {
    "n": (CHAT, {"messages": [{}], "n": 2, "stream": True}),
    "best_of": (COMPLETIONS, {"prompt": "a", "best_of": 3}),
    "use_beam_search": (COMPLETIONS, {"prompt": "a", "use_beam_search": True}),
    "prompt_logprobs": (CHAT, {"messages": [{}], "prompt_logprobs": 0}),
    "echo": (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 0}),
    "batch": (COMPLETIONS, {"prompt": ["a", "b"]}),
    "input": ("/v1/responses", {"input": "a", "max_output_tokens": 5}),
}


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
@pytest.mark.parametrize("name", SPLIT)
async def test_vllm_decodes_from_the_pages_of_the_same_prompt(name: str, connector: str) -> None:
    path, body = SPLIT[name]
    async with vllm(connector) as made:
        status, answer = await made.ask(path, body)
        assert status == 200, answer
        assert answer.endswith(DONE) if body.get("stream") else answer == WHOLE
        assert made.local is None
        assert parked_of(made).num_read == 1
        sent = made.decode.posts[0].json
        assert sent == {**body, "kv_transfer_params": sent["kv_transfer_params"]}


@pytest.mark.parametrize("reason", WHOLE_ONLY)
async def test_vllm_request_that_cannot_be_split_is_left_to_the_decode_node(reason: str) -> None:
    path, body = WHOLE_ONLY[reason]
    async with vllm() as made:
        status, answer = await made.ask(path, body)
        assert status == 200, answer
        assert made.local == reason
        assert made.prefill.posts == []
        assert made.decode.posts[0].json == body


@pytest.mark.parametrize("parameters", [None, {}, {"remote_block_ids": []}, {"remote_block_ids": None}])
async def test_vllm_prefill_node_that_parks_nothing(parameters: Any) -> None:
    """Its connector answers without pages after an abort; a decode node that is told of none stops with an assertion."""
    async with vllm() as made:

        async def prefill(request: Any) -> None:
            await request.reply(200, json.dumps({"kv_transfer_params": parameters}).encode())

        made.prefill.behave = prefill
        assert await made.ask(CHAT, {"messages": [{}]}) == (200, WHOLE)
        assert made.local == "nothing_parked"
        assert made.decode.posts[0].json == {"messages": [{}]}


@pytest.mark.parametrize("body", [{"messages": []}, {"messages": [{}], "tools": []}, {"messages": [{}], "tool_choice": "auto"}])
async def test_vllm_prefill_node_refuses_for_both(body: dict[str, Any]) -> None:
    async with vllm() as made:
        status, answer = await made.ask(CHAT, body)
        assert status == 400
        assert json.loads(answer)["error"]["code"] == 400
        assert made.decode.posts == []


async def test_vllm_parameters_of_a_client_are_dropped() -> None:
    theirs = b'{"messages":[{}],"\\u006bv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1]]},"seed":1}'
    async with vllm() as made:
        for without_prefill in (False, True):
            assert (await made.ask(CHAT, theirs, without_prefill=without_prefill))[0] == 200
        assert parked_of(made).num_read == 1
        assert made.decode.posts[1].body == b'{"messages":[{}],"seed":1}'


@pytest.mark.parametrize(
    "reply", [b"", b"[]", b'{"kv_transfer_params":[]}', b'{"kv_transfer_params":{"remote_block_ids":7}}', b"\xff", b"[" * 100_000]
)
def test_vllm_reply_that_is_none(reply: bytes) -> None:
    with pytest.raises(RequestError, match="not a vLLM completion") as error:
        NIXL.decode_leg(outgoing(b"{}"), reply)
    assert error.value.failure.status == 502


def test_mooncake_needs_the_engine_id_of_the_prefill_node() -> None:
    with pytest.raises(RequestError, match="engine id") as error:
        MOONCAKE.decode_leg(outgoing(b'{"prompt":"a"}'), None)
    assert error.value.failure.status == 503


def test_vllm_reply_that_does_not_tell_what_was_cached() -> None:
    for usage in ("null", "{}", '{"prompt_tokens_details":null}', '{"prompt_tokens_details":{"cached_tokens":null}}'):
        reply = f'{{"usage":{usage},"kv_transfer_params":{{"remote_block_ids":[1]}}}}'
        assert NIXL.decode_leg(outgoing(b"{}"), reply.encode()).body == b'{"kv_transfer_params":{"remote_block_ids":[1]}}'


def test_mooncake_spreads_over_data_parallel_ranks() -> None:
    seen = set()
    for rooms in range(8):
        out = replace(outgoing(b'{"prompt":"a"}'), rooms=rooms)
        assert out.prefill is not None
        out.prefill.info = msgspec.structs.replace(out.prefill.info, kv_engine_ids=("e0", "e1"))
        engine_id = json.loads(MOONCAKE.decode_leg(out, None).body)["kv_transfer_params"]["remote_engine_id"]
        seen.add((MOONCAKE.prefill_leg(out).headers, engine_id))
    assert seen == {(b"x-data-parallel-rank: 0\r\n", "e0"), (b"x-data-parallel-rank: 1\r\n", "e1")}


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"a":{"engine_id":"x"}}', b'{"0":{"engine_id":7}}', b'{"0":{}}'])
def test_mooncake_bootstrap_server_that_is_none(answer: bytes) -> None:
    assert mooncake_engines(answer) == []


@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
async def test_mooncake_engine_ids_are_asked_of_the_bootstrap_server(connector: str) -> None:
    """The nixl mock has none."""
    nodes, mock = NodeTable(RouterConfig(kv_connector="mooncake")), MockVllm("prefill", Parked(), connector)
    await mock.start()
    node, client = nodes.add("prefill", f"{mock.url},{mock.port}"), NodeClient(2.0)
    try:
        await Prober(nodes, client, interval_s=1, timeout_s=5).probe(node)
        assert node.info.kv_engine_ids == ((mock.engine_id,) if connector == "mooncake" else ())
        if connector == "mooncake":
            assert (node.engine, node.reason) == ("vllm", None)
        else:
            assert node.reason is not None
            assert "no Mooncake bootstrap server" in node.reason
    finally:
        client.close()
        await mock.stop()


def test_mooncake_legs_of_one_attempt_share_an_id_and_those_of_two_do_not() -> None:
    out = outgoing(b'{"prompt":"a"}')
    assert out.prefill is not None
    out.prefill.info = msgspec.structs.replace(out.prefill.info, kv_engine_ids=("e",))
    again = replace(out, rooms=mint_rooms(None))
    first, second = (json.loads(MOONCAKE.prefill_leg(one).body)["kv_transfer_params"]["transfer_id"] for one in (out, again))
    assert first != second


@pytest.mark.parametrize("name", REFUSED)
async def test_the_vllm_mock_refuses_what_vllm_refuses(name: str) -> None:
    path, body = REFUSED[name]
    async with vllm() as made:
        for node in (made.prefill, made.decode):
            reply = await made.client.post(node.url + path, json=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["code"] == 400


@pytest.mark.parametrize("left", [{"max_completion_tokens": 99}, {"n": 2}, {"stream": True}, {"kv_transfer_params": {}}])
async def test_the_vllm_mock_refuses_prefill_legs_that_vllm_would_serve(left: dict[str, Any]) -> None:
    """Real nodes would generate an answer for nobody, or park pages that nobody reads."""
    async with pair(node := MockVllm("prefill", Parked()), MockVllm("decode", node.parked), NIXL) as made:
        assert (await made.client.post(node.url + CHAT, json={"messages": [{}], **ONE_TOKEN})).status_code == 200
        assert (await made.client.post(node.url + CHAT, json={"messages": [{}], **ONE_TOKEN, **left})).status_code == 500


async def test_the_vllm_mock_lets_pages_be_read_once_and_by_the_same_prompt() -> None:
    async with pair(node := MockVllm("prefill", Parked()), MockVllm("decode", node.parked), NIXL) as made:
        leg = {"messages": [{}], "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        for prompts, status in (([{}], 200), ([{"role": "user"}], 500)):
            reply = (await made.client.post(node.url + CHAT, json=leg)).content
            body = NIXL.decode_leg(outgoing(json.dumps({"messages": prompts}).encode()), reply).body
            for expected in (status, 500):
                assert (await made.client.post(made.decode.url + CHAT, content=body)).status_code == expected


SGLANG_BODIES = {
    "chat": (CHAT, {"messages": [{}]}),
    "stream": (CHAT, {"messages": [{}], "stream": True}),
    "prompt": (COMPLETIONS, {"prompt": "a"}),
    "prompts": (COMPLETIONS, {"prompt": ["a", "b"]}),
    "token ids": (COMPLETIONS, {"prompt": [1, 2]}),
    "lists of token ids": (COMPLETIONS, {"prompt": [[1], [2, 3]]}),
    "generate": (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": 3}}),
    "generate several": (GENERATE, {"text": ["a"]}),
    "generate ids": (GENERATE, {"input_ids": [1, 2]}),
    "generate lists of ids": (GENERATE, {"input_ids": [[1, 2], [3]], "stream": True}),
}


@pytest.mark.parametrize("name", SGLANG_BODIES)
async def test_sglang_nodes_get_rooms_in_their_form(name: str) -> None:
    path, body = SGLANG_BODIES[name]
    async with sglang() as made:
        for _ in range(2):  # each with rooms of its own
            status, answer = await made.ask(path, body)
            assert status == 200, answer
        assert made.prefill.posts[0].body == made.decode.posts[0].body


async def test_sglang_refusal_reaches_the_client() -> None:
    async with sglang() as made:
        status, answer = await made.ask(COMPLETIONS, {"prompt": []})
        assert status == 200  # no list of prompts: SGLang itself refuses it
        status, answer = await made.ask(CHAT, {"prompt": "a"})
        assert (status, json.loads(answer)["object"]) == (400, "error")


@pytest.mark.parametrize(("engine", "computes"), [("pdserve", True), ("sglang", False), ("vllm", True)])
def test_decode_node_that_gets_a_prompt_alone_is_told_of_no_other(engine: str, computes: bool) -> None:
    body = b'{"a":1,"bootstrap_room":7,"kv_transfer_params":{}}'
    sent = json.loads(ENGINES[engine].decode_leg(outgoing(body, alone=True), None).body)
    assert sent["a"] == 1
    assert ("kv_transfer_params" if engine == "vllm" else "bootstrap_room") not in sent
    assert ENGINES[engine].decode_computes is computes


def test_address_of_ipv6_is_in_brackets() -> None:
    out = replace(outgoing(b"{}"), prefill=Node("prefill", "http://[::1]:8100", 9000))
    sent = json.loads(ENGINES["pdserve"].prefill_leg(out).body)
    assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("[::1]", 9000)


def outgoing(body: bytes, *, alone: bool = False) -> Outgoing:
    prefill = None if alone else Node("prefill", "http://p:1")
    return Outgoing(body, read_head(body), prefill, Node("decode", "http://d:1"), mint_rooms(None), "id-1")


async def answers_of(node: MockNode) -> dict[str, tuple[int, bytes]]:
    async with httpx.AsyncClient(timeout=5, trust_env=False, verify=False) as client:
        replies = {path: await client.get(node.url + path) for path in DETECT_PATHS}
    return {path: (reply.status_code, reply.content) for path, reply in replies.items()}


async def test_engines_are_told_apart() -> None:
    rooms = Rooms()
    nodes = [MockVllm("decode", Parked()), MockSglang("decode", rooms, set()), MockSglang("decode", rooms, set(), "/get_server_info")]
    found = []
    async with mock_nodes(0, 1) as (_, (ours,)):
        for node in nodes:
            await node.start()
        for node in (ours, *nodes):
            answers = await answers_of(node)
            engine = detect(answers)
            found.append((engine, facts(engine, answers).get("served_model_name"), facts(engine, answers).get("context_length")))
        for node in nodes:
            await node.stop()
    assert found == [("pdserve", "tiny", 256), ("vllm", "tiny", 256), ("sglang", "tiny", 256), ("sglang", "tiny", 256)]


@pytest.mark.parametrize(
    ("answers", "engine"),
    [
        ({}, None),
        ({"/server_info": (200, b"[]"), "/v1/models": (200, b'{"data":[]}')}, None),
        ({"/server_info": (500, b'{"protocol_version":1}')}, None),
        ({"/server_info": (200, b"\xff{"), "/version": (200, b'{"version":"1"}')}, None),
        ({"/server_info": (200, json.dumps(INFO).encode())}, "pdserve"),
        ({"/server_info": (200, b'{"vllm_config":"..."}')}, "vllm"),
        ({"/version": (200, b'{"version":"1"}'), "/v1/models": (200, b'{"data":[{"owned_by":"vllm"}]}')}, "vllm"),
        ({"/v1/models": (200, b'{"data":[{"owned_by":"vllm"}]}')}, None),  # a proxy in front of it
        ({"/v1/models": (200, b'{"data":[{"owned_by":"sglang"}]}')}, "sglang"),
        ({"/v1/models": (200, b'{"data":[{"owned_by":"openai"}]}')}, None),
    ],
)
def test_what_answers_tell(answers: dict[str, tuple[int, bytes]], engine: str | None) -> None:
    assert detect(answers) == engine


def test_flags_that_say_nothing_are_no_facts() -> None:
    info = {"disaggregation_mode": "decode", "dtype": "auto", "page_size": 1, "served_model_name": "m"}
    assert facts("sglang", {"/server_info": (200, json.dumps(info).encode())}) == {"disaggregation_mode": "decode", "served_model_name": "m"}
