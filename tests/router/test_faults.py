"""Every fault of either leg: what the client gets, whether another pair is tried, who is blamed."""

import asyncio
import time
from dataclasses import dataclass

import httpx
import pytest
from mock_node import EVENTS, STREAM, WHOLE, Behaviour, Received, babble, end_early, hang, hang_up, refuse, reset, reset_midway
from router_harness import CHAT, Rig, events, rig


@dataclass(frozen=True)
class Outcome:
    """status, code: with no other node to go to. cured: another pair is tried and serves. blamed: the node is struck off until probed."""

    status: int
    code: str
    cured: bool
    blamed: bool


FAULTS: dict[str, Behaviour | None] = {
    "400": refuse(400), "404": refuse(404), "429": refuse(429, retry_after="7"), "500": refuse(500), "502": refuse(502),
    "503": refuse(503, retry_after="7"), "504": refuse(504),
    "refused": None, "reset": reset, "hang up": hang_up, "garbage": babble, "hang": hang, "reset midway": reset_midway,
}  # fmt: skip
REFUSALS = {name: Outcome(int(name), "refused_by_mock", cured=name in ("502", "503"), blamed=False) for name in FAULTS if name.isdigit()}
OUTCOMES: dict[str, Outcome] = {
    **REFUSALS,
    "refused": Outcome(503, "node_unreachable", cured=True, blamed=True),
    "reset": Outcome(503, "node_unreachable", cured=True, blamed=True),
    "hang up": Outcome(503, "node_unreachable", cured=True, blamed=True),
    "garbage": Outcome(502, "node_failed", cured=True, blamed=True),
    "hang": Outcome(504, "deadline_exceeded", cured=False, blamed=False),
}
MIDWAY = {
    ("prefill", False): Outcome(502, "node_failed", cured=True, blamed=True),
    ("prefill", True): Outcome(502, "node_failed", cured=True, blamed=True),
    ("decode", False): Outcome(502, "node_failed", cured=False, blamed=True),  # it had begun to answer: no second try
    ("decode", True): Outcome(200, "node_failed", cured=False, blamed=True),  # in-band
}


