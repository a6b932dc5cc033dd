"""Nodes that are added, drained and removed while requests are served: commands, their HTTP, races."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mock_node import MockNode, Received
from router_harness import CHAT, Rig, rig, until

from common.config import JsonObject, RouterConfig
from common.errors import RequestError, StartupError
from router.admin import Admin
from router.admin_http import MAX_BODY_BYTES, admin_app, admin_check
from router.nodes import Node, NodeInfo, NodeTable

P, D, D2 = "http://p:1", "http://d:1", "http://d2:1"


def table() -> NodeTable:
    nodes = NodeTable.of(RouterConfig(prefill=(P,), decode=(D, D2)))
    for node in nodes.all:
        node.probe_succeeded(NodeInfo(served_model_name="m"), 0)
    return nodes


@asynccontextmanager
async def surface(nodes: NodeTable, key_file: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    admin = Admin(nodes)

    async def send(command: JsonObject) -> JsonObject:
        return admin.apply(command)

    check = admin_check(RouterConfig(admin_port=0, admin_api_key_file=key_file))
    assert check is not None
    transport = httpx.ASGITransport(admin_app(admin, send, check))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin", trust_env=False, verify=False) as client:
        yield client


async def test_workers_are_listed() -> None:
    nodes = table()
    nodes.decode[0].blame("failed a request: reset")
    nodes.decode[1].num_in_flight = 3
    nodes.drain(nodes.decode[1])
    async with surface(nodes) as client:
        listed = (await client.get("/workers")).json()
        assert (listed["total"], listed["stats"]) == (3, {"prefill_count": 1, "decode_count": 2})
        prefill, blamed, drained = listed["workers"]
        assert (prefill["url"], prefill["role"], prefill["worker_type"], prefill["model_id"]) == (P, "prefill", "prefill", "m")
        assert (prefill["state"], prefill["is_healthy"], prefill["reason"], prefill["breaker"]) == ("usable", True, None, "closed")
        assert (blamed["state"], blamed["is_healthy"], blamed["reason"]) == ("unusable", False, "failed a request: reset")
        assert (drained["draining"], drained["in_flight"], drained["leaving"]) == (True, 3, False)
        assert abs(prefill["since"] - blamed["since"]) < 100
        assert (await client.get(f"/workers/{P}")).json() == prefill
        assert (await client.get("/workers/http%3A%2F%2Fp%3A1")).json()["url"] == P
        missing = await client.get("/workers/http://x:1")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "worker_not_found")
        assert "http://x:1" in missing.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"role": "prefill", "bootstrap_port": 8998}, {"worker_type": "prefill"}, {"role": "decode"}])
async def test_a_worker_is_added(body: JsonObject) -> None:
    nodes = table()
    version = nodes.version
    async with surface(nodes) as client:
        reply = await client.post("/workers", json={"url": "http://new:1/", **body})
        assert reply.status_code == 201
        assert reply.json()["status"] == "added"
        (node,) = nodes.of_url("http://new:1")
        assert reply.json()["worker"]["state"] == "unknown"
        assert (node.leg, node.bootstrap_port) == (next(iter(body.values())), body.get("bootstrap_port"))
        assert nodes.version != version
        again = await client.post("/workers", json={"url": "http://new:1", **body})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "worker_exists")
        other = {"prefill": "decode", "decode": "prefill"}[node.leg]
        assert (await client.post("/workers", json={"url": "http://new:1", "role": other})).status_code == 409
        assert len(nodes.all) == 4


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no JSON object"),
        (b"[]", "no JSON object"),
        (b'{"url":' + b"[" * 9000, "no JSON object"),
        (b'{"role":"decode"}', "`url`"),
        (b'{"url":"http://x:1"}', "`role`"),
        (b'{"url":"http://x:1","role":"both"}', "both"),
        (b'{"url":"http://x:1","role":"decode","worker_type":"prefill"}', "`role`"),
        (b'{"url":"http://x:1","role":"decode","bootstrap_port":1}', "bootstrap_port"),
        (b'{"url":"http://x:1","role":"prefill","bootstrap_port":65536}', "65535"),
        (b'{"url":"http://x:1","role":"decode","priority":3}', "priority"),
        (b'{"url":7,"role":"decode"}', "url"),
        (b'{"url":"x:1","role":"decode"}', "no node address"),
        (b'{"url":"http://","role":"decode"}', "no node address"),
        (b'{"url":"http://x:99999","role":"decode"}', "no node address"),
        (b'{"url":"http://x:1?a=b","role":"decode"}', "no node address"),
        (b'{"url":"http://user:secret@x:1","role":"decode"}', "no node address"),
        (b'{"url":"http://x:1/\\r\\nset-cookie: a=b","role":"decode"}', "no node address"),
        (b'{"url":"http://x:1,nine","role":"prefill"}', "no port"),
    ],
)
async def test_what_is_no_worker_is_refused_with_a_reason(body: bytes, words: str) -> None:
    nodes = table()
    before = (nodes.version, nodes.all)
    async with surface(nodes) as client:
        reply = await client.post("/workers", content=body)
        assert reply.status_code == 400
        assert words in reply.json()["error"]["message"]
        assert (nodes.version, nodes.all) == before


async def test_bodies_and_paths_that_are_wrong() -> None:
    async with surface(table()) as client:
        assert (await client.post("/workers", content=b" " * (MAX_BODY_BYTES + 1))).status_code == 413
        assert (await client.delete("/workers")).status_code == 400
        assert (await client.delete("/workers", params={"url": P, "force": "perhaps"})).status_code == 400
        for method, path, status in (("GET", "/nope", 404), ("PUT", "/workers", 405), ("POST", "/workers/nope", 405)):
            reply = await client.request(method, path)
            assert reply.status_code == status
            assert "/workers is" in reply.json()["error"]["message"]
        for path in ("/workers/drain", "/workers/undrain"):
            assert (await client.post(path, json={"url": "http://x:1"})).status_code == 404
            assert (await client.post(path, json={"url": P, "role": "prefill"})).status_code == 400


async def test_an_idle_worker_is_removed_at_once_a_busy_one_when_it_is_idle() -> None:
    nodes = table()
    nodes.decode[0].num_in_flight = 2
    async with surface(nodes) as client:
        reply = await client.delete(f"/workers/{P}")
        assert (reply.status_code, reply.json()) == (200, {"status": "removed", "url": P, "in_flight": 0})
        assert nodes.prefill == ()
        assert (await client.delete(f"/workers/{P}")).status_code == 404
        for _ in range(2):
            reply = await client.delete("/workers", params={"url": D})
            assert (reply.status_code, reply.json()) == (202, {"status": "leaving", "url": D, "in_flight": 2})
        assert (await client.get(f"/workers/{D}")).json()["leaving"]
        reply = await client.delete("/workers", params={"url": D, "force": "true"})
        assert (reply.status_code, reply.json()["status"]) == (200, "removed")
        assert [node.url for node in nodes.decode] == [D2]


async def test_drain_is_taken_back() -> None:
    nodes = table()
    node = nodes.decode[0]
    async with surface(nodes) as client:
        for _ in range(2):
            assert (await client.post("/workers/drain", json={"url": D})).json() == {"status": "draining", "url": D, "in_flight": 0}
            assert node.draining
        refused = await client.post("/workers", json={"url": D, "role": "decode"})  # an operator's drain is not undone by whoever adds nodes
        assert refused.status_code == 409
        assert "undrain" in refused.json()["error"]["message"]
        for _ in range(2):
            assert (await client.post("/workers/undrain", json={"url": D})).json()["status"] == "serving"
            assert not node.draining


async def test_adding_a_worker_that_is_leaving_keeps_it() -> None:
    nodes = table()
    node = nodes.prefill[0]
    node.num_in_flight = 1
    async with surface(nodes) as client:
        assert (await client.delete(f"/workers/{P}")).status_code == 202
        assert (await client.post("/workers", json={"url": P, "role": "decode"})).status_code == 409
        reply = await client.post("/workers", json={"url": P, "role": "prefill", "bootstrap_port": 9000})
        assert (reply.status_code, reply.json()["worker"]["in_flight"]) == (201, 1)
        assert nodes.prefill == (node,)
        assert (node.leaving, node.draining, node.bootstrap_port) == (False, False, 9000)
        await client.delete(f"/workers/{P}")
        assert (await client.post("/workers/undrain", json={"url": P})).status_code == 200
        assert not node.leaving


async def test_the_key_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "admin.key"
    file.write_text("k" * 32 + "\n")
    file.chmod(0o600)
    nodes = table()
    async with surface(nodes, str(file)) as client:
        for headers in ({}, {"authorization": "Bearer " + "k" * 31}, {"authorization": "Basic " + "k" * 32}, {"authorization": "k" * 32}):
            for method, path in (("GET", "/workers"), ("POST", "/workers"), ("DELETE", f"/workers/{P}"), ("POST", "/workers/drain")):
                reply = await client.request(method, path, headers=headers)
                assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
                assert "kkk" not in reply.text
        for scheme in ("Bearer", "bearer"):
            assert (await client.get("/workers", headers={"authorization": f"{scheme} {'k' * 32}"})).status_code == 200
        headers = {"authorization": f"Bearer {'k' * 32}", "origin": "http://console"}
        assert (await client.delete(f"/workers/{P}", headers=headers)).status_code == 200
    file.chmod(0o644)
    with pytest.raises(StartupError, match=r"--admin-api-key-file .* is open to other users"):
        admin_check(RouterConfig(admin_api_key_file=str(file)))


def test_there_is_no_admin_surface_for_everybody() -> None:
    assert admin_check(RouterConfig()) is None
    assert admin_check(RouterConfig(admin_port=0, admin_host="::1")) is not None
    for host in ("0.0.0.0", "10.0.0.1", "::"):
        with pytest.raises(StartupError, match="give --admin-api-key-file"):
            admin_check(RouterConfig(admin_port=0, admin_host=host))


async def test_without_a_key_browsers_change_nothing() -> None:
    nodes = table()
    async with surface(nodes) as client:
        headers = {"origin": "http://evil.example", "content-type": "text/plain"}
        for method, path in (("POST", "/workers"), ("DELETE", f"/workers/{P}"), ("POST", "/workers/drain")):
            assert (await client.request(method, path, headers=headers, json={"url": P})).status_code == 403
        assert (await client.get("/workers", headers=headers)).status_code == 200
    assert nodes.prefill


def status_of(admin: Admin, command: JsonObject) -> int:
    try:
        admin.apply(command)
    except RequestError as error:
        return error.failure.status
    return 200


COMMANDS = st.builds(
    lambda name, url, extra: {"command": name, "url": url, **(extra if name == "add" else {})},
    st.sampled_from(["add", "remove", "drain", "undrain"]),
    st.sampled_from([P, D, "http://n:1"]),
    st.sampled_from([{"role": "prefill"}, {"worker_type": "decode"}]),
)


@given(st.lists(st.one_of(COMMANDS, st.sampled_from([P, D, "http://n:1"])), max_size=40))
def test_commands_in_any_order_leave_a_table_that_can_be_trusted(steps: list[Any]) -> None:
    """A bare URL: a request begins at that node, if it may. Removed nodes are told of once, and are none of the table's."""
    nodes = table()
    admin, removed = Admin(nodes), []
    nodes.removed.append(removed.append)
    for step in steps:
        if isinstance(step, str):
            for node in nodes.of_url(step):
                node.num_in_flight += not node.draining
            continue
        version, before = nodes.version, [(node, node.draining) for node in nodes.all]
        outcome = status_of(admin, step)
        changed = [(node, node.draining) for node in nodes.all] != before
        assert (nodes.version != version) == changed
        assert outcome == 200 or (outcome in (404, 409) and not changed)
        assert len({(node.leg, node.url) for node in nodes.all}) == len(nodes.all)
        assert all(node.draining for node in nodes.all if node.leaving)
        assert not set(removed) & set(nodes.all)
        assert len(set(removed)) == len(removed)
        assert all(not node.usable and not node.num_in_flight for node in removed)


