"""One HTTP request and its one reply, at the level of ASGI messages.

The two completion endpoints speak ASGI themselves: a token's way to the client is one `send`, and the status line waits until
the first output or failure is known, so that an early failure has its true status also when a stream was asked for.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from common.errors import Failure, RequestError, deadline_exceeded, invalid, too_large
from common.server.openai_stream import error_body

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

DEADLINE_HEADER = b"x-request-deadline"
BODY_TIMEOUT_S = 30.0  # a client that sends its body slower than this holds a connection for nothing
LINGER_S = 1.0  # how long the rest of a refused body is read and thrown away, so that the client gets to read the refusal
JSON_HEADERS: Headers = [(b"content-type", b"application/json")]
STREAM_HEADERS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class ClientGone(Exception):
    """The connection ended before the request was complete."""


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._headers: Headers = scope["headers"]
        self._receive = receive
        self._send = send
        self.path: str = scope["path"]
        self.request_id: str = scope["state"]["request_id"]
        self.started = False
        self._unread_body = True

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self._headers if key == name), None)

    async def body(self, max_bytes: int) -> bytes:
        """The whole body. Raises RequestError (413 as soon as it is known to be too large, 408) or ClientGone."""
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
                raise ClientGone
            part = message.get("body", b"")
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise too_large(f"the request body is larger than the {max_bytes} bytes that are taken: shorten it, or raise --max-body-bytes")
            parts.append(part)
            if not message.get("more_body", False):
                self._unread_body = False
                return b"".join(parts)

    def deadline_s(self, request_timeout_s: float) -> float:
        """Unix time by which the request must have ended: what the client says, at most the node's limit from now."""
        now_s = time.time()
        asked = self.header(DEADLINE_HEADER)
        if asked is None:
            return now_s + request_timeout_s
        try:
            deadline_s = float(asked)
        except ValueError:
            deadline_s = math.nan
        if not math.isfinite(deadline_s):
            raise invalid(f"header {DEADLINE_HEADER.decode()} is {asked[:40]!r}; it must be a time in unix seconds", param=DEADLINE_HEADER.decode())
        if deadline_s <= now_s:
            raise RequestError(deadline_exceeded("intake"))
        return min(deadline_s, now_s + request_timeout_s)

    async def wait_disconnect(self) -> None:
        """Returns when the client has closed the connection. The body has been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def reply_json(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """The whole reply. After a body that was not read, the connection is closed."""
        extra = [(b"connection", b"close")] if self._unread_body else []
        await self.start(status, [*JSON_HEADERS, (b"content-length", b"%d" % len(body)), *extra, *headers])
        if self._unread_body:
            await self.write(body, more=True)
            await self._discard_body()
            body = b""
        await self.write(body, more=False)

    async def reply_failure(self, failure: Failure) -> None:
        """An OpenAI error object, with Retry-After where the failure knows it."""
        retry = [] if failure.retry_after_s is None else [(b"retry-after", b"%d" % max(1, math.ceil(failure.retry_after_s)))]
        await self.reply_json(failure.status, error_body(failure), retry)

    async def _discard_body(self) -> None:
        try:
            async with asyncio.timeout(LINGER_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
        except TimeoutError:
            return