@pytest.mark.parametrize("others", [False, True], ids=["alone", "with others"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_every_fault_of_one_leg(leg: str, stream: bool, others: bool) -> None:
    """All faults at the same time, each with a router and nodes of its own."""
    outcomes = await asyncio.gather(*(meet(leg, fault, stream, others) for fault in FAULTS), return_exceptions=True)
    assert {fault: outcome for fault, outcome in zip(FAULTS, outcomes, strict=True) if outcome is not None} == {}


async def meet(leg: str, fault: str, stream: bool, others: bool) -> None:
    expected = MIDWAY[leg, stream] if fault == "reset midway" else OUTCOMES[fault]
    async with rig(2 if others else 1, 2 if others else 1, health_check_interval_s=30.0) as made:
        faulty = (made.prefills if leg == "prefill" else made.decodes)[0]
        behaviour = FAULTS[fault]
        if behaviour is None:
            await faulty.stop()
        else:
            faulty.behave = behaviour
        timeout_s = 0.3 if fault == "hang" else 5.0
        began_s = time.monotonic()
        headers = {"x-request-deadline": f"{time.time() + timeout_s:.3f}"}
        reply = await made.client.post(CHAT, json={"messages": [], "stream": stream}, headers=headers)
        assert time.monotonic() - began_s < 1.3
        await check(made, reply, expected, stream=stream, others=others)
        assert made.node(faulty).num_blames == int(expected.blamed)
        for mock in (*made.prefills, *made.decodes):
            if mock is not faulty:
                assert made.node(mock).num_blames == 0
        retried = expected.cured and (others or not expected.blamed)
        assert await made.retries() == float(retried)
        if behaviour is None:
            await faulty.start()


async def check(made: Rig, reply: httpx.Response, expected: Outcome, *, stream: bool, others: bool) -> None:
    assert reply.headers["x-request-id"]
    if expected.cured and others:
        assert reply.status_code == 200
        assert reply.content == (STREAM if stream else WHOLE)
        assert reply.headers["x-pdserve-prefill"] in {node.url for node in made.prefills}
        return
    assert reply.status_code == expected.status
    if expected.status == 200:
        *said, error, done = events(reply.text)
        assert len(said) == 2  # the half event is not shown
        assert done == "[DONE]"
        assert error["error"]["code"] == expected.code
        return
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert error["code"] == expected.code
    if expected.code == "refused_by_mock":
        assert error == {"message": f"mock says {expected.status}", "type": "t", "param": "p", "code": "refused_by_mock"}
    if expected.status == 429:
        assert reply.headers["retry-after"] == "7"


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_another_room_for_another_try(leg: str) -> None:
    async with rig(2, 2) as made:
        faulty = (made.prefills if leg == "prefill" else made.decodes)[0]
        faulty.behave = refuse(503)
        assert (await made.client.post(CHAT, json={"messages": []})).status_code == 200
        posts = [post for mock in (*made.prefills, *made.decodes) for post in mock.posts]
        assert len(posts) == 4
        assert len({post.room for post in posts}) == 2
        first, second = (mock.posts[0] for mock in (made.prefills if leg == "prefill" else made.decodes))
        assert first.room != second.room


async def test_first_cause_is_answered_when_tries_are_used_up() -> None:
    async with rig(2, 1) as made:
        made.prefills[0].behave = refuse(503, code="first")
        made.prefills[1].behave = refuse(503, code="second")
        reply = await made.client.post(CHAT, json={"messages": []})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "first")
        assert await made.retries() == 1


@pytest.mark.parametrize("max_retries", [0, 1, 3])
async def test_number_of_tries_is_bounded(max_retries: int) -> None:
    async with rig(1, 1, max_retries=max_retries) as made:
        made.decodes[0].behave = refuse(503)
        assert (await made.client.post(CHAT, json={"messages": []})).status_code == 503
        assert len(made.decodes[0].posts) == 1 + max_retries


async def test_stream_that_ends_without_done_gets_an_error() -> None:
    async with rig() as made:
        made.decodes[0].behave = end_early
        reply = await made.client.post(CHAT, json={"messages": [], "stream": True})
        first, error, done = events(reply.text)
        assert first["choices"]
        assert error["error"]["type"] == "server_error"
        assert "without [DONE]" in error["error"]["message"]
        assert done == "[DONE]"


async def test_prefill_failure_after_first_byte_leaves_the_decode_node_alone() -> None:
    async with rig() as made:
        failed, finish = made.prefills[0], made.decodes[0]

        async def decode(request: Received) -> None:
            await request.head(200, "text/event-stream")
            await request.chunk(EVENTS[0])
            (await failed.wait_posts(1)).reset()
            await request.chunk(EVENTS[1] + EVENTS[2])
            while not made.node(failed).num_blames:
                await asyncio.sleep(0.002)
            await request.chunk(b"data: [DONE]\n\n")
            await request.end()

        failed.behave, finish.behave = hang, decode
        reply = await made.client.post(CHAT, json={"messages": [], "stream": True})
        assert reply.content == STREAM
        assert await made.retries() == 0
        assert list((await made.metric("pdserve_router_leg_failures_total")).values()) == [1.0]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_failed_leg_closes_the_other_at_once(leg: str) -> None:
    async with rig() as made:
        faulty, other = (made.prefills[0], made.decodes[0]) if leg == "prefill" else (made.decodes[0], made.prefills[0])
        other.behave = hang

        async def refuse_late(request: Received) -> None:
            await other.wait_posts(1)
            await refuse(400)(request)

        faulty.behave = refuse_late
        reply = await made.client.post(CHAT, json={"messages": []})
        assert reply.status_code == 400
        async with asyncio.timeout(0.2):
            await other.posts[0].closed.wait()


async def test_error_that_is_no_openai_object_is_put_into_one() -> None:
    async with rig() as made:
        made.prefills[0].behave = refuse(400, body=b"<h1>Bad\nRequest</h1>", content_type="text/html")
        reply = await made.client.post(CHAT, json={"messages": []})
        assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json")
        assert "Bad Request" in reply.json()["error"]["message"]
