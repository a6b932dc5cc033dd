"""One POST to one node, from its connection to the end of its reply, and what may go wrong with it.

    connecting -> sent -> answered (200) -> the reply's parts ... -> ended
         └───────────┴────────────┴──> failed (LegFailed), once

A leg has no task: the node's connection tells it what came, and it tells its owner (on_progress). Everything that a connection can
raise becomes a LegFailed. Four kinds of failure are told apart, because they differ in what follows:
    unreachable   no connection, or it broke: 503; the node is blamed; another pair may serve the request
    refused       the node answered with an error: its status and body are kept. 500, 502 and 503 may be served by another pair, and with
                  Retry-After by nodes other than this one only; without it the node is blamed
    broken        the node's reply is cut short or no HTTP: 502; the node is blamed
    overloaded    this process has no socket left: 503 with Retry-After; nobody is blamed, no other pair is tried
A kept connection may have been closed by the node at the very moment of use. When nothing was answered on it and it ended at once,
the POST is made once more, on a new one.
"""

import asyncio
import errno
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from common.errors import Failure, overloaded
from common.http_exchange import DEADLINE_HEADER, ID_HEADER, Headers
from router.api_paths import OPENAI, StreamForm
from router.connection import NotHttp, Pool, Reply
from router.events import end_of_events, error_in, failure_of, in_one_line, is_client_error, is_event_stream, openai_error
from router.nodes import Node

CROSSING_S = 0.5  # a node's closing that crossed a request arrives within a round trip; later it is the node that failed
MAX_ERROR_BYTES = 1 << 20
MAX_ERROR_CHARACTERS = 400  # of a reply that is not ours to interpret
MAX_REPLY_BYTES = 64 << 20  # of a reply that is not streamed; a million tokens as text have a tenth of it
RETRYABLE_STATUSES = (500, 502, 503)
OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})  # of this process or its host
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
                        b"transfer-encoding", b"upgrade"})
# not passed on: what this hop decides anew, also which of a vLLM node's engines computes; Accept-Encoding because a stream's end is read
# from its bytes
NOT_TO_NODE = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"accept-encoding", b"x-data-parallel-rank", DEADLINE_HEADER, ID_HEADER}
NOT_TO_CLIENT = HOP_BY_HOP | {b"content-length", b"date", b"server", ID_HEADER}
CORS_PREFIX = b"access-control-"  # which origins may read the router's answers is not for nodes to say; by default SGLang's and vLLM's let all


@dataclass(eq=False)
class LegFailed(Exception):
    """A leg did not bring an answer. `reply`: the node's own error reply, to be passed on as it is. timed_out: it took the time that a
    connection may take, and would take it again."""

    node: Node
    failure: Failure
    retryable: bool
    reply: "NodeReply | None" = None
    timed_out: bool = False

    @property
    def asks_patience(self) -> bool:
        """The node is there, and busy."""
        return self.reply is not None and any(name == b"retry-after" for name, _ in self.reply.headers)

    def __str__(self) -> str:
        return f"{self.node.leg} node {self.node.url}: {self.failure.status} {in_one_line(self.failure.message)}"


@dataclass(frozen=True, slots=True)
class NodeReply:
    status: int
    headers: Headers
    body: bytes


class NodeClient:
    """Connections to all nodes. Use inside a running loop; `close` at the end."""

    def __init__(self, connect_timeout_s: float) -> None:
        self.pool = Pool(connect_timeout_s)
        self._probing = Pool(connect_timeout_s)  # a frozen node's probes take no connection from requests

    def close(self) -> None:
        for pool in (self.pool, self._probing):
            pool.close()

    async def get(self, node: Node, path: str, max_bytes: int, headers: bytes = b"") -> tuple[int, bytes]:
        """Status and body. headers: further lines. Raises NotHttp, OSError or OverflowError; nobody is blamed."""
        head = message_head(b"GET", node, path.encode(), headers)
        reply = await self._exchange(node, head)
        try:
            return cast(int, reply.status), await read_whole(reply, max_bytes)
        finally:
            reply.close()

    async def _exchange(self, node: Node, head: bytes) -> Reply:
        """Send, and read the reply's head."""
        if (kept := self._probing.take(node.address)) is not None:
            reply = kept.send(head, b"")
            try:
                return await _head(reply)
            except ConnectionError:
                if reply.heard:
                    raise
        return await _head((await self._probing.connect(node.address)).send(head, b""))


