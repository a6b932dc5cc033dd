"""The HTTP surface over real sockets, with a scripted scheduler behind it."""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from fake_scheduler import words
from http_node import CONTEXT_LENGTH, SERVED_MODEL, HttpNode, http_node, write_model_dir

from common.cluster_key import ClusterKey, key_id
from common.errors import Failure
from common.messages import Generate, TextOut
from common.request import Bootstrap

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
pytestmark = pytest.mark.asyncio(loop_scope="module")
HELD_S = 0.05  # long enough for something wrong to arrive


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_node(model_dir: Path) -> AsyncIterator[HttpNode]:
    async with http_node(model_dir) as node:
        yield node


@pytest_asyncio.fixture(loop_scope="module")
async def node(shared_node: HttpNode) -> AsyncIterator[HttpNode]:
    """One node for all tests, at rest before and after each."""
    shared_node.scheduler.auto = None
    for queue in (shared_node.scheduler.generates, shared_node.scheduler.aborts, shared_node.scheduler.drops):
        while not queue.empty():
            queue.get_nowait()
    yield shared_node
    assert shared_node.manager.num_open == 0


def events(body: str) -> list[Any]:
    """The data of every server-sent event; [DONE] as a string."""
    assert body.endswith("\n\n")
    lines = [event.removeprefix("data: ") for event in body.removesuffix("\n\n").split("\n\n")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def taken(node: HttpNode) -> Generate:
    return await asyncio.wait_for(node.scheduler.generates.get(), 5)


def first_output(generate: Generate) -> list[TextOut]:
    return [TextOut(rid=generate.rid, text="a", num_new_tokens=1)]


async def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)


# ---- answers ------------------------------------------------------------------------------------------------------------


async def test_completion(node: HttpNode) -> None:
    node.scheduler.auto = words
    answer = await node.client.post(COMPLETION, json={"model": SERVED_MODEL, "prompt": "hello", "max_tokens": 3})
    assert answer.status_code == 200
    assert answer.headers["x-pdserve-prefill-site"] == "local"
    body = answer.json()
    assert body["choices"] == [{"index": 0, "text": " w0 w1 w2", "logprobs": None, "finish_reason": "length"}]
    generate = await taken(node)
    assert generate.prompt_ids == node.tokenizer.encode("hello")
    assert body["usage"]["prompt_tokens"] == len(generate.prompt_ids)
    assert body["usage"]["completion_tokens"] == 3


async def test_chat_prompt_is_the_rendered_template(node: HttpNode) -> None:
    node.scheduler.auto = words
    answer = await node.client.post(CHAT, json={"messages": [{"role": "developer", "content": "be brief"}, *USER], "max_tokens": 2})
    assert answer.json()["choices"][0]["message"]["content"] == " w0 w1"
    text = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (await taken(node)).prompt_ids == node.tokenizer.encode(text, add_special_tokens=False)


async def test_token_ids_reach_the_scheduler_as_they_are(node: HttpNode) -> None:
    node.scheduler.auto = words
    answer = await node.client.post(COMPLETION, json={"prompt": [[5, 6], [7]], "max_tokens": 1})
    assert [choice["text"] for choice in answer.json()["choices"]] == [" w0", " w0"]
    assert [(await taken(node)).prompt_ids for _ in range(2)] == [[5, 6], [7]]


async def test_default_lengths(node: HttpNode) -> None:
    node.scheduler.auto = words
    await node.client.post(COMPLETION, json={"prompt": [5, 6]})
    assert (await taken(node)).sampling.max_new_tokens == 16
    await node.client.post(COMPLETION, json={"prompt": [5] * (CONTEXT_LENGTH - 3)})
    assert (await taken(node)).sampling.max_new_tokens == 3
    await node.client.post(CHAT, json={"messages": USER})
    generate = await taken(node)
    assert generate.sampling.max_new_tokens == CONTEXT_LENGTH - len(generate.prompt_ids)


