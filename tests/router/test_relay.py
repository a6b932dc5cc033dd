"""What goes to the nodes and what comes back, byte for byte and without waiting."""

import asyncio
import json
import re
import time
from typing import Any

import pytest
from mock_node import DONE, EVENTS, STREAM, WHOLE, Behaviour, Received, hang, hang_up
from router_harness import CHAT, COMPLETIONS, rig, until

from common import http_exchange
from common.http_exchange import BodyBudget
from router import completions

BODY = b'{ "messages":[{"role":"user","content":"\xc3\xa9 \\u00e9"}], "temperature":1.00e-1, "big":1234567890123456789012, "unknown":{"a" : []} }\n'


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_both_nodes_get_the_clients_bytes_and_one_room(path: str) -> None:
    async with rig() as made:
        reply = await made.client.post(path, content=BODY, headers={"content-type": "application/json"})
        assert reply.content == WHOLE
        (prefill,), (decode,) = made.prefills[0].posts, made.decodes[0].posts
        assert prefill.path == decode.path == path
        assert prefill.body == decode.body
        found = re.fullmatch(rb'(.*),"bootstrap_host":"127\.0\.0\.1","bootstrap_port":8998,"bootstrap_room":(\d+)\}\n', prefill.body, re.DOTALL)
        assert found is not None
        assert found[1] == BODY[:-2]
        assert 0 <= int(found[2]) < 1 << 63


async def test_query_is_passed_on() -> None:
    async with rig() as made:
        assert (await made.client.post(CHAT + "?api-version=1%2F2&x=%C3%A9", json={})).status_code == 200
        assert made.prefills[0].posts[0].path == made.decodes[0].posts[0].path == CHAT + "?api-version=1%2F2&x=%C3%A9"
        assert (await made.metric("pdserve_http_requests_total"))[f'{{path="{CHAT}",status="200"}}'] == 1


async def test_list_of_prompts_has_a_room_each() -> None:
    async with rig() as made:
        assert (await made.client.post(COMPLETIONS, json={"prompt": ["a", "b"]})).status_code == 200
        assert (await made.client.post(COMPLETIONS, json={"prompt": [1, 2, 3]})).status_code == 200
        several, single = (post.json for post in made.decodes[0].posts)
        assert several["bootstrap_host"] == ["127.0.0.1"] * 2
        assert several["bootstrap_port"] == [8998] * 2
        assert len(set(several["bootstrap_room"])) == 2
        assert isinstance(single["bootstrap_room"], int)


async def test_rooms_of_a_client_are_dropped() -> None:
    async with rig() as made:
        await made.client.post(CHAT, json={"bootstrap_room": 7, "messages": [{"bootstrap_room": 8}], "bootstrap_host": "evil"})
        sent = made.prefills[0].posts[0].json
        assert sent["bootstrap_room"] != 7
        assert sent["bootstrap_host"] == "127.0.0.1"
        assert sent["messages"] == [{"bootstrap_room": 8}]


async def test_headers_to_the_nodes() -> None:
    async with rig(request_timeout_s=50.0) as made:
        sent = {"authorization": "Bearer k", "x-request-id": "id-1", "x-custom": "café".encode(), "connection": "keep-alive, x-hop", "x-hop": "1",
                "te": "trailers", "accept-encoding": "gzip", "x-data-parallel-rank": "1"}  # fmt: skip
        reply = await made.client.post(CHAT, content=b"{}", headers=sent)
        assert reply.headers["x-request-id"] == "id-1"
        for mock in (made.prefills[0], made.decodes[0]):
            got = mock.posts[0].headers
            assert got["authorization"] == "Bearer k"
            assert got["x-request-id"] == "id-1"
            assert got["x-custom"].encode("latin-1").decode() == "café"
            assert not {"x-hop", "te", "accept-encoding", "transfer-encoding", "x-data-parallel-rank"} & set(got)
            assert int(got["content-length"]) == len(mock.posts[0].body)
            assert got["host"] == mock.url.removeprefix("http://")
            assert abs(float(got["x-request-deadline"]) - time.time() - 50) < 5


async def test_headers_to_the_client() -> None:
    async with rig() as made:
        reply = await made.client.post(CHAT, content=b"{}")
        assert reply.headers["x-pdserve-prefill"] == made.prefills[0].url
        assert reply.headers["x-pdserve-decode"] == made.decodes[0].url
        assert reply.headers["x-pdserve-prefill-site"] == "remote"
        assert re.fullmatch("[0-9a-f]{16}", reply.headers["x-request-id"])
        assert reply.headers["content-length"] == str(len(WHOLE))