class Leg:
    """`failure` is set when it failed, `ended` when nothing more will come. on_progress is called after every change."""

    __slots__ = (
        "_answered", "_body", "_connecting", "_error_parts", "_form", "_fresh", "_head", "_num_error_bytes", "_pool", "_request_id", "_sent_s",
        "began_s", "ended", "failure", "node", "on_progress", "reply",
    )  # fmt: skip

    def __init__(self, pool: Pool, node: Node, request_id: str, head: bytes, body: bytes, form: StreamForm, on_progress: Callable[[], None]) -> None:
        self.node = node
        self.reply: Reply | None = None
        self.failure: LegFailed | None = None
        self.ended = False
        self.on_progress = on_progress
        self.began_s = 0.0
        self._pool = pool
        self._request_id = request_id
        self._head = head
        self._body = body
        self._form = form
        self._fresh = False
        self._sent_s = 0.0
        self._answered = False  # with 200
        self._connecting: asyncio.Task[None] | None = None
        self._error_parts: list[bytes] = []
        self._num_error_bytes = 0

    @property
    def answered(self) -> bool:
        """The head of a reply with status 200 has come."""
        return self._answered

    def start(self) -> None:
        self.began_s = self._sent_s = time.monotonic()
        if (kept := self._pool.take(self.node.address)) is not None:
            self.reply = kept.send(self._head, self._body, self._on_reply)
        else:
            self._connect()

    def forget_body(self) -> None:
        """It is on its way, and will not be sent again."""
        if self.reply is not None:
            self._body, self._fresh = b"", True

    def cancel(self) -> None:
        """Nothing more is wanted of it: the connection is closed, unless the reply is complete."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self.reply is not None:
            self.reply.on_progress = None
            self.reply.close()
        self.ended = True

    def fail(self, failure: LegFailed) -> None:
        if self.ended:
            return
        self.failure = failure
        self.cancel()
        self.on_progress()

    def _connect(self) -> None:
        self._fresh = True
        self._connecting = asyncio.create_task(self._connected())

    async def _connected(self) -> None:
        try:
            connection = await self._pool.connect(self.node.address)
        except OSError as error:  # TimeoutError is one
            self._connecting = None
            self.fail(unreachable(self.node, error, self.began_s))
            return
        self._connecting = None
        if self.ended:
            self._pool.keep(connection)
            return
        self._sent_s = time.monotonic()
        self.reply = connection.send(self._head, self._body, self._on_reply)

    def _on_reply(self) -> None:
        reply = self.reply
        assert reply is not None
        if self._answered:
            self._on_body(reply)
        elif reply.status is None:
            if reply.error is not None:
                self._on_silence(reply, reply.error)
        elif self._answers_another(reply):
            reply.fail(NotHttp("it answers another request"))  # so that its connection is not kept
            self.fail(broken(self.node, "its reply is to another request", self.began_s))
        elif reply.status == 200:
            self._answered = True
            self._on_body(reply)
        else:
            self._on_refusal(reply, reply.status)

    def _answers_another(self, reply: Reply) -> bool:
        """A node that answers a request twice would have all later ones on that connection answered with another's text. Those that give back
        the id of a request, as pdserve's do, are found out. A proxy may write ids of its own: a new connection's reply tells."""
        answered = reply.header(ID_HEADER)
        if self._fresh and answered:
            self.node.echoes_ids = answered == self._request_id
        return self.node.echoes_ids and answered not in ("", self._request_id)

    def _on_body(self, reply: Reply) -> None:
        """Parts came, or the end: for the owner, who takes them."""
        if reply.has_parts or reply.complete or reply.error is not None:
            self.on_progress()

    def _on_silence(self, reply: Reply, error: Exception) -> None:
        """The connection ended, and nothing was answered."""
        if isinstance(error, NotHttp):
            self.fail(broken(self.node, f"its reply is no HTTP: {error}"[:MAX_ERROR_CHARACTERS], self.began_s))
        elif not self._fresh and not reply.heard and isinstance(error, ConnectionError) and time.monotonic() - self._sent_s <= CROSSING_S:
            reply.on_progress = None
            reply.close()
            self.reply = None
            self._connect()
        else:
            self.fail(unreachable(self.node, error, self.began_s))

    def _on_refusal(self, reply: Reply, status: int) -> None:
        part = reply.take()
        self._error_parts.append(part)
        self._num_error_bytes += len(part)
        if reply.complete:
            self.fail(refused(self.node, status, headers_to_client(reply), b"".join(self._error_parts), self._form, self.began_s))
        elif self._num_error_bytes > MAX_ERROR_BYTES:
            self.fail(refused(self.node, status, headers_to_client(reply), b"", self._form, self.began_s))
        elif reply.error is not None:
            self.fail(broken(self.node, f"its reply with status {status} is cut short: {reply.error}", self.began_s))


class PrefillLeg(Leg):
    """Reads its reply to the end by itself: for an error in a stream, and because a sequential engine's decode leg needs it."""

    __slots__ = ("_held", "_num_bytes", "_parts", "body")

    def __init__(self, pool: Pool, node: Node, request_id: str, head: bytes, body: bytes, form: StreamForm, on_progress: Callable[[], None]) -> None:
        super().__init__(pool, node, request_id, head, body, form, on_progress)
        self._held = b""  # of a stream: an event that has not ended
        self._parts: list[bytes] = []  # of a reply that is not streamed
        self._num_bytes = 0
        self.body = b""  # of such a reply, once it is complete

    def _on_body(self, reply: Reply) -> None:
        error = self._error_in_events(reply) if is_event_stream(reply.header(b"content-type")) else self._error_in_whole(reply)
        if error is not None:
            self.fail(failed_in_band(self.node, error, self.began_s))
        elif reply.complete:
            self.node.succeeded(self.began_s)
            self.cancel()
            self.on_progress()
        elif reply.error is not None:
            self.fail(broken(self.node, f"its reply is cut short: {reply.error}", self.began_s))
        elif self._num_bytes > MAX_REPLY_BYTES:
            self.fail(broken(self.node, f"its reply is longer than {MAX_REPLY_BYTES} bytes", self.began_s))

    def _error_in_events(self, reply: Reply) -> bytes | None:
        held = self._held + reply.take()
        end = len(held) if reply.complete else end_of_events(held, self._form)
        self._held = held[end:]
        return error_in(held[:end])

    def _error_in_whole(self, reply: Reply) -> bytes | None:
        part = reply.take()
        self._parts.append(part)
        self._num_bytes += len(part)
        if not reply.complete:
            return None
        self.body, self._parts = b"".join(self._parts), []
        return error_in(self.body)


