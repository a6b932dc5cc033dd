"""One POST to one node, and what may go wrong with it.

Everything that aiohttp can raise is turned into LegFailed here. Four kinds of failure are told apart, because they differ in
what follows:
    unreachable   no connection, or it broke: 503; the node is blamed; another pair may serve the request
    refused       the node answered with an error: its status and body are kept; 502 and 503 may be served by another pair, and with
                  Retry-After by nodes other than this one only
    broken        the node's reply is cut short or no HTTP: 502; the node is blamed
    overloaded    this process has no socket left: 503 with Retry-After; nobody is blamed, no other pair is tried
A connection from the pool may have been closed by the node at the very moment of use. When nothing was answered on a reused
connection, the POST is made once more, on a new one.
"""

import errno
import io
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import aiohttp
import msgspec
from aiohttp import AddrInfoType
from multidict import CIMultiDict
from yarl import URL

from common.errors import Failure, overloaded
from common.http_exchange import DEADLINE_HEADER, ID_HEADER, JSON_HEADERS, Headers
from router.events import failure_of, openai_error
from router.nodes import Node

KEEP_ALIVE_S = 4.0  # below the 5 s after which uvicorn closes by default, so that the pool closes first; also below any NAT's patience
MAX_HEADER_BYTES = 64 << 10
READ_BUFFER_BYTES = 1 << 18
LARGE_BODY_BYTES = 256 << 10
MAX_ERROR_BYTES = 1 << 20
MAX_ERROR_CHARACTERS = 400  # of a reply that is not ours to interpret
MAX_REPLY_BYTES = 64 << 20  # of a reply that is not streamed; a million tokens as text have a tenth of it
RETRYABLE_STATUSES = (502, 503)
OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})  # of this process or its host
# A host that vanishes sends no reset. 5 s of silence and it is asked; 10 s without an acknowledgement and the connection ends: far
# below a request's deadline, far above what a lossy network takes to recover.
TCP_OPTIONS = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000))  # s, s, probes, ms
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
                        b"transfer-encoding", b"upgrade"})
# not passed on: what this hop decides anew; Accept-Encoding because a stream's end is read from its bytes
NOT_TO_NODE = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"accept-encoding", DEADLINE_HEADER, ID_HEADER}
NOT_TO_CLIENT = HOP_BY_HOP | {b"content-length", b"date", b"server", ID_HEADER}
AIOHTTP_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # that it would add by itself


@dataclass(eq=False)
class LegFailed(Exception):
    """A leg did not bring an answer. `reply`: the node's own error reply, to be passed on as it is."""

    node: Node
    failure: Failure
    retryable: bool
    reply: "NodeReply | None" = None

    @property
    def asks_patience(self) -> bool:
        """The node is there, and busy."""
        return self.reply is not None and any(name == b"retry-after" for name, _ in self.reply.headers)

    def __str__(self) -> str:
        return f"{self.node.leg} node {self.node.url}: {self.failure.status} {self.failure.message}"


@dataclass(frozen=True, slots=True)
class NodeReply:
    status: int
    headers: Headers
    body: bytes