async def test_headers_that_are_not_for_the_client() -> None:
    """What is for one hop only, which origins may read the answer, what comes behind the body."""
    async with rig() as made:

        async def decode(request: Received) -> None:
            more = {"connection": "keep-alive, x-hop", "x_hop": "1", "access_control_allow_origin": "*", "x_kept": "1"}
            await request.head(200, "application/json", **more)
            await request.write(b"2\r\n{}\r\n0\r\nx-trailer: 1\r\n\r\n")

        made.decodes[0].behave = decode
        reply = await made.client.post(CHAT, content=b"{}")
        assert reply.content == b"{}"
        assert reply.headers["x-kept"] == "1"
        assert not {"x-hop", "x-trailer", "access-control-allow-origin"} & set(reply.headers)


@pytest.mark.parametrize(("sent", "status"), [("soon", 400), ("nan", 400), ("1.5", 504), ("inf", 400)])
async def test_deadline_of_a_client_that_makes_no_sense(sent: str, status: int) -> None:
    async with rig() as made:
        reply = await made.client.post(CHAT, content=b"{}", headers={"x-request-deadline": sent})
        assert reply.status_code == status
        assert reply.json()["error"]["message"]
        assert not made.decodes[0].posts


async def test_deadline_is_the_earlier_of_the_clients_and_ours() -> None:
    async with rig(request_timeout_s=5.0) as made:
        for ahead_s in (2.0, 1000.0):
            await made.client.post(CHAT, content=b"{}", headers={"x-request-deadline": str(time.time() + ahead_s)})
        given = [float(post.headers["x-request-deadline"]) - time.time() for post in made.decodes[0].posts]
        assert given == [pytest.approx(2, abs=1), pytest.approx(5, abs=1)]


async def test_chunks_come_as_they_are_sent() -> None:
    async with rig() as made:
        go = asyncio.Semaphore(0)

        async def decode(request: Received) -> None:
            await request.head(200, "text/event-stream")
            for event in (*EVENTS, DONE):
                await go.acquire()
                await request.chunk(event)
            await request.end()

        made.decodes[0].behave, made.prefills[0].behave = decode, hang  # the first byte does not wait for the prefill node's reply
        go.release()
        async with made.client.stream("POST", CHAT, json={"stream": True}) as reply, asyncio.timeout(5):
            assert reply.status_code == 200
            chunks = reply.aiter_raw()
            for event in (*EVENTS, DONE):
                assert await anext(chunks) == event
                go.release()
            assert [chunk async for chunk in chunks] == []


async def test_events_cut_anywhere_arrive_whole() -> None:
    async with rig() as made:

        async def decode(request: Received) -> None:
            await request.head(200, "text/event-stream")
            for n in range(0, len(STREAM), 7):
                await request.chunk(STREAM[n : n + 7])
                await asyncio.sleep(0)
            await request.end()

        made.decodes[0].behave = decode
        async with made.client.stream("POST", CHAT, json={"stream": True}) as reply:
            chunks = [chunk async for chunk in reply.aiter_raw()]
        assert b"".join(chunks) == STREAM
        assert all(chunk.endswith(b"\n\n") for chunk in chunks)


@pytest.mark.parametrize(("tail", "passed_on"), [(b"data: [DONE]\r\n\r\n",) * 2, (b"data: [DONE]\n", DONE), (b"data: [DONE]", DONE)])
async def test_other_forms_of_the_end_are_passed_on(tail: bytes, passed_on: bytes) -> None:
    """An event that has no end is none for clients, so it gets one."""
    async with rig() as made:

        async def decode(request: Received) -> None:
            await request.head(200, "text/event-stream")
            await request.chunk(EVENTS[0] + tail)
            await request.end()

        made.decodes[0].behave = decode
        reply = await made.client.post(CHAT, json={"stream": True})
        assert reply.content == EVENTS[0] + passed_on


@pytest.mark.parametrize("kind", ["done", "error"])
async def test_deadline_that_passes_behind_the_last_word_changes_nothing(kind: str) -> None:
    """The node does not end its stream."""
    last = DONE if kind == "done" else b'data: {"error":{"message":"m","type":"t","param":null,"code":null}}\n\n'
    async with rig(request_timeout_s=0.3) as made:

        async def decode(request: Received) -> None:
            await request.head(200, "text/event-stream")
            await request.chunk(EVENTS[0] + last)
            await hang(request)

        made.decodes[0].behave = decode
        reply = await made.client.post(CHAT, json={"stream": True})
        assert reply.content == EVENTS[0] + last + (b"" if kind == "done" else DONE)


