"""Which nodes serve: probes, blame, restarts, compatible pairs, models."""

import asyncio
import socket
import time
from typing import Any

import pytest
from mock_node import INFO, MockNode, Rooms, hang, mock_nodes, refuse
from router_harness import CHAT, rig, routed, until

from common.config import RouterConfig
from router.legs import NodeClient
from router.nodes import AGREED_FACTS, NodeInfo, NodeTable, disagreement


async def test_ready_needs_one_usable_node_of_each_role() -> None:
    async with rig() as made:
        assert (await made.client.get("/ready")).status_code == 200
        for mock, role in ((made.prefills[0], "prefill"), (made.decodes[0], "decode")):
            mock.ready_status = 503
            await until(lambda mock=mock: not made.node(mock).usable, "not usable")  # type: ignore[misc]
            reply = await made.client.get("/ready")
            assert reply.status_code == 503
            assert reply.json()["reason"] == f"no usable {role} node: {mock.url} is not ready (it answers 503)"
            refusal = await made.client.post(CHAT, json={})
            assert refusal.status_code == 503
            assert refusal.headers["retry-after"] == "1"
            assert f"no usable {role} node" in refusal.json()["error"]["message"]
            mock.ready_status = 200
            await until(lambda mock=mock: made.node(mock).usable, "usable again")  # type: ignore[misc]
        assert (await made.client.post(CHAT, json={})).status_code == 200


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_restarted_node_serves_again_within_an_interval(leg: str) -> None:
    async with rig(health_check_interval_s=0.2) as made:
        mock = (made.prefills if leg == "prefill" else made.decodes)[0]
        for _ in range(2):
            await mock.stop()
            began_s = time.monotonic()
            assert (await made.client.post(CHAT, json={})).status_code == 503
            assert time.monotonic() - began_s < 1
            assert leg in (await made.client.get("/ready")).json()["reason"]
            await mock.start()
            began_s = time.monotonic()
            await until(lambda: made.node(mock).usable, "usable again")
            assert time.monotonic() - began_s < 0.5
            assert (await made.client.post(CHAT, json={})).status_code == 200


async def test_blame_is_followed_by_a_probe_at_once() -> None:
    async with rig(health_check_interval_s=30.0) as made:
        node = made.node(made.decodes[0])
        node.blame("for a test")
        assert not node.usable
        await until(lambda: node.usable, "probed at once")


async def test_probe_from_before_the_blame_does_not_clear_it() -> None:
    node = NodeTable.of(RouterConfig(prefill=("http://h:1",))).prefill[0]
    began = node.num_blames
    node.blame("died meanwhile")
    assert not node.probe_succeeded(NodeInfo(), began)
    assert node.reason == "died meanwhile"
    assert node.probe_succeeded(NodeInfo(), node.num_blames)
    assert node.usable


async def test_frozen_node_is_found_out_while_others_are_probed_on_time() -> None:
    async with rig(2, 1, connect_timeout_s=0.2) as made:
        frozen, other = made.prefills

        async def silence(request: Any) -> None:
            await hang(request)

        frozen._get = silence  # type: ignore[method-assign]
        await until(lambda: not made.node(frozen).usable, "found out")
        assert "probes within 0.2 s each" in str(made.node(frozen).reason)
        before = len(other.gets)
        await until(lambda: len(other.gets) > before + 2, "the other is probed")
        for _ in range(3):
            assert (await made.client.post(CHAT, json={})).headers["x-pdserve-prefill"] == other.url


async def test_connections_to_nodes_end_when_a_host_vanishes() -> None:
    """It sends no reset; the kernel asks it, and gives up in about 10 s."""
    async with mock_nodes() as ((prefill,), _):
        client = NodeClient(1.0)
        try:
            node = NodeTable.of(RouterConfig(prefill=(prefill.url,))).prefill[0]
            connection = (await client.pool.connect(node.address))._transport.get_extra_info("socket")
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            for option, value in ((socket.TCP_USER_TIMEOUT, 10_000), (socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2)):
                assert connection.getsockopt(socket.IPPROTO_TCP, option) == value
        finally:
            client.close()


async def test_one_late_answer_to_a_probe_is_forgiven() -> None:
    async with rig(connect_timeout_s=0.1) as made:
        mock, node = made.decodes[0], made.node(made.decodes[0])
        answer, silent = mock._get, asyncio.Event()

        async def silent_once(request: Any) -> None:
            mock._get = answer  # type: ignore[method-assign]
            silent.set()
            await hang(request)

        mock._get = silent_once  # type: ignore[method-assign]
        await silent.wait()
        await until(lambda: node.num_silent_probes == 1, "probe timed out")
        assert node.usable
        await until(lambda: node.num_silent_probes == 0, "next probe answered")
        assert node.usable