async def _head(reply: Reply) -> Reply:
    try:
        await reply.head()
    except BaseException:
        reply.close()
        raise
    return reply


async def read_whole(reply: Reply, max_bytes: int) -> bytes:
    """The reply's body. Raises OverflowError, NotHttp or OSError."""
    parts: list[bytes] = []
    num_bytes = 0
    while part := await reply.read():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise OverflowError(f"the reply is longer than {max_bytes} bytes")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def unreachable(node: Node, error: BaseException, began_s: float = math.inf) -> LegFailed:
    if is_own_limit(error):
        text = f"this router has no socket left for another connection ({error}); try again, raise its limit of open files, or add a router"
        return LegFailed(node, overloaded(text, stage="router").failure, retryable=False)
    if isinstance(error, TimeoutError):
        text = "no connection in time"
    elif isinstance(error, OSError) and error.strerror:
        text = error.strerror
    else:
        text = str(error) or type(error).__name__
    failure = Failure(503, f"{node.leg} node {node.url} cannot be reached: {text}", code="node_unreachable", stage="router", retry_after_s=1.0)
    node.blame(f"failed a request: {text}", began_s=began_s)
    return LegFailed(node, failure, retryable=True, timed_out=isinstance(error, TimeoutError))


def broken(node: Node, what: str, began_s: float = math.inf) -> LegFailed:
    node.blame(f"failed a request: {what}", began_s=began_s)
    return LegFailed(node, Failure(502, f"{node.leg} node {node.url} failed: {what}", code="node_failed", stage="router"), retryable=True)


