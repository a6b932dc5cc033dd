"""One HTTP request and its one reply, at the level of ASGI messages; nodes and the router speak it on the completion paths.

A token's way to the client is one `send`. The status line waits until the first output or failure is known, so that an early
failure has its true status also when a stream was asked for; a later one is a data event with an error object, then [DONE]:
clients raise on it, whereas they take a cut stream for a success.
"""

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import msgspec

from common.errors import Failure, RequestError, deadline_exceeded, invalid, overloaded, too_large
from common.random_words import random_words

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

DONE = b"data: [DONE]\n\n"
ABORT_EXTENSION = "pdserve.abort"  # of the ASGI scope: {"call": drops the connection with what is still to be sent}
ID_HEADER = b"x-request-id"
ACCEPTED_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
DEADLINE_HEADER = b"x-request-deadline"
MAX_BODIES_BYTES = 64 << 20  # sixteen of the largest by default; the router holds a body, and a copy for each leg, until its request ends
BODY_TIMEOUT_S = 30.0  # a client that sends its body slower than this holds a connection for nothing
LINGER_S = 1.0  # how long the rest of a refused body is read and thrown away, so that the client gets to read the refusal
JSON_HEADERS: Headers = [(b"content-type", b"application/json")]


_words = random_words()


class ClientLeft(Exception):
    """The client closed its connection before the reply was complete."""


class BodyBudget:
    """Bounds what all bodies of a process take together (R7). max_body_bytes: of one, which always fits. what: for people."""

    def __init__(self, max_body_bytes: int, max_bytes: int | None = None, what: str = "bodies of open requests") -> None:
        self._max_bytes = max(MAX_BODIES_BYTES if max_bytes is None else max_bytes, max_body_bytes)
        self._what = what
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises RequestError (503) and takes nothing when that is too much."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise overloaded(f"the {self._what} take {self.num_bytes} bytes already; try again", stage="intake")
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.headers: Headers = scope["headers"]
        self.path: str = scope["path"]
        self.reply_headers: Headers = []  # sent with whatever is answered
        self.status: int | None = None  # once sent
        self._receive = receive
        self._send = send
        self._unread_body = True
        self._budget: BodyBudget | None = None
        self._num_body_bytes = 0  # taken from the budget
        self._abort: Callable[[], None] = scope["extensions"][ABORT_EXTENSION]["call"]

    @property
    def started(self) -> bool:
        return self.status is not None

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)

    async def body(self, max_bytes: int, budget: BodyBudget) -> bytes:
        """The whole body, counted in `budget` until release_body(). Raises RequestError (413 as soon as it is known to be too
        large, 408, 503) or ClientLeft."""
        self._budget = budget
        declared = self.header(b"content-length")
        if declared is not None and int(declared) > max_bytes:
            raise too_large(f"the request body has {int(declared)} bytes; at most {max_bytes} are taken: shorten it, or raise --max-body-bytes")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read(max_bytes)
        except TimeoutError:
            sentence = f"the request body did not arrive within {BODY_TIMEOUT_S:.0f} s"
            raise RequestError(Failure(408, sentence, code="request_timeout", stage="intake")) from None

    async def _read(self, max_bytes: int) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            part = message.get("body", b"")
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise too_large(f"the request body is larger than the {max_bytes} bytes that are taken: shorten it, or raise --max-body-bytes")
            if self._budget is not None:
                self._budget.take(len(part))
                self._num_body_bytes += len(part)
            parts.append(part)
            if not message.get("more_body", False):
                self._unread_body = False
                return b"".join(parts)

    def release_body(self) -> None:
        """The body is not needed any more. Idempotent; owed in every case once body() was called."""
        if self._budget is not None:
            self._budget.give_back(self._num_body_bytes)
            self._num_body_bytes = 0

    def deadline_s(self, request_timeout_s: float) -> float:
        """Unix time by which the request must have ended."""
        return deadline_of(self.header, request_timeout_s)

    async def wait_disconnect(self) -> None:
        """Returns when the client has closed the connection. The body has been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.reply_headers]})

    async def write(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def reply(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """The whole reply. After a body that was not read, the connection is closed."""
        close = [(b"connection", b"close")] if self._unread_body else []
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body)), *close])
        if self._unread_body:
            await self.write(body, more=True)
            await self._discard_body()
            body = b""
        await self.write(body, more=False)

    async def fail(self, failure: Failure) -> None:
        """An OpenAI error object, with Retry-After where the failure knows it; after the status line, as the stream's end."""
        error = msgspec.json.encode(failure.openai_body())
        if self.started:
            await self.write(b"data: " + error + b"\n\n" + DONE, more=False)
            return
        retry = [] if failure.retry_after_s is None else [(b"retry-after", b"%d" % max(1, math.ceil(failure.retry_after_s)))]
        await self.reply(failure.status, [*JSON_HEADERS, *retry], error)

    def abort(self) -> None:
        """For a client that does not read: a closing connection would wait for it."""
        self._abort()

    async def _discard_body(self) -> None:
        try:
            async with asyncio.timeout(LINGER_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
        except TimeoutError:
            return


def deadline_of(header: Callable[[bytes], bytes | None], request_timeout_s: float) -> float:
    """Unix time by which a request must have ended: what the client says, at most the server's limit from now. Raises RequestError:
    400 for what is no time, 504 for one that has passed."""
    now_s = time.time()
    asked = header(DEADLINE_HEADER)
    if asked is None:
        return now_s + request_timeout_s
    try:
        deadline_s = float(asked)
    except ValueError:
        deadline_s = math.nan
    if not math.isfinite(deadline_s):
        name, text = DEADLINE_HEADER.decode(), asked[:40].decode("latin-1")
        raise invalid(f"header {name} is {text!r}; it must be a time in unix seconds", param=name)
    if deadline_s <= now_s:
        raise RequestError(deadline_exceeded("intake"))
    return min(deadline_s, now_s + request_timeout_s)


def request_id_of(headers: Headers) -> str:
    """The client's x-request-id, or a new one."""
    given = next((value for key, value in headers if key == ID_HEADER), None)
    return given.decode() if given is not None and ACCEPTED_ID.fullmatch(given) else f"{next(_words):016x}"
