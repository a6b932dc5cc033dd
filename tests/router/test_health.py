"""Probes: what a node is asked, what is made of the answers, and when; which nodes are probed."""

import asyncio
import errno
import json
import selectors
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from mock_node import MockNode, Received, Rooms, hang, mock_nodes
from router_harness import Rig, rig, until

from common.config import RouterConfig
from router.health import Prober
from router.legs import NodeClient
from router.nodes import Node, NodeInfo, NodeTable

SGLANG = {"served_model_name": "m", "disaggregation_mode": "prefill", "version": "0.5", "page_size": 1, "internal_states": [{}]}
SURFACES: dict[str, dict[str, Any]] = {
    "pdserve": {"/ready": {}, "/server_info": {"protocol_version": 1, "served_model_name": "m", "context_length": 99}},
    "sglang": {"/health": {}, "/server_info": {**SGLANG, "context_length": 99}},
    "sglang, older": {"/health": {}, "/get_server_info": {**SGLANG, "context_length": 99}},
    "vllm": {"/health": {}, "/version": {"version": "0.32.0"}, "/v1/models": {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 99}]}},
}
ASKED = {  # once the engine is known
    "pdserve": ["/ready", "/server_info"],
    "sglang": ["/health", "/server_info"],
    "sglang, older": ["/health", "/server_info", "/get_server_info"],
    "vllm": ["/health", "/v1/models"],
}


def serve(mock: MockNode, surface: dict[str, Any]) -> None:
    async def answer(request: Received) -> None:
        await request.reply(200 if request.path in surface else 404, json.dumps(surface.get(request.path, {})).encode())

    mock._get = answer  # type: ignore[method-assign]


def prober_of(nodes: NodeTable, client: Any) -> Prober:
    config = RouterConfig()
    return Prober(nodes, client, interval_s=config.health_check_interval_s, timeout_s=config.connect_timeout_s)


@pytest.mark.parametrize("surface", SURFACES)
async def test_each_engine_is_recognised_and_then_asked_what_it_answers(surface: str) -> None:
    async with mock_nodes() as ((mock,), _):
        serve(mock, SURFACES[surface])
        nodes, client = NodeTable.of(RouterConfig(prefill=(mock.url,))), NodeClient(1.0)
        node, prober = nodes.prefill[0], prober_of(nodes, client)
        try:
            await prober.probe(node)
            assert (node.usable, node.engine) == (True, surface.partition(",")[0])
            assert (node.info.served_model_name, node.info.context_length) == ("m", 99)
            mock.gets.clear()
            version = nodes.version
            await prober.probe(node)
            assert nodes.version == version  # nothing new
            asked = [get.path for get in mock.gets]
            assert asked == ASKED[surface]
        finally:
            client.close()


async def test_a_node_that_comes_back_may_be_another_engine() -> None:
    async with mock_nodes() as ((mock,), _):
        nodes, client = NodeTable.of(RouterConfig(prefill=(mock.url,))), NodeClient(1.0)
        node, prober = nodes.prefill[0], prober_of(nodes, client)
        try:
            for surface, engine in ((SURFACES["pdserve"], "pdserve"), ({}, "pdserve"), (SURFACES["vllm"], "vllm")):
                serve(mock, surface)
                await prober.probe(node)
                assert (node.engine, node.usable) == (engine, bool(surface))
        finally:
            client.close()


async def test_what_engine_may_be_said() -> None:
    async with rig(engine="vllm", ready=False) as made:
        serve(made.prefills[0], {"/health": {}, "/v1/models": {"data": [{"id": "m", "owned_by": "somebody"}]}})
        await until(lambda: made.router.nodes.prefill[0].usable, "usable")
        assert made.router.nodes.prefill[0].engine == "vllm"
        assert {get.path for get in made.prefills[0].gets} == {"/health", "/v1/models"}


async def test_nodes_that_want_a_key_get_it(tmp_path: Path) -> None:
    """Without it such a node is used, but nothing is known of it."""
    file = tmp_path / "node.key"
    file.write_text("node-key")
    file.chmod(0o600)

    async def locked(request: Received) -> None:
        if request.path != "/health" and request.headers.get("authorization") != "Bearer node-key":
            await request.reply(401, b"{}")
        else:
            known = request.path in SURFACES["vllm"]
            await request.reply(200 if known else 404, json.dumps(SURFACES["vllm"].get(request.path, {})).encode())

    for path, engine, model in ((str(file), "vllm", "m"), (None, None, None)):
        async with rig(ready=False, node_api_key_file=path) as made:
            for mock in (*made.prefills, *made.decodes):
                mock._get = locked  # type: ignore[method-assign]
            nodes = made.router.nodes
            await until(lambda nodes=nodes: all(node.usable for node in nodes.all), "usable")  # type: ignore[misc]
            assert {(node.engine, node.info.served_model_name) for node in nodes.all} == {(engine, model)}


