"""The nodes' API beyond chat: forwarded as it is; each form of a stream ends by its own last word, and fails with its own error."""

import json
from dataclasses import dataclass

import pytest
from http_edge import alone_too
from mock_node import WHOLE, Behaviour, MockNode, Received, refuse
from router_harness import Rig, rig

from router.api_paths import PATHS

OPENAI_PARTS = (b'data: {"choices":[{"index":0,"text":"a"}]}\n\n', b'data: {"choices":[{"index":0,"text":"b"}]}\n\n', b"data: [DONE]\n\n")


@dataclass(frozen=True)
class Form:
    content_type: str
    parts: tuple[bytes, ...]  # of a stream that is whole
    own_error: bytes  # an error event of the node's
    after_own_error: bytes = b""


EVENTS = "text/event-stream; charset=utf-8"
FORMS = {
    "/v1/responses": Form(EVENTS, (
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}\n\n',
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"event: response.completed"}\n\n',
        b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r"}}\n\n',
    ), b'event: error\ndata: {"type":"error","error":{"message":"node says so"}}\n\n'),
    "/v1/messages": Form(EVENTS, (
        b'event: message_start\ndata: {"type":"message_start"}\n\n',
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"event: message_stop"}}\n\n',
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ), b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"node says so"}}\n\n'),
    **dict.fromkeys(("/api/chat", "/api/generate"), Form("application/x-ndjson", (
        b'{"model":"tiny","message":{"content":"\\"done\\":true"},"done":false}\n',
        b'{"model":"tiny","message":{"tool_calls":[{"function":{"name":"f","arguments":{"done":true}}}]},"done":false}\n',
        b'{"model":"tiny","message":{"content":""},"done":true,"done_reason":"stop"}\n',
    ), b'{"error":"node says so"}\n')),
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/generate"), Form(
        EVENTS, OPENAI_PARTS, b'data: {"error":{"message":"node says so","code":500}}\n\n', b"data: [DONE]\n\n")),
}  # fmt: skip
streams = pytest.mark.parametrize("path", FORMS)


def streaming(node: MockNode, form: Form, *parts: bytes, whole: bool = True) -> Behaviour:
    async def behave(request: Received) -> None:
        await node._rooms.of(request.room).wait()
        await request.head(200, form.content_type)
        for part in parts:
            await request.chunk(part)
        if whole:
            await request.end()
        else:
            request.hang_up()

    return behave


async def stream(made: Rig, path: str, *parts: bytes, whole: bool = True) -> bytes:
    made.decodes[0].behave = streaming(made.decodes[0], FORMS[path], *parts, whole=whole)
    reply = await made.client.post(path, content=b'{"stream":true,"model":"tiny"}')
    assert (reply.status_code, reply.headers["content-type"]) == (200, FORMS[path].content_type)
    return reply.content


def check_error(path: str, said: bytes) -> None:
    """As this API's clients read it, and nothing behind it that they would wait for."""
    match path:
        case "/v1/responses":
            head, data = said.split(b"\n", 1)
            error = json.loads(data.removeprefix(b"data: "))
            assert (head, error["type"], error["code"]) == (b"event: error", "error", "node_failed")
            message = error["message"]
        case "/v1/messages":
            head, data = said.split(b"\n", 1)
            error = json.loads(data.removeprefix(b"data: "))
            assert (head, error["type"], error["error"]["type"]) == (b"event: error", "error", "api_error")
            message = error["error"]["message"]
        case "/api/chat" | "/api/generate":
            message = json.loads(said)["error"]
            assert said.endswith(b"}\n")
        case _:
            data, done = said.removesuffix(b"\n\n").split(b"\n\n")
            error = json.loads(data.removeprefix(b"data: "))["error"]
            assert (done, error["code"]) == (b"data: [DONE]", "node_failed")
            message = error["message"]
    assert "failed: its stream" in message


