"""Bytes that nobody should send, from clients and from nodes: every client gets HTTP or a closed connection, in time; no fault of the
router, nothing held, and everybody else is served.

Each example is a batch of clients at the same time, before one router that lives through all examples. PDSERVE_FUZZ_EXAMPLES: how many
batches; without it few, and the same ones every time.
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import uvloop
from http_edge import BODY, Edge, alone_too, edge, replies, request, say
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mock_node import DONE, EVENTS, STREAM, WHOLE, MockNode, Received
from router_harness import CHAT, COMPLETIONS

from router import server as module
from router.api_paths import OPENAI, PATHS
from router.events import error_in, has_done

NUM_EXAMPLES = int(os.environ.get("PDSERVE_FUZZ_EXAMPLES", "4"))
fuzz = settings(max_examples=NUM_EXAMPLES, derandomize="PDSERVE_FUZZ_EXAMPLES" not in os.environ, deadline=None, database=None,
                phases=[Phase.generate])  # a batch is not shrunk: what failed says what it was
BATCH = 32
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of a batch that failed
HELD_S = 0.4  # of everything that waits for the other side

# ---- one router for all ------------------------------------------------------------------------------------------------------


class Fuzzed:
    """A router under test, in a loop of its own that goes on only in run()."""

    def __init__(self, runner: asyncio.Runner, made: Edge) -> None:
        self._runner = runner
        self.edge = made

    def run(self, *doing: Awaitable[None]) -> None:
        async def all_at_once() -> None:
            await asyncio.gather(*doing)
            await self.edge.is_well()

        self._runner.run(all_at_once())


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, patch.object(module, "KEEP_ALIVE_S", HELD_S):
        context = edge(2, 2, head_timeout_s=HELD_S, body_timeout_s=HELD_S, max_body_bytes=1 << 20, connect_timeout_s=5.0, request_timeout_s=20.0)
        made = runner.run(context.__aenter__())
        for node in made.rig.decodes:
            node.behave = alone_too(node)
        try:
            yield Fuzzed(runner, made)
        finally:
            runner.run(context.__aexit__(None, None, None))


# ---- clients' bytes ----------------------------------------------------------------------------------------------------------

NASTY = (
    b"\r\n", b"\n", b"\r", b"\0", b"\xff", b" ", b":", b"\r\n\r\n", b"0\r\n\r\n", b"\r\n 1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0",
    b"\r\ncontent-length: 3", b"\r\ncontent-length: 99999999999999999999", b"\r\ncontent-length: -1", b"\r\ncontent-length: 0x10",
    b"\r\ntransfer-encoding: chunked", b"\r\ntransfer-encoding: gzip, chunked", b"\r\ntransfer-encoding : chunked", b"\r\nhost: [",
    b"\r\nhost: a/b@c", b"\r\nconnection: close", b"\r\nconnection: upgrade\r\nupgrade: websocket",
    b"\r\nexpect: 100-continue", b"\r\nexpect: 100-Continue, x",
    b"\r\nx-request-deadline: 1e400", b"\r\nx-request-deadline: \xff", b"\r\nx-request-id: \xff\xfe", b"\r\nauthorization: Bearer \xff",
    b"\r\ntraceparent: 00-\xff-0-0", b"ffffffffffffffff\r\n", b"7fffffff\r\n", b"-1\r\n", b"3;" + b"x" * 200 + b"\r\n", b"%", b"%00", b"%ff", b"/../",
    b"?", b"#", b"//[", b"http://", b"http://[/x", b"*", b"GET ", b"CONNECT ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00",
    b"x: " + b"y" * 70_000 + b"\r\n",
)  # fmt: skip
SITES = (CHAT, COMPLETIONS, "/health", "/ready", "/metrics", "/server_info", "/v1/models", "/v1/models/a%00b", "/workers", "/nope", "/docs", "/",
         "/v1/responses", "/tokenize", "/v1/chat%2Fcompletions", "/health/")  # fmt: skip


@st.composite
def well_formed(draw: st.DrawFn) -> bytes:
    method = draw(st.sampled_from((b"POST", b"POST", b"POST", b"GET", b"DELETE", b"OPTIONS", b"PUT", b"M-SEARCH")))
    path = draw(st.sampled_from(SITES)).encode() + draw(st.sampled_from((b"", b"", b"?a=1", b"?\xc3\xa9", b"#x")))
    body = draw(st.sampled_from((BODY, b"", b"{}", b'{"stream":true}', b"x" * 5000, b'{"prompt":["a","b"]}')))
    lines = draw(st.lists(st.sampled_from((b"connection: close", b"connection: keep-alive", b"expect: 100-continue", b"x-a: b", b"accept: */*")),
                          max_size=3))  # fmt: skip
    if draw(st.booleans()):
        return request(body, *lines, method=method, path=path)
    size = draw(st.integers(1, 20))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[n : n + size] for n in range(0, min(len(body), 200), size)))
    head = b"".join(line + b"\r\n" for line in (b"host: x", b"transfer-encoding: chunked", *lines))
    return b"%b %b HTTP/1.1\r\n%b\r\n%b0\r\n\r\n" % (method, path, head, chunks)


@st.composite
def mutated(draw: st.DrawFn, whole: st.SearchStrategy[bytes], most: int = 3) -> bytes:
    said = draw(whole)
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, min(len(said), 400)))
        length = draw(st.integers(1, 30))
        match draw(st.sampled_from(("insert", "flip", "drop", "double", "cut", "lines"))):
            case "insert":
                said = said[:at] + draw(st.sampled_from(NASTY)) + said[at:]
            case "flip":
                said = said[:at] + draw(st.binary(min_size=1, max_size=2)) + said[at + 1 :]
            case "drop":
                said = said[:at] + said[at + length :]
            case "double":
                said = said[: at + length] + said[at:]
            case "cut":
                said = said[:at]
            case "lines":
                lines = said.split(b"\r\n")
                said = b"\r\n".join(lines[: 1 + at % len(lines)] + lines[at % len(lines) :])
    return said


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[bytes], str]:
    """What a client sends, in pieces, and how it ends."""
    said = b"".join(draw(st.lists(mutated(well_formed()), min_size=1, max_size=3)))
    cuts = sorted(draw(st.lists(st.integers(0, min(len(said), 600)), max_size=4)))
    pieces = [said[start:end] for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    return pieces, draw(st.sampled_from(("wait", "wait", "wait", "half close", "close", "reset")))


@fuzz
@given(st.lists(conversations(), min_size=BATCH, max_size=BATCH))
def test_whatever_clients_send(fuzzed: Fuzzed, batch: list[tuple[list[bytes], str]]) -> None:
    async def converse(pieces: list[bytes], end: str) -> None:
        said = await say(fuzzed.edge.rig.port, pieces, end)
        if end != "wait":  # what comes after such an end may be cut
            return
        for reply in replies(said):
            assert reply.status < 500 or reply.status == 505, (pieces, reply)
            assert reply.headers["x-request-id"]
            if reply.status >= 400 and reply.headers["content-type"] == "application/json":
                message = json.loads(reply.body)["error"]["message"]
                assert message.strip()
                assert not message.endswith(": "), message  # an assertion inside a callback of the parser says nothing

    fuzzed.run(*(converse(*each) for each in batch))


# ---- clients' JSON -----------------------------------------------------------------------------------------------------------

ROOM_NAMES = ("bootstrap_room", "bootstrap_host", "bootstrap_port")
NASTY_VALUES = (
    "null", "true", "-0", "1e400", "-1e400", "1e-400", "9" * 400, "-" + "9" * 30, "1.0000000000000000000001", '""', r'"\ud800"', r'"\ud83d\ude00"',
    r'"\u0000"', '"\0"', '"é"', "[]", "{}", "[" * 2000 + "]" * 2000, "[" * 20_000, '{"a":' * 3000 + "1" + "}" * 3000, r'"\q"', "nan", "[1,]", '"\n"',
    "[" + "1," * 5000 + "1]", '["a",["b"],1]', '[{"role":"user","content":[{"type":"text","text":"\\u007b}{\\"]["}]}]', "[" + '"a",' * 4096 + '"a"]',
)  # fmt: skip
JSON_NAMES = ("model", "stream", "prompt", "messages", "input", "priority", "max_tokens", "tools", "n", "x", "kv_transfer_params", *ROOM_NAMES)


def escaped(name: str) -> str:
    """The same key for who decodes it."""
    return "".join(f"\\u{ord(character):04X}" for character in name)


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    members = []
    for _ in range(draw(st.integers(0, 6))):
        name = draw(st.sampled_from(JSON_NAMES))
        key = draw(st.sampled_from((name, name, escaped(name), escaped(name[:3]) + name[3:])))
        value = draw(st.sampled_from(NASTY_VALUES) | st.integers().map(str) | st.text(max_size=5).map(json.dumps))
        members.append(f'{draw(st.sampled_from(("", " ", chr(10))))}"{key}" :{value}')
    text = ("{" + ",".join(members) + "}").encode(errors="surrogatepass")
    kind = draw(st.sampled_from(("whole", "whole", "whole", "cut", "invalid", "before", "behind")))
    at = draw(st.integers(0, len(text)))
    return {
        "whole": text, "cut": text[:at], "invalid": text[:at] + b"\xff" + text[at:], "before": b"\xef\xbb\xbf" + text, "behind": text + b" }"
    }[kind]  # fmt: skip


@fuzz
@given(st.lists(st.tuples(st.sampled_from(sorted(PATHS)), documents()), min_size=BATCH, max_size=BATCH))
def test_whatever_json_clients_send(fuzzed: Fuzzed, batch: list[tuple[bytes, bytes]]) -> None:
    nodes = [*fuzzed.edge.rig.prefills, *fuzzed.edge.rig.decodes]
    before = [len(node.posts) for node in nodes]

    async def ask(path: bytes, body: bytes) -> None:
        (reply,) = replies(await say(fuzzed.edge.rig.port, [request(body, b"connection: close", path=path)]))
        assert reply.status in (200, 400, 404), (path, body, reply)
        assert reply.status == 200 or json.loads(reply.body)["error"]["message"]

    fuzzed.run(*(ask(*each) for each in batch))
    for node, number in zip(nodes, before, strict=True):
        for post in node.posts[number:]:
            check_rooms(post)


def check_rooms(post: Received) -> None:
    """Each of the fields that join two nodes is there once, and the router's; or not at all."""
    keys = [key for key, _ in json.loads(post.body, object_pairs_hook=list)]
    sent = post.json
    for name in ROOM_NAMES:
        assert keys.count(name) == ("bootstrap_room" in keys), (name, post.body)
    if "bootstrap_room" in keys:
        hosts = sent["bootstrap_host"]
        assert set(hosts if isinstance(hosts, list) else [hosts]) == {"127.0.0.1"}


