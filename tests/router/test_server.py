"""The edge: what clients send, in pieces, too slow, too much, ahead of time, or as no HTTP; one answer for each, and nothing is held."""

import asyncio
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from mock_node import STREAM, WHOLE
from router_harness import CHAT, Rig, rig

BODY = b'{"messages":[]}'


def post(body: bytes = BODY, *lines: bytes, path: str = CHAT, version: bytes = b"1.1") -> bytes:
    head = b"".join(line + b"\r\n" for line in (b"host: x", b"content-length: %d" % len(body), *lines))
    return b"POST %s HTTP/%s\r\n%s\r\n%s" % (path.encode(), version, head, body)


@asynccontextmanager
async def connected(made: Rig) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
    try:
        async with asyncio.timeout(10):
            yield reader, writer
    finally:
        writer.transport.abort()


async def read_reply(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")[:-2]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") != "chunked":
        return int(first.split()[1]), headers, await reader.readexactly(int(headers.get("content-length", "0")))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return int(first.split()[1]), headers, body


async def ends(reader: asyncio.StreamReader) -> bool:
    """The router closes the connection, and says nothing more."""
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_request_cut_anywhere(size: int) -> None:
    async with rig() as made, connected(made) as (reader, writer):
        message = post()
        for start in range(0, len(message), size):
            writer.write(message[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        status, headers, body = await read_reply(reader)
        assert (status, body) == (200, WHOLE)
        assert "connection" not in headers
        assert headers["date"].endswith("GMT")


async def test_chunked_body() -> None:
    async with rig() as made, connected(made) as (reader, writer):
        head = b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode()
        writer.write(head + b'4\r\n{"me\r\nb\r\nssages":[]}\r\n0\r\n\r\n')
        assert (await read_reply(reader))[0] == 200
        sent = made.decodes[0].posts[0]
        assert sent.body.startswith(b'{"messages":[],')
        assert int(sent.headers["content-length"]) == len(sent.body)


async def test_requests_sent_ahead_are_answered_in_their_order() -> None:
    async with rig() as made, connected(made) as (reader, writer):
        stream = b'{"stream":true}'
        writer.write(post() + post(stream) + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + post() + b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n")
        bodies = [(await read_reply(reader))[::2] for _ in range(5)]
        assert bodies[:4] == [(200, WHOLE), (200, STREAM), (200, b'{"status":"live"}'), (200, WHOLE)]
        assert bodies[4][0] == 404
        writer.write(post())
        assert (await read_reply(reader))[0] == 200


async def test_connection_close_is_said_and_done() -> None:
    async with rig() as made, connected(made) as (reader, writer):
        writer.write(post(BODY, b"connection: close"))
        status, headers, _ = await read_reply(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await ends(reader)


@pytest.mark.parametrize(("keep", "said"), [(b"keep-alive", "keep-alive"), (b"close", "close")])
async def test_http_1_0(keep: bytes, said: str) -> None:
    async with rig() as made, connected(made) as (reader, writer):
        writer.write(post(BODY, b"connection: " + keep, version=b"1.0"))
        status, headers, body = await read_reply(reader)
        assert (status, headers["connection"], body) == (200, said, WHOLE)


async def test_stream_to_http_1_0_ends_with_its_connection() -> None:
    async with rig() as made, connected(made) as (reader, writer):
        writer.write(post(b'{"stream":true}', b"connection: keep-alive", version=b"1.0"))
        assert (await reader.read()).partition(b"\r\n\r\n")[2] == STREAM


async def test_expect_continue() -> None:
    async with rig() as made, connected(made) as (reader, writer):
        message = post(BODY, b"expect: 100-continue")
        head, body = message[: -len(BODY)], message[-len(BODY) :]
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await read_reply(reader))[0] == 200


async def test_body_that_is_too_large_is_refused_unread() -> None:
    async with rig(max_body_bytes=100) as made, connected(made) as (reader, writer):
        writer.write(post(b"x" * 1000)[:-500])
        status, headers, body = await read_reply(reader)
        assert (status, headers["connection"]) == (413, "close")
        assert "1000 bytes" in json.loads(body)["error"]["message"]
        writer.write(b"x" * 500)
        assert await ends(reader)
        assert not made.decodes[0].posts


async def test_chunked_body_that_grows_too_large() -> None:
    async with rig(max_body_bytes=100) as made, connected(made) as (reader, writer):
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nff\r\n%s" % (CHAT.encode(), b"x" * 255))
        status, _, body = await read_reply(reader)
        assert status == 413
        assert json.loads(body)["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("sent", [b"", b"POST ", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: "])
async def test_head_that_comes_too_slowly_ends_its_connection(sent: bytes) -> None:
    async with rig(head_timeout_s=0.2) as made, connected(made) as (reader, writer):
        writer.write(sent)
        assert await ends(reader)


async def test_body_that_comes_too_slowly_is_answered_408() -> None:
    async with rig(body_timeout_s=0.2) as made, connected(made) as (reader, writer):
        writer.write(post()[:-3])
        status, headers, body = await read_reply(reader)
        assert (status, headers["connection"], json.loads(body)["error"]["code"]) == (408, "close", "request_timeout")


async def test_time_limits_do_not_touch_requests_under_way() -> None:
    async with rig(head_timeout_s=0.1, body_timeout_s=0.1) as made, connected(made) as (reader, writer):
        go = asyncio.Event()

        async def late(request: object) -> None:
            await go.wait()
            await made.decodes[0].serve_well(request)  # type: ignore[arg-type]

        made.decodes[0].behave = late
        writer.write(post())
        await made.decodes[0].wait_posts(1)
        async with connected(made) as (other, _):
            assert await ends(other)  # so the limit has passed
        go.set()
        assert (await read_reply(reader))[::2] == (200, WHOLE)


NO_HTTP = {
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    "two lengths": b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    "length and chunked": b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "length that is none": b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    "chunk that is none": b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "newline in a header": b"POST /x HTTP/1.1\r\nhost: x\r\nx-a: b\nc: d\r\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("kind", NO_HTTP)
async def test_what_is_no_http_is_answered_once_and_closed(kind: str) -> None:
    async with rig() as made, connected(made) as (reader, writer):
        writer.write(NO_HTTP[kind])
        status, headers, body = await read_reply(reader)
        assert (status, headers["connection"], headers["content-type"]) == (400, "close", "application/json")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        writer.write_eof()
        assert await ends(reader)
        assert (await made.client.get("/health")).status_code == 200


async def test_older_http_is_not_spoken() -> None:
    async with rig() as made, connected(made) as (reader, writer):
        writer.write(b"GET /health\r\n\r\n")
        assert (await read_reply(reader))[0] == 505


async def test_connect_is_not_offered() -> None:
    async with rig() as made, connected(made) as (reader, writer):
        writer.write(b"CONNECT x:443 HTTP/1.1\r\nhost: x:443\r\n\r\n\x16\x03")
        assert (await read_reply(reader))[0] == 405


async def test_garbage_behind_a_request_does_not_spoil_its_answer() -> None:
    async with rig() as made, connected(made) as (reader, writer):
        writer.write(post() + b"\x00\x01\x02\r\n\r\n")
        assert (await read_reply(reader))[::2] == (200, WHOLE)
        assert (await read_reply(reader))[0] == 400


@pytest.mark.parametrize("cut", [0, 5, 15])
async def test_upgrade_is_not_taken_up(cut: int) -> None:
    """curl --http2 asks for one in every request."""
    async with rig() as made, connected(made) as (reader, writer):
        message = post(BODY, b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQAAP__")
        writer.write(message[: len(message) - cut])
        await writer.drain()
        await asyncio.sleep(0)
        writer.write(message[len(message) - cut :])
        status, headers, body = await read_reply(reader)
        assert (status, headers["connection"], body) == (200, "close", WHOLE)
        assert "upgrade" not in made.decodes[0].posts[0].headers


async def test_upgrade_of_a_request_without_a_body() -> None:
    async with rig() as made, connected(made) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        assert (await read_reply(reader))[0] == 200


async def test_absolute_form_of_a_target() -> None:
    async with rig() as made, connected(made) as (reader, writer):
        writer.write(b"GET http://router.example/health?x=1 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await read_reply(reader))[0] == 200


async def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]  # fmt: skip
    made_it = await asyncio.create_subprocess_exec(*make, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert await made_it.wait() == 0
    context = ssl.create_default_context(cafile=str(certificate))
    async with rig(ssl_keyfile=str(key), ssl_certfile=str(certificate)) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port, ssl=context)
        for body, expected in ((BODY, WHOLE), (b'{"stream":true}', STREAM)):
            writer.write(post(body))
            assert (await read_reply(reader))[::2] == (200, expected)
        writer.close()
        await writer.wait_closed()


async def test_browsers_may_ask_from_allowed_origins_only() -> None:
    asked = {"origin": "https://app.example", "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with rig(cors_allowed_origins="https://app.example, https://other.example") as made:
        preflight = await made.client.options(CHAT, headers=asked)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "https://app.example")
        for origin, allowed in (("https://app.example", "https://app.example"), ("https://evil.example", None)):
            for path in (CHAT, "/v1/unknown"):
                reply = await made.client.post(path, content=BODY, headers={"origin": origin})
                assert reply.headers.get("access-control-allow-origin") == allowed
    async with rig() as made:
        assert (await made.client.options(CHAT, headers=asked)).status_code == 405
        assert "access-control-allow-origin" not in (await made.client.post(CHAT, content=BODY, headers=asked)).headers
