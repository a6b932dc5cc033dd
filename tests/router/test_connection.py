"""HTTP replies in every form, cut anywhere; which connections are kept, and for how long."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from router import connection as module
from router.connection import MAX_BUFFERED_BYTES, Address, NotHttp, Pool, Reply

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@asynccontextmanager
async def pool_to(serve: Serve) -> AsyncIterator[tuple[Pool, Address]]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    pool = Pool(1.0)
    try:
        yield pool, Address("127.0.0.1", server.sockets[0].getsockname()[1], tls=False)
    finally:
        pool.close()
        server.close()
        await server.wait_closed()


def replying(*pieces: bytes, stay: bool = True) -> Serve:
    """Send the pieces one by one to each request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.0005)
            if not stay:
                return

    return serve


async def ask(pool: Pool, address: Address) -> Reply:
    connection = pool.take(address) or await pool.connect(address)
    reply = connection.send(HEAD, b"")
    await reply.head()
    return reply


async def whole(reply: Reply) -> bytes:
    parts = []
    while part := await reply.read():
        parts.append(part)
    return b"".join(parts)


CHUNKED = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\ntrailer: 1\r\n\r\n"
LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabcde"


@pytest.mark.parametrize("raw", [CHUNKED, LENGTH, b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH], ids=["chunked", "length", "after 100"])
async def test_reply_cut_anywhere_is_whole_and_keeps_its_connection(raw: bytes) -> None:
    async with pool_to(replying(*(raw[n : n + 1] for n in range(len(raw))))) as (pool, address):
        connections = set()
        for _ in range(2):
            reply = await ask(pool, address)
            assert reply.status == 200
            assert await whole(reply) == b"abcde"
            assert await reply.read() == b""
            connections.add(reply._connection)
            reply.close()
            reply.close()  # again: nothing happens
        assert len(connections) == 1


async def test_body_that_ends_with_its_connection() -> None:
    async with pool_to(replying(b"HTTP/1.1 200 OK\r\n\r\nabc", b"de", stay=False)) as (pool, address):
        reply = await ask(pool, address)
        assert await whole(reply) == b"abcde"
        reply.close()
        assert pool.take(address) is None


@pytest.mark.parametrize("raw", [LENGTH[:-1], CHUNKED[:-4]], ids=["length", "chunked"])
async def test_reply_cut_short_shows_what_came_and_then_raises(raw: bytes) -> None:
    async with pool_to(replying(raw, stay=False)) as (pool, address):
        reply = await ask(pool, address)
        assert (await reply.read()).startswith(b"abcd")
        with pytest.raises(ConnectionError):
            await whole(reply)
        reply.close()


@pytest.mark.parametrize(
    "raw",
    [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"x: %s\r\n" % (b"y" * 1000) * 70 + b"\r\n",
     b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"HTTP/1.1 000 X\r\ncontent-length: 5\r\n\r\nabcde"],
    ids=["ssh", "length", "long head", "chunk size", "status"],
)  # fmt: skip
async def test_what_is_no_http_raises(raw: bytes) -> None:
    async with pool_to(replying(raw)) as (pool, address):
        with pytest.raises(NotHttp):
            await whole(await ask(pool, address))


@pytest.mark.parametrize("raw", [LENGTH + LENGTH, LENGTH.replace(b"OK\r\n", b"OK\r\nconnection: close\r\n"), LENGTH + b"garbage\r\n"])
async def test_connection_that_says_more_or_closes_is_not_kept(raw: bytes) -> None:
    async with pool_to(replying(raw)) as (pool, address):
        reply = await ask(pool, address)
        assert await whole(reply) == b"abcde"
        reply.close()
        assert pool.take(address) is None


@pytest.mark.parametrize("raw", [CHUNKED, LENGTH + b"HTTP/1.1 200 OK\r\nx-b: 2\r\n\r\n"], ids=["trailers", "another reply"])
async def test_what_follows_a_reply_is_not_in_its_head(raw: bytes) -> None:
    async with pool_to(replying(raw)) as (pool, address):
        reply = await ask(pool, address)
        assert await whole(reply) == b"abcde"
        assert {name for name, _ in reply.headers} <= {b"x-a", b"transfer-encoding", b"content-length"}
        reply.close()


@pytest.mark.parametrize("before", [b"HTTP/1.1 200 OK\r\nx: ", CHUNKED[:-12], CHUNKED[:-4], b"HTTP/1.1 100 Continue\r\n\r\n"],
                         ids=["header", "chunk extension", "trailer", "1xx"])  # fmt: skip
async def test_what_has_no_end_is_not_read_without_end(before: bytes) -> None:
    more, num_sent = {b"HTTP/1.1 100 Continue\r\n\r\n": b"HTTP/1.1 100 Continue\r\n\r\n" * 40}.get(before, b"y" * 1000), 0

    async def go_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(before)
        while True:
            writer.write(more)
            await writer.drain()
            num_sent += len(more)
            await asyncio.sleep(0)

    async with pool_to(go_on) as (pool, address), asyncio.timeout(5):
        with pytest.raises(NotHttp, match="longer than"):
            await whole(await ask(pool, address))
        assert num_sent < 16 << 20  # what sockets hold


async def test_certificates_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0

    def read() -> ssl.SSLContext:
        nonlocal num_read
        num_read += 1
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    monkeypatch.setattr(ssl, "create_default_context", read)
    async with pool_to(close) as (pool, address):
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await pool.connect(address._replace(tls=True))
    assert num_read == 1


async def test_host_that_is_none_raises_os_error() -> None:
    with pytest.raises(OSError, match="is no host name"):
        await Pool(2.0).connect(Address("x" * 70 + ".y", 1, tls=False))


async def test_reply_given_up_closes_its_connection() -> None:
    async with pool_to(replying(LENGTH[:-2])) as (pool, address):
        reply = await ask(pool, address)
        reply.close()
        assert pool.take(address) is None
        assert reply._connection.closed


async def test_kept_connection_the_node_closed_is_not_taken() -> None:
    async with pool_to(replying(LENGTH, stay=False)) as (pool, address):
        reply = await ask(pool, address)
        await whole(reply)
        connection = reply._connection
        reply.close()
        async with asyncio.timeout(2):
            while not connection.closed:
                await asyncio.sleep(0.001)
        assert pool.take(address) is None


async def test_kept_connections_are_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.05)
    async with pool_to(replying(LENGTH)) as (pool, address):
        replies = [await ask(pool, address) for _ in range(3)]
        for reply in replies:
            await whole(reply)
            reply.close()
        async with asyncio.timeout(2):
            while not all(reply._connection.closed for reply in replies):
                await asyncio.sleep(0.001)
        assert not any(pool._kept.values())


async def test_node_is_slowed_down_to_the_readers_pace() -> None:
    sent = 0
    size = 40 * MAX_BUFFERED_BYTES

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with pool_to(flood) as (pool, address):
        reply = await ask(pool, address)
        async with asyncio.timeout(5):
            while not reply._connection._paused:
                await asyncio.sleep(0.001)
        assert reply._num_buffered_bytes < 4 * MAX_BUFFERED_BYTES
        assert sent < size
        assert len(await whole(reply)) == size
        reply.close()
        assert pool.take(address) is reply._connection


async def test_addresses_that_are_not_used_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.01)
    async with pool_to(replying(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")) as (pool, address):
        reply = (await pool.connect(address)).send(HEAD, b"")
        await reply.head()
        reply.close()
        async with asyncio.timeout(5):
            while pool._kept:
                await asyncio.sleep(0.01)
