"""What the router reads of a request's body, and how members are put into it and taken out.

The body stays the client's bytes: numbers keep their digits, unknown fields stay. A decode into `Head` checks the whole JSON, once,
and finds what choosing nodes needs; then an engine (engines/) has members written before the closing brace, and others of those names
taken out (a room names memory on other nodes: only the router mints one), at the top level only; the same names further inside are
the client's business. Keys may be written with escapes (`"bootstrap\\u005froom"`) and more than once, so whether there is something
to take out is asked of the decoded keys, not of the bytes.

Taking out walks the members. Values that get long are in `Head`, as the bytes they were: finding those bytes at a member's place ends
the member, with one comparison. (A JSON value that is followed by a comma, a brace or a space cannot go on, so what is found there is
that value, even when the key was given twice and Head has the other one.)
"""

import json
import re
from collections.abc import Collection, Mapping

import msgspec

from common.errors import RequestError, invalid
from common.random_words import random_words

ROOM_BITS = 63
MAX_PROMPTS = 4096  # rooms in one body: more prompts than any node queues
STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
OPENING = re.compile(rb"([ \t\r\n]*\{)[ \t\r\n]*")
KEY = re.compile(rb"[ \t\r\n]*(%s)[ \t\r\n]*:[ \t\r\n]*" % STRING, re.DOTALL)
SCALAR = re.compile(rb"%s|[^,}\s]+" % STRING, re.DOTALL)
NESTING = re.compile(rb"%s|[{}\[\]]" % STRING, re.DOTALL)
AFTER_VALUE = re.compile(rb"[ \t\r\n]*([,}])")
LONG_VALUES = ("messages", "prompt", "input", "tools", "text", "input_ids")  # of Head


class Head(msgspec.Struct):
    """The top level of a body, as far as it matters here."""

    model: str | None = None
    stream: bool | None = None
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    priority: int | None = None
    # limits of the answer: whether they are right is for the node to say, which may take 10.0 for 10
    max_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    max_completion_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    max_output_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # of /v1/responses
    # what else the pages of a prompt depend on
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    chat_template_kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    system: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    instructions: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    lora_path: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    cache_salt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    extra_key: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    # SGLang's /generate
    text: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    # what keeps a request from being split (engines/vllm.py)
    n: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    best_of: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    use_beam_search: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    echo: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    # what only a router may write
    kv_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    bootstrap_host: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    bootstrap_port: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    bootstrap_room: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_words = random_words()
_decode_head = msgspec.json.Decoder(Head).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def read_head(body: bytes) -> Head:
    """Raises RequestError 400 unless the body is one JSON object in UTF-8 whose `model` and `stream` have their types."""
    try:
        if not body.isascii():
            body.decode()  # strings that are skipped are not checked by the decoder
        return _decode_head(body)
    except UnicodeDecodeError as error:
        raise invalid(f"the request body is not UTF-8: {error.reason} at byte {error.start}") from None
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"the request body is not valid JSON: {error}") from None


def num_prompts(head: Head) -> int | None:
    """How many prompts a completion request brings as a list, each wanting its own room; None for one prompt (text or token ids)."""
    prompts = next((value for value in (head.prompt, head.text, head.input_ids) if value is not msgspec.UNSET), None)
    if prompts is None:
        return None
    raw = bytes(prompts)
    if not raw.startswith(b"[") or raw[1:].lstrip()[:1] not in (b'"', b"["):
        return None
    number = len(_decode_list(raw))
    if number > MAX_PROMPTS:
        raise invalid(f"`prompt` is a list of {number} prompts; at most {MAX_PROMPTS} go into one request", param="prompt")
    return number


def mint_rooms(number: int | None) -> int | list[int]:
    """Random rooms: one, or a list of `number`. Unguessable, and unique without a word between routers."""
    return next(_words) >> (64 - ROOM_BITS) if number is None else [next(_words) >> (64 - ROOM_BITS) for _ in range(number)]


def splice(body: bytes, head: Head, members: Mapping[str, bytes], drop: Collection[str] = ()) -> bytes:
    """`body`, which was decoded into `head`, with `members` (name, JSON) at its end, and no other top-level member of these names or
    those in `drop`. Long bodies are copied once: more copies cost more than all the rest, in pages that the allocator gives back."""
    opening = OPENING.match(body)
    assert opening is not None, "the body was decoded before"
    start, close = opening.end(1), body.rindex(b"}")
    view = memoryview(body)
    text = b",".join([b'"%s":%s' % (name.encode(), value) for name, value in members.items()])
    names = (*members, *drop)
    for name in names:
        if opening.end() < close and getattr(head, name, None) is not msgspec.UNSET:  # None: Head does not tell whether it is there
            break
    else:
        comma = b"," if members and opening.end() < close else b""
        return b"".join((view[:close], comma, text, view[close:]))
    parts: list[bytes | memoryview] = []
    for first, end in _spans_of_others(body, head, set(names), start):
        parts += view[first:end], b","
    if members:
        parts.append(text)
    elif parts:
        parts.pop()
    return b"".join((view[:start], *parts, view[close:]))


def _spans_of_others(body: bytes, head: Head, names: Collection[str], at: int) -> list[tuple[int, int]]:
    """Where top-level members of other names are; neighbours are one span, their comma in it. at: behind the opening brace."""
    spans: list[tuple[int, int]] = []
    follows, more = False, True  # follows: the member before this one stays too
    while more:
        key = KEY.match(body, at)
        assert key is not None, "the body was decoded before"
        name = json.loads(key[1]) if b"\\" in key[1] else key[1][1:-1].decode()
        after = AFTER_VALUE.match(body, _value_end(body, key.end(), name, head))
        assert after is not None, "the body was decoded before"
        stays = name not in names
        if stays:
            spans[-1:] = [(spans[-1][0], after.start(1))] if follows else [*spans[-1:], (at, after.start(1))]
        follows, more, at = stays, after[1] == b",", after.end()
    return spans


def _value_end(body: bytes, at: int, name: str, head: Head) -> int:
    """Where the value that begins at `at` ends."""
    if name in LONG_VALUES and (raw := getattr(head, name)) is not msgspec.UNSET:
        value = bytes(raw)
        end = at + len(value)
        if body[end : end + 1] in b" \t\r\n,}" and body.startswith(value, at):
            return end
    if body[at] not in b"{[":
        scalar = SCALAR.match(body, at)
        assert scalar is not None, "the body was decoded before"
        return scalar.end()
    depth = 0
    for token in NESTING.finditer(body, at):
        if token[0] in (b"{", b"["):
            depth += 1
        elif token[0] in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return token.end()
    raise AssertionError("the body was decoded before, so its brackets match")


def _wrong_type(message: str) -> RequestError:
    """msgspec names the place as `$.field`."""
    _, _, place = message.partition("`$.")
    param = place.rstrip("`") or None
    return invalid(f"wrong type in the request body: {message}" if param else f"the request body must be a JSON object: {message}", param=param)
