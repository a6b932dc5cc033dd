"""Who may ask what: clients' keys at every path of the edge, and the key that nodes get to see instead."""

import os
from pathlib import Path

import pytest
from router_harness import CHAT, Rig, rig, until

from router.api_paths import PATHS

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
NODE_KEY = "node-0123456789abcdef"
ADMIN_KEY = "admin-0123456789abcdef"


def secret(path: Path, content: str) -> str:
    """In one step, as an administrator should."""
    fresh = path.with_suffix(".new")
    fresh.write_text(content)
    fresh.chmod(0o600)
    os.replace(fresh, path)
    return str(path)


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    return secret(tmp_path / "keys.toml", f"[alice]\nkey = '{ALICE}'\n[bob]\nkey = '{BOB}'\nrequests_per_second = 0.01\n")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


KEYED = [
    *(("POST", path.decode()) for path in PATHS),
    ("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("GET", "/server_info"), ("HEAD", "/server_info"), ("GET", "/openapi.json"), ("GET", "/docs"),
    ("GET", "/health/"), ("GET", "/%68ealth"), ("GET", "//health"), ("GET", "/health/../server_info"), ("GET", "/nope"),
    ("GET", CHAT), ("PUT", "/ready/x"),
]  # fmt: skip


async def test_every_path_wants_a_key_but_those_that_probes_ask_for(key_file: str) -> None:
    async with rig(api_key_file=key_file) as made:
        for method, path in KEYED:
            reply = await made.client.request(method, path, content=b"{}" if method == "POST" else None)
            assert reply.status_code == 401, path
            assert reply.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert reply.json()["error"]["code"] == "missing_api_key"
        for path in ("/health", "/ready", "/metrics"):
            assert (await made.client.get(path)).status_code == 200
        assert not any(node.posts for node in (*made.prefills, *made.decodes))
        assert (await made.client.get("/v1/models", headers=bearer(ALICE))).status_code == 200
        assert (await made.client.get("/server_info", headers={"x-api-key": BOB})).status_code == 200
        assert (await made.client.get("/nope", headers=bearer(ALICE))).status_code == 404


@pytest.mark.parametrize(
    ("headers", "code"),
    [({}, "missing_api_key"), ({"authorization": "Bearer"}, "missing_api_key"), ({"authorization": "Basic YTpi"}, "missing_api_key"),
     ({"authorization": ALICE}, "missing_api_key"), (bearer(ALICE[:-1]), "invalid_api_key"), (bearer(ALICE + " x"), "invalid_api_key"),
     ({"x-api-key": "x"}, "invalid_api_key"), ({"authorization": b"Bearer \xff\xfe"}, "invalid_api_key"), ({"cookie": ALICE}, "missing_api_key")],
)  # fmt: skip
async def test_refusals_of_what_is_no_key(key_file: str, headers: dict[str, str], code: str) -> None:
    async with rig(api_key_file=key_file) as made:
        for reply in (await made.client.post(CHAT, content=b"{}", headers=headers), await made.client.get("/v1/models", headers=headers)):
            error = reply.json()["error"]
            assert (reply.status_code, reply.headers["www-authenticate"], error["code"]) == (401, "Bearer", code)
            assert error["type"] == "authentication_error"
            assert ALICE not in reply.text
        assert await made.metric("pdserve_router_refusals_total") == {'{key="",reason="unauthorized"}': 2.0}
        assert await made.metric("pdserve_router_key_requests_total") == {}


async def test_a_body_is_not_parsed_before_the_key_is_known(key_file: str) -> None:
    async with rig(api_key_file=key_file) as made:
        assert (await made.client.post(CHAT, content=b"no JSON")).status_code == 401
        assert (await made.client.post(CHAT, content=b"no JSON", headers=bearer(ALICE))).status_code == 400


async def test_requests_are_counted_by_name_and_limited_by_key(key_file: str) -> None:
    async with rig(api_key_file=key_file) as made:
        for _ in range(3):
            assert (await made.client.post(CHAT, content=b"{}", headers=bearer(ALICE))).status_code == 200
        assert (await made.client.post(CHAT, content=b"{}", headers=bearer(BOB))).status_code == 200
        refused = await made.client.post(CHAT, content=b"{}", headers=bearer(BOB))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_rate_limit")
        assert 60 < int(refused.headers["retry-after"]) <= 100
        assert (await made.client.post(CHAT, content=b"{}", headers=bearer(ALICE))).status_code == 200
        assert await made.metric("pdserve_router_key_requests_total") == {'{key="alice"}': 4.0, '{key="bob"}': 2.0}
        assert await made.metric("pdserve_router_refusals_total") == {'{key="bob",reason="key_rate_limit"}': 1.0}
        assert len(made.decodes[0].posts) == 5
        text = (await made.client.get("/metrics")).text
        assert ALICE not in text
        assert BOB not in text


async def test_the_file_is_read_again_while_requests_come(key_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.keys.CHECK_S", 0.0)
    async with rig(api_key_file=key_file) as made:
        async def status(key: str) -> int:
            return (await made.client.post(CHAT, content=b"{}", headers=bearer(key))).status_code

        assert await status(ALICE) == 200
        secret(Path(key_file), f"[carol]\nkey = '{ALICE[::-1]}'\n")
        await until(lambda: is_refused(made, ALICE), "alice is out")
        assert await status(ALICE[::-1]) == 200
        secret(Path(key_file), "[carol\n")
        assert await status(ALICE[::-1]) == 200  # what cannot be read changes nothing


async def is_refused(made: Rig, key: str) -> bool:
    return (await made.client.post(CHAT, content=b"{}", headers=bearer(key))).status_code == 401


async def test_nodes_see_their_own_key_in_place_of_the_clients(key_file: str, tmp_path: Path) -> None:
    node_key_file = secret(tmp_path / "node", NODE_KEY)
    async with rig(api_key_file=key_file, node_api_key_file=node_key_file) as made:
        for headers in (bearer(ALICE), {"x-api-key": ALICE}, {**bearer(ALICE), "x-api-key": ALICE}):
            assert (await made.client.post(CHAT, content=b"{}", headers=headers)).status_code == 200
        for node in (*made.prefills, *made.decodes):
            assert len(node.posts) == 3
            for post in node.posts:
                assert post.headers["authorization"] == f"Bearer {NODE_KEY}"
                assert ALICE not in str(post.headers)
            assert node.gets
            assert {get.headers.get("authorization") for get in node.gets} == {f"Bearer {NODE_KEY}"}


@pytest.mark.parametrize("headers", [bearer(ALICE), {"x-api-key": ALICE}])
async def test_without_a_node_key_the_clients_is_passed_on(key_file: str, headers: dict[str, str]) -> None:
    async with rig(api_key_file=key_file) as made:
        assert (await made.client.post(CHAT, content=b"{}", headers=headers)).status_code == 200
        (name, value), = headers.items()
        for node in (*made.prefills, *made.decodes):
            assert node.posts[0].headers[name] == value
            assert not any("authorization" in get.headers for get in node.gets)


async def test_the_admin_surface_has_a_key_of_its_own(key_file: str, tmp_path: Path) -> None:
    admin_key_file = secret(tmp_path / "admin", ADMIN_KEY)
    async with rig(api_key_file=key_file, admin_api_key_file=admin_key_file) as made:
        paths = ("/workers", "/workers/x", "/workers?url=x")
        for method, path in (*(("GET", path) for path in paths), ("POST", "/workers"), ("POST", "/workers/drain"), ("DELETE", "/workers?url=x")):
            for headers in ({}, bearer(ALICE), {"x-api-key": ADMIN_KEY}):
                reply = await made.client.request(method, path, headers=headers)
                assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
        assert (await made.client.get("/workers", headers=bearer(ADMIN_KEY))).json()["total"] == 2
        assert (await made.client.post(CHAT, content=b"{}", headers=bearer(ADMIN_KEY))).status_code == 401
