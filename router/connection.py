"""HTTP/1.1 connections to nodes: send one whole request, read the reply part by part, keep the connection for the next one.

    connect -> send -> head -> parts ... -> end -> kept -> send ...
                                   |                 |
                                   closed            closed by the node, or after KEEP_ALIVE_S

Written for what the router does with them, because that is most of its work: with a general client (aiohttp, 100 us of CPU for a
POST and its reply) a request cost the router 400 us where it now costs 210 (32 clients, instant mock nodes, interleaved runs on a
busy machine). Bytes of head and body are passed on as they are; the parser is llhttp.

A reply whose parts nobody fetches stops its connection's reading, so a slow client slows its node down, not this process's memory.
"""

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast

import httptools

from common.http_exchange import Headers

KEEP_ALIVE_S = 4.0  # below the 5 s after which uvicorn closes by default, so that this side closes first; also below any NAT's patience
MAX_HEAD_BYTES = 64 << 10
MAX_BUFFERED_BYTES = 1 << 18  # of a reply; then its connection is not read
FRAMING = (b"content-length", b"transfer-encoding")
JOINED_BYTES = 64 << 10  # a body up to this goes out in one piece with its head
# A host that vanishes sends no reset. 5 s of silence and it is asked; 10 s without an acknowledgement and the connection ends: far
# below a request's deadline, far above what a lossy network takes to recover.
TCP_OPTIONS = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000))  # s, s, probes, ms


class NotHttp(Exception):
    """The node's bytes are no HTTP reply."""


class Address(NamedTuple):
    host: str
    port: int
    tls: bool