async def test_long_text_is_tokenised_all_the_same(node: HttpNode) -> None:
    text = "hello " * 5000
    answer = await node.client.post(COMPLETION, json={"prompt": text})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_stream_order_and_headers(node: HttpNode) -> None:
    node.scheduler.auto = words
    body = {"messages": USER, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    answer = await node.client.post(CHAT, json=body, headers={"x-request-id": "my-id"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-request-id"] == "my-id"
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    assert {(chunk["id"], chunk["created"]) for chunk in chunks} == {(chunks[0]["id"], chunks[0]["created"])}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": " w0"}, {"content": " w1"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "length"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert (await taken(node)).rid.startswith("my-id.")


async def test_a_token_is_sent_before_the_next_exists(node: HttpNode) -> None:
    node.scheduler.auto = first_output
    async with node.client.stream("POST", COMPLETION, json={"prompt": "x", "stream": True}) as answer:
        rid = (await taken(node)).rid
        lines = answer.aiter_lines()
        for text in ("a", "b", "c"):
            assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["text"] == text
            assert await anext(lines) == ""
            node.scheduler.emit(TextOut(rid=rid, text=chr(ord(text) + 1), num_new_tokens=1))
        node.scheduler.emit(TextOut(rid=rid, text="", num_new_tokens=1, finish_reason="stop", matched_stop=2))
        assert [line async for line in lines][-2:] == ["data: [DONE]", ""]


async def test_streams_of_several_prompts_interleave(node: HttpNode) -> None:
    request = asyncio.ensure_future(node.client.post(COMPLETION, json={"prompt": ["a", "b"], "stream": True}))
    first, second = await taken(node), await taken(node)
    node.scheduler.emit(TextOut(rid=second.rid, text="B", num_new_tokens=1))
    node.scheduler.emit(TextOut(rid=first.rid, text="A", num_new_tokens=1, finish_reason="stop"))
    node.scheduler.emit(TextOut(rid=second.rid, text="!", num_new_tokens=1, finish_reason="length"))
    *chunks, done = events((await request).text)
    assert [(c["choices"][0]["index"], c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        (1, "B", None), (0, "A", "stop"), (1, "!", "length"),
    ]  # fmt: skip
    assert done == "[DONE]"


async def test_the_pair_rides_along_and_the_reply_says_where_prefill_ran(node: HttpNode) -> None:
    node.scheduler.auto = words
    pair = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 77}
    for stream in (False, True):
        answer = await node.client.post(COMPLETION, json={"prompt": "x", "max_tokens": 1, "stream": stream, **pair})
        assert answer.headers["x-pdserve-prefill-site"] == "remote"
        assert (await taken(node)).bootstrap == Bootstrap("10.0.0.1", 9000, 77)
    metrics = (await node.client.get("/metrics")).text
    assert 'pdserve_prompts_by_prefill_site_total{site="remote"}' in metrics


async def test_what_sglang_router_sends_is_understood(node: HttpNode) -> None:
    """Bodies captured from sglang-router 0.3.2 in PD mode."""
    node.scheduler.auto = words
    chat = {
        "messages": USER, "model": SERVED_MODEL, "logprobs": False, "max_completion_tokens": 5, "stream": False, "temperature": 0.699999988079071,
        "no_stop_trim": False, "ignore_eos": False, "continue_final_message": False, "skip_special_tokens": True, "separate_reasoning": True,
        "stream_reasoning": True, "return_hidden_states": False, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998,
        "bootstrap_room": 4927745396891679518,
    }  # fmt: skip
    assert (await node.client.post(CHAT, json=chat)).json()["usage"]["completion_tokens"] == 5
    assert (await taken(node)).bootstrap == Bootstrap("127.0.0.1", 8998, 4927745396891679518)
    batch = {
        "model": SERVED_MODEL, "prompt": ["hi", "ho"], "stream": False, "echo": False, "no_stop_trim": False, "ignore_eos": False,
        "skip_special_tokens": True, "return_hidden_states": False, "bootstrap_host": ["127.0.0.1"] * 2, "bootstrap_port": [8998, None],
        "bootstrap_room": [6350951301497544321, 7619266701486437166],
    }  # fmt: skip
    assert len((await node.client.post(COMPLETION, json=batch)).json()["choices"]) == 2
    assert [(await taken(node)).bootstrap for _ in range(2)] == [
        Bootstrap("127.0.0.1", 8998, 6350951301497544321), Bootstrap("127.0.0.1", 8998, 7619266701486437166),
    ]  # fmt: skip


async def test_sampling_reaches_the_scheduler(node: HttpNode) -> None:
    node.scheduler.auto = words
    body = {"prompt": "x", "max_tokens": 2, "temperature": 0.5, "top_k": 4, "seed": 9, "stop": "###", "stop_token_ids": [3], "ignore_eos": True}
    await node.client.post(COMPLETION, json=body)
    generate = await taken(node)
    assert (generate.sampling.temperature, generate.sampling.top_k, generate.sampling.seed) == (0.5, 4, 9)
    assert (generate.sampling.stop_token_ids, generate.sampling.ignore_eos, generate.text.stop) == ((3,), True, ("###",))


# ---- openai-python ------------------------------------------------------------------------------------------------------


async def test_openai_client(node: HttpNode) -> None:
    node.scheduler.auto = words
    async with openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == [SERVED_MODEL]
        assert (await client.models.retrieve(SERVED_MODEL)).id == SERVED_MODEL
        chat = await client.chat.completions.create(model=SERVED_MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=2)
        assert chat.choices[0].message.content == " w0 w1"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 2
        completion = await client.completions.create(model=SERVED_MODEL, prompt=["a", "b"], max_tokens=2)
        assert [choice.text for choice in completion.choices] == [" w0 w1"] * 2

        chat_stream = await client.chat.completions.create(
            model=SERVED_MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=2, stream=True, stream_options={"include_usage": True}
        )
        chat_chunks = [chunk async for chunk in chat_stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chat_chunks if chunk.choices) == " w0 w1"
        assert chat_chunks[-1].usage is not None
        text_stream = await client.completions.create(model=SERVED_MODEL, prompt="a", max_tokens=3, stream=True)
        text_chunks = [chunk async for chunk in text_stream]
        assert "".join(chunk.choices[0].text for chunk in text_chunks) == " w0 w1 w2"
        assert text_chunks[-1].choices[0].finish_reason == "length"


async def test_openai_client_sees_errors(node: HttpNode) -> None:
    async with openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="not served here"):
            await client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model=SERVED_MODEL, prompt="a", temperature=-1)
        node.scheduler.auto = first_output
        stream = await client.completions.create(model=SERVED_MODEL, prompt="a", stream=True)
        node.scheduler.emit(TextOut(rid=(await taken(node)).rid, failure=Failure(503, "the peer is gone", code="peer_lost")))
        with pytest.raises(openai.APIError, match="the peer is gone"):
            async for _ in stream:
                pass


# ---- bad input ----------------------------------------------------------------------------------------------------------

BAD_BODIES: dict[str, tuple[str, bytes, int, str | None]] = {
    "invalid JSON": (CHAT, b"{", 400, None),
    "empty body": (CHAT, b"", 400, None),
    "invalid UTF-8": (CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}', 400, None),
    "lone surrogate": (CHAT, b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}', 400, None),
    "not an object": (COMPLETION, b"[1]", 400, None),
    "deep nesting": (COMPLETION, b'{"prompt":' + b"[" * 100_000, 400, None),
    "huge number": (COMPLETION, b'{"prompt": "a", "temperature": 1e999}', 400, None),
    "NaN": (COMPLETION, b'{"prompt": "a", "temperature": NaN}', 400, None),
    "wrong type": (COMPLETION, b'{"prompt": "a", "temperature": "hot"}', 400, "temperature"),
    "negative temperature": (COMPLETION, b'{"prompt": "a", "temperature": -1}', 400, "temperature"),
    "unknown model": (CHAT, b'{"model": "gpt", "messages": [{"role": "user", "content": "a"}]}', 404, "model"),
    "empty messages": (CHAT, b'{"messages": []}', 400, "messages"),
    "unknown role": (CHAT, b'{"messages": [{"role": "robot", "content": "a"}]}', 400, "messages[0].role"),
    "template refuses": (CHAT, b'{"messages": [{"role": "user", "content": "refuse me"}]}', 400, "messages"),
    "prompt too long": (COMPLETION, json.dumps({"prompt": [5] * CONTEXT_LENGTH}).encode(), 400, "prompt"),
    "megabytes of prompt": (CHAT, json.dumps({"messages": [{"role": "user", "content": "word " * 700_000}]}).encode(), 400, "messages"),
    "megabytes of one letter": (COMPLETION, json.dumps({"prompt": "a" * 3_000_000}).encode(), 400, "prompt"),
    "max_tokens too large": (COMPLETION, b'{"prompt": [5, 6], "max_tokens": 255}', 400, "max_tokens"),
    "max_tokens absurd": (COMPLETION, b'{"prompt": [5, 6], "max_tokens": ' + b"9" * 100 + b"}", 400, "max_tokens"),
    "token outside the vocabulary": (COMPLETION, b'{"prompt": [5, 512]}', 400, "prompt"),
    "negative token": (COMPLETION, b'{"prompt": [5, -1]}', 400, "prompt"),
    "absurd token": (COMPLETION, b'{"prompt": [5, ' + b"9" * 100 + b"]}", 400, "prompt"),
    "stop token outside the vocabulary": (COMPLETION, b'{"prompt": "a", "stop_token_ids": [512]}', 400, "stop_token_ids"),
    "biased token outside the vocabulary": (COMPLETION, b'{"prompt": "a", "logit_bias": {"512": 1}}', 400, "logit_bias"),
    "half a pair": (COMPLETION, b'{"prompt": "a", "bootstrap_room": 5}', 400, "bootstrap_host"),
    "forged room": (COMPLETION, b'{"prompt": "a", "bootstrap_host": "h", "bootstrap_room": 9223372036854775808}', 400, "bootstrap_room"),
    "n": (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "n": 2}', 400, "n"),
    "too large": (COMPLETION, b'{"prompt": "' + b"a" * (4 << 20) + b'"}', 413, None),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", BAD_BODIES)
async def test_bad_input_is_answered_at_once(node: HttpNode, name: str, stream: bool) -> None:
    path, body, status, param = BAD_BODIES[name]
    if stream:
        body = body.replace(b"{", b'{"stream": true, ', 1)
    started_s = time.monotonic()
    answer = await node.client.post(path, content=body)
    assert time.monotonic() - started_s < 1
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if name != "template refuses":  # the tokenizer's own refusal need not name the field
        assert error["param"] == param
    assert node.scheduler.generates.empty()
    node.scheduler.auto = words
    assert (await node.client.post(COMPLETION, json={"prompt": "a", "max_tokens": 1})).status_code == 200


async def test_a_body_without_a_length_is_cut_off_at_the_limit(model_dir: Path) -> None:
    async with http_node(model_dir, max_body_bytes=1000) as node:
        sent = 0

        async def parts() -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(1000):
                sent += 1000
                yield b"x" * 1000

        answer = await node.client.post(COMPLETION, content=parts())
        assert answer.status_code == 413
        assert answer.headers["connection"] == "close"
        assert (await node.client.post(COMPLETION, content=b"x" * 1001)).status_code == 413
        assert (await node.client.post(COMPLETION, content=b"x" * 1000)).status_code == 400


async def test_a_refused_body_is_answered_before_it_has_arrived(node: HttpNode) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(node.url).port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000\r\n\r\n{")
    assert (await asyncio.wait_for(reader.readline(), 1)).startswith(b"HTTP/1.1 413 ")
    writer.close()


@pytest.mark.parametrize("head", [b"GET /health HTTP/1.1\r\nx: ", b"GET /"])
async def test_a_head_without_an_end_is_refused(node: HttpNode, head: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(node.url).port)
    writer.write(head)
    for _ in range(5):
        writer.write(b"a" * 16384)
        await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 2)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"head is longer than 65536 bytes" in answer
    writer.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("DELETE", "/health", 405), ("POST", "/metrics", 405), ("GET", "/nope", 404), ("POST", "/v1/embeddings", 404),
     ("GET", "/v1/models/other", 404), ("GET", "/v1/models/org/other", 404)],
)  # fmt: skip
async def test_unknown_paths_and_methods(node: HttpNode, method: str, path: str, status: int) -> None:
    answer = await node.client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert "allow" in answer.headers or status != 405