def refused(node: Node, status: int, headers: Headers, body: bytes, form: StreamForm = OPENAI, began_s: float = math.inf) -> LegFailed:
    """The node answered with a status other than 200."""
    if not 400 <= status < 600:
        return broken(node, f"it answered with status {status}, which is no answer to a completion", began_s)
    said = openai_error(body)
    if said is not None:
        message, code = said[0], said[2]
    else:
        text = " ".join(body.decode(errors="replace").split())[:MAX_ERROR_CHARACTERS]
        message, code = f"{node.leg} node answered {status}: {text or 'without a word'}", None
    failure = Failure(status, message, code=code if isinstance(code, str) else None, stage=node.leg)
    if not is_client_error(body, form):
        body = msgspec.json.encode(failure.openai_body())
        headers = [line for line in headers if line[0] not in (b"content-type", b"content-encoding")] + [(b"content-type", b"application/json")]
    failed = LegFailed(node, failure, status in RETRYABLE_STATUSES, NodeReply(status, headers, body))
    if failed.retryable and not failed.asks_patience:
        node.blame(f"answered {status}: {message}", began_s=began_s, answered=True)
    return failed


def failed_in_band(node: Node, error: bytes, began_s: float = math.inf) -> LegFailed:
    """error: the JSON of an error event, which came instead of an answer."""
    failure = failure_of(error, node.leg)
    retryable = failure.status in RETRYABLE_STATUSES
    if retryable:
        node.blame(f"answered {failure.status}: {failure.message}", began_s=began_s, answered=True)
    reply = NodeReply(failure.status, [(b"content-type", b"application/json")], error) if is_client_error(error, OPENAI) else None
    return LegFailed(node, failure, retryable, reply)


def message_head(method: bytes, node: Node, target: bytes, lines: bytes) -> bytes:
    """A request's head. target: path and query. lines: header lines, each with its CRLF."""
    return b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (method, node.path_prefix, target, node.host_header, lines)


def headers_to_node(headers: Sequence[tuple[bytes, bytes]], request_id: str, deadline_s: float, *, but: Collection[bytes] = ()) -> bytes:
    """Lines of a request's head, as far as they come from the client or are the same for both nodes. but: names that the caller sets."""
    named = _named_by_connection(headers)
    lines, typed = list[bytes](), False
    for line in headers:
        name = line[0]
        if name not in NOT_TO_NODE and name not in named and name not in but:
            lines.append(b"%b: %b\r\n" % line)
        typed = typed or name == b"content-type"
    if not typed:
        lines.append(b"content-type: application/json\r\n")
    lines.append(b"%b: %b\r\n%b: %.3f\r\n" % (ID_HEADER, request_id.encode(), DEADLINE_HEADER, deadline_s))
    return b"".join(lines)


def headers_to_client(reply: Reply) -> Headers:
    named = _named_by_connection(reply.headers)
    return [line for line in reply.headers
            if line[0] not in NOT_TO_CLIENT and line[0] not in named and not line[0].startswith(CORS_PREFIX)]  # fmt: skip


def _named_by_connection(headers: Sequence[tuple[bytes, bytes]]) -> Collection[bytes]:
    """Headers that are for one hop only because it says so."""
    named: Collection[bytes] = ()
    for key, value in headers:
        if key == b"connection" and value != b"keep-alive":  # which is in HOP_BY_HOP
            named = {*named, *(word.strip().lower() for word in value.split(b","))}
    return named


def is_own_limit(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in OWN_LIMITS