# ---- nodes' bytes ------------------------------------------------------------------------------------------------------------

NASTY_EVENTS = (
    b"data: \n\n", b"data:[DONE]\n\n", b'data: {"error":null}\n\n', b'data: {"error":{"message":"\\ud800","code":503}}\n\n', b": comment\n\n",
    b"\n\n\n\n", b'data: {"error":{"message":"m","code":9999999999999999999999}}\n\n',
    b'data: {"error":[1]}\n\n', b'data: {"error":"text"}\n\n', b"\xff\xfe\n\n",
    b'data: {"object":"error"}\n\n', b'data: {"error":' + b"[" * 5000 + b"\n\n", b"data: " + b"x" * 100_000, b"event: error\ndata: 1\n\n",
)  # fmt: skip
NODE_HEADERS = (
    b"content-type: text/event-stream", b"content-type: application/json", b"content-type: \xff\xfe", b"connection: close", b"content-length: 0",
    b"content-length: 12", b"content-length: 99999999999999999999", b"transfer-encoding: chunked", b"transfer-encoding: gzip",
    b"retry-after: 1", b"retry-after: soon", b"x-a: \xff", b"x-request-id: spoofed", b"connection: upgrade\r\nupgrade: x", b"location: http://x/",
    b"x-pdserve-prefill-site: \xff", b"content-encoding: gzip", b"www-authenticate: x", b"date: never", b"x: " + b"y" * 70_000,
)  # fmt: skip
STATUSES = (b"200", b"200", b"200", b"200", b"400", b"401", b"404", b"429", b"500", b"503", b"101", b"103", b"204", b"302", b"304", b"599", b"099")