async def test_last_word_that_is_cut_short_is_none() -> None:
    async with rig() as made:

        async def decode(request: Received) -> None:
            await request.head(200, "text/event-stream")
            await request.chunk(b'event: response.created\ndata: {}\n\nevent: response.completed\ndata: {"usage":{"out')
            await request.end()

        made.decodes[0].behave = decode
        reply = await made.client.post("/v1/responses", json={"stream": True})
        assert b"completed\ndata" not in reply.content
        assert b'data: {"type":"error"' in reply.content


@pytest.mark.parametrize("how", [hang, hang_up])
async def test_error_behind_a_very_long_event_that_breaks_is_an_event_of_its_own(how: Behaviour) -> None:
    async with rig(request_timeout_s=0.5) as made:

        async def decode(request: Received) -> None:
            await request.head(200, "text/event-stream")
            await request.chunk(b'data: {"text":"' + b"x" * 3_000_000)
            await asyncio.sleep(0.02)
            await how(request)

        made.decodes[0].behave = decode
        reply = await made.client.post(CHAT, json={"stream": True})
        *_, error, last = reply.text.split("\n\n")[:-1]
        assert error.startswith('data: {"error":{"message":')
        assert last == "data: [DONE]"


async def test_stream_that_breaks_in_its_first_event_has_a_true_status() -> None:
    async with rig() as made:

        async def decode(request: Received) -> None:
            await request.head(200, "text/event-stream")
            await request.chunk(EVENTS[0][:10])
            await asyncio.sleep(0.02)
            request.reset()

        made.decodes[0].behave = decode
        reply = await made.client.post(CHAT, json={"stream": True})
        assert (reply.status_code, reply.headers["content-type"]) == (502, "application/json")
        assert "cut" in reply.json()["error"]["message"]


async def test_reply_to_another_request_reaches_nobody() -> None:
    """A kept connection answers with what belongs to the request before."""
    async with rig(max_retries=0, health_check_interval_s=30.0) as made:
        mock = made.decodes[0]

        async def answer_twice(request: Received) -> None:
            answered = mock.posts[0 if len(mock.posts) == 2 else -1]
            await request.reply(200, WHOLE, x_request_id=answered.headers["x-request-id"])

        mock.behave = answer_twice
        assert (await made.client.post(CHAT, json={})).content == WHOLE
        num_connections = mock.num_connections
        reply = await made.client.post(CHAT, json={})
        assert (reply.status_code, mock.num_connections) == (502, num_connections)
        assert "another request" in reply.json()["error"]["message"]
        assert (await made.client.post(CHAT, json={})).content == WHOLE
        assert mock.num_connections == num_connections + 1


async def test_ids_that_a_proxy_before_the_node_writes_are_no_fault() -> None:
    async with rig() as made:
        for leg in (made.prefills[0], made.decodes[0]):
            leg.behave = lambda request: request.reply(200, WHOLE, x_request_id=f"proxy-{id(request)}")
        for _ in range(3):
            assert (await made.client.post(CHAT, json={})).content == WHOLE


async def test_large_bodies_pass_both_ways() -> None:
    async with rig() as made:
        big = json.dumps({"text": "x" * 3_000_000}).encode()

        async def decode(request: Received) -> None:
            await request.reply(200, big)

        made.decodes[0].behave = decode
        reply = await made.client.post(CHAT, content=big)  # a warning of the HTTP client's would be an error here
        assert reply.content == big
        (first,), (second,) = made.prefills[0].posts, made.decodes[0].posts
        assert first.body == second.body
        assert first.body[: len(big) - 1] == big[:-1]
        assert first.json["text"] == "x" * 3_000_000


