"""One request of a client and its one reply, as the bytes of HTTP/1.1; server.py reads it, whoever answers writes it."""

import math
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Protocol

import msgspec

from common.errors import Failure, RequestError, too_large
from common.http_exchange import BodyBudget, Headers

REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
JSON_LINE = b"content-type: application/json\r\n"
INTERNAL_FAILURE = Failure(500, "the router failed on this request; its log has the cause", code="internal_error", stage="router")


class Channel(Protocol):
    """What an exchange needs of its client's connection."""

    writable: bool
    client: tuple[str, int] | None

    @property
    def date_line(self) -> bytes: ...
    @property
    def num_unsent_bytes(self) -> int: ...
    def write(self, data: bytes) -> None: ...
    def abort(self) -> None: ...
    def exchange_ended(self, exchange: "Exchange") -> None: ...


class Exchange:
    """One request and its one reply. `left`: the client is gone; on_left is told once. Writing to a client that is gone does nothing."""

    __slots__ = (
        "_budget", "_chunked", "_connection", "_num_body_bytes", "_parts", "_unsent_head", "arrived_s", "body", "ended", "extra", "headers",
        "http_11", "keep_alive", "left", "method", "on_left", "on_writable", "path", "refusal", "request_id", "status", "target",
    )  # fmt: skip

    def __init__(self, connection: Channel, budget: BodyBudget) -> None:
        self._connection = connection
        self._budget = budget
        self._num_body_bytes = 0  # taken from the budget
        self._parts: list[bytes] = []
        self._chunked = False
        self._unsent_head = b""
        self.arrived_s = time.monotonic()
        self.method = "GET"
        self.target = b""  # path and query
        self.path = b""
        self.headers: Headers = []  # names in lower case
        self.body = b""
        self.http_11 = True
        self.keep_alive = False
        self.request_id = ""
        self.refusal: Failure | None = None  # why the body was not read
        self.extra = b""  # header lines that go with whatever is answered
        self.status: int | None = None  # once sent
        self.ended = False
        self.left = False
        self.on_left: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None  # the client reads again

    @property
    def started(self) -> bool:
        """Something of the reply has gone out: its status is said."""
        return self.status is not None and not self._unsent_head

    @property
    def writable(self) -> bool:
        """False: the client does not read as fast as is written; write no more until on_writable."""
        return self._connection.writable

    @property
    def client(self) -> tuple[str, int] | None:
        return self._connection.client

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def reply(self, status: int, lines: bytes, body: bytes) -> None:
        """The whole reply. lines: header lines, each with its CRLF."""
        head = self._head(status, b"%scontent-length: %d\r\n" % (lines, len(body)))
        self._connection.write(head if self.method == "HEAD" else head + body)
        self._finish()

    def start(self, status: int, lines: bytes) -> None:
        """A reply of unknown length; write() and end() follow. The head goes out with the first of them: one system call less."""
        self._chunked = self.http_11
        if not self._chunked:
            self.keep_alive = False  # HTTP/1.0: the connection's end is the body's
        self._unsent_head = self._head(status, lines + (b"transfer-encoding: chunked\r\n" if self._chunked else b""))

    def write(self, part: bytes) -> None:
        """part: not empty."""
        if self.method == "HEAD":
            return
        if self._chunked:
            part = b"%x\r\n%b\r\n" % (len(part), part)
        if self._unsent_head:
            part, self._unsent_head = self._unsent_head + part, b""
        self._connection.write(part)

    def end(self, part: bytes = b"") -> None:
        if part:
            self.write(part)
        rest, self._unsent_head = self._unsent_head + (b"0\r\n\r\n" if self._chunked and self.method != "HEAD" else b""), b""
        if rest:
            self._connection.write(rest)
        self._finish()

    def fail(self, failure: Failure, lines: bytes = b"") -> None:
        """An OpenAI error object, with Retry-After where the failure knows it. Only before start()."""
        self.reply(failure.status, JSON_LINE + retry_after_line(failure) + lines, msgspec.json.encode(failure.openai_body()))

    def abort(self) -> None:
        """For a client that does not read: a closing connection would wait for it."""
        self._connection.abort()

    @property
    def num_unsent_bytes(self) -> int:
        return self._connection.num_unsent_bytes

    def release_body(self) -> None:
        """The body is not needed any more. Idempotent."""
        if self._num_body_bytes:
            self._budget.give_back(self._num_body_bytes)
            self._num_body_bytes = 0
        self.body = b""

    def lost(self) -> None:
        """From the connection: it ended."""
        self.left = True
        self.release_body()
        if self.on_left is not None and not self.ended:
            self.on_left()

    # From the parser, through the connection

    def take(self, part: bytes, max_bytes: int) -> None:
        """Raises RequestError when that is too much."""
        if self._num_body_bytes + len(part) > max_bytes:
            raise body_too_large(None, max_bytes)
        self._budget.take(len(part))
        self._num_body_bytes += len(part)
        self._parts.append(part)

    def body_complete(self) -> None:
        parts, self._parts = self._parts, []
        self.body = parts[0] if len(parts) == 1 else b"".join(parts)

    def _head(self, status: int, lines: bytes) -> bytes:
        self.status = status
        keep = b"" if self.keep_alive and self.http_11 else b"connection: keep-alive\r\n" if self.keep_alive else b"connection: close\r\n"
        return b"HTTP/1.1 %d %b\r\n%bx-request-id: %b\r\n%b%b%b\r\n" % (
            status, REASONS.get(status, b"Unknown"), self.extra, self.request_id.encode(), self._connection.date_line, lines, keep)  # fmt: skip

    def _finish(self) -> None:
        self.ended = True
        self.release_body()
        self._connection.exchange_ended(self)


def header_lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def retry_after_line(failure: Failure) -> bytes:
    return b"" if failure.retry_after_s is None else b"retry-after: %d\r\n" % max(1, math.ceil(failure.retry_after_s))


def body_too_large(num_bytes: int | None, max_bytes: int) -> RequestError:
    if num_bytes is None:
        return too_large(f"the request body is larger than the {max_bytes} bytes that are taken: shorten it, or raise --max-body-bytes")
    return too_large(f"the request body has {num_bytes} bytes; at most {max_bytes} are taken: shorten it, or raise --max-body-bytes")