async def test_adapters_and_aliases_are_models_too() -> None:
    async with rig(ready=False) as made:
        cards = [{"id": name, "owned_by": "vllm", "max_model_len": 99} for name in ("base", "alias", "adapter")]
        for mock in (*made.prefills, *made.decodes):
            serve(mock, {**SURFACES["vllm"], "/v1/models": {"data": cards}})
        nodes = made.router.nodes
        await until(lambda: all(node.usable for node in nodes.all), "usable")
        assert list(nodes.models) == ["base", "alias", "adapter"]
        assert nodes.decode[0].serves("adapter")
        assert not nodes.decode[0].serves("other")
        del cards[2]  # unloaded
        await until(lambda: list(nodes.models) == ["base", "alias"], "seen")


async def test_nodes_of_two_engines_are_no_pair() -> None:
    async with rig(ready=False) as made:
        serve(made.decodes[0], SURFACES["vllm"])
        for node in made.router.nodes.all:
            await until(lambda node=node: node.usable, "usable")  # type: ignore[misc]
        await until(lambda: made.router.nodes.decode[0].engine == "vllm", "asked")
        assert f"engine is pdserve on {made.prefills[0].url} and vllm on {made.decodes[0].url}" in (await made.client.get("/ready")).json()["reason"]


async def test_a_node_in_the_other_role_is_not_used() -> None:
    async with rig(ready=False) as made:
        made.prefills[0].info["disaggregation_mode"] = "decode"
        node = made.router.nodes.prefill[0]
        await until(lambda: "was given as a prefill node" in str(node.reason), "found out")
        assert node.reason == "is a decode node, and was given as a prefill node; give it as --decode"
        made.prefills[0].info["disaggregation_mode"] = "prefill"
        await until(lambda: node.usable, "usable")


async def test_load_is_read_and_is_no_change() -> None:
    async with rig() as made:
        nodes, node, info = made.router.nodes, made.router.nodes.decode[0], made.decodes[0].info
        await until(lambda: len(made.decodes[0].gets) > 4, "settled")
        version = nodes.version
        info.update(pages={"free": 5, "cached": 7, "held": 8, "quarantined": 0, "total": 20}, running=3, waiting=4, max_running_requests=8)
        await until(lambda: node.info.running == 3, "read")
        assert (node.info.pages_free, node.info.pages_total, node.info.waiting, node.info.max_running_requests) == (12, 20, 4, 8)
        assert (node.info.tokens_free, node.info.tokens_total) == (12 * info["page_size"], 20 * info["page_size"])
        assert nodes.version == version
        info["context_length"] = 77
        await until(lambda: node.info.context_length == 77, "read")
        assert nodes.version != version


@pytest.mark.parametrize(
    ("fact", "value"),
    [("context_length", "many"), ("running", 10**400), ("max_running_requests", -1), ("pages", {"free": -9}), ("pages", {"free": 10**400})],
)
async def test_facts_that_cannot_be_read_are_done_without_and_said_once(fact: str, value: object, caplog: pytest.LogCaptureFixture) -> None:
    async with rig(ready=False) as made:
        made.prefills[0].info[fact] = value
        node = made.router.nodes.prefill[0]
        await until(lambda: node.usable, "usable")
        await settled(made)
        assert (node.info.context_length, node.info.served_model_name) == (None, None)
        (line,) = [record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()]
        assert line.startswith(f"prefill node {node.url} is used without the facts it states")
        assert fact in line


async def test_a_restart_is_told() -> None:
    async with rig() as made:
        nodes, mock = made.router.nodes, made.prefills[0]
        restarted: list[Node] = []
        nodes.restarted.append(restarted.append)
        mock.info["incarnation"] = 1  # not known before: no restart
        await until(lambda: nodes.prefill[0].info.incarnation == 1, "read")
        assert restarted == []
        mock.info["incarnation"] = 2
        await until(lambda: nodes.prefill[0].info.incarnation == 2, "read")
        assert restarted == [nodes.prefill[0]]
        del mock.info["incarnation"]
        await until(lambda: nodes.prefill[0].info.incarnation is None, "read")  # another server there
        assert len(restarted) == 2
        decode = made.decodes[0]  # has no incarnation: accepting nothing for a while is a restart, being silent is none
        await decode.stop()
        await until(lambda: not nodes.decode[0].usable, "gone")
        await decode.start()
        await until(lambda: nodes.decode[0].usable, "back")
        assert restarted[2:] == [nodes.decode[0]]
        decode.ready_status = 503
        await until(lambda: not nodes.decode[0].usable, "not ready")
        decode.ready_status = 200
        await until(lambda: nodes.decode[0].usable, "ready")
        assert len(restarted) == 3


async def test_added_nodes_are_probed_and_removed_ones_are_not() -> None:
    async with rig() as made:
        nodes, rooms = made.router.nodes, Rooms()
        mock = MockNode("decode", rooms)
        await mock.start()
        node = nodes.add("decode", mock.url)
        await until(lambda: node.usable, "usable")
        nodes.remove(node)
        assert not node.usable
        await settled(made)
        num_gets = len(mock.gets)
        await settled(made)
        assert len(mock.gets) == num_gets
        node.blame("late")  # by a request that was under way
        assert node.reason == "was removed"
        again = nodes.add("decode", mock.url)
        assert again is not node
        await until(lambda: again.usable, "usable")
        await mock.stop()


