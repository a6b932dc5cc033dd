"""Faults and what follows them: rooms, tries, first causes, ends of streams (every fault of either leg: test_fault_matrix.py)."""

import asyncio
import json
import time
from typing import Any

import pytest
from mock_node import EVENTS, STREAM, Behaviour, Received, end_early, hang, hang_up, refuse, reset, reset_midway
from router_harness import CHAT, events, rig, until

from router.connection import Address, Connection, Pool
from router.pairing import Pairing, Placement


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


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_node_that_fails_midway_is_counted(stream: bool) -> None:
    async with rig() as made:
        made.decodes[0].behave = reset_midway
        await made.client.post(CHAT, json={"messages": [], "stream": stream})
        assert await made.metric("pdserve_router_leg_failures_total") == {f'{{leg="decode",node="{made.decodes[0].url}",status="502"}}': 1.0}


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


async def test_what_a_node_says_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Nodes repeat what clients sent."""
    message = "no such model\n2026-01-01 WARNING forged\x1b[2J" + "x" * 1000
    async with rig(max_retries=1) as made:
        made.decodes[0].behave = refuse(503, body=json.dumps({"error": {"message": message, "type": "t", "param": None, "code": None}}).encode())
        reply = await made.client.post(CHAT, json={"messages": []})
        assert reply.json()["error"]["message"] == message
    lines = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert lines
    assert all(line.isprintable() and len(line) < 800 for line in lines)


async def test_prefill_refusal_after_the_decode_nodes_head_is_the_answer() -> None:
    """A node that sends its head early has not begun to answer."""
    async with rig() as made:
        prefill, decode = made.prefills[0], made.decodes[0]

        async def head_only(request: Received) -> None:
            await request.head(200, "text/event-stream")
            await hang(request)

        async def refuse_late(request: Received) -> None:
            await decode.wait_posts(1)
            await asyncio.sleep(0.05)  # the head arrives
            await refuse(400)(request)

        prefill.behave, decode.behave = refuse_late, head_only
        reply = await made.client.post(CHAT, json={"messages": [], "stream": True})
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, "mock says 400")
        async with asyncio.timeout(0.2):
            await decode.posts[0].closed.wait()
        await until(lambda: made.node(decode).num_in_flight == 0, "nothing in flight")


@pytest.mark.parametrize(
    ("error", "status"),
    [('{"message":"too long","type":"BadRequest","code":400}', 400), ('{"message":"too long","type":"invalid_request_error","code":"c"}', 400),
     ('{"message":"too long","type":"x","code":null}', 500)],
)  # fmt: skip
async def test_error_event_of_the_prefill_leg_is_a_failure(error: str, status: int) -> None:
    async with rig() as made:
        event = f'data: {{"error":{error}}}\n\n'.encode()

        async def in_band(request: Received) -> None:
            await request.head(200, "text/event-stream")
            await request.chunk(event[:20])
            await request.chunk(event[20:])
            await request.end()

        made.prefills[0].behave, made.decodes[0].behave = in_band, hang
        reply = await made.client.post(CHAT, json={"messages": [], "stream": True})
        assert (reply.status_code, reply.json()["error"]["message"]) == (status, "too long")
        assert made.node(made.prefills[0]).num_blames == 0


@pytest.mark.parametrize("after", [b"", b": bye\n\n"], ids=["done", "comment"])
@pytest.mark.parametrize("end", [reset, hang_up, Received.end], ids=["reset", "hang up", "end"])
async def test_stream_that_said_done_has_ended_well(after: bytes, end: Behaviour) -> None:
    async with rig() as made:

        async def decode(request: Received) -> None:
            await request.head(200, "text/event-stream")
            await request.chunk(STREAM + after)
            await asyncio.sleep(0.02)  # a reset discards what the receiver has not read
            await end(request)

        made.decodes[0].behave = decode
        reply = await made.client.post(CHAT, json={"messages": [], "stream": True})
        assert reply.content == STREAM + after
        assert made.node(made.decodes[0]).num_blames == 0


async def test_stream_that_goes_on_after_done_is_ended() -> None:
    async with rig() as made:

        async def decode(request: Received) -> None:
            await request.head(200, "text/event-stream")
            await request.chunk(STREAM)
            await hang(request)

        made.decodes[0].behave = decode
        began_s = time.monotonic()
        assert (await made.client.post(CHAT, json={"messages": [], "stream": True})).content == STREAM
        assert time.monotonic() - began_s < 2
        async with asyncio.timeout(1):
            await made.decodes[0].posts[0].closed.wait()


@pytest.mark.parametrize("end", [reset, hang_up, Received.end], ids=["reset", "hang up", "end"])
async def test_error_event_of_the_decode_node_stays_the_only_one(end: Behaviour, caplog: pytest.LogCaptureFixture) -> None:
    async with rig() as made:
        error = b'data: {"error":{"message":"first cause","type":"server_error"}}\n\n'

        async def decode(request: Received) -> None:
            await request.head(200, "text/event-stream")
            await request.chunk(EVENTS[0] + error)
            await asyncio.sleep(0.02)
            await end(request)

        made.decodes[0].behave = decode
        reply = await made.client.post(CHAT, json={"messages": [], "stream": True}, headers={"x-request-id": "id-7"})
        assert reply.content == EVENTS[0] + error + b"data: [DONE]\n\n"
        (line,) = [record.getMessage() for record in caplog.records if "id-7" in record.getMessage()]
        assert "500 first cause" in line
        assert made.decodes[0].url in line


async def test_text_that_looks_like_an_end_is_none() -> None:
    async with rig() as made:

        async def decode(request: Received) -> None:
            await request.head(200, "text/event-stream")
            await request.chunk(b'data: {"choices":[{"delta":{"content":"\\ndata: [DONE]\\n\\"error\\""}}]}\n\n')
            await request.end()

        made.decodes[0].behave = decode
        *_, error, _ = events((await made.client.post(CHAT, json={"stream": True})).text)
        assert "without [DONE]" in error["error"]["message"]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_node_that_asks_for_patience_gets_it(leg: str) -> None:
    """Its refusal is passed on when there is no other; another node serves when there is one."""
    async with rig(1, 2) as made:
        for mock in made.prefills if leg == "prefill" else made.decodes:
            mock.behave = refuse(503, retry_after="7")
        reply = await made.client.post(CHAT, json={})
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "7")
        assert len(made.prefills[0].posts) == (1 if leg == "prefill" else 2)
        assert [len(mock.posts) for mock in made.decodes] in ([[1, 0], [0, 1]] if leg == "prefill" else [[1, 1]])


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_one_reset_of_the_only_node_costs_no_request(leg: str) -> None:
    """Neither that one nor those that come while the node is probed."""
    async with rig(health_check_interval_s=30.0) as made:
        mock = (made.prefills if leg == "prefill" else made.decodes)[0]

        async def reset_once(request: Received) -> None:
            await (reset if request is mock.posts[0] else mock.serve_well)(request)

        mock.behave = reset_once
        replies = await asyncio.gather(*(made.client.post(CHAT, json={}) for _ in range(4)))
        assert [reply.status_code for reply in replies] == [200] * 4
        assert await made.retries() == 1
        assert made.node(mock).num_blames == 1
        assert len({post.room for post in mock.posts}) == 5


async def test_frozen_only_node_is_not_waited_for_longer_than_a_probe() -> None:
    async with rig(health_check_interval_s=30.0, connect_timeout_s=0.2) as made:
        mock = made.decodes[0]
        mock.behave = reset
        mock._get = hang  # type: ignore[method-assign]
        began_s = time.monotonic()
        reply = await made.client.post(CHAT, json={})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "node_unreachable")
        assert 0.15 < time.monotonic() - began_s < 1


async def test_failed_request_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Its id, its pair, the first cause."""
    async with rig() as made:
        caplog.set_level("INFO")
        made.prefills[0].behave = refuse(400)
        await made.client.post(CHAT, json={}, headers={"x-request-id": "id-9"})
        (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("router.")]
        assert line == f"id-9 {CHAT}: 400 mock says 400 (prefill {made.prefills[0].url}, decode {made.decodes[0].url})"