@pytest.mark.parametrize("garbage", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00", b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"\x00" * 100])
async def test_what_is_not_http_1_is_refused(node: HttpNode, garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(node.url).port)
    writer.write(garbage)
    answer = await asyncio.wait_for(reader.read(), 2)
    assert answer.startswith(b"HTTP/1.1 400")
    writer.close()
    assert (await node.client.get("/ready")).status_code == 200


# ---- failures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_output_has_its_status(node: HttpNode, stream: bool) -> None:
    failure = Failure(503, "no pages", code="overloaded", stage="queue", retry_after_s=1.2)
    node.scheduler.auto = lambda generate: [TextOut(rid=generate.rid, failure=failure)]
    answer = await node.client.post(CHAT, json={"messages": USER, "stream": stream})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == failure.openai_body()


async def test_a_failure_after_the_first_output_is_an_event_then_done(node: HttpNode) -> None:
    node.scheduler.auto = first_output
    async with node.client.stream("POST", COMPLETION, json={"prompt": "x", "stream": True}) as answer:
        assert answer.status_code == 200
        failure = Failure(504, "too late", code="deadline_exceeded")
        rid = (await taken(node)).rid
        node.scheduler.emit(TextOut(rid=rid, text="b", num_new_tokens=1), TextOut(rid=rid, failure=failure))
        first, second, error, done = events((await answer.aread()).decode())
    assert (first["choices"][0]["text"], second["choices"][0]["text"]) == ("a", "b")  # what came before the failure is not lost
    assert error == failure.openai_body()
    assert done == "[DONE]"


async def test_a_whole_reply_that_fails_late_has_its_status(node: HttpNode) -> None:
    request = asyncio.ensure_future(node.client.post(COMPLETION, json={"prompt": "x"}))
    rid = (await taken(node)).rid
    node.scheduler.emit(TextOut(rid=rid, text="a", num_new_tokens=1))
    await asyncio.sleep(HELD_S)
    node.scheduler.emit(TextOut(rid=rid, failure=Failure(503, "gone", code="peer_lost")))
    assert (await request).status_code == 503


async def test_one_failed_prompt_fails_the_request_and_aborts_the_others(node: HttpNode) -> None:
    request = asyncio.ensure_future(node.client.post(COMPLETION, json={"prompt": ["a", "b", "c"]}))
    rids = [(await taken(node)).rid for _ in range(3)]
    node.scheduler.emit(TextOut(rid=rids[0], text="done", finish_reason="stop"))
    node.scheduler.emit(TextOut(rid=rids[1], failure=Failure(503, "gone")))
    assert (await request).json()["error"]["message"] == "gone"
    assert (await asyncio.wait_for(node.scheduler.aborts.get(), 5)).rid == rids[2]
    assert (await asyncio.wait_for(node.scheduler.drops.get(), 5)).rid == rids[2]
    assert node.scheduler.aborts.empty()


async def test_a_fault_of_the_server_is_a_500_with_a_log(node: HttpNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(node.manager, "open", broken)
    with caplog.at_level(logging.ERROR):
        answer = await node.client.post(COMPLETION, json={"prompt": "x"})
    assert answer.status_code == 500
    assert "inside" not in answer.text
    assert "ZeroDivisionError" in caplog.text


# ---- clients that leave, deadlines, overload ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_aborts_its_request(node: HttpNode, stream: bool, begun: bool) -> None:
    request = asyncio.ensure_future(node.client.post(COMPLETION, json={"prompt": "x", "stream": stream}))
    rid = (await taken(node)).rid
    if begun:
        node.scheduler.emit(TextOut(rid=rid, text="a", num_new_tokens=1))
        await asyncio.sleep(HELD_S)
    request.cancel()
    abort = await asyncio.wait_for(node.scheduler.aborts.get(), 2)
    assert (abort.rid, abort.cause) == (rid, "client_left")
    assert (await asyncio.wait_for(node.scheduler.drops.get(), 2)).rid == rid
    await until(lambda: node.manager.num_open == 0)
    node.scheduler.emit(TextOut(rid=rid, text="late", finish_reason="stop"))  # finds nobody
    assert 'pdserve_http_requests_total{path="/v1/completions",status="499"}' in (await node.client.get("/metrics")).text


async def test_a_finished_request_is_not_aborted(node: HttpNode) -> None:
    node.scheduler.auto = words
    await node.client.post(COMPLETION, json={"prompt": "x", "max_tokens": 2})
    await node.client.post(COMPLETION, json={"prompt": "x", "max_tokens": 2, "stream": True})
    await asyncio.sleep(HELD_S)
    assert node.scheduler.aborts.empty()
    assert node.scheduler.drops.empty()


async def test_a_stop_string_ends_the_scheduler_s_work_too(node: HttpNode) -> None:
    node.scheduler.auto = lambda generate: [TextOut(rid=generate.rid, text="a", num_new_tokens=2, finish_reason="stop", matched_stop="##")]
    answer = await node.client.post(COMPLETION, json={"prompt": "x", "stop": "##"})
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert (await asyncio.wait_for(node.scheduler.aborts.get(), 2)).cause == "stop_string"
    assert node.scheduler.drops.empty()


async def test_a_silent_scheduler_does_not_outlast_the_deadline(node: HttpNode) -> None:
    started_s = time.monotonic()
    answer = await node.client.post(COMPLETION, json={"prompt": "x"}, headers={"x-request-deadline": str(time.time() + 0.2)})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert 0.2 < time.monotonic() - started_s < 1.5
    assert (await asyncio.wait_for(node.scheduler.aborts.get(), 2)).cause == "deadline"
    assert (await taken(node)).deadline_s < time.time() + 0.2


async def test_a_deadline_in_a_stream_is_an_event(node: HttpNode) -> None:
    node.scheduler.auto = first_output
    headers = {"x-request-deadline": str(time.time() + 0.2)}
    answer = await node.client.post(COMPLETION, json={"prompt": "x", "stream": True}, headers=headers)
    first, error, done = events(answer.text)
    assert (first["choices"][0]["text"], error["error"]["code"], done) == ("a", "deadline_exceeded", "[DONE]")


@pytest.mark.parametrize(("deadline", "status"), [("soon", 400), ("nan", 400), ("inf", 400), ("", 400), ("0", 504), ("1.5e9", 504)])
async def test_a_bad_or_past_deadline_is_answered_at_once(node: HttpNode, deadline: str, status: int) -> None:
    answer = await node.client.post(COMPLETION, json={"prompt": "x"}, headers={"x-request-deadline": deadline})
    assert answer.status_code == status


async def test_a_far_deadline_is_clamped_to_the_node_s(model_dir: Path) -> None:
    async with http_node(model_dir, request_timeout_s=60.0) as node:
        node.scheduler.auto = words
        for headers in ({}, {"x-request-deadline": str(time.time() + 1e6)}):
            await node.client.post(COMPLETION, json={"prompt": "x"}, headers=headers)
            assert 50 < (await taken(node)).deadline_s - time.time() <= 60


async def test_too_many_open_requests_are_refused_with_retry_after(model_dir: Path) -> None:
    async with http_node(model_dir, max_running_requests=1, max_queued_requests=1) as node:
        requests = [asyncio.ensure_future(node.client.post(COMPLETION, json={"prompt": "x", "max_tokens": 1})) for _ in range(2)]
        rids = [(await taken(node)).rid for _ in range(2)]
        answer = await node.client.post(COMPLETION, json={"prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"], answer.json()["error"]["code"]) == (503, "1", "overloaded")
        never = await node.client.post(COMPLETION, json={"prompt": ["x", "y", "z"]})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")
        for rid in rids:
            node.scheduler.emit(TextOut(rid=rid, text="a", finish_reason="length"))
        assert [(await request).status_code for request in requests] == [200, 200]
        node.scheduler.auto = words
        assert (await node.client.post(COMPLETION, json={"prompt": "x"})).status_code == 200


async def test_a_room_that_is_in_use_is_refused(node: HttpNode) -> None:
    body = {"prompt": "x", "bootstrap_host": "h", "bootstrap_room": 5}
    first = asyncio.ensure_future(node.client.post(COMPLETION, json=body))
    rid = (await taken(node)).rid
    second = await node.client.post(COMPLETION, json=body)
    assert (second.status_code, second.json()["error"]["param"]) == (400, "bootstrap_room")
    node.scheduler.emit(TextOut(rid=rid, text="a", finish_reason="stop"))
    assert (await first).status_code == 200
    node.scheduler.auto = words
    assert (await node.client.post(COMPLETION, json=body)).status_code == 200


# ---- control plane ------------------------------------------------------------------------------------------------------


async def test_a_loading_node_is_live_but_not_ready(model_dir: Path) -> None:
    async with http_node(model_dir, ready=False) as node:
        assert (await node.client.get("/health")).status_code == 200
        assert (await node.client.get("/ready")).status_code == 503
        answer = await node.client.post(COMPLETION, json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]) == (503, "not_ready", "1")
        assert (await node.client.get("/server_info")).json()["phase"] == "loading"


async def test_server_info_and_metrics_show_the_scheduler_s_figures(node: HttpNode) -> None:
    node.scheduler.status()
    await until(lambda: bool(node.health.status.stats))
    for path in ("/server_info", "/get_server_info"):
        info = (await node.client.get(path)).json()
        assert info["role"] == info["disaggregation_mode"] == "decode"
        assert info["served_model_name"] == SERVED_MODEL
        assert (info["fingerprint"], info["dtype"], info["incarnation"], info["protocol_version"]) == ("f00d", "float32", "inc-1", 1)
        assert (info["page_size"], info["context_length"]) == (16, CONTEXT_LENGTH)
        assert info["pages"] == {"free": 7, "cached": 2, "held": 1, "quarantined": 0, "total": 10}
        assert (info["running"], info["waiting"]) == (1, 2)
        assert info["peers"] == [{"endpoint": "127.0.0.1:1", "state": "connected", "reason": ""}]
        assert info["bootstrap_port"] is None
        assert (info["transfer_backend"], info["cluster_key_id"]) == ("auto", "none")
    metrics = (await node.client.get("/metrics")).text
    assert "pdserve_pages_free 7.0" in metrics
    assert "# TYPE pdserve_output_tokens_total counter\npdserve_output_tokens_total 42.0" in metrics


async def test_a_prefill_node_tells_its_control_endpoint(model_dir: Path) -> None:
    async with http_node(model_dir, role="prefill", advertise_host="10.1.1.1") as node:
        info = (await node.client.get("/server_info")).json()
        assert (info["role"], info["bootstrap_host"]) == ("prefill", "10.1.1.1")
        assert info["bootstrap_port"] == info["disaggregation_bootstrap_port"] == 8998


async def test_a_node_shows_which_key_it_has_and_not_the_key(model_dir: Path, tmp_path: Path) -> None:
    secrets = ["ab" * 32, "cd" * 32]
    ids: list[str] = []
    for secret in secrets:
        path = tmp_path / f"{secret[:2]}.key"
        path.write_text(secret)
        path.chmod(0o600)
        async with http_node(model_dir, cluster_key_file=str(path), transfer_backend="tcp") as node:
            answer = await node.client.get("/server_info")
        assert secret[:8] not in answer.text
        assert answer.json()["transfer_backend"] == "tcp"
        ids.append(answer.json()["cluster_key_id"])
    assert ids == [key_id(ClusterKey(bytes.fromhex(secret))) for secret in secrets]
    assert all(re.fullmatch("[0-9a-f]{8}", id) for id in ids)


async def test_model_info(node: HttpNode) -> None:
    for path in ("/model_info", "/get_model_info"):
        info = (await node.client.get(path)).json()
        assert (info["is_generation"], info["model_type"], info["architectures"]) == (True, "llama", ["LlamaForCausalLM"])


async def test_metrics_count_what_was_served(model_dir: Path) -> None:
    async with http_node(model_dir) as node:
        node.scheduler.auto = words
        await node.client.post(COMPLETION, json={"prompt": [5, 6, 7], "max_tokens": 4})
        await node.client.post(COMPLETION, json={"prompt": []})
        metrics = (await node.client.get("/metrics")).text
    for line in (
        'pdserve_http_requests_total{path="/v1/completions",status="200"} 1.0',
        'pdserve_http_requests_total{path="/v1/completions",status="400"} 1.0',
        "pdserve_prompt_tokens_total 3.0", "pdserve_generation_tokens_total 4.0", "pdserve_cached_prompt_tokens_total 2.0",
        "pdserve_time_to_first_token_seconds_count 1.0", "pdserve_inter_token_latency_seconds_count 3.0",
        "pdserve_e2e_request_latency_seconds_count 1.0", "pdserve_open_prompts 0.0", "pdserve_ready 1.0",
    ):  # fmt: skip
        assert line in metrics


@pytest.mark.parametrize("given", ["with space", "x" * 129, "<script>"])
async def test_an_odd_request_id_is_replaced(node: HttpNode, given: str) -> None:
    answer = await node.client.get("/health", headers={"x-request-id": given})
    assert len(answer.headers["x-request-id"]) == 16
