"""A decode node's stream becomes the client's, part by part, as its bytes come.

A stream is passed on event by event: what a node sent of an event that never ended is not shown, so that the in-band error after
it can be read. A stream has ended well when it has said its last word (api_paths.py), whatever becomes of its connection; one that
ends after an error event of its own gets the end it lacks and no second error.

A part goes from the node's connection to the client's in one call, without a task. When the client does not read, the node's
connection is not read either: what is held for a stream is one connection's buffers.
"""

import asyncio
import time
from collections.abc import Callable

from router.api_paths import StreamForm
from router.connection import Reply
from router.events import MAX_HELD_BYTES, end_of_events, error_in, has_done, last_event
from router.exchange import Exchange

AFTER_DONE_S = 1.0  # how long a node may take to end a stream in which it has said its last word


class Relay:
    """`ended`: nothing more comes; then `cause` says what is wrong, None when the stream is whole. The caller ends the exchange."""

    __slots__ = ("_exchange", "_form", "_gap", "_held", "_last_s", "_limit", "_midway", "_on_ended", "_reply", "cause", "done", "ended", "error")

    def __init__(self, exchange: Exchange, reply: Reply, form: StreamForm, gap: Callable[[float], None], on_ended: Callable[[], None]) -> None:
        self.ended = False
        self.done = False
        self.error: bytes | None = None  # of an error event that the node sent
        self.cause: str | None = None
        self._exchange = exchange
        self._reply = reply
        self._form = form
        self._gap = gap
        self._on_ended = on_ended
        self._held = b""
        self._midway = False  # in an event so long that its beginning was passed on
        self._last_s = 0.0
        self._limit: asyncio.TimerHandle | None = None
        exchange.on_writable = self.progress

    def progress(self) -> None:
        """Parts came, or the end, or the client reads again."""
        if self.ended or not self._exchange.writable:
            return
        reply = self._reply
        if part := reply.take():
            self._pass_on(part)
        if not self.ended and (reply.complete or reply.error is not None) and not reply.has_parts:
            self.end(f"its stream was cut: {reply.error}" if not reply.complete else f"its stream ended without {self._form.last_word}")

    def close(self) -> None:
        """No more is passed on."""
        self.ended = True
        self._exchange.on_writable = None
        if self._limit is not None:
            self._limit.cancel()

    def _pass_on(self, part: bytes) -> None:
        if self._held:
            part = self._held + part
        end = end_of_events(part, self._form)
        if end == len(part):
            self._held = b""
        else:
            part, self._held = part[:end], part[end:]
            if not part:
                return
        self._midway = len(part) > MAX_HELD_BYTES and not part.endswith(self._form.separators)
        now_s = time.monotonic()
        if self._last_s:
            self._gap(now_s - self._last_s)
        self._last_s = now_s
        if not self.done and has_done(part, self._form):
            self.done = True
            self._limit = asyncio.get_running_loop().call_later(AFTER_DONE_S, self.end, f"its stream goes on after {self._form.last_word}")
        if self.error is None:
            self.error = error_in(part)
        self._exchange.write(part)

    def end(self, cause: str) -> None:
        """Nothing more is waited for. cause: what is wrong, unless it is whole."""
        if self.ended:
            return
        self.close()
        if not self.done and (last := last_event(self._held, self._form)):
            self.done = True
            self._exchange.write(last)
        elif self.error is not None and not self.done and self._form.after_error:
            self._exchange.write(self._form.after_error)
        if not self.done and self.error is None:
            self.cause = cause
            if self._midway:
                self._exchange.write(self._form.separators[0])  # so that the error is an event of its own
        self._on_ended()
