"""Keys, the queue and the objective as clients meet them, through the router's own server."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from mock_node import hang
from router_harness import CHAT, Rig, rig, until

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(f"[alice]\nkey = '{ALICE}'\nmax_concurrent_requests = 1\n[bob]\nkey = '{BOB}'\npriority = -3\n")
    path.chmod(0o600)
    return str(path)


def ask(made: Rig, key: str | None = None, headers: dict[str, str] | None = None, **fields: Any) -> "asyncio.Task[httpx.Response]":
    authorization = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **fields}
    return asyncio.ensure_future(made.client.post(CHAT, json=body, headers={**authorization, **(headers or {})}))


def free_slots(made: Rig) -> None:
    """Nodes that hang answer from now on, and those that hang now fail."""
    for node in (*made.prefills, *made.decodes):
        node.behave = node.serve_well
        for post in node.posts:
            post.hang_up()


async def queued(made: Rig) -> float:
    return sum((await made.metric("pdserve_router_queued_requests")).values())


async def wait_queued(made: Rig, number: int) -> None:
    async def reached() -> bool:
        return await queued(made) == number

    await until(reached, f"{number} wait")


async def test_only_keys_that_are_known_are_served_and_others_are_challenged(key_file: str) -> None:
    async with rig(api_key_file=key_file) as made:
        for reply in (await ask(made), await ask(made, ALICE + "x")):
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.json()["error"]["type"] == "authentication_error"
        assert (await ask(made, ALICE)).status_code == 200
        assert (await ask(made, headers={"x-api-key": BOB})).status_code == 200
        assert (await made.metric("pdserve_router_key_requests_total")) == {'{key="alice"}': 1.0, '{key="bob"}': 1.0}


async def test_a_key_s_limit_is_its_own(key_file: str) -> None:
    async with rig(api_key_file=key_file, max_retries=0) as made:
        for node in (*made.prefills, *made.decodes):
            node.behave = hang
        first = ask(made, ALICE)
        await made.decodes[0].wait_posts(1)
        refused = await ask(made, ALICE)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "key_limit"
        assert int(refused.headers["retry-after"]) >= 1
        assert await made.metric("pdserve_router_refusals_total") == {'{key="alice",reason="key_limit"}': 1.0}
        other = ask(made, BOB)
        await made.decodes[0].wait_posts(2)
        free_slots(made)
        await asyncio.gather(first, other)
        assert (await ask(made, ALICE)).status_code == 200


async def test_the_queue_goes_by_priority_and_who_stands_last_makes_way() -> None:
    async with rig(max_concurrent_requests=1, queue_size=2, max_retries=0) as made:
        for node in (*made.prefills, *made.decodes):
            node.behave = hang
        running = ask(made)
        await made.decodes[0].wait_posts(1)
        background = ask(made, priority=10)
        await wait_queued(made, 1)
        plain = ask(made, user="plain")
        await wait_queued(made, 2)
        refused = await ask(made, priority=10)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        urgent = ask(made, priority=-10, user="urgent")
        displaced = await background
        assert (displaced.status_code, displaced.json()["error"]["code"]) == (429, "queue_full")
        free_slots(made)
        assert (await running).status_code == 503  # its nodes hung up
        assert [(await reply).status_code for reply in (urgent, plain)] == [200, 200]
        assert [post.json["user"] for post in made.decodes[0].posts[1:]] == ["urgent", "plain"]


async def test_the_queue_s_timeout_answers_503() -> None:
    async with rig(max_concurrent_requests=1, queue_timeout_s=0.1, max_retries=0) as made:
        for node in (*made.prefills, *made.decodes):
            node.behave = hang
        running = ask(made)
        await made.decodes[0].wait_posts(1)
        late = await ask(made)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
        assert int(late.headers["retry-after"]) >= 1
        free_slots(made)
        await running
        assert (await ask(made)).status_code == 200


async def test_a_client_that_leaves_the_queue_frees_its_place_and_a_deadline_ends_its_wait() -> None:
    async with rig(max_concurrent_requests=1, queue_size=1, max_retries=0) as made:
        for node in (*made.prefills, *made.decodes):
            node.behave = hang
        running = ask(made)
        await made.decodes[0].wait_posts(1)
        leaver = ask(made)
        await wait_queued(made, 1)
        leaver.cancel()
        await wait_queued(made, 0)
        late = await ask(made, headers={"x-request-deadline": str(time.time() + 0.2)})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        next_ = ask(made)
        await wait_queued(made, 1)
        free_slots(made)
        await running
        assert (await next_).status_code == 200
        assert len(made.decodes[0].posts) == 2  # who left or was late was never sent


async def test_requests_beyond_the_objective_are_refused_at_once_and_the_first_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.ttft.DOUBT_S", 600.0)
    async with rig(ttft_slo_s=0.001) as made:
        assert (await ask(made)).status_code == 200  # nothing is known of the nodes
        for node in (*made.prefills, *made.decodes):
            node.behave = hang
        made.router.nodes.prefill[0].prefill_load.begin(10**9, time.monotonic())  # a prompt that will never be computed
        refused = await ask(made)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "ttft_slo")
        assert "--ttft-slo" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