async def test_through_the_router_s_own_port(tmp_path: Path) -> None:
    """By its server, with a key; URLs in paths as they are and percent-encoded."""
    file = tmp_path / "admin.key"
    file.write_text("k" * 32)
    file.chmod(0o600)
    key = {"authorization": "Bearer " + "k" * 32}
    async with rig(1, 2, admin_api_key_file=str(file)) as made:
        assert (await made.client.get("/workers")).status_code == 401
        workers = (await made.client.get("/workers", headers=key)).json()["workers"]
        assert [worker["url"] for worker in workers] == [node.url for node in made.router.nodes.all]
        assert (workers[0]["queued_tokens"], workers[0]["tokens_per_s"], "queued_tokens" in workers[1]) == (0, None, False)
        first, second = (node.url for node in made.decodes)
        for url in (first, quote(second, safe="")):
            assert (await made.client.get(f"/workers/{url}", headers=key)).json()["role"] == "decode"
            assert (await made.client.delete(f"/workers/{url}")).status_code == 401
            assert (await made.client.delete(f"/workers/{url}", headers=key)).status_code == 200
        assert "no decode node" in (await made.client.get("/ready")).json()["reason"]
        assert (await made.client.post("/workers", headers=key, json={"url": first, "role": "decode"})).status_code == 201
        await until(lambda: all(node.usable for node in made.router.nodes.all), "usable")
        assert (await made.client.post(CHAT, json={})).headers["x-pdserve-decode"] == first
    async with rig() as made:
        assert (await made.client.get("/workers")).status_code == 404  # no key, no surface


