"""Paths, methods, bad bodies, models, metrics; openai-python."""

import asyncio

import openai
import pytest
from mock_node import hang, refuse, reset_midway
from router_harness import CHAT, COMPLETIONS, rig, until


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("POST", "/v1/unknown", 404), ("GET", CHAT, 405), ("DELETE", COMPLETIONS, 405), ("POST", "/health", 405),
     ("GET", "/v1/models/nope", 404)],
)  # fmt: skip
async def test_wrong_paths_and_methods(method: str, path: str, status: int) -> None:
    async with rig() as made:
        reply = await made.client.request(method, path)
        assert reply.status_code == status
        assert reply.json()["error"]["message"]
        assert reply.headers["x-request-id"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"a":"\xff"}', b'{"stream":"yes"}', b'{"model":1}', b'{"a":' + b"[" * 50_000])
async def test_bodies_that_are_no_request(body: bytes) -> None:
    async with rig() as made:
        reply = await made.client.post(CHAT, content=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert not made.decodes[0].posts


async def test_body_above_the_limit_is_refused_before_it_is_read() -> None:
    async with rig(max_body_bytes=1000) as made:
        fits = b"{" + b" " * 998 + b"}"
        assert (await made.client.post(CHAT, content=fits)).status_code == 200
        reply = await made.client.post(CHAT, content=fits + b" ")
        assert reply.status_code == 413
        assert "1001 bytes" in reply.json()["error"]["message"]


@pytest.mark.parametrize("complete", [True, False], ids=["ends", "goes on"])
async def test_chunked_body_above_the_limit(complete: bool) -> None:
    async with rig(max_body_bytes=1000) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode())
        writer.write(b"200\r\n" + b" " * 512 + b"\r\n" + b"200\r\n" + b" " * 512 + b"\r\n" + (b"0\r\n\r\n" if complete else b""))
        async with asyncio.timeout(3):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 413 " in head
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert b"request_too_large" in await reader.readexactly(length)
            if not complete:
                assert await reader.read() == b""  # the connection ends
        writer.close()
        await writer.wait_closed()


async def test_head_that_does_not_end_is_refused() -> None:
    async with rig() as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(b"POST / HTTP/1.1\r\n" + b"x: %s\r\n" % (b"y" * 1000) * 100)
        async with asyncio.timeout(3):
            assert b" 431 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_information() -> None:
    async with rig() as made:
        assert (await made.client.get("/health")).json() == {"status": "live"}
        info = await made.info()
        assert (info["role"], info["policy"], info["models"], info["missing"]) == ("router", "round_robin", ["tiny"], None)
        assert info["version"]
        (prefill,), (decode,) = info["prefill"], info["decode"]
        assert (prefill["url"], prefill["state"], prefill["bootstrap_port"]) == (made.prefills[0].url, "usable", 8998)
        assert decode["info"]["context_length"] == 256
        (card,) = (await made.client.get("/v1/models")).json()["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/server_info", "/v1/models"])
async def test_head_is_get_without_a_body(path: str) -> None:
    async with rig() as made:
        reply = await made.client.head(path)
        assert (reply.status_code, reply.content) == (200, b"")
        assert int(reply.headers["content-length"]) > 0
        assert (await made.client.get("/health")).status_code == 200  # on the same connection


async def test_more_open_requests_than_allowed_are_refused_at_once() -> None:
    async with rig(max_concurrent_requests=2, queue_size=0) as made:
        made.prefills[0].behave = made.decodes[0].behave = hang
        asking = [asyncio.ensure_future(made.client.post(CHAT, json={})) for _ in range(2)]
        await made.decodes[0].wait_posts(2)
        for _ in range(3):  # a refused one counts for none
            reply = await made.client.post(CHAT, json={"messages": "x" * 1000})
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full")
            assert int(reply.headers["retry-after"]) >= 1
        made.prefills[0].behave, made.decodes[0].behave = made.prefills[0].serve_well, made.decodes[0].serve_well
        for task in asking:
            task.cancel()

        async def is_served() -> bool:
            return (await made.client.post(CHAT, json={})).status_code == 200

        await until(is_served, "room again")
        assert len(made.decodes[0].posts) == 3


async def test_metrics() -> None:
    async with rig() as made:
        decode = made.decodes[0]
        await made.client.post(CHAT, json={"stream": True})
        await made.client.post(COMPLETIONS, json={})
        decode.behave = refuse(503)
        await made.client.post(CHAT, json={})
        requests = await made.metric("pdserve_http_requests_total")
        assert requests['{path="/v1/chat/completions",status="200"}'] == 1
        assert requests['{path="/v1/chat/completions",status="503"}'] == 1
        assert requests['{path="/v1/completions",status="200"}'] == 1
        assert await made.retries() == 1
        assert (await made.metric("pdserve_router_leg_failures_total")) == {f'{{leg="decode",node="{decode.url}",status="503"}}': 2}
        assert (await made.metric("pdserve_time_to_first_byte_seconds_count"))[""] == 2
        assert (await made.metric("pdserve_http_request_duration_seconds_count"))['{path="/v1/chat/completions"}'] == 2
        assert (await made.metric("pdserve_router_in_flight"))[""] == 0
        assert set((await made.metric("pdserve_router_node_up")).values()) == {1}


async def test_openai_client() -> None:
    async with rig() as made, openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key="k", max_retries=0) as client:
        answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "012"
        stream = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True)
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["0", "1", "2"]
        assert made.prefills[0].posts[0].headers["authorization"] == "Bearer k"
        with pytest.raises(openai.NotFoundError, match="known: 'tiny'"):
            await client.chat.completions.create(model="other", messages=[])
        made.decodes[0].behave = reset_midway
        stream = await client.chat.completions.create(model="tiny", messages=[], stream=True)
        assert [(await anext(stream)).choices[0].delta.content for _ in range(2)] == ["0", "1"]
        with pytest.raises(openai.APIError, match="its stream was cut"):
            await anext(stream)
        made.decodes[0].behave = refuse(400)
        with pytest.raises(openai.BadRequestError, match="mock says 400"):
            await client.chat.completions.create(model="tiny", messages=[], stream=True)
