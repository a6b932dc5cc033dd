"""Nodes that need no time, for router_overhead.py: every request is answered at once, with bytes made beforehand.

    python bench/router_mock.py prefill prefill decode decode

One line of JSON on standard output has the port of each; they end when standard input does. They speak what pairs of SGLang nodes (both legs at
once) and of vLLM nodes (`kv_transfer_params` in the prefill node's reply) speak, as far as routers look at it.

A stream goes as its prompt says ("chunks=64 gap_ms=20"; other fields may be lost on the way); a prefill node's has one chunk. The text of a chunk is
the moment at which it was written (time.monotonic(), one clock for all processes), so that its reader knows how long it took.
"""

import asyncio
import re
import socket
import sys
import time
from typing import cast

import msgspec
import uvloop

BACKLOG = 4096
MODEL = "mock"
BOOTSTRAP_PORT = 8998
NUM_REPLY_TOKENS = 32
CONTENT_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
STREAMED = re.compile(rb'"stream": ?true')
PACE = re.compile(rb"chunks=(\d+) gap_ms=(\d+)")
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
TICKET = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e0", "remote_block_ids": [1, 2, 3], "remote_host": "127.0.0.1",
          "remote_port": 5600, "remote_request_id": "r", "tp_size": 1}  # fmt: skip


def http(body: bytes, kind: str = "application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind.encode(), len(body), body)


def chunk(part: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(part), part)


def event(node: str, text: str, finish_reason: str | None) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if finish_reason is None else {}, "logprobs": None, "finish_reason": finish_reason}
    said = {"id": node, "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + msgspec.json.encode(said) + b"\n\n"


class Replies:
    """Of one node. `name`: in its streams."""

    def __init__(self, role: str, name: str) -> None:
        self.is_prefill = role == "prefill"
        self.event_before, _, self.event_after = event(name, "@", None).partition(b"@")
        self.stream_tail = chunk(event(name, "", "length") + b"data: [DONE]\n\n") + b"0\r\n\r\n"
        facts = {"model_path": MODEL, "served_model_name": MODEL, "tokenizer_path": MODEL, "is_generation": True, "dp_size": 1, "version": "0.5.23",
                 "disaggregation_mode": role, "disaggregation_bootstrap_port": BOOTSTRAP_PORT}  # fmt: skip
        models = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": MODEL}]}
        loads = [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]
        self.pages = {
            **dict.fromkeys((b"/health", b"/health_generate", b"/ready", b"/metrics"), http(b"", "text/plain")),
            **dict.fromkeys((b"/server_info", b"/get_server_info", b"/model_info", b"/get_model_info"), http(msgspec.json.encode(facts))),
            b"/v1/models": http(msgspec.json.encode(models)),
            b"/get_load": http(msgspec.json.encode(loads)),
        }
        message = {"role": "assistant", "content": "token " * NUM_REPLY_TOKENS}
        usage = {"prompt_tokens": 8, "completion_tokens": NUM_REPLY_TOKENS, "total_tokens": 8 + NUM_REPLY_TOKENS}
        choices = [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
        ticket = {"kv_transfer_params": TICKET} if self.is_prefill else {}
        completion = {"id": "x", "object": "chat.completion", "created": 1, "model": MODEL, "choices": choices, "usage": usage, **ticket}
        self.completion = http(msgspec.json.encode(completion))


class NodeConnection(asyncio.Protocol):
    """Of a router to a node."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._num_needed = 1  # of the request that comes, as far as that is known

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._num_bytes += len(data)
        while self._num_bytes >= self._num_needed:
            received = b"".join(self._parts)
            self._num_needed = request_nbytes(received)
            if self._num_bytes < self._num_needed:
                self._parts = [received]
                return
            request, rest = received[: self._num_needed], received[self._num_needed :]
            self._parts, self._num_bytes, self._num_needed = [rest], len(rest), 1
            self._answer(request)
            if self._transport.is_closing():
                return

    def _answer(self, request: bytes) -> None:
        method, path, _ = request.split(b" ", 2)
        if method == b"PRI":  # is this gRPC?
            self._transport.close()
        elif method != b"POST":
            self._transport.write(self._replies.pages.get(path.partition(b"?")[0], NOT_FOUND))
        elif not STREAMED.search(request):
            self._transport.write(self._replies.completion)
        else:
            pace = PACE.search(request)
            num_chunks, gap_ms = (1, 0) if self._replies.is_prefill or pace is None else map(int, pace.groups())
            self._transport.write(STREAM_HEAD)
            self._stream(num_chunks, gap_ms / 1e3)

    def _stream(self, num_chunks: int, gap_s: float) -> None:
        if self._transport.is_closing():
            return
        if num_chunks == 0:
            self._transport.write(self._replies.stream_tail)
            return
        self._transport.write(chunk(b"%s%.6f%s" % (self._replies.event_before, time.monotonic(), self._replies.event_after)))
        asyncio.get_running_loop().call_later(gap_s, self._stream, num_chunks - 1, gap_s)


def request_nbytes(received: bytes) -> int:
    """How long the first request in `received` is, or more than there is while that is unknown."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return len(received) + 1
    length = CONTENT_LENGTH.search(received, 0, end)
    return end + 4 + (int(length[1]) if length is not None else 0)


async def serve(roles: list[str]) -> None:
    """Until standard input ends."""
    loop = asyncio.get_running_loop()
    ports: list[int] = []
    for role in roles:
        listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        ports.append(listener.getsockname()[1])
        replies = Replies(role, f"n{ports[-1]}")
        await loop.create_server(lambda replies=replies: NodeConnection(replies), sock=listener)  # type: ignore[misc]
    print(msgspec.json.encode(ports).decode(), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1:]))