@st.composite
def node_replies(draw: st.DrawFn) -> tuple[bytes, bool]:
    """All bytes of a reply, and whether the connection ends behind it; else the node is silent for a while first."""
    chunked, streamed = draw(st.booleans()), draw(st.booleans())
    parts = list(draw(st.permutations((*EVENTS, *draw(st.lists(st.sampled_from(NASTY_EVENTS), max_size=3))))) if streamed else (WHOLE,))
    parts += [DONE] * (streamed and draw(st.booleans()))
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n" if chunked else b"".join(parts)
    framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
    kind = b"content-type: text/event-stream" if streamed else b"content-type: application/json"
    lines = [kind, framing, *draw(st.lists(st.sampled_from(NODE_HEADERS), max_size=2))]
    if draw(st.booleans()):
        lines.pop(draw(st.integers(0, len(lines) - 1)))
    whole = b"HTTP/1.1 %b X\r\n%b\r\n\r\n%b" % (draw(st.sampled_from(STATUSES)), b"\r\n".join(lines), body)
    return draw(mutated(st.just(whole), 2)), draw(st.booleans())


Script = tuple[tuple[bytes, bool] | None, tuple[bytes, bool] | None, bool]  # of P and D, None: does well; streamed


@fuzz
@given(st.lists(st.tuples(st.none() | node_replies(), st.none() | node_replies(), st.booleans()), min_size=BATCH, max_size=BATCH))
def test_whatever_nodes_answer(fuzzed: Fuzzed, batch: list[Script]) -> None:
    made = fuzzed.edge.rig
    scripts = {f"fuzz-{n}": script for n, script in enumerate(batch)}

    def scripted(node: MockNode) -> Callable[[Received], Awaitable[None]]:
        async def answer(post: Received, said: bytes, ends: bool) -> None:
            if node.role == "prefill":
                node.serves(post)
            for start in range(0, len(said), 4096):
                await post.write(said[start : start + 4096])
            if not ends:
                await asyncio.sleep(HELD_S)
            post.hang_up()

        async def behave(post: Received) -> None:
            script = scripts.get(post.headers["x-request-id"])
            reply = script and script[0 if node.role == "prefill" else 1]
            with suppress(ConnectionError, RuntimeError):  # uvloop's for a connection that the router has closed
                await (well[node](post) if reply is None else answer(post, *reply))

        return behave

    async def ask(name: str, streamed: bool) -> None:
        head = (b"connection: close", b"x-request-id: " + name.encode(), b"x-request-deadline: %.3f" % (time.time() + 3))
        (reply,) = replies(await say(made.port, [request(b'{"stream":true}' if streamed else BODY, *head)]))
        check_reply(reply.status, reply.headers, reply.body, scripts[name])

    well = {node: node.behave for node in (*made.prefills, *made.decodes)}
    for node in well:
        node.behave = scripted(node)
    try:
        fuzzed.run(*(ask(name, script[2]) for name, script in scripts.items()))
    finally:
        for node, behave in well.items():
            node.behave = behave


def check_reply(status: int, headers: dict[str, str], body: bytes, script: Any) -> None:
    assert headers["x-request-id"].startswith("fuzz-"), script
    if status != 200:
        assert b"internal_error" not in body, script
    elif headers.get("content-type", "").startswith("text/event-stream"):
        assert has_done(body, OPENAI) or error_in(body) is not None, (script, body)
    elif script[0] is None and script[1] is None:
        assert body == (STREAM if script[2] else WHOLE)
