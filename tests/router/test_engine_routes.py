"""The router in front of vLLM's and SGLang's nodes: what each node is asked, in which order, and what becomes of failures between the legs."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mock_node import STREAM, WHOLE, Received, Rooms, hang, refuse, reset
from mock_sglang import MockSglang
from mock_vllm import MockVllm, Parked
from router_harness import CHAT, COMPLETIONS, Rig, routed, until

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


@asynccontextmanager
async def vllm(num_prefill: int = 1, num_decode: int = 1, **settings: Any) -> AsyncIterator[Rig]:
    """At the end: no fault, and whatever was parked has been read."""
    parked = Parked()
    prefills = [MockVllm("prefill", parked) for _ in range(num_prefill)]
    decodes = [MockVllm("decode", parked) for _ in range(num_decode)]
    async with started(prefills, decodes, **settings) as made:
        yield made
        assert parked.faults == []
        assert parked.pages == {}


@asynccontextmanager
async def sglang(**settings: Any) -> AsyncIterator[Rig]:
    rooms, used = Rooms(), set[tuple[str, int]]()
    async with started([MockSglang("prefill", rooms, used)], [MockSglang("decode", rooms, used)], **settings) as made:
        yield made


@asynccontextmanager
async def started(prefills: Any, decodes: Any, **settings: Any) -> AsyncIterator[Rig]:
    for node in (*prefills, *decodes):
        await node.start()
    try:
        async with routed(prefills, decodes, **settings) as made:
            yield made
    finally:
        for node in (*prefills, *decodes):
            await node.stop()


@pytest.mark.parametrize("stream", [False, True])
async def test_vllm_prefill_leg_comes_first_and_the_answer_is_the_decode_nodes(stream: bool) -> None:
    async with vllm() as made:
        asked_early = []

        async def prefill(request: Received) -> None:
            asked_early.append(len(made.decodes[0].posts))
            await made.prefills[0].serve_well(request)

        made.prefills[0].behave = prefill
        reply = await made.client.post(CHAT, json={**ASK, "stream": stream, "stop": ["x"]})
        assert reply.status_code == 200, reply.text
        assert reply.content == (STREAM if stream else WHOLE)
        assert asked_early == [0]
        assert made.decodes[0].posts[0].json["kv_transfer_params"]["do_remote_prefill"] is True
        assert reply.headers["x-pdserve-prefill"] == made.prefills[0].url
        same = [mock.posts[0].headers["x-request-id"] for mock in (made.prefills[0], made.decodes[0])]
        assert same == [reply.headers["x-request-id"]] * 2


@pytest.mark.parametrize("how", [reset, refuse(503)])
async def test_vllm_prefill_node_that_fails_is_replaced_and_no_decode_node_was_asked(how: Any) -> None:
    async with vllm(2, 1) as made:
        made.prefills[0].behave = how
        reply = await made.client.post(CHAT, json=ASK)
        assert reply.content == WHOLE
        assert len(made.decodes[0].posts) == 1
        assert await made.retries() == 1


async def test_vllm_prefill_node_that_babbles_is_blamed() -> None:
    async with vllm(max_retries=0) as made:
        made.prefills[0].behave = refuse(200, body=b'{"kv_transfer_params":7}')
        reply = await made.client.post(CHAT, json=ASK)
        assert reply.status_code == 502
        assert "vLLM" in reply.json()["error"]["message"]
        assert made.decodes[0].posts == []
        assert made.node(made.prefills[0]).num_blames == 1


async def test_vllm_refusal_of_the_prefill_node_reaches_the_client() -> None:
    async with vllm(2, 2) as made:
        reply = await made.client.post(COMPLETIONS, json={"prompt": ""})
        assert reply.status_code == 400
        assert "prompt" in reply.json()["error"]["message"]
        assert await made.retries() == 0


async def test_vllm_decode_node_that_fails_gets_another_with_pages_of_its_own() -> None:
    """What the first attempt had parked is nobody's: the node gives it up by itself."""
    async with vllm(1, 2) as made:
        made.decodes[0].behave = reset
        assert (await made.client.post(CHAT, json=ASK)).content == WHOLE
        first, second = (mock.posts[0].json["kv_transfer_params"]["remote_request_id"] for mock in made.decodes)
        assert first != second
        made.prefills[0].parked.pages.clear()  # type: ignore[attr-defined]