async def test_a_removed_node_serves_what_it_has_and_nothing_more() -> None:
    """Requests all the while: none fails, none goes to the node after its removal; its metrics and its prefixes go with it."""
    async with rig(1, 2) as made:
        nodes, leaving = made.router.nodes, made.decodes[0]
        admin, node = Admin(nodes), made.node(leaving)
        forgotten: list[Node] = []
        nodes.removed.append(forgotten.append)
        finish = asyncio.Event()

        async def slow(request: Received) -> None:
            await finish.wait()
            await leaving.serve_well(request)

        leaving.behave = slow
        asked = [asyncio.ensure_future(made.client.post(CHAT, json={"stream": True})) for _ in range(6)]
        await until(lambda: len(leaving.posts) == 3, "three are there")
        assert admin.apply({"command": "remove", "url": leaving.url})["status"] == "leaving"
        replies = await asyncio.gather(*(made.client.post(CHAT, json={}) for _ in range(20)))
        assert {reply.headers["x-pdserve-decode"] for reply in replies} == {made.decodes[1].url}
        assert node in nodes.decode
        finish.set()
        assert [reply.status_code for reply in await asyncio.gather(*asked)] == [200] * 6
        await until(lambda: node not in nodes.decode, "gone")
        assert forgotten == [node]
        assert len(leaving.posts) == 3
        assert leaving.url not in (await made.client.get("/server_info")).text
        assert not any(leaving.url in labels for labels in await made.metric("pdserve_router_node_up"))


