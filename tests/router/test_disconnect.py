"""A client that leaves, or does not read, in every phase: both legs are closed at once, nothing is left."""

import asyncio
import json
import time
from collections.abc import Callable

import pytest
from mock_node import EVENTS, MockNode, Received, hang
from router_harness import CHAT, Rig, rig, until

from router import completions

CLOSED_WITHIN_S = 0.1


async def connect(made: Rig, body: bytes, *, send: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
    writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body[:send]))
    await writer.drain()
    return reader, writer


async def stream_slowly(request: Received) -> None:
    await request.head(200, "text/event-stream")
    while True:
        await request.chunk(EVENTS[0])
        await asyncio.sleep(0.01)


async def half_a_body(request: Received) -> None:
    await request.head(200, "application/json", length=100)
    await request.write(b"{")
    await asyncio.Event().wait()


PHASES: dict[str, tuple[Callable[[MockNode], None], Callable[[MockNode], None]]] = {
    "both wait": (lambda p: setattr(p, "behave", hang), lambda d: setattr(d, "behave", hang)),
    "prefill served": (lambda p: None, lambda d: setattr(d, "behave", hang)),
    "prefill reply under way": (lambda p: setattr(p, "behave", half_a_body), lambda d: setattr(d, "behave", hang)),
    "streaming": (lambda p: setattr(p, "behave", hang), lambda d: setattr(d, "behave", stream_slowly)),
    "reply under way": (lambda p: setattr(p, "behave", hang), lambda d: setattr(d, "behave", half_a_body)),
}


@pytest.mark.parametrize("phase", PHASES)
async def test_client_leaves(phase: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with rig() as made:
        prefill, decode = made.prefills[0], made.decodes[0]
        for mock, behave in zip((prefill, decode), PHASES[phase], strict=True):
            behave(mock)
        reader, writer = await connect(made, json.dumps({"stream": phase == "streaming"}).encode())
        legs = [await prefill.wait_posts(1), await decode.wait_posts(1)]
        if phase == "streaming":
            await reader.readuntil(EVENTS[0])
        if phase == "prefill served":
            legs = legs[1:]  # the other connection is kept
            await until(lambda: made.node(prefill).num_in_flight == 0, "prefill leg over")
        await asyncio.sleep(0.02)
        assert not any(leg.closed.is_set() for leg in legs)
        began_s = time.monotonic()
        writer.transport.abort()
        async with asyncio.timeout(2):
            for leg in legs:
                await leg.closed.wait()
        assert time.monotonic() - began_s < CLOSED_WITHIN_S
        await until(lambda: made.node(prefill).num_in_flight == made.node(decode).num_in_flight == 0, "nothing in flight")
        assert (await made.info())["in_flight"] == 0
        assert (await made.metric("pdserve_http_requests_total"))['{path="/v1/chat/completions",status="499"}'] == 1
        (line,) = [record for record in caplog.records if record.name == "router.completions"]
        assert f"{CHAT}: the client left (prefill {prefill.url}, decode {decode.url})" in line.getMessage()
        assert line.levelname == "INFO"
        assert line.exc_info is None
        assert await made.retries() == 0
        assert made.node(prefill).num_blames == made.node(decode).num_blames == 0


async def test_client_leaves_while_it_sends_its_body() -> None:
    async with rig() as made:
        _, writer = await connect(made, b"{" + b" " * 1000 + b"}", send=10)
        await until(lambda: _connected(made, 2), "connected")
        writer.transport.abort()
        await until(lambda: _connected(made, 1), "gone")
        assert not made.decodes[0].posts


async def _connected(made: Rig, number: int) -> bool:
    """So many connections of clients; one is the rig's own."""
    return (await made.metric("pdserve_router_connections"))[""] == number


async def _open(made: Rig, number: int) -> bool:
    return bool((await made.info())["in_flight"] == number)


async def test_client_that_does_not_read_holds_its_nodes_only_until_the_deadline() -> None:
    async with rig(request_timeout_s=0.3) as made:

        async def flood(request: Received) -> None:
            await request.head(200, "text/event-stream")
            while True:
                await request.chunk(b"data: " + b"x" * 65536 + b"\n\n")

        made.decodes[0].behave = flood
        reader, writer = await connect(made, b'{"stream":true}')
        leg = await made.decodes[0].wait_posts(1)
        began_s = time.monotonic()
        async with asyncio.timeout(3):
            await leg.closed.wait()
        assert time.monotonic() - began_s < 1.3
        await until(lambda: _open(made, 0), "request over")
        await until(lambda: _connected(made, 1), "cut off")
        async with asyncio.timeout(2):
            assert not (await reader.read()).endswith(b"0\r\n\r\n")  # the connection ended, the reply did not
        writer.close()
        await writer.wait_closed()


async def test_client_that_reads_late_gets_the_error_and_then_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection takes no further request: that one's reply might be cut off in place of this."""
    monkeypatch.setattr(completions, "SEND_GRACE_S", 5.0)
    async with rig(request_timeout_s=0.3) as made:

        async def flood(request: Received) -> None:
            await request.head(200, "text/event-stream")
            while True:
                await request.chunk(b"data: " + b"x" * 65536 + b"\n\n")

        made.decodes[0].behave = flood
        reader, writer = await connect(made, b'{"stream":true}')
        async with asyncio.timeout(3):
            await (await made.decodes[0].wait_posts(1)).closed.wait()
            text = await reader.read()
        assert b'"code":"deadline_exceeded"' in text
        assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()
        await writer.wait_closed()