async def test_replies_that_are_gathered_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made_budgets: list[BodyBudget] = []

    def budget(*limits: Any) -> BodyBudget:
        made_budgets.append(BodyBudget(2 << 20, 3 << 20))
        return made_budgets[-1]

    monkeypatch.setattr(completions, "BodyBudget", budget)
    async with rig() as made:
        large = b'"%s"' % (b"x" * 1_900_000)

        async def most_of_it(request: Received) -> None:
            await request.head(200, "application/json", length=len(large))
            await request.write(large[:-1])
            await hang(request)

        made.decodes[0].behave = most_of_it
        first = asyncio.ensure_future(made.client.post(CHAT, json={}))
        await made.decodes[0].wait_posts(1)
        (replies,) = made_budgets
        await until(lambda: replies.num_bytes > 1_800_000, "most of the first is here")
        second = await made.client.post(CHAT, json={})
        assert (second.status_code, second.json()["error"]["code"]) == (503, "overloaded")
        assert made.node(made.decodes[0]).num_blames == 0
        first.cancel()
        made.decodes[0].behave = made.decodes[0].serve_well
        await until(lambda: replies.num_bytes == 0, "given back")
        assert (await made.client.post(CHAT, json={})).status_code == 200


async def test_connections_are_kept() -> None:
    async with rig() as made:
        before = made.decodes[0].num_connections, made.prefills[0].num_connections
        for stream in (True, False) * 5:
            assert (await made.client.post(CHAT, json={"stream": stream})).status_code == 200
        assert (made.decodes[0].num_connections, made.prefills[0].num_connections) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_kept_connection_that_the_node_just_closed_costs_no_request(leg: str) -> None:
    """The node closes an idle connection at the moment the router uses it."""
    async with rig(health_check_interval_s=30.0) as made:
        mock = (made.prefills if leg == "prefill" else made.decodes)[0]
        used = set()

        async def close_second(request: Received) -> None:
            if request.writer in used:
                await hang_up(request)
            else:
                used.add(request.writer)
                await mock.serve_well(request)

        mock.behave = close_second
        for _ in range(4):
            assert (await made.client.post(CHAT, json={})).status_code == 200
        assert await made.retries() == 0
        assert made.node(mock).num_blames == 0


async def test_load_is_counted_per_leg() -> None:
    async with rig() as made:
        go = asyncio.Event()

        async def decode(request: Received) -> None:
            await request.head(200, "text/event-stream")
            await request.chunk(EVENTS[0])
            await go.wait()
            await request.chunk(DONE)
            await request.end()

        made.decodes[0].behave = decode
        prefill, decode_node = made.node(made.prefills[0]), made.node(made.decodes[0])
        async with made.client.stream("POST", CHAT, json={"stream": True}) as reply:
            await anext(reply.aiter_raw())
            await until(lambda: prefill.num_in_flight == 0, "prefill leg over while the stream goes on")
            assert prefill.prefill_load.queued_tokens == 0
            assert decode_node.num_in_flight == 1
            go.set()
        await until(lambda: decode_node.num_in_flight == 0, "decode leg over")
        made.prefills[0].behave = made.decodes[0].behave = hang
        asking = asyncio.ensure_future(made.client.post(CHAT, json={"prompt": "x" * 4000}))
        await made.prefills[0].wait_posts(2)
        assert 900 < prefill.prefill_load.queued_tokens < 1100
        asking.cancel()
        await until(lambda: prefill.num_in_flight == decode_node.num_in_flight == 0, "nothing in flight")
        assert prefill.prefill_load.queued_tokens == 0


async def test_prefill_leg_that_goes_on_after_the_answer_is_closed() -> None:
    async with rig() as made:

        async def decode(request: Received) -> None:
            await made.prefills[0].wait_posts(1)
            await request.reply(200, WHOLE)

        made.prefills[0].behave, made.decodes[0].behave = hang, decode
        assert (await made.client.post(CHAT, json={})).content == WHOLE
        async with asyncio.timeout(3):
            await made.prefills[0].posts[0].closed.wait()
        assert made.node(made.prefills[0]).num_blames == 0


async def test_body_is_held_until_the_answer_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of long prompts go on for minutes: what all bodies may take together is for those that may still be sent."""
    monkeypatch.setattr(http_exchange, "MAX_BODIES_BYTES", 0)
    async with rig(max_body_bytes=1000) as made:
        go, prompt = asyncio.Event(), "x" * 900

        async def decode(request: Received) -> None:
            await request.head(200, "text/event-stream")
            await request.chunk(EVENTS[0])
            await go.wait()
            await request.chunk(DONE)
            await request.end()

        made.decodes[0].behave = decode
        async with made.client.stream("POST", CHAT, json={"stream": True, "prompt": prompt}) as reply:
            await anext(reply.aiter_raw())
            made.decodes[0].behave = hang
            asking = asyncio.ensure_future(made.client.post(CHAT, json={"prompt": prompt}))
            await made.decodes[0].wait_posts(2)
            refused = await made.client.post(CHAT, json={"prompt": prompt})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            asking.cancel()
            go.set()
