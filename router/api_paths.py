"""Which paths of the nodes' API the router serves, and how a stream of each says that it is complete, or failed.

The list is closed: what is not in it is 404 here, so that a node's own administration cannot be reached through the router. Whether a
node has a path it says itself: its 404 is passed on. Paths that compute a prompt go to a pair; the rest goes to one decode node.

A stream that ends without its last word is a failure, however clean the connection's end: clients of these APIs take it for success.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from common.errors import Failure

OPENAI_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class StreamForm:
    """done: what a line begins with that says the stream is complete, or what a line holds that may say so (`done_inside`). after_error:
    what is due after an error that the node itself put into the stream."""

    separators: tuple[bytes, ...]  # each ends an event
    last_word: str  # for people
    done_beginnings: tuple[bytes, ...]
    error: Callable[[Failure], bytes]  # the event, and what ends the stream after it
    after_error: bytes = b""
    done_inside: tuple[bytes, ...] = ()


def _openai_error(failure: Failure) -> bytes:
    # a plain data event: `event: error` is swallowed by OpenAI's clients, a cut stream is taken for a success
    return b"data: " + msgspec.json.encode(failure.openai_body()) + b"\n\n" + OPENAI_DONE


def _responses_error(failure: Failure) -> bytes:
    error = {"type": "error", "code": failure.code, "message": failure.message, "param": failure.param}
    return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"


def _messages_error(failure: Failure) -> bytes:
    error = {"type": "error", "error": {"type": "overloaded_error" if failure.status in (429, 503) else "api_error", "message": failure.message}}
    return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"


def _lines_error(failure: Failure) -> bytes:
    return msgspec.json.encode({"error": failure.message}) + b"\n"


EVENTS_END = (b"\n\n", b"\r\n\r\n")
OPENAI = StreamForm(EVENTS_END, "[DONE]", (b"data: [DONE]", b"data:[DONE]"), _openai_error, OPENAI_DONE)
RESPONSE_ENDS = (b"event: response.completed", b"event: response.failed", b"event: response.incomplete")
RESPONSES = StreamForm(EVENTS_END, "response.completed", RESPONSE_ENDS, _responses_error)
MESSAGES = StreamForm(EVENTS_END, "message_stop", (b"event: message_stop",), _messages_error)
LINES = StreamForm((b"\n",), '"done": true', (), _lines_error, done_inside=(b'"done":true', b'"done": true'))


@dataclass(frozen=True, slots=True)
class ApiPath:
    name: str  # in metrics and logs
    form: StreamForm = OPENAI
    pair: bool = True  # False: any one decode node answers


PATHS: dict[bytes, ApiPath] = {
    path.encode(): ApiPath(path, form, pair)
    for path, form, pair in (
        ("/v1/chat/completions", OPENAI, True),
        ("/v1/completions", OPENAI, True),
        ("/v1/responses", RESPONSES, True),
        ("/v1/messages", MESSAGES, True),
        ("/api/chat", LINES, True),
        ("/api/generate", LINES, True),
        ("/generate", OPENAI, True),  # SGLang's own
        ("/v1/messages/count_tokens", OPENAI, False),
        ("/tokenize", OPENAI, False),
        ("/detokenize", OPENAI, False),
        ("/v1/embeddings", OPENAI, False),
        ("/v1/rerank", OPENAI, False),
        ("/v1/score", OPENAI, False),
        ("/v1/classify", OPENAI, False),
    )
}