async def settled(made: Rig) -> None:
    """Some rounds of probes."""
    num_gets = len(made.prefills[0].gets)
    await until(lambda: len(made.prefills[0].gets) > num_gets + 6, "probed")


async def test_a_leaving_node_goes_when_nothing_is_under_way() -> None:
    async with rig(1, 2) as made:
        nodes = made.router.nodes
        node = nodes.decode[0]
        removed: list[Node] = []
        nodes.removed.append(removed.append)
        node.num_in_flight += 1
        nodes.retire(node)
        await settled(made)
        assert node in nodes.decode
        assert node.draining
        node.num_in_flight -= 1
        await until(lambda: node not in nodes.decode, "gone")
        assert removed == [node]


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Time passes when nothing is to be done, at once."""

    def __init__(self) -> None:
        super().__init__(_NoWaiting(self))
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s


class _NoWaiting(selectors.SelectSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen"
        self._loop.now_s += max(timeout, 0.0)
        return super().select(0)


class Network:
    """The node answers but from `away_s` to `back_s`; then it is silent, or refuses, or is not ready. has_ready: it knows /ready."""

    def __init__(self, fault: str, has_ready: bool, away_s: float, back_s: float) -> None:
        self.fault, self.has_ready, self.away_s, self.back_s = fault, has_ready, away_s, back_s

    async def get(self, node: Node, path: str, max_bytes: int, headers: bytes) -> tuple[int, bytes]:
        now_s = asyncio.get_running_loop().time()
        if path == "/ready" and not self.has_ready:
            return 404, b""
        if self.away_s <= now_s < self.back_s:
            if self.fault == "silent":
                await asyncio.get_running_loop().create_future()  # what was sent is lost
            if self.fault == "refuses":
                raise ConnectionRefusedError
            return 503, b""
        return 200, b"{}"


def simulate(coroutine: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(coroutine())


@pytest.mark.parametrize("has_ready", [True, False], ids=["ready", "health only"])
@pytest.mark.parametrize("fault", ["silent", "refuses", "not ready"])
def test_a_node_that_was_away_is_used_within_5_s_of_its_return(fault: str, has_ready: bool) -> None:
    """With default settings, whenever in a probe's round it returns."""

    async def once(back_s: float) -> None:
        loop = asyncio.get_running_loop()
        nodes = NodeTable.of(RouterConfig(decode=("http://h:1",)), loop.time)
        network = Network(fault, has_ready, away_s=10.3, back_s=back_s)
        probing = asyncio.ensure_future(prober_of(nodes, network).run())
        await asyncio.sleep(10.5)
        for _ in range(50):  # the requests that were under way
            nodes.decode[0].blame("reset")
        await asyncio.sleep(back_s - 10.5)
        assert not nodes.decode[0].usable
        await asyncio.sleep(5.0)
        assert nodes.decode[0].usable
        assert nodes.decode[0].breaker.num_failures == 0
        assert nodes.decode[0].since_s <= back_s + 3.1
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)

    for phase in range(20):
        simulate(lambda phase=phase: once(16.0 + phase * 0.17))  # type: ignore[misc]


async def test_a_suspect_that_is_removed_keeps_nobody_waiting() -> None:
    nodes = NodeTable.of(RouterConfig(decode=("http://h:1",)))
    node = nodes.decode[0]
    node.blame("reset")
    assert node.verdict is not None
    verdict = node.verdict
    nodes.remove(node)
    async with asyncio.timeout(1):
        await verdict.wait()


async def test_a_limit_of_this_process_is_no_node_s_fault_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class NoSockets:
        async def get(self, *arguments: object) -> tuple[int, bytes]:
            raise OSError(errno.EMFILE, "Too many open files")

    nodes = NodeTable.of(RouterConfig(decode=("http://a:1", "http://b:1")))
    prober = prober_of(nodes, NoSockets())
    for node in nodes.all:
        node.probe_succeeded(NodeInfo(), 0)
    for node in nodes.all * 3:
        await prober.probe(node)
    assert all(node.usable for node in nodes.all)
    assert [record.getMessage() for record in caplog.records if "Too many open files" in record.getMessage()] == [
        "nodes are not probed, and taken to be as they were: [Errno 24] Too many open files (decode node http://a:1)"
    ]


async def test_hanging_probes_do_not_hold_up_a_removal() -> None:
    async with mock_nodes() as (_, (mock,)):
        mock._get = hang  # type: ignore[method-assign]
        nodes, client = NodeTable.of(RouterConfig(decode=(mock.url,))), NodeClient(5.0)
        probing = asyncio.ensure_future(Prober(nodes, client, interval_s=30, timeout_s=30).run())
        try:
            await until(lambda: bool(mock.gets), "asked")
            nodes.remove(nodes.decode[0])
            await until(lambda: not any("_watch" in repr(task.get_coro()) for task in asyncio.all_tasks()), "over")
            assert not probing.done()
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
            client.close()
