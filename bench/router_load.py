"""Clients for router_overhead.py, as light as can be: raw protocols, requests that are ready before they are sent, replies that are hardly read.

Requests are chat completions. No two prompts are alike from their first word on, so that nothing a router remembers of them helps it. How a stream
goes is said in its prompt (router_mock.py).
"""

import asyncio
import re
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import cast

CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHUNK = re.compile(rb'"content":"(\d+\.\d{6})"')
NODE = re.compile(rb'"id":"(\w+)"')
LAST_CHUNK = b"0\r\n\r\n"
SENTENCE = b"The quick brown fox jumps over the lazy dog, and nobody is the wiser for it. "
MAX_ERROR_CHARACTERS = 300
_numbers = count(time.time_ns())  # new ones in each run


class Request:
    """A request with a body of `num_bytes` (a few more than that when it is very small); a new prompt each time."""

    def __init__(self, num_bytes: int, *, num_chunks: int = 0, gap_s: float = 0.0) -> None:
        """num_chunks: of a stream, gap_s apart; 0: it is not streamed."""
        self._before = b'{"model":"mock","messages":[{"role":"system","content":"'
        turn = b' chunks=%d gap_ms=%d"},{"role":"user","content":"' % (num_chunks, round(gap_s * 1e3))
        end = b'"}],"temperature":0.7,"max_tokens":32,"stream":%s}' % (b"true" if num_chunks else b"false")
        room = max(0, num_bytes - len(self._before) - 16 - len(turn) - len(end))
        self._after = turn + (SENTENCE * (room // len(SENTENCE) + 1))[:room] + end
        num_bytes = len(self._before) + 16 + len(self._after)
        self._head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % num_bytes

    def next_bytes(self) -> bytes:
        return b"%s%s%016x%s" % (self._head, self._before, next(_numbers), self._after)


@dataclass(slots=True)
class Tally:
    """What clients saw while it was `open`."""

    open: bool = True
    latencies_s: "array[float]" = field(default_factory=lambda: array("d"))  # of whole requests
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))  # from a chunk's writing at the node to its arrival here
    num_chunks: int = 0
    errors: list[str] = field(default_factory=list)  # always noted


class Caller(asyncio.Protocol):
    """One connection. `ended` is called with it at each reply's end, and may send the next request."""

    def __init__(self, request: Request, tally: Tally, ended: "Ended") -> None:
        self._request = request
        self._tally = tally
        self._ended = ended
        self._head: bytes | None = b""  # None: it has been read
        self._num_missing: int | None = None  # of the reply's body; None: it comes in chunks
        self._tail = b""
        self.sent_s = 0.0
        self.heard_s = 0.0
        self.node = b""  # that sends the stream
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self) -> None:
        self._head, self._tail, request = b"", b"", self._request.next_bytes()
        self.sent_s = time.monotonic()
        self._transport.write(request)

    def close(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self._fail(f"connection lost: {error}")

    def data_received(self, data: bytes) -> None:
        self.heard_s = time.monotonic()
        if self._head is not None and not (data := self._read_head(self._head + data)):
            return
        if self._num_missing is not None:
            self._num_missing -= len(data)
            complete = self._num_missing <= 0
        else:
            self._read_chunks(data)
            self._tail = (self._tail + data)[-len(LAST_CHUNK) :]
            complete = self._tail == LAST_CHUNK
        if complete and not self.closed.done():
            if self._tally.open:
                self._tally.latencies_s.append(self.heard_s - self.sent_s)
            self._ended(self)

    def _read_head(self, received: bytes) -> bytes:
        """What follows the head; empty when nothing does yet."""
        end = received.find(b"\r\n\r\n")
        if end < 0:
            self._head = received
            return b""
        if not received.startswith(b"HTTP/1.1 200"):
            self._fail(received.decode(errors="replace"))
            return b""
        length = CONTENT_LENGTH.search(received, 0, end)
        self._head, self._num_missing = None, None if length is None else int(length[1])
        return received[end + 4 :]

    def _read_chunks(self, data: bytes) -> None:
        written_s = CHUNK.findall(data)
        if self._tally.open:
            self._tally.num_chunks += len(written_s)
            self._tally.gaps_s.extend([self.heard_s - float(one_s) for one_s in written_s])
        if not self.node and (node := NODE.search(data)) is not None:
            self.node = node[1]
        if b'"error"' in data:
            self._fail(data.decode(errors="replace"))

    def _fail(self, what: str) -> None:
        self._tally.errors.append(what[:MAX_ERROR_CHARACTERS])
        self.close()


Ended = Callable[[Caller], None]


async def open_callers(port: int, request: Request, tally: Tally, number: int, ended: Ended, within_s: float = 0.0) -> list[Caller]:
    """`number` connections that have sent a request each, opened one after the other within that time."""
    loop = asyncio.get_running_loop()
    callers: list[Caller] = []
    started_s = loop.time()
    for turn in range(number):
        await asyncio.sleep(started_s + within_s * turn / number - loop.time())
        _, caller = await loop.create_connection(lambda: Caller(request, tally, ended), "127.0.0.1", port)
        callers.append(caller)
    return callers


async def call_for(port: int, request: Request, concurrency: int, seconds: float) -> Tally:
    """`concurrency` clients that send one request after the other."""
    tally, until_s = Tally(), time.monotonic() + seconds
    callers = await open_callers(port, request, tally, concurrency, lambda caller: caller.send() if caller.heard_s < until_s else caller.close())
    await asyncio.gather(*(caller.closed for caller in callers))
    return tally


async def call_often(port: int, request: Request, concurrency: int, number: int) -> Tally:
    """The same, until `number` requests are answered."""
    tally, num_left = Tally(), number - concurrency

    def ended(caller: Caller) -> None:
        nonlocal num_left
        if num_left > 0:
            num_left -= 1
            caller.send()
        else:
            caller.close()

    callers = await open_callers(port, request, tally, concurrency, ended)
    await asyncio.gather(*(caller.closed for caller in callers))
    return tally


class Steady:
    """Requests at an even rate, however long the answers take: those that find no idle connection get a new one."""

    def __init__(self, port: int, request: Request, rate_per_s: float) -> None:
        self.tally = Tally()
        self._port = port
        self._request = request
        self._pause_s = 1.0 / rate_per_s
        self._idle: list[Caller] = []
        self._callers: list[Caller] = []

    @property
    def num_waiting(self) -> int:
        return sum(not caller.closed.done() for caller in self._callers) - sum(not caller.closed.done() for caller in self._idle)

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        try:
            while True:
                next_s += self._pause_s
                await asyncio.sleep(next_s - loop.time())
                if self._idle and not (caller := self._idle.pop()).closed.done():
                    caller.send()
                else:
                    self._callers += await open_callers(self._port, self._request, self.tally, 1, self._idle.append)
        finally:
            for caller in self._callers:
                caller.close()
