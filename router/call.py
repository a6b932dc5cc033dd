"""One request under way: what its task waits for, and what ends it from outside.

The task waits in progress() and nowhere else. Whatever happens (a leg got on, the client left, the deadline passed, the router shuts
down) wakes it, and it looks at what is the case; so nothing is cancelled in the middle of something, and one future is all that waits.
"""

import asyncio
import math
import time
from typing import TypeVar

from common.tracing import Span
from router.admission import Ticket
from router.exchange import Exchange
from router.pairing import Placement

T = TypeVar("T")


class ClientLeft(Exception):
    """The client closed its connection before the reply was complete."""


class Call:
    __slots__ = ("_loop", "_open", "_waiter", "arrived_s", "end_s", "ended_by", "exchange", "placement", "span", "ticket")

    def __init__(self, exchange: Exchange, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.exchange = exchange
        self.arrived_s = time.monotonic()
        self.placement: Placement | None = None  # the last that was tried
        self.span: Span | None = None  # when it is traced
        self.ticket: Ticket | None = None  # once admitted
        self.end_s = math.inf  # its deadline, monotonic
        self.ended_by: Exception | None = None
        self._open = True
        self._waiter: asyncio.Future[None] | None = None

    async def progress(self) -> None:
        """Until something has happened since the caller last looked. Raises what interrupted the call."""
        if self.ended_by is None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.ended_by is not None:
            raise self.ended_by

    async def wait(self, future: "asyncio.Future[T]") -> T:
        """Its result. When the call is interrupted the future is cancelled."""
        future.add_done_callback(self.wake)
        try:
            while not future.done():
                await self.progress()
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def wake(self, *_: object) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def prompt_computed(self) -> None:
        """Its first token is there."""
        if self.ticket is not None:
            self.ticket.first_byte()

    def interrupt(self, error: Exception) -> None:
        """The task's progress() raises `error`. The first one counts."""
        if self._open and self.ended_by is None:
            self.ended_by = error
            self.wake()

    def close(self) -> None:
        """Its reply is decided: nothing interrupts it any more."""
        self._open = False
