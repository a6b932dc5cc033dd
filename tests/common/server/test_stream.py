"""Replies byte by byte."""

import json
from typing import Any

from common.messages import TextOut
from common.server.openai_schema import ApiRequest, RequestParser
from common.server.openai_stream import Reply

PARSER = RequestParser("m", bootstrap_port=8998)


def request(kind: str, **fields: Any) -> ApiRequest:
    if kind == "chat":
        return PARSER.parse_chat(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode())
    return PARSER.parse_completion(json.dumps({"prompt": "hi", **fields}).encode())


def out(text: str = "", **fields: Any) -> TextOut:
    return TextOut(rid="r", text=text, num_new_tokens=1, num_prompt_tokens=5, num_cached_tokens=4, **fields)


def identity(reply: Reply) -> tuple[str, int]:
    first = json.loads(reply.chunk(0, out("x")).split(b"\n\n")[0].removeprefix(b"data: "))
    return first["id"], first["created"]


def test_chat_stream_bytes() -> None:
    reply = Reply(request("chat", stream=True), "m")
    data = reply.chunk(0, out("a")) + reply.chunk(0, out('"\n€')) + reply.chunk(0, out("", finish_reason="stop")) + reply.tail()
    first = json.loads(data.split(b"\n\n")[0].removeprefix(b"data: "))
    head = f'data: {{"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},"model":"m","choices":[{{"index":0,"delta":'
    assert first["id"].startswith("chatcmpl-")
    assert data.decode() == (
        f'{head}{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}{{"content":"a"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}{{"content":"\\"\\n€"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}{{}},"logprobs":null,"finish_reason":"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )


def test_chat_stream_with_usage_bytes() -> None:
    reply = Reply(request("chat", stream=True, stream_options={"include_usage": True}), "m")
    data = reply.chunk(0, out("a", prefill_site="remote", finish_reason="length")) + reply.tail()
    first = json.loads(data.split(b"\n\n")[0].removeprefix(b"data: "))
    head = f'data: {{"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},"model":"m","choices":['
    assert data.decode() == (
        f'{head}{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}],"usage":null}}\n\n'
        f'{head}{{"index":0,"delta":{{"content":"a"}},"logprobs":null,"finish_reason":null}}],"usage":null}}\n\n'
        f'{head}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"length"}}],"usage":null}}\n\n'
        f'{head}],"usage":{{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6,"prompt_tokens_details":{{"cached_tokens":4}},'
        f'"prefill_site":"remote"}}}}\n\n'
        "data: [DONE]\n\n"
    )


def test_completion_stream_bytes() -> None:
    reply = Reply(request("completion", prompt=["x", "y"], stream=True), "m")
    data = reply.chunk(1, out("b")) + reply.chunk(0, out("a", finish_reason="length")) + reply.chunk(1, out("", finish_reason="stop")) + reply.tail()
    first = json.loads(data.split(b"\n\n")[0].removeprefix(b"data: "))
    head = f'data: {{"id":"{first["id"]}","object":"text_completion","created":{first["created"]},"model":"m","choices":['
    assert first["id"].startswith("cmpl-")
    assert data.decode() == (
        f'{head}{{"index":1,"text":"b","logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}{{"index":0,"text":"a","logprobs":null,"finish_reason":"length"}}]}}\n\n'
        f'{head}{{"index":1,"text":"","logprobs":null,"finish_reason":"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )


def test_an_output_without_text_makes_no_content_chunk() -> None:
    chat_reply, completion_reply = Reply(request("chat", stream=True), "m"), Reply(request("completion", stream=True), "m")
    assert chat_reply.chunk(0, out()).count(b"data: ") == 1  # the role
    assert chat_reply.chunk(0, out()) == b""
    assert completion_reply.chunk(0, out()) == b""


def test_usage_counts_every_choice_and_every_token() -> None:
    reply = Reply(request("completion", prompt=["x", "y"]), "m")
    reply.add(0, out("a"))
    reply.add(0, out("b", finish_reason="stop"))
    assert not reply.finished
    reply.add(1, out("c", finish_reason="length", prefill_site="remote"))
    assert reply.finished
    body = json.loads(reply.body())
    assert body["usage"] == {
        "prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 8}, "prefill_site": "mixed",
    }  # fmt: skip
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [(0, "ab", "stop"), (1, "c", "length")]


def test_chat_body() -> None:
    reply = Reply(request("chat"), "m")
    reply.add(0, out("Hé"))
    reply.add(0, out("llo", finish_reason="stop"))
    body = json.loads(reply.body())
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Héllo", "refusal": None}, "logprobs": None, "finish_reason": "stop"}
    ]


def test_two_replies_have_two_ids() -> None:
    assert identity(Reply(request("chat", stream=True), "m"))[0] != identity(Reply(request("chat", stream=True), "m"))[0]
