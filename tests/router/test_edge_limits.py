"""What clients may make the router hold, many of them at once, or one behind its own requests: time, bytes and stack end somewhere."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from http_edge import BODY, edge, replies, request, say
from mock_node import WHOLE, MockNode, Received
from router_harness import CHAT, Rig, rig, until

NUM_SLOW = 500
CHUNKED = b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode()
LAST = request(BODY, b"connection: close")
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@contextmanager
def held_up(node: MockNode) -> Iterator[asyncio.Event]:
    """It answers when the event is set."""
    go = asyncio.Event()

    async def late(request: Received) -> None:
        await go.wait()
        await node.serve_well(request)

    node.behave = late
    yield go


@pytest.mark.parametrize("kind", ["nothing", "head", "body", "chunks"])
async def test_many_slow_clients_are_all_cut_off_and_others_do_not_notice(kind: str) -> None:
    """They send a byte now and then, for as long as they may."""
    starts = {"nothing": b"", "head": b"POST %s HTTP/1.1\r\nx-slow: " % CHAT.encode(), "body": request(b"x" * 1000)[:-900], "chunks": CHUNKED}
    pieces = {"nothing": b"\r\n", "head": b"x", "body": b"x", "chunks": b"1\r\nx\r\n"}

    async def trickle(made: Rig) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(starts[kind])
        reading = asyncio.ensure_future(reader.read())
        while not reading.done():
            await asyncio.wait((reading,), timeout=0.2)
            writer.write(pieces[kind])
        writer.transport.abort()
        with suppress(ConnectionError):
            return await reading
        return b""

    async with edge(head_timeout_s=1.0, body_timeout_s=1.0) as made:
        slow = [asyncio.ensure_future(trickle(made.rig)) for _ in range(NUM_SLOW)]
        for _ in range(20):
            assert (await made.rig.client.post(CHAT, content=BODY)).content == WHOLE
        async with asyncio.timeout(30):
            said = {reply[:12] for reply in await asyncio.gather(*slow)}
        assert said <= ({b"", b"HTTP/1.1 408"} if kind in ("body", "chunks") else {b""})
        await made.is_well()
        assert made.parts.server.num_connections <= 1


async def test_thousands_of_requests_ahead_that_are_answered_at_once(tmp_path: Path) -> None:
    """Each refusal leads to the next one, which may not be told by the stack."""
    keys = tmp_path / "keys"
    keys.write_text('[a]\nkey = "0123456789abcdef"\n')
    keys.chmod(0o600)
    async with edge(api_key_file=str(keys)) as made:
        ahead = HEALTH + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 3000 + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        found = replies(await say(made.rig.port, [ahead]))
        assert [reply.status for reply in found] == [200] + [401] * 3000 + [200]
        assert made.trouble == []


@pytest.mark.parametrize("behind", [HEALTH[:10], HEALTH[:-1], LAST[:-3]], ids=["line", "head", "body"])
async def test_a_request_that_comes_slowly_behind_another_does_not_end_that_ones_answer(behind: bytes) -> None:
    async with edge(head_timeout_s=0.1, body_timeout_s=0.1) as made:
        with held_up(made.rig.decodes[0]) as go:
            asking = asyncio.ensure_future(say(made.rig.port, [request() + behind]))
            await made.rig.decodes[0].wait_posts(1)
            assert await say(made.rig.port, []) == b""  # so the limit has passed
            go.set()
            first, *rest = replies(await asking)
            assert (first.status, first.body) == (200, WHOLE)
            assert [reply.status for reply in rest] == ([408] if behind == LAST[:-3] else [])


async def test_a_body_behind_two_requests_has_its_limit_too() -> None:
    async with edge(body_timeout_s=0.1) as made:
        with held_up(made.rig.decodes[0]) as go:
            asking = asyncio.ensure_future(say(made.rig.port, [request() + request() + LAST[:-3]]))
            await made.rig.decodes[0].wait_posts(1)
            go.set()
            assert [reply.status for reply in replies(await asking)] == [200, 200, 408]


async def test_a_request_cut_behind_two_others_is_served_when_its_rest_comes() -> None:
    async with edge() as made:
        with held_up(made.rig.decodes[0]) as go:
            for cut in (5, 40, len(LAST) - 3):
                go.clear()
                reader, writer = await asyncio.open_connection("127.0.0.1", made.rig.port)
                writer.write(request() + request() + LAST[:cut])
                await made.rig.decodes[0].wait_posts(len(made.rig.decodes[0].posts) + 1)
                go.set()
                async with asyncio.timeout(10):
                    said = await reader.readuntil(WHOLE)
                    writer.write(LAST[cut:])
                    said += await reader.read()
                assert [reply.status for reply in replies(said)] == [200, 200, 200]
                writer.transport.abort()
        assert made.rig.decodes[0].posts[-1].body.startswith(BODY[:-1])


@pytest.mark.parametrize("endless", [CHUNKED + b"2\r\n{}\r\n0\r\nx: ", CHUNKED + b"2;x=", b"GET /x", b"GET /x HTTP/1.1\r\nx: "],
                         ids=["trailers", "extension", "target", "header"])  # fmt: skip
async def test_what_the_parser_takes_without_end_is_cut_off(endless: bytes) -> None:
    async with edge() as made:
        said = replies(await say(made.rig.port, [endless, *[b"y" * 16384] * 64]))
        assert [reply.status for reply in said] in ([431], [])  # a client that still writes may lose it
        await made.is_well()


async def test_long_bodies_sent_ahead_are_no_long_heads() -> None:
    async with edge() as made:
        long = request(b'{"x":"%s"}' % (b"y" * 200_000))
        found = replies(await say(made.rig.port, [long + long + HEALTH[:9], HEALTH[9:] + LAST]))
        assert [reply.status for reply in found] == [200] * 4


async def test_trailers_are_not_headers() -> None:
    async with edge() as made:
        trailers = b"authorization: Bearer k\r\nx-request-id: spoofed\r\nx-more: 1\r\n"
        said = await say(made.rig.port, [CHUNKED + b"2\r\n{}\r\n0\r\n" + trailers + b"\r\n" + LAST])
        assert [reply.status for reply in replies(said)] == [200, 200]
        sent = made.rig.decodes[0].posts[0].headers
        assert not {"authorization", "x-more"} & set(sent)
        assert sent["x-request-id"] != "spoofed"


async def test_what_follows_the_last_request_is_not_served() -> None:
    async with edge() as made:
        old = request().replace(b"HTTP/1.1", b"HTTP/1.0")
        for last in (LAST, old, request(BODY, b"connection: close", path=b"/nope")):
            number = len(made.rig.decodes[0].posts)
            assert len(replies(await say(made.rig.port, [last + request() * 3]))) == 1
            assert len(made.rig.decodes[0].posts) <= number + 1
        await made.is_well()


@pytest.mark.parametrize("lines", [(), (b"connection: close",)], ids=["kept", "closed"])
async def test_a_client_that_does_not_read_its_reply_is_let_go(lines: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.server.KEEP_ALIVE_S", 0.2)
    async with edge() as made:
        async def long(request: Received) -> None:
            await request.reply(200, b"x" * (32 << 20))

        made.rig.decodes[0].behave = long
        reader, writer = await asyncio.open_connection("127.0.0.1", made.rig.port, limit=1024)
        try:
            writer.write(request(BODY, *lines))
            await reader.readuntil(b"\r\n\r\n")
            made.rig.decodes[0].behave = made.rig.decodes[0].serve_well
            await until(lambda: not any(connection.num_unsent_bytes for connection in made.parts.server._connections), "let go")
            num_bytes = 0
            with suppress(ConnectionError):
                while part := await reader.read(1 << 20):
                    num_bytes += len(part)
            assert num_bytes < 32 << 20
        finally:
            writer.transport.abort()
        await made.is_well()


async def test_a_handshake_has_a_limit_too(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=localhost",
            "-keyout", str(key), "-out", str(certificate)]  # fmt: skip
    made_it = await asyncio.create_subprocess_exec(*make, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL)
    assert await made_it.wait() == 0
    async with rig(ssl_keyfile=str(key), ssl_certfile=str(certificate), head_timeout_s=0.2) as made:
        assert await say(made.port, [], timeout_s=10) == b""
        assert await say(made.port, [b"\x16\x03\x01"], timeout_s=10) == b""