class NodeClient:
    """Connections to all nodes. Use inside a running loop; `close` at the end."""

    def __init__(self, connect_timeout_s: float) -> None:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._pooled = self._session(aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, socket_factory=_socket), tracing)
        self._fresh = self._session(aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_socket), None)
        self.probing = self._session(aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S), None)  # GET: aiohttp itself tries anew

    async def close(self) -> None:
        for session in (self._pooled, self._fresh, self.probing):
            await session.close()

    async def post(self, node: Node, path: str, headers: CIMultiDict[str], body: bytes) -> aiohttp.ClientResponse:
        """The node's reply, its head read. path: with the query. Raises LegFailed, also for every status but 200."""
        trace = SimpleNamespace(reused=False)
        url = URL(node.url + path, encoded=True)
        try:
            try:
                reply = await self._pooled.post(url, data=_payload(body), headers=headers, allow_redirects=False, trace_request_ctx=trace)
            except (aiohttp.ServerDisconnectedError, ConnectionError):
                if not trace.reused:
                    raise
                reply = await self._fresh.post(url, data=_payload(body), headers=headers, allow_redirects=False)
        except aiohttp.ClientResponseError as error:
            raise broken(node, f"its reply is no HTTP: {' '.join(error.message.split())[:MAX_ERROR_CHARACTERS]}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise unreachable(node, error) from error
        if reply.status != 200:
            raise await self._refusal(node, reply)
        return reply

    async def _refusal(self, node: Node, reply: aiohttp.ClientResponse) -> LegFailed:
        async with reply:
            try:
                body = await read_whole(reply, MAX_ERROR_BYTES)
            except (aiohttp.ClientError, OSError) as error:
                return broken(node, f"its reply with status {reply.status} is cut short: {error}")
            except OverflowError:
                body = b""
        headers = headers_to_client(reply)
        said = openai_error(body)
        if reply.status < 400:
            return broken(node, f"it answered with status {reply.status}, which is no answer to a completion")
        if said is not None:
            message = said[0]
        else:
            text = " ".join(body.decode(errors="replace").split())[:MAX_ERROR_CHARACTERS]
            message = f"{node.leg} node answered {reply.status}: {text or 'without a word'}"
            body = msgspec.json.encode(Failure(reply.status, message).openai_body())
            headers = [(name, value) for name, value in headers if name != b"content-type"] + [(b"content-type", b"application/json")]
        failure = Failure(reply.status, message, stage=node.leg)
        return LegFailed(node, failure, reply.status in RETRYABLE_STATUSES, NodeReply(reply.status, headers, body))

    def _session(self, connector: aiohttp.TCPConnector, tracing: aiohttp.TraceConfig | None) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, auto_decompress=False, skip_auto_headers=AIOHTTP_HEADERS, cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[tracing] if tracing else None, read_bufsize=READ_BUFFER_BYTES,
            max_line_size=MAX_HEADER_BYTES, max_field_size=MAX_HEADER_BYTES,
        )  # fmt: skip


async def read_whole(reply: aiohttp.ClientResponse, max_bytes: int, first: bytes = b"") -> bytes:
    """The reply's body, of which `first` has been read. Raises OverflowError, or what aiohttp raises."""
    parts = [first] if first else []
    num_bytes = len(first)
    while part := await reply.content.readany():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise OverflowError
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _payload(body: bytes) -> bytes | io.BytesIO:
    """A large body is sent piece by piece, so that other requests get their turn."""
    return body if len(body) <= LARGE_BODY_BYTES else io.BytesIO(body)


def unreachable(node: Node, error: BaseException) -> LegFailed:
    if is_own_limit(error):
        text = f"this router has no socket left for another connection ({error}); try again, raise its limit of open files, or add a router"
        return LegFailed(node, overloaded(text, stage="router").failure, retryable=False)
    if isinstance(error, TimeoutError):
        text = "no connection in time"
    elif isinstance(error, aiohttp.ClientConnectorError):
        text = error.os_error.strerror or str(error.os_error)
    else:
        text = str(error) or type(error).__name__
    failure = Failure(503, f"{node.leg} node {node.url} cannot be reached: {text}", code="node_unreachable", stage="router", retry_after_s=1.0)
    node.blame(f"failed a request: {text}")
    return LegFailed(node, failure, retryable=True)


def broken(node: Node, what: str) -> LegFailed:
    node.blame(f"failed a request: {what}")
    return LegFailed(node, Failure(502, f"{node.leg} node {node.url} failed: {what}", code="node_failed", stage="router"), retryable=True)


def failed_in_band(node: Node, error: bytes) -> LegFailed:
    """error: the JSON of an error event. The node said itself what is wrong: it is not blamed."""
    failure = failure_of(error, node.leg)
    return LegFailed(node, failure, failure.status in RETRYABLE_STATUSES, NodeReply(failure.status, JSON_HEADERS, error))


def headers_to_node(headers: Sequence[tuple[bytes, bytes]], request_id: str, deadline_s: float) -> CIMultiDict[str]:
    named = {word.strip().lower() for key, value in headers if key == b"connection" for word in value.split(b",")}
    passed: CIMultiDict[str] = CIMultiDict()
    for key, value in headers:
        if key not in NOT_TO_NODE and key not in named:
            passed.add(key.decode("latin-1"), value.decode(errors="replace"))
    passed.setdefault("content-type", "application/json")
    passed["x-request-id"] = request_id
    passed[DEADLINE_HEADER.decode()] = f"{deadline_s:.3f}"
    return passed


def headers_to_client(reply: aiohttp.ClientResponse) -> Headers:
    return [(key.lower(), value) for key, value in reply.raw_headers if key.lower() not in NOT_TO_CLIENT]


def is_own_limit(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in OWN_LIMITS


def _socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP_OPTIONS:
        if (option := getattr(socket, name, None)) is not None:  # Linux has all four
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


async def _note_reuse(session: aiohttp.ClientSession, context: SimpleNamespace, parameters: object) -> None:
    context.trace_request_ctx.reused = True