async def test_verdict_that_comes_at_once_is_not_missed() -> None:
    """The one decode node has failed a request; the probe that clears it ends between the next request's coming and its waiting."""
    async with rig() as made:
        node = made.node(made.decodes[0])
        settled, place = Pairing.settled, Pairing.place

        def place_with_a_suspect(pairing: Pairing, *args: Any, **options: Any) -> Placement:
            if not node.num_blames:
                node.blame("failed a request")
            return place(pairing, *args, **options)

        async def late(pairing: Pairing, timeout_s: float) -> bool:
            await until(lambda: node.usable, "verdict")
            return await settled(pairing, timeout_s)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pairing, "place", place_with_a_suspect)
            patch.setattr(Pairing, "settled", late)
            assert (await made.client.post(CHAT, json={"messages": []})).status_code == 200


@pytest.mark.parametrize("others", [False, True], ids=["alone", "with others"])
async def test_a_connection_that_times_out_is_not_waited_for_twice(others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a host that is gone; its probes, on a connection of their own, may still be answered."""
    async with rig(2 if others else 1, 1, connect_timeout_s=0.5) as made:
        faulty, connect = made.prefills[0], Pool.connect
        times = []

        async def no_answer(self: Pool, address: Address) -> Connection:
            if address.port != faulty.port:
                return await connect(self, address)
            times.append(time.monotonic())
            async with asyncio.timeout(0.5):
                await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(Pool, "connect", no_answer)
        reply = await made.client.post(CHAT, json={"messages": []})
        took_s = time.monotonic() - times[0]
        assert len(times) == 1
        if others:
            assert (reply.status_code, await made.retries()) == (200, 1)
        else:
            assert (reply.status_code, reply.json()["error"]["code"], await made.retries()) == (503, "node_unreachable", 0)
            assert took_s < 0.95
