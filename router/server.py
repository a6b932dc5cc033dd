"""The router's HTTP/1.1 server: clients' connections on llhttp, with nothing between a request's bytes and who answers it.

    NEW, IDLE --first byte--> HEAD --blank line--> BODY --last byte--> SERVING --reply complete--> IDLE
                                │                    │                                            └─> CLOSING (connection: close)
                                └─ too slow: closed  └─ too slow: 408, too large: 413

Written for the same reason as connection.py: with a general ASGI server, and the tasks that came with it, a request cost the router 1.6 times
as much (bench/README.md). A request is handed over when its body is complete; whoever answers calls reply(), or
start(), write() and end(). Control paths, which are rare, are an ASGI app (asgi_bridge.py).

What a client may make the router hold is bounded: head, body, all bodies together, time for each, requests sent ahead, unread
replies, connections. Time is looked at by one sweep over all connections, which costs a request nothing.
"""

import asyncio
import logging
import math
import resource
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from enum import Enum
from typing import cast

import httptools
import msgspec

from common.errors import Failure, RequestError
from common.http_exchange import BodyBudget, request_id_of
from router.exchange import JSON_LINE, Exchange, body_too_large, header_lines, retry_after_line

MAX_HEAD_BYTES = 64 << 10  # request line and headers; the parser itself has no limit
KEEP_ALIVE_S = 120.0  # longer than clients' pools keep an idle connection, so that the client closes first and never meets a closing server
LINGER_S = 1.0  # how long the rest of a refused body is read and thrown away, so that the client gets to read the refusal
SWEEP_S = 1.0  # how late a time limit may be noticed; shorter limits are looked at four times within them
BACKLOG = 4096
UPGRADE_HEADERS = (b"connection", b"upgrade", b"http2-settings")
SOCKETS_A_REQUEST = 3  # its client's and two nodes': so many of the process's open files are not for further clients

log = logging.getLogger(__name__)


class Phase(Enum):
    NEW = "new"
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    SERVING = "serving"
    CLOSING = "closing"


@dataclass(frozen=True, slots=True)
class Limits:
    max_body_bytes: int
    head_timeout_s: float
    body_timeout_s: float


