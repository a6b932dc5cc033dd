"""The router's edge for tests that send bytes: say something, and read what comes back as strictly as a client may; see what is held."""

import asyncio
import gc
import logging
import re
import socket
import struct
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from mock_node import MockNode, Received
from router_harness import CHAT, Rig, rig, until

import router.main
from router.main import Parts
from router.nodes import Node

BODY = b'{"messages":[]}'
STATUS_LINE = re.compile(rb"HTTP/1\.1 ([1-9][0-9]{2}) [A-Za-z -]*\r\n")
HEADER_LINE = re.compile(rb"([a-z0-9-]+): ([\t -~\x80-\xff]*)\r\n")
CHUNK_LINE = re.compile(rb"([0-9a-f]+)\r\n")
LINGER = struct.pack("ii", 1, 0)


class Malformed(Exception):
    """What a client reads is no HTTP reply, or is cut short."""


@dataclass(frozen=True)
class HttpReply:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Edge:
    rig: Rig
    parts: Parts
    trouble: list[str] = field(default_factory=list)  # errors in the log, and exceptions that nobody caught

    def held(self) -> list[str]:
        """What is still in flight."""
        found = [f"{self.parts.proxy.num_open} open requests"] * bool(self.parts.proxy.num_open)
        found += [f"{self.parts.server.bodies.num_bytes} bytes of bodies"] * bool(self.parts.server.bodies.num_bytes)
        return found + [f"{node.num_in_flight} at {node.url}" for node in self.rig.router.nodes.all if busy(node)]

    async def is_well(self) -> None:
        """Nothing is held, nothing went wrong inside, and others are served."""
        with suppress(AssertionError):
            await until(lambda: not self.held(), "nothing held")
        assert self.held() == []
        await until(lambda: all(node.usable for node in self.rig.router.nodes.all), "all nodes usable")
        assert (await self.rig.client.get("/health")).status_code == 200
        reply = await self.rig.client.post(CHAT, content=BODY)
        assert reply.status_code == 200, reply.text
        gc.collect()  # tasks tell of exceptions that nobody fetched when they are collected
        await asyncio.sleep(0)
        assert not self.trouble, "\n".join(self.trouble)


def busy(node: Node) -> bool:
    return bool(node.num_in_flight or node.prefill_load.queued_tokens)


@asynccontextmanager
async def edge(num_prefill: int = 1, num_decode: int = 1, **settings: Any) -> AsyncIterator[Edge]:
    parts: list[Parts] = []

    class Watched(Parts):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            parts.append(self)

    loop = asyncio.get_running_loop()
    with patch.object(router.main, "Parts", Watched):
        async with rig(num_prefill, num_decode, **settings) as made:
            whole = Edge(made, parts[0])
            watch = _Watch(whole.trouble)
            logging.getLogger().addHandler(watch)
            loop.set_exception_handler(lambda _, context: whole.trouble.append(_told(context)))
            try:
                yield whole
            finally:
                loop.set_exception_handler(None)
                logging.getLogger().removeHandler(watch)


def _told(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return context["message"] + ("" if error is None else "\n" + "".join(traceback.format_exception(error)))


def alone_too(node: MockNode) -> Callable[[Received], Awaitable[None]]:
    """A decode node that also computes prompts for which no room was minted."""

    async def behave(post: Received) -> None:
        if post.room is None:
            node.serves(post)
        await node.serve_well(post)

    return behave


class _Watch(logging.Handler):
    def __init__(self, trouble: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._trouble = trouble

    def emit(self, record: logging.LogRecord) -> None:
        self._trouble.append(self.format(record))


def request(body: bytes = BODY, *lines: bytes, method: bytes = b"POST", path: bytes = CHAT.encode()) -> bytes:
    head = b"".join(line + b"\r\n" for line in (b"host: x", b"content-length: %d" % len(body), *lines))
    return b"%s %s HTTP/1.1\r\n%s\r\n%s" % (method, path, head, body)


async def say(port: int, pieces: Sequence[bytes], end: str = "wait", timeout_s: float = 20.0) -> bytes:
    """Send the pieces, one write each. end: "wait" until the router closes; "half close", "close" or "reset" at once.
    Returns all that came. Raises TimeoutError when the router neither answers nor closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if end == "half close":
                writer.write_eof()
            elif end != "wait":
                if end == "reset":
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
                return b""
        said = b""
        async with asyncio.timeout(timeout_s):
            with suppress(ConnectionError):
                while part := await reader.read(65536):
                    said += part
        return said
    finally:
        writer.transport.abort()


def replies(said: bytes) -> list[HttpReply]:
    """All of them, whole; informational ones are left out. Raises Malformed."""
    found, at = [], 0
    while at < len(said):
        reply, at = _reply(said, at)
        if reply.status >= 200:
            found.append(reply)
    return found


def _reply(said: bytes, at: int) -> tuple[HttpReply, int]:
    first = STATUS_LINE.match(said, at)
    if first is None:
        raise Malformed(f"no status line: {said[at : at + 80]!r}")
    at, headers = first.end(), {}
    while (line := HEADER_LINE.match(said, at)) is not None:
        name = line[1].decode()
        if name in headers and name in ("content-length", "transfer-encoding", "connection"):
            raise Malformed(f"{name} comes twice")
        headers.setdefault(name, line[2].decode("latin-1"))
        at = line.end()
    if said[at : at + 2] != b"\r\n":
        raise Malformed(f"no header line: {said[at : at + 80]!r}")
    status = int(first[1])
    body, at = (b"", at + 2) if status < 200 else _body(said, at + 2, headers)
    return HttpReply(status, headers, body), at


def _body(said: bytes, at: int, headers: dict[str, str]) -> tuple[bytes, int]:
    if "content-length" in headers:
        end = at + int(headers["content-length"])
        if end > len(said) or "transfer-encoding" in headers:
            raise Malformed(f"{headers} before {len(said) - at} bytes")
        return said[at:end], end
    if headers.get("transfer-encoding") != "chunked":
        return said[at:], len(said)  # to an HTTP/1.0 client
    body = b""
    while (line := CHUNK_LINE.match(said, at)) is not None:
        start, size = line.end(), int(line[1], 16)
        if said[start + size : start + size + 2] != b"\r\n":
            raise Malformed(f"a chunk of {size} bytes is cut short")
        body, at = body + said[start : start + size], start + size + 2
        if not size:
            return body, at
    raise Malformed(f"no chunk: {said[at : at + 80]!r}")