async def test_vllm_client_that_leaves_before_the_decode_leg() -> None:
    async with vllm() as made:
        made.prefills[0].behave = hang
        asking = asyncio.ensure_future(made.client.post(CHAT, json=ASK))
        request = await made.prefills[0].wait_posts(1)
        asking.cancel()
        async with asyncio.timeout(3):
            await request.closed.wait()
        await until(lambda: made.node(made.prefills[0]).num_in_flight == made.node(made.decodes[0]).num_in_flight == 0, "nothing in flight")
        assert made.decodes[0].posts == []


async def test_vllm_deadline_holds_over_both_legs() -> None:
    async with vllm(request_timeout_s=0.5) as made:
        made.prefills[0].behave = hang
        reply = await made.client.post(CHAT, json=ASK)
        assert reply.status_code == 504
        assert made.decodes[0].posts == []


@pytest.mark.parametrize(("path", "body", "reason"), [(CHAT, {**ASK, "n": 2}, "n"), (COMPLETIONS, {"prompt": ["a", "b"]}, "batch")])
async def test_vllm_request_that_cannot_be_split(path: str, body: dict[str, Any], reason: str) -> None:
    async with vllm() as made:
        reply = await made.client.post(path, json=body)
        assert reply.status_code == 200
        assert made.prefills[0].posts == []
        assert made.decodes[0].posts[0].json == body
        assert reply.headers.get("x-pdserve-prefill-site") == "local"


async def test_vllm_prefill_node_that_parks_nothing() -> None:
    async with vllm() as made:
        made.prefills[0].parks = False  # type: ignore[attr-defined]
        reply = await made.client.post(CHAT, json=ASK)
        assert reply.content == WHOLE
        assert made.decodes[0].posts[0].json == ASK
        assert reply.headers.get("x-pdserve-prefill-site") == "local"


class WithBootstrapServer(MockVllm):
    """Named as --prefill names it: with the port of its bootstrap server, which is its own here."""

    @property
    def url(self) -> str:
        return f"{super().url},{self.port}"


async def test_mooncake_legs_go_out_at_once_and_meet() -> None:
    parked = Parked()
    prefill, decode = WithBootstrapServer("prefill", parked, "mooncake"), MockVllm("decode", parked, "mooncake")
    async with started([prefill], [decode], kv_connector="mooncake") as made:
        asked = asyncio.Event()

        async def compute(request: Received) -> None:
            await decode.wait_posts(1)  # which was not held back until this one answers
            await prefill.serve_well(request)
            asked.set()

        prefill.behave = compute
        assert (await made.client.post(CHAT, json={**ASK, "stop": ["a"]})).content == WHOLE
        assert asked.is_set()
        assert (parked.faults, parked.num_read) == ([], 1)


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"prompt": ["a", "b"], "stream": True}])
async def test_sglang_nodes_get_both_legs_at_once(body: dict[str, Any]) -> None:
    async with sglang() as made:
        reply = await made.client.post(COMPLETIONS, json=body)
        assert reply.status_code == 200, reply.text
        assert made.prefills[0].posts[0].body == made.decodes[0].posts[0].body


async def test_sglang_refusal_reaches_the_client_with_its_words() -> None:
    async with sglang() as made:
        reply = await made.client.post(CHAT, json={"prompt": "a"})
        assert reply.status_code == 400
        said = json.loads(reply.content)
        assert "exactly one of" in said.get("error", said)["message"]


async def test_nodes_of_two_engines_are_no_pair() -> None:
    rooms, parked = Rooms(), Parked()
    async with started([MockSglang("prefill", rooms, set())], [MockVllm("decode", parked)]) as made:
        reply = await made.client.post(CHAT, json=ASK)
        assert reply.status_code == 503
        assert "sglang" in reply.json()["error"]["message"]
        assert made.decodes[0].posts == []


@pytest.mark.parametrize(("disaggregation", "why"), [("never", "compute no prompts"), ("prefer", "no usable prefill node")])
async def test_sglang_decode_nodes_compute_no_prompts(disaggregation: str, why: str) -> None:
    async with sglang(disaggregation=disaggregation) as made:
        if disaggregation == "prefer":
            assert (await made.client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200
            await made.prefills[0].stop()
            await until(lambda: not made.node(made.prefills[0]).usable, "the prefill node is gone")
        asked = len(made.decodes[0].posts)
        reply = await made.client.post(COMPLETIONS, json={"prompt": "a"})
        assert reply.status_code == 503
        assert why in reply.json()["error"]["message"]
        assert len(made.decodes[0].posts) == asked
        if disaggregation == "prefer":
            await made.prefills[0].start()