class ClientConnection(asyncio.Protocol):
    """Requests of one client, answered in their order."""

    def __init__(self, server: "Server") -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._phase = Phase.NEW
        self._since_s = server.now_s  # the phase's beginning
        self._close_by_s = math.inf  # in CLOSING
        self._num_stuck_bytes = 0  # read since the parser last got on
        self._got_on = False
        self._reading: Exchange | None = None  # its head or body is being read; then the phase is HEAD or BODY, whatever is being served
        self._waiting: deque[Exchange] = deque()  # sent ahead, behind `_serving`
        self._serving: Exchange | None = None
        self._starting = False  # inside the handler, which may answer at once
        self._paused = False
        self._open = True
        self.writable = True
        self.client: tuple[str, int] | None = None

    @property
    def date_line(self) -> bytes:
        return self._server.date_line

    @property
    def num_unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._open else 0

    @property
    def _closing(self) -> bool:
        return self._phase is Phase.CLOSING

    @property
    def busy(self) -> bool:
        return self._serving is not None

    def write(self, data: bytes) -> None:
        if self._open:
            self._transport.write(data)

    def abort(self) -> None:
        if self._open:
            self._transport.abort()

    def close(self) -> None:
        """After what is still to be sent."""
        if self._open:
            self._transport.close()

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.client = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else None
        if not self._server.connected(self):
            self._phase = Phase.CLOSING
            self._transport.write(self._server.full_reply())
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._open = False
        self._server.disconnected(self)
        for exchange in (self._serving, self._reading, *self._waiting):
            if exchange is not None:
                exchange.lost()
        self._waiting.clear()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        if self._serving is not None and self._serving.on_writable is not None:
            self._serving.on_writable()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._got_on = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            if not self._closing:
                self._refuse(cause.failure if isinstance(cause, RequestError) else Failure(400, f"the request is no HTTP/1.1: {cause or error}"))
            return
        if self._got_on:
            self._num_stuck_bytes = 0
            return
        self._num_stuck_bytes += len(data)  # of a head, or trailers, or a chunk's extension, all of which the parser takes without end
        if self._num_stuck_bytes > MAX_HEAD_BYTES:
            self._refuse(Failure(431, f"the request's head, or what follows its body, is longer than {MAX_HEAD_BYTES} bytes"))

    # From the parser

    def on_message_begin(self) -> None:
        if self._closing:
            raise ConnectionAbortedError("the reply before was the last")
        self._got_on = self._got_on or self._phase not in (Phase.NEW, Phase.IDLE)  # else all of this read is the head's
        self._reading = Exchange(self, self._server.bodies)
        self._enter(Phase.HEAD)

    def on_url(self, url: bytes) -> None:
        assert self._reading is not None
        self._reading.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._reading is not None
        if self._phase is Phase.HEAD:  # trailers are dropped: a proxy in front has not seen them as headers (RFC 9110, 6.5.1)
            self._reading.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._got_on = True
        exchange = self._reading
        assert exchange is not None
        exchange.method = self._parser.get_method().decode()
        if exchange.method == "CONNECT":
            raise RequestError(Failure(405, "CONNECT is not offered here"))
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise RequestError(Failure(505, f"HTTP/{version} is not spoken here; use HTTP/1.1"))
        exchange.http_11 = version == "1.1"
        exchange.keep_alive = self._parser.should_keep_alive() and not self._server.stopping
        if not exchange.target.startswith(b"/"):
            exchange.target = _origin_form(exchange.target)
        exchange.path = exchange.target.partition(b"?")[0]
        exchange.request_id = request_id_of(exchange.headers)
        expects = False
        for name, value in exchange.headers:
            if name == b"content-length" and int(value) > self._server.limits.max_body_bytes:
                raise body_too_large(int(value), self._server.limits.max_body_bytes)
            expects = expects or (name == b"expect" and value.lower() == b"100-continue")
        if expects and self._serving is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._enter(Phase.BODY)

    def on_body(self, part: bytes) -> None:
        self._got_on = True
        if self._reading is not None:
            self._reading.take(part, self._server.limits.max_body_bytes)

    def on_message_complete(self) -> None:
        self._got_on = True
        if self._reading is None or self._parser.should_upgrade():  # said of its head alone
            return
        exchange, self._reading = self._reading, None
        exchange.body_complete()
        if self._serving is None:
            self._serve(exchange)
            return
        self._enter(Phase.SERVING)
        self._waiting.append(exchange)
        if not self._paused:
            self._paused = True  # a client's leaving is not seen meanwhile: only of those who send requests ahead
            self._transport.pause_reading()

    # The reply

    def exchange_ended(self, exchange: Exchange) -> None:
        if exchange is not self._serving:
            return
        self._serving = None
        if not self._starting:
            self._serve(self._next(exchange))

    def _next(self, ended: Exchange) -> Exchange | None:
        """What is to be served after it, if anything waits."""
        if not ended.keep_alive or self._server.stopping:
            self._close_after(ended)
            return None
        if self._waiting:
            return self._waiting.popleft()
        if self._paused and self._open:
            self._paused = False
            self._transport.resume_reading()
        self._enter(Phase.IDLE if self._reading is None else self._phase)  # what was being read meanwhile has its whole time from now on
        return None

    def _without_upgrade(self, rest: bytes) -> None:
        """The parser stops behind the head of a request that offers another protocol (`curl --http2` offers one in each). The offer need
        not be taken (RFC 9110, 7.8): the request is parsed again without it."""
        exchange, self._reading = self._reading, None
        assert exchange is not None
        lines = header_lines([line for line in exchange.headers if line[0] not in UPGRADE_HEADERS])
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(b"%b %b HTTP/1.1\r\n%bconnection: close\r\n\r\n" % (exchange.method.encode(), exchange.target, lines) + rest)

    def expired(self, now_s: float) -> None:
        """From the sweep: has the phase lasted too long?"""
        limits, lasted_s = self._server.limits, now_s - self._since_s
        if self._closing:
            if now_s > self._close_by_s:
                self.abort()
        elif self._serving is not None:
            return  # the next request may come as slowly as it likes
        elif self._phase is Phase.BODY:
            if lasted_s > limits.body_timeout_s:
                sentence = f"the request body did not arrive within {limits.body_timeout_s:g} s"
                self._refuse(Failure(408, sentence, code="request_timeout", stage="intake"))
        elif lasted_s > (KEEP_ALIVE_S if self._phase is Phase.IDLE else limits.head_timeout_s):
            self.abort()

    def _serve(self, exchange: Exchange | None) -> None:
        """And what waits behind it, as long as the handler answers at once: a loop, because thousands may have been sent ahead."""
        while exchange is not None:
            self._serving = exchange
            if self._reading is None:
                self._enter(Phase.SERVING)
            self._starting = True
            try:
                self._server.handler(exchange)
            except Exception:
                log.exception("%s %s: a fault of the router", exchange.request_id, exchange.path.decode("latin-1"))
                self.abort()
            self._starting = False
            exchange = self._next(exchange) if self._serving is None else None

    def _refuse(self, failure: Failure) -> None:
        """Answer what cannot be read on, after what came before it; then close."""
        exchange = self._reading or Exchange(self, self._server.bodies)
        self._reading = None
        exchange.keep_alive = False
        exchange.refusal = failure
        exchange.request_id = exchange.request_id or request_id_of(exchange.headers)
        exchange.path = exchange.path or exchange.target.partition(b"?")[0]
        if self._serving is not None:
            self._waiting.append(exchange)
            self._enter(Phase.CLOSING)
        else:
            self._serve(exchange)

    def _close_after(self, exchange: Exchange) -> None:
        self._enter(Phase.CLOSING)
        if exchange.refusal is None:
            self._close_by_s = self._server.now_s + KEEP_ALIVE_S  # for a client that reads slowly
            self.close()
            return
        self._close_by_s = self._server.now_s + LINGER_S
        if self._open and self._transport.can_write_eof():
            self._transport.write_eof()

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._since_s = self._server.now_s