async def test_node_without_ready_is_asked_for_health() -> None:
    async with rig(ready=False) as made:
        for mock in (*made.prefills, *made.decodes):

            async def sglang(request: Any) -> None:
                status = 200 if request.path in ("/health", "/get_server_info") else 404
                await request.reply(status, b'{"served_model_name":"m","context_length":null}')

            mock._get = sglang  # type: ignore[method-assign]
        await until(lambda: all(node.usable and node.info.served_model_name == "m" for node in made.router.nodes.all), "usable")


@pytest.mark.parametrize("fact", AGREED_FACTS)
async def test_nodes_that_disagree_are_no_pair(fact: str) -> None:
    async with rig(1, 2) as made:
        value = INFO[fact]
        made.decodes[1].info[fact] = 999 if isinstance(value, int) else "other"
        await until(lambda: getattr(made.node(made.decodes[1]).info, fact) != value, "seen")
        for _ in range(4):
            assert (await made.client.post(CHAT, json={})).headers["x-pdserve-decode"] == made.decodes[0].url
        made.decodes[0].info[fact] = made.decodes[1].info[fact]
        await until(lambda: getattr(made.node(made.decodes[0]).info, fact) != value, "seen")
        reply = await made.client.post(CHAT, json={})
        assert reply.status_code == 503
        reason = f"{fact} is {value} on {made.prefills[0].url} and {made.decodes[0].info[fact]} on {made.decodes[0].url}"
        assert f"no compatible pair: {reason}" in reply.json()["error"]["message"]
        assert fact in (await made.info())["incompatible"][0]
        ready = await made.client.get("/ready")
        assert ready.status_code == 503
        assert reason in ready.json()["reason"]


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ({"transfer_backend": "auto"}, {"transfer_backend": "nixl"}, None),
        ({"transfer_backend": "tcp"}, {"transfer_backend": "auto"}, None),
        ({"transfer_backend": "nixl"}, {"transfer_backend": "nixl"}, None),
        ({"transfer_backend": "nixl"}, {"transfer_backend": "mooncake"}, "transfer_backend is nixl on http://p0:1 and mooncake on http://d0:1"),
        ({"cluster_key_id": "0123abcd"}, {"cluster_key_id": "0123abcd"}, None),
        ({"cluster_key_id": "0123abcd"}, {"cluster_key_id": "none"}, "cluster_key_id is 0123abcd on http://p0:1 and none on http://d0:1"),
        ({"dtype": "auto"}, {"dtype": "float32"}, "dtype is auto on http://p0:1 and float32 on http://d0:1"),  # fits all only as a backend
        ({"kv_cache_dtype": "float32"}, {"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype is float32 on http://p0:1 and bfloat16 on http://d0:1"),
        ({}, {"transfer_backend": "nixl", "cluster_key_id": "0123abcd"}, None),  # SGLang reports neither
        ({"transfer_backend": "nixl", "cluster_key_id": "0123abcd"}, {}, None),
    ],
)
def test_what_two_nodes_must_agree_on(prefill: dict[str, str], decode: dict[str, str], reason: str | None) -> None:
    nodes = table(1, 1)
    nodes.prefill[0].info, nodes.decode[0].info = NodeInfo(**prefill), NodeInfo(**decode)  # type: ignore[arg-type]
    assert disagreement(nodes.prefill[0], nodes.decode[0]) == reason