@streams
async def test_whole_streams_are_passed_on_as_they_are(path: str) -> None:
    form = FORMS[path]
    text = b"".join(form.parts)
    async with rig() as made:
        assert await stream(made, path, *form.parts) == text
        assert await stream(made, path, *(text[n : n + 9] for n in range(0, len(text), 9))) == text
        assert await stream(made, path, *form.parts, whole=False) == text  # the last word was said, whatever became of the connection
        assert made.node(made.decodes[0]).num_blames == 0
        assert [post.path for post in made.prefills[0].posts] == [path] * 3
        (room,) = {made.prefills[0].posts[0].room, made.decodes[0].posts[0].room}
        assert room is not None


@streams
async def test_streams_without_their_last_word_end_with_an_error_of_their_form(path: str) -> None:
    first, second, _ = FORMS[path].parts
    async with rig() as made:
        for whole, rest in ((True, b""), (False, b""), (False, second[:20])):  # ended, cut between two events, cut within one
            said = await stream(made, path, first, second, *([rest] if rest else []), whole=whole)
            assert said.startswith(first + second)
            check_error(path, said.removeprefix(first + second))


@streams
async def test_an_error_that_the_node_puts_into_its_stream_is_the_end_of_it(path: str) -> None:
    form = FORMS[path]
    async with rig() as made:
        for whole in (True, False):
            assert await stream(made, path, form.parts[0], form.own_error, whole=whole) == form.parts[0] + form.own_error + form.after_own_error


@pytest.mark.parametrize("form", sorted({FORMS[path] for path in FORMS if path.startswith("/api")}, key=str))
async def test_streams_that_go_on_behind_something_like_their_last_word(form: Form) -> None:
    """The tool's arguments have a `done` of their own: nothing is cut off behind them."""
    async with rig() as made:
        first, second, last = form.parts
        assert await stream(made, "/api/chat", first, second, second, second, last) == first + second * 3 + last
        check_error("/api/chat", (await stream(made, "/api/chat", first, second)).removeprefix(first + second))


async def test_every_path_is_forwarded_and_answered_whole() -> None:
    async with rig() as made:
        made.decodes[0].behave = alone_too(made.decodes[0])
        for number, (name, api) in enumerate(PATHS.items()):
            before = len(made.prefills[0].posts)
            reply = await made.client.post(name.decode() + "?v=1", content=b'{"model":"tiny", "n" : 1.0}')
            assert (reply.status_code, reply.content) == (200, WHOLE)
            assert len(made.prefills[0].posts) - before == api.pair
            sent = made.decodes[0].posts[number]
            assert sent.path == name.decode() + "?v=1"
            assert sent.body.startswith(b'{"model":"tiny", "n" : 1.0')
            assert (sent.room is not None) == api.pair
            assert ("x-pdserve-prefill" in reply.headers) == api.pair
            assert "x-pdserve-local-prefill" not in reply.headers
        requests = await made.metric("pdserve_http_requests_total")
        assert {f'{{path="{path.decode()}",status="200"}}' for path in PATHS} <= set(requests)


@pytest.mark.parametrize("path", ["/v1/unknown", "/v1/chat/completions/", "/v1", "/flush_cache", "/V1/chat/completions", "/v1/chat%2Fcompletions"])
async def test_other_paths_do_not_reach_a_node(path: str) -> None:
    async with rig() as made:
        reply = await made.client.post(path, content=b"{}")
        assert reply.status_code in (404, 405)
        assert reply.json()["error"]["message"]
        assert not any(node.posts for node in (*made.prefills, *made.decodes))


async def test_a_nodes_own_404_is_passed_on() -> None:
    """It does not have this part of the API; that is no failure of the node, and none that another one would cure."""
    async with rig(1, 2) as made:
        for body, kind in ((b'{"detail":"Not Found"}', "application/json"), (b"not here", "text/plain"), (None, "application/json")):
            for node in made.decodes:
                node.behave = refuse(404, body=body, content_type=kind)
            for path in ("/v1/responses", "/tokenize", "/api/chat"):
                reply = await made.client.post(path, content=b"{}")
                assert reply.status_code == 404
                message = reply.json()["error"]["message"]
                assert (body or b"mock says 404").decode() in message
        assert await made.retries() == 0
        assert all(node.num_blames == 0 for node in made.router.nodes.all)
