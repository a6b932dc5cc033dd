"""One POST to one node, and what may go wrong with it.

Everything that a connection can raise is turned into LegFailed here. Four kinds of failure are told apart, because they differ in
what follows:
    unreachable   no connection, or it broke: 503; the node is blamed; another pair may serve the request
    refused       the node answered with an error: its status and body are kept; 502 and 503 may be served by another pair, and with
                  Retry-After by nodes other than this one only
    broken        the node's reply is cut short or no HTTP: 502; the node is blamed
    overloaded    this process has no socket left: 503 with Retry-After; nobody is blamed, no other pair is tried
A kept connection may have been closed by the node at the very moment of use. When nothing was answered on it and it ended at once,
the POST is made once more, on a new one.
"""

import errno
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from common.errors import Failure, overloaded
from common.http_exchange import DEADLINE_HEADER, ID_HEADER, JSON_HEADERS, Headers
from router.connection import NotHttp, Pool, Reply
from router.events import failure_of, openai_error
from router.nodes import Node

CROSSING_S = 0.5  # a node's closing that crossed a request arrives within a round trip; later it is the node that failed
CUT_SHORT = (OSError, NotHttp)  # what reading a reply may raise
MAX_ERROR_BYTES = 1 << 20
MAX_ERROR_CHARACTERS = 400  # of a reply that is not ours to interpret
MAX_REPLY_BYTES = 64 << 20  # of a reply that is not streamed; a million tokens as text have a tenth of it
RETRYABLE_STATUSES = (502, 503)
OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})  # of this process or its host
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
                        b"transfer-encoding", b"upgrade"})
# not passed on: what this hop decides anew; Accept-Encoding because a stream's end is read from its bytes
NOT_TO_NODE = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"accept-encoding", DEADLINE_HEADER, ID_HEADER}
NOT_TO_CLIENT = HOP_BY_HOP | {b"content-length", b"date", b"server", ID_HEADER}


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
        self._pool = Pool(connect_timeout_s)
        self._probing = Pool(connect_timeout_s)  # a frozen node's probes take no connection from requests

    def close(self) -> None:
        for pool in (self._pool, self._probing):
            pool.close()

    async def post(self, node: Node, target: bytes, headers: bytes, body: bytes) -> Reply:
        """The node's reply, its head read. target: path and query. headers: as headers_to_node makes them. Raises LegFailed, also for
        every status but 200."""
        try:
            reply = await self._exchange(self._pool, node, b"POST", target, b"%scontent-length: %d\r\n" % (headers, len(body)), body)
        except NotHttp as error:
            raise broken(node, f"its reply is no HTTP: {error}"[:MAX_ERROR_CHARACTERS]) from error
        except OSError as error:  # TimeoutError is one
            raise unreachable(node, error) from error
        if reply.status != 200:
            raise await self._refusal(node, reply)
        return reply

    async def get(self, node: Node, path: str, max_bytes: int) -> tuple[int, bytes]:
        """Status and body. Raises NotHttp, OSError or OverflowError; nobody is blamed."""
        reply = await self._exchange(self._probing, node, b"GET", path.encode(), b"", b"")
        try:
            return cast(int, reply.status), await read_whole(reply, max_bytes)
        finally:
            reply.close()

    @staticmethod
    async def _exchange(pool: Pool, node: Node, method: bytes, target: bytes, headers: bytes, body: bytes) -> Reply:
        """Send, and read the reply's head."""
        head = b"%s %s%s HTTP/1.1\r\nhost: %s\r\n%s\r\n" % (method, node.path_prefix, target, node.host_header, headers)
        if (kept := pool.take(node.address)) is not None:
            reply, sent_s = kept.send(head, body), time.monotonic()
            try:
                return await _head(reply)
            except ConnectionError:
                if reply.heard or time.monotonic() - sent_s > CROSSING_S:
                    raise
        return await _head((await pool.connect(node.address)).send(head, body))

    async def _refusal(self, node: Node, reply: Reply) -> LegFailed:
        status = cast(int, reply.status)
        try:
            body = await read_whole(reply, MAX_ERROR_BYTES)
        except CUT_SHORT as error:
            return broken(node, f"its reply with status {status} is cut short: {error}")
        except OverflowError:
            body = b""
        finally:
            reply.close()
        headers = headers_to_client(reply)
        said = openai_error(body)
        if status < 400:
            return broken(node, f"it answered with status {status}, which is no answer to a completion")
        if said is not None:
            message = said[0]
        else:
            text = " ".join(body.decode(errors="replace").split())[:MAX_ERROR_CHARACTERS]
            message = f"{node.leg} node answered {status}: {text or 'without a word'}"
            body = msgspec.json.encode(Failure(status, message).openai_body())
            headers = [(name, value) for name, value in headers if name != b"content-type"] + [(b"content-type", b"application/json")]
        failure = Failure(status, message, stage=node.leg)
        return LegFailed(node, failure, status in RETRYABLE_STATUSES, NodeReply(status, headers, body))


async def _head(reply: Reply) -> Reply:
    try:
        await reply.head()
    except BaseException:
        reply.close()
        raise
    return reply


async def read_whole(reply: Reply, max_bytes: int, first: bytes = b"") -> bytes:
    """The reply's body, of which `first` has been read. Raises OverflowError, or CUT_SHORT."""
    parts = [first] if first else []
    num_bytes = len(first)
    while part := await reply.read():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise OverflowError
    return parts[0] if len(parts) == 1 else b"".join(parts)


def unreachable(node: Node, error: BaseException) -> LegFailed:
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
    node.blame(f"failed a request: {text}")
    return LegFailed(node, failure, retryable=True)


def broken(node: Node, what: str) -> LegFailed:
    node.blame(f"failed a request: {what}")
    return LegFailed(node, Failure(502, f"{node.leg} node {node.url} failed: {what}", code="node_failed", stage="router"), retryable=True)


def failed_in_band(node: Node, error: bytes) -> LegFailed:
    """error: the JSON of an error event. The node said itself what is wrong: it is not blamed."""
    failure = failure_of(error, node.leg)
    return LegFailed(node, failure, failure.status in RETRYABLE_STATUSES, NodeReply(failure.status, JSON_HEADERS, error))


def headers_to_node(headers: Sequence[tuple[bytes, bytes]], request_id: str, deadline_s: float) -> bytes:
    """Lines of a request's head, as far as they come from the client or are the same for both nodes."""
    named = {word.strip().lower() for key, value in headers if key == b"connection" for word in value.split(b",")}
    lines = [b"%s: %s\r\n" % line for line in headers if line[0] not in NOT_TO_NODE and line[0] not in named]
    if not any(key == b"content-type" for key, _ in headers):
        lines.append(b"content-type: application/json\r\n")
    lines.append(b"%s: %s\r\n%s: %.3f\r\n" % (ID_HEADER, request_id.encode(), DEADLINE_HEADER, deadline_s))
    return b"".join(lines)


def headers_to_client(reply: Reply) -> Headers:
    return [header for header in reply.headers if header[0] not in NOT_TO_CLIENT]


def is_own_limit(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in OWN_LIMITS