async def test_models_have_their_own_nodes() -> None:
    async with rig(2, 2, ready=False) as made:
        for mock in (made.prefills[1], made.decodes[1]):
            mock.info["served_model_name"] = "org/second"
        nodes = made.router.nodes
        await until(lambda: set(nodes.models) == {"tiny", "org/second"} and all(node.usable for node in nodes.all), "both models known")
        for number, model in enumerate(("tiny", "org/second")):
            for _ in range(3):
                reply = await made.client.post(CHAT, json={"model": model})
                assert reply.headers["x-pdserve-prefill"] == made.prefills[number].url
                assert reply.headers["x-pdserve-decode"] == made.decodes[number].url
            assert (await made.client.get(f"/v1/models/{model}")).json()["id"] == model
        assert {card["id"] for card in (await made.client.get("/v1/models")).json()["data"]} == {"tiny", "org/second"}
        missing = await made.client.post(CHAT, json={})
        assert (missing.status_code, missing.json()["error"]["param"]) == (400, "model")
        unknown = await made.client.post(CHAT, json={"model": "third"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert "'tiny'" in unknown.json()["error"]["message"]
        await made.decodes[1].stop()
        await until(lambda: not made.node(made.decodes[1]).usable, "gone")
        away = await made.client.post(CHAT, json={"model": "org/second"})  # known, but not there now
        assert away.status_code == 503
        assert (await made.client.post(CHAT, json={"model": "tiny"})).status_code == 200
        await made.decodes[1].start()


async def test_model_may_be_left_out_when_there_is_one() -> None:
    async with rig() as made:
        assert (await made.client.post(CHAT, json={})).status_code == 200
        assert (await made.client.post(CHAT, json={"model": "tiny"})).status_code == 200


def table(num_prefill: int, num_decode: int) -> NodeTable:
    prefill, decode = (tuple(f"http://{letter}{n}:1" for n in range(number)) for letter, number in (("p", num_prefill), ("d", num_decode)))
    made = NodeTable.of(RouterConfig(prefill=prefill, decode=decode))
    for node in made.all:
        node.probe_succeeded(NodeInfo(), 0)
    return made


def test_bootstrap_address() -> None:
    nodes = NodeTable.of(RouterConfig(prefill=("http://p0:1,9000", "http://p1:1/"), decode=("http://d:1",)))
    configured, reported = nodes.prefill
    assert (configured.bootstrap_host, configured.bootstrap_port) == ("p0", 9000)
    assert (reported.url, reported.bootstrap_port) == ("http://p1:1", None)
    reported.probe_succeeded(NodeInfo(bootstrap_host="10.1.1.1", bootstrap_port=7), 0)
    assert (reported.bootstrap_host, reported.bootstrap_port) == ("10.1.1.1", 7)
    reported.probe_succeeded(NodeInfo(disaggregation_bootstrap_port=8), 0)
    assert (reported.bootstrap_host, reported.bootstrap_port) == ("p1", 8)


async def test_nodes_that_come_later_than_the_router() -> None:
    rooms = Rooms()
    prefill, decode = MockNode("prefill", rooms), MockNode("decode", rooms)
    for mock in (prefill, decode):
        await mock.start()
        await mock.stop()
    async with routed([prefill], [decode], ready=False) as made:
        await until(lambda: made.node(decode).reason != "not probed yet", "probed")
        reply = await made.client.post(CHAT, json={})
        assert reply.status_code == 503
        assert "cannot be reached" in reply.json()["error"]["message"]
        for mock in (prefill, decode):
            await mock.start()
        await until(lambda: all(node.usable for node in made.router.nodes.all), "usable")
        assert (await made.client.post(CHAT, json={})).status_code == 200
        for mock in (prefill, decode):
            await mock.stop()


async def test_hundred_at_once_through_faulty_nodes_each_get_one_answer() -> None:
    async with rig(2, 2) as made:
        made.prefills[0].behave = refuse(503)
        made.decodes[0].behave = refuse(429)
        replies = await asyncio.gather(*(made.client.post(CHAT, json={"stream": bool(n % 2)}) for n in range(100)))
        assert {reply.status_code for reply in replies} <= {200, 429, 503}
        assert sum(reply.status_code == 200 for reply in replies) > 0
        assert all(node.num_in_flight == 0 for node in made.router.nodes.decode)
        await until(lambda: all(node.num_in_flight == 0 for node in made.router.nodes.all), "nothing in flight")


async def test_the_log_says_why_a_node_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Also of one that never was: refused, no node, or without a partner. Once each."""
    async with mock_nodes(2, 1) as (prefills, decodes):
        prefills[1].info["dtype"] = "bfloat16"
        gone, wrong = MockNode("decode", Rooms()), MockNode("decode", Rooms())
        wrong.info["role"] = "router"
        await gone.start()
        await gone.stop()
        await wrong.start()
        try:
            async with routed(prefills, [decodes[0], gone, wrong], ready=False) as made:
                await until(lambda: made.node(decodes[0]).usable and made.node(prefills[1]).usable, "usable")
                assert (await made.client.post(CHAT, json={})).status_code == 200
                await until(lambda: all(node.reason != "not probed yet" for node in made.router.nodes.all), "all probed")
                await until(lambda: len(wrong.gets) > 8, "probed again")
        finally:
            await wrong.stop()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum(f"{gone.url} cannot be reached" in line for line in said) == 1
    assert sum(f"{wrong.url} is a router" in line for line in said) == 1
    assert sum(f"{prefills[1].url} has no decode node to pair with: dtype is bfloat16" in line for line in said) == 1