class Reply:
    """What comes for one request. `status` is None until the head is there; `error` ends it, what came before stays readable.

    Read by whoever is told of progress (on_progress, then take()), or by waiting (head(), read()), which raises `error`: NotHttp or
    ConnectionError.
    """

    __slots__ = ("_connection", "_num_buffered_bytes", "_parts", "_waiter", "complete", "error", "headers", "heard", "on_progress", "reusable",
                 "status")  # fmt: skip

    def __init__(self, connection: "Connection", on_progress: Callable[[], None] | None = None) -> None:
        self.status: int | None = None
        self.headers: Headers = []  # names in lower case
        self.heard = False  # anything at all
        self.complete = False
        self.reusable = False
        self._connection = connection
        self._parts: list[bytes] = []
        self._num_buffered_bytes = 0
        self.error: Exception | None = None
        self.on_progress = on_progress  # something came, or it ended
        self._waiter: asyncio.Future[None] | None = None

    def header(self, name: bytes) -> str:
        """Empty when there is none."""
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1")
        return ""

    async def head(self) -> None:
        while self.status is None:
            await self._wait()

    async def read(self) -> bytes:
        """What has come since the last call, at least a byte; empty at the end."""
        while not self._parts and not self.complete:
            await self._wait()
        return self.take()

    def take(self) -> bytes:
        """What has come since the last call; empty when nothing has."""
        parts = self._parts
        if not parts:
            return b""
        self._parts, self._num_buffered_bytes = [], 0
        self._connection.resume()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def has_parts(self) -> bool:
        return bool(self._parts)

    def close(self) -> None:
        """Keeps the connection when the reply is complete."""
        self._connection.release(self)

    async def _wait(self) -> None:
        if self.error is not None:
            raise self.error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # From the connection

    def came(self) -> None:
        """Something did, or it failed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.on_progress is not None:
            self.on_progress()
        if self._num_buffered_bytes > MAX_BUFFERED_BYTES:  # nobody took them
            self._connection.pause()

    def add(self, part: bytes) -> None:
        self._parts.append(part)
        self._num_buffered_bytes += len(part)

    def lost(self, error: Exception | None) -> None:
        if error is None and self.error is None and self.status is not None and not any(name in FRAMING for name, _ in self.headers):
            self.complete = True  # a body that ends with its connection
        self.fail(error or ConnectionResetError("the connection was closed"))
        self.came()

    def fail(self, error: Exception) -> None:
        """For good. What came before stays readable."""
        self.error = self.error or error
        self.reusable = False


class Connection(asyncio.Protocol):
    """To one node, for one request at a time."""

    def __init__(self, pool: "Pool", address: Address) -> None:
        self.address = address
        self.kept_since_s = 0.0  # monotonic
        self.closed = False
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._num_head_bytes = 0
        self._num_stuck_bytes = 0  # read since the parser last got on
        self._reply: Reply | None = None
        self._paused = False

    def send(self, head: bytes, body: bytes, on_progress: Callable[[], None] | None = None) -> Reply:
        reply = self._reply = Reply(self, on_progress)
        if len(body) <= JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return reply

    def release(self, reply: Reply) -> None:
        if reply is not self._reply:
            return
        self._reply = None
        if reply.reusable and not self._transport.is_closing() and not self._transport.get_write_buffer_size():
            self.resume()
            self._pool.keep(self)
        else:
            self.abort()

    def abort(self) -> None:
        self.closed = True
        self._transport.abort()

    def pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in TCP_OPTIONS:
            if (option := getattr(socket, name, None)) is not None:  # Linux has all four
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        if reply is None:
            self.abort()  # nobody asked
            return
        reply.heard = True
        self._num_stuck_bytes += len(data)
        try:
            self._parser.feed_data(data)
            if self._num_stuck_bytes > MAX_HEAD_BYTES:  # of a head, or trailers, or a chunk's extension, all of which the parser takes without end
                raise httptools.HttpParserError(f"its head, or what is between its parts, is longer than {MAX_HEAD_BYTES} bytes")
        except httptools.HttpParserError as error:
            self._failed(reply, str(error.__context__ or error))
        except httptools.HttpParserUpgrade:
            self._failed(reply, "it speaks another protocol now")
        reply.came()

    def _failed(self, reply: Reply, why: str) -> None:
        """What else would come is nobody's."""
        reply.fail(NotHttp(why))
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._reply is not None:
            self._reply.lost(error)

    # From the parser, which sees one reply after another

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        if self._reply is not None and self._reply.complete:
            self._reply.fail(NotHttp("more than one reply"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_head_bytes += len(name) + len(value)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise ValueError(f"the head is longer than {MAX_HEAD_BYTES} bytes")
        if self._reply is not None and self._reply.status is None:  # trailers are dropped (RFC 9110, 6.5.1)
            self._reply.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        reply, status = self._reply, self._parser.get_status_code()
        if reply is None or reply.complete:
            return
        if status < 100:
            raise ValueError(f"status {status} is none")
        if status < 200:
            reply.headers = []  # the reply is still to come
        else:
            reply.status = status
            self._num_stuck_bytes = 0

    def on_body(self, part: bytes) -> None:
        self._num_stuck_bytes = 0
        if self._reply is not None and not self._reply.complete:
            self._reply.add(part)

    def on_message_complete(self) -> None:
        reply = self._reply
        if reply is not None and reply.status is not None and not reply.complete:
            self._num_stuck_bytes = 0
            reply.complete = True
            reply.reusable = self._parser.should_keep_alive() and reply.error is None


class Pool:
    """Connections that are kept for the next request, the latest first."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._kept: dict[Address, deque[Connection]] = {}
        self._tls: ssl.SSLContext | None = None
        self._sweeping: asyncio.TimerHandle | None = None

    def take(self, address: Address) -> Connection | None:
        kept = self._kept.get(address)
        oldest_s = time.monotonic() - KEEP_ALIVE_S
        while kept:
            connection = kept.pop()
            if not connection.closed and connection.kept_since_s > oldest_s:
                return connection
            connection.abort()
        return None

    async def connect(self, address: Address) -> Connection:
        """Raises OSError or TimeoutError."""
        if address.tls and self._tls is None:
            self._tls = ssl.create_default_context()  # once: reading all authorities' certificates takes 60 ms, in which the loop stands still
        context = self._tls if address.tls else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(lambda: Connection(self, address), address.host, address.port, ssl=context)
        except UnicodeError as error:
            raise OSError(f"{address.host!r} is no host name: {error}") from None
        return connection

    def keep(self, connection: Connection) -> None:
        connection.kept_since_s = time.monotonic()
        kept = self._kept.get(connection.address)
        if kept is None:
            kept = self._kept[connection.address] = deque()
        kept.append(connection)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._sweep)

    def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        for kept in self._kept.values():
            for connection in kept:
                connection.abort()
        self._kept.clear()

    def _sweep(self) -> None:
        """Close what has been kept for too long; again later while anything is kept."""
        self._sweeping = None
        oldest_s = time.monotonic() - KEEP_ALIVE_S
        for kept in self._kept.values():
            while kept and (kept[0].closed or kept[0].kept_since_s <= oldest_s):
                kept.popleft().abort()
        self._kept = {address: kept for address, kept in self._kept.items() if kept}  # nodes come and go
        if self._kept:
            self._sweeping = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._sweep)