async def test_nodes_come_and_go_under_load() -> None:
    """Whatever is added, drained and removed: every request is answered well, by a node that was there when it was placed."""
    async with rig(2, 2) as made:
        admin, rooms = Admin(made.router.nodes), made.decodes[0]._rooms
        spare = MockNode("decode", rooms)
        await spare.start()
        stop = asyncio.Event()

        async def client() -> list[int]:
            statuses = []
            while not stop.is_set():
                statuses.append((await made.client.post(CHAT, json={})).status_code)
            return statuses

        clients = [asyncio.ensure_future(client()) for _ in range(4)]
        for _ in range(6):
            admin.apply({"command": "add", "url": spare.url, "role": "decode"})
            await until(lambda: len(spare.posts) > 0, "it serves")
            admin.apply({"command": "drain", "url": made.decodes[1].url})
            admin.apply({"command": "remove", "url": spare.url})
            admin.apply({"command": "undrain", "url": made.decodes[1].url})
            await until(lambda: not made.router.nodes.of_url(spare.url), "it is gone")
            spare.posts.clear()
        stop.set()
        statuses = [status for statuses in await asyncio.gather(*clients) for status in statuses]
        assert set(statuses) == {200}
        assert await made.retries() == 0
        await idle(made)
        await spare.stop()


async def idle(made: Rig) -> None:
    await until(lambda: all(node.num_in_flight == 0 for node in made.router.nodes.all), "nothing in flight")
