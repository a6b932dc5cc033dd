"""Prefill and decode nodes made of raw asyncio streams, which do what a test tells them: answer, refuse, hang, reset, babble.

A decode mock that answers well first waits until a prefill mock has served the same room, as a real one waits for its KV; so a
prefill fault always comes before the decode node's reply, without timing. Everything that was received is kept.
"""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

EVENTS = [b'data: {"choices":[{"index":0,"delta":{"content":"%d"}}]}\n\n' % n for n in range(3)]
DONE = b"data: [DONE]\n\n"
STREAM = b"".join(EVENTS) + DONE
WHOLE = b'{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"012"}}],"usage":{"x":1.50}}'
INFO = {
    "served_model_name": "tiny", "fingerprint": "f", "dtype": "float32", "kv_cache_dtype": "float32", "page_size": 16, "protocol_version": 1,
    "context_length": 256, "transfer_backend": "tcp", "cluster_key_id": "none",
}  # fmt: skip


@dataclass(eq=False)
class Received:
    """One request, and the connection it came on."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    closed: asyncio.Event = field(default_factory=asyncio.Event)  # the router closed the connection

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def room(self) -> Any:
        room = self.json.get("bootstrap_room")
        return tuple(room) if isinstance(room, list) else room

    @property
    def stream(self) -> bool:
        return bool(self.json.get("stream"))

    async def head(self, status: int, content_type: str, *, length: int | None = None, **headers: str) -> None:
        framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        lines = [f"HTTP/1.1 {status} X", f"content-type: {content_type}", framing, *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
        await self.write(("\r\n".join(lines) + "\r\n\r\n").encode())

    async def chunk(self, body: bytes) -> None:
        await self.write(b"%x\r\n%s\r\n" % (len(body), body))

    async def end(self) -> None:
        await self.write(b"0\r\n\r\n")

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self, status: int, body: bytes, content_type: str = "application/json", **headers: str) -> None:
        await self.head(status, content_type, length=len(body), **headers)
        await self.write(body)

    def reset(self) -> None:
        """RST, as when the process was killed with data unread."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def hang_up(self) -> None:
        """FIN, in the middle of whatever was being said."""
        self.writer.close()


Behaviour = Callable[[Received], Awaitable[None]]


class Rooms:
    """Which rooms have been served by a prefill mock."""

    def __init__(self) -> None:
        self._served: dict[Any, asyncio.Event] = {}

    def of(self, room: Any) -> asyncio.Event:
        return self._served.setdefault(room, asyncio.Event())


class MockNode:
    def __init__(self, role: str, rooms: Rooms, **info: Any) -> None:
        self.role = role
        self.info: dict[str, Any] = {**INFO, "bootstrap_port": 8998 if role == "prefill" else None, **info}
        self.ready_status = 200
        self.behave: Behaviour = self.serve_well
        self.posts: list[Received] = []
        self.gets: list[Received] = []
        self.arrived = asyncio.Condition()
        self.num_connections = 0
        self.port = 0
        self._rooms = rooms
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As a process's death: nobody listens, every connection is reset. start() again takes the same port."""
        assert self._server is not None
        self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    async def wait_posts(self, number: int) -> Received:
        """The `number`th POST, once it is there."""
        async with self.arrived, asyncio.timeout(5):
            await self.arrived.wait_for(lambda: len(self.posts) >= number)
        return self.posts[number - 1]

    def serves(self, request: Received) -> None:
        """A prefill node has computed the prompt: the decode node may answer."""
        self._rooms.of(request.room).set()

    async def serve_well(self, request: Received) -> None:
        """What a node does; chunk by chunk."""
        if self.role == "prefill":
            self.serves(request)
        else:
            await self._rooms.of(request.room).wait()
        if not request.stream:
            await request.reply(200, WHOLE, x_pdserve_prefill_site="remote")
            return
        await request.head(200, "text/event-stream; charset=utf-8", x_pdserve_prefill_site="remote")
        for event in (*EVENTS, DONE):
            await request.chunk(event)
        await request.end()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        try:
            while (request := await self._read(reader, writer)) is not None:
                if request.method == "GET":
                    self.gets.append(request)
                    await self._get(request)
                    continue
                watch = asyncio.ensure_future(self._watch_closing(reader, request))
                async with self.arrived:
                    self.posts.append(request)
                    self.arrived.notify_all()
                await self._behave_until_closed(request, watch)
                if request.closed.is_set():
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _behave_until_closed(self, request: Received, watch: "asyncio.Task[None]") -> None:
        behaving = asyncio.ensure_future(self.behave(request))
        try:
            await asyncio.wait((behaving, watch), return_when=asyncio.FIRST_COMPLETED)
            if behaving.done():
                behaving.result()
        except ConnectionError:
            request.closed.set()
        finally:
            for task in (behaving, watch):
                task.cancel()
                with suppress(asyncio.CancelledError, ConnectionError):
                    await task

    @staticmethod
    async def _watch_closing(reader: asyncio.StreamReader, request: Received) -> None:
        """A client sends nothing while it waits: the next thing to come is the end. (at_eof() also needs an empty buffer.)"""
        with suppress(ConnectionError):
            while not reader.at_eof() and not reader.exception():
                await asyncio.sleep(0.002)
        request.closed.set()

    @staticmethod
    async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Received | None:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, path, _ = first.split(" ", 2)
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return Received(method, path, headers, body, writer)

    async def _get(self, request: Received) -> None:
        if request.path == "/ready":
            await request.reply(self.ready_status, b"{}")
        elif request.path == "/server_info":
            await request.reply(200, json.dumps(self.info).encode())
        else:
            await request.reply(404, b"{}")


async def hang(request: Received) -> None:
    await asyncio.Event().wait()


async def reset(request: Received) -> None:
    request.reset()


async def hang_up(request: Received) -> None:
    request.hang_up()


async def reset_midway(request: Received) -> None:
    """After a part of the reply: two events and a half, or half a body."""
    if request.stream:
        await request.head(200, "text/event-stream")
        await request.chunk(EVENTS[0])
        await request.chunk(EVENTS[1] + EVENTS[2][:20])
    else:
        await request.head(200, "application/json", length=len(WHOLE))
        await request.write(WHOLE[:30])
    await asyncio.sleep(0.02)  # a reset discards what the receiver has not read
    request.reset()


async def end_early(request: Received) -> None:
    """A proper HTTP end, without [DONE]."""
    await request.head(200, "text/event-stream")
    await request.chunk(EVENTS[0])
    await request.end()


async def babble(request: Received) -> None:
    await request.write(b"\x15\x03\x01 no HTTP this is\r\n\r\n")
    request.hang_up()


def refuse(status: int, *, code: str = "refused_by_mock", content_type: str = "application/json", body: bytes | None = None,
           **headers: str) -> Behaviour:  # fmt: skip
    """Answer with an OpenAI error object, or `body`."""
    error = json.dumps({"error": {"message": f"mock says {status}", "type": "t", "param": "p", "code": code}}).encode()

    async def behave(request: Received) -> None:
        await request.reply(status, error if body is None else body, content_type, **headers)

    return behave


@asynccontextmanager
async def mock_nodes(num_prefill: int = 1, num_decode: int = 1) -> AsyncIterator[tuple[list[MockNode], list[MockNode]]]:
    rooms = Rooms()
    prefills = [MockNode("prefill", rooms) for _ in range(num_prefill)]
    decodes = [MockNode("decode", rooms) for _ in range(num_decode)]
    nodes = [*prefills, *decodes]
    for node in nodes:
        await node.start()
    try:
        yield prefills, decodes
    finally:
        for node in nodes:
            await node.stop()