class Server:
    """Serves on sockets that are bound and listen already, until close()."""

    def __init__(self, handler: Callable[[Exchange], None], limits: Limits, bodies: BodyBudget, tls: ssl.SSLContext | None = None) -> None:
        self.handler = handler
        self.limits = limits
        self.bodies = bodies
        self.stopping = False
        self.now_s = time.monotonic()  # as of the last sweep, a quarter of any limit old at the most
        self.date_line = b""
        self._tls = tls
        self._connections: set[ClientConnection] = set()
        self._empty = asyncio.Event()
        self._servers: list[asyncio.Server] = []
        self._sweeping: asyncio.TimerHandle | None = None
        self._sweep_s = min(SWEEP_S, limits.head_timeout_s / 4, limits.body_timeout_s / 4)
        self._max_connections = max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SOCKETS_A_REQUEST)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def listen(self, listeners: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        self._sweep()
        for listener in listeners:
            self._servers.append(await loop.create_server(
                lambda: ClientConnection(self), sock=listener, backlog=BACKLOG, ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self.limits.head_timeout_s))  # fmt: skip

    def stop(self) -> None:
        """No new connections; those between requests are closed, the others after their reply."""
        self.stopping = True
        for server in self._servers:
            server.close()
        for connection in tuple(self._connections):
            if not connection.busy:
                connection.close()

    def close(self) -> None:
        """At once, whatever is under way."""
        self.stop()
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for connection in tuple(self._connections):
            connection.abort()

    async def closed(self, timeout_s: float) -> None:
        """Wait until every connection has ended, or the time is over."""
        self._empty.clear()
        if self._connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), timeout_s)

    def connected(self, connection: ClientConnection) -> bool:
        """False: there are too many."""
        if len(self._connections) >= self._max_connections:
            return False
        self._connections.add(connection)
        return True

    def disconnected(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def full_reply(self) -> bytes:
        failure = Failure(503, f"{self._max_connections} connections are open here, the limit; raise the limit of open files, or add a router",
                          code="overloaded", stage="router", retry_after_s=1.0)  # fmt: skip
        body = msgspec.json.encode(failure.openai_body())
        return b"HTTP/1.1 503 Service Unavailable\r\n%b%bconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (
            JSON_LINE, retry_after_line(failure), len(body), body)  # fmt: skip

    def _sweep(self) -> None:
        self.now_s = time.monotonic()
        self.date_line = b"date: %b\r\n" % formatdate(usegmt=True).encode()
        for connection in tuple(self._connections):
            connection.expired(self.now_s)
        self._sweeping = asyncio.get_running_loop().call_later(self._sweep_s, self._sweep)


def _origin_form(target: bytes) -> bytes:
    """The path and query of an absolute-form target (`GET http://host/path`), which proxies' clients send."""
    scheme, separator, rest = target.partition(b"://")
    return b"/" + rest.partition(b"/")[2] if separator and scheme.lower() in (b"http", b"https") else target
