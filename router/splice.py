"""What the router reads of a request's body, and the three fields that it writes into it.

The body stays the client's bytes: numbers keep their digits, unknown fields stay. A decode into `Head` checks the whole JSON and
finds the few values that choose a pair; then `bootstrap_host`, `bootstrap_port` and `bootstrap_room` are put before the closing
brace. Values of these names that the client sent are cut out first (a room names memory on other nodes: only the router mints
one), at the top level only; the same names further inside are the client's business. Keys may be written with escapes
(`"bootstrap\\u005froom"`), so whether there is something to cut is asked of the decoded keys, not of the bytes.
"""

import json
import re
import secrets

import msgspec

from common.errors import RequestError, invalid

ROOM_BITS = 63
FIELD_NAMES = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
MAX_PROMPTS = 4096  # rooms in one body: more prompts than any node queues
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]', re.DOTALL)


class Head(msgspec.Struct):
    """The top level of a body, as far as it matters here."""

    model: str | None = None
    stream: bool | None = None
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None  # of /v1/responses
    # what else the pages of a prompt depend on
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    system: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    instructions: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    lora_path: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    cache_salt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    extra_key: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    bootstrap_host: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    bootstrap_port: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    bootstrap_room: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def names_rooms(self) -> bool:
        return any(getattr(self, name) is not msgspec.UNSET for name in FIELD_NAMES)


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
    if head.prompt is msgspec.UNSET:
        return None
    raw = bytes(head.prompt).lstrip()
    if not raw.startswith(b"[") or raw[1:].lstrip()[:1] not in (b'"', b"["):
        return None
    number = len(_decode_list(raw))
    if number > MAX_PROMPTS:
        raise invalid(f"`prompt` is a list of {number} prompts; at most {MAX_PROMPTS} go into one request", param="prompt")
    return number


def mint_rooms(number: int | None) -> int | list[int]:
    """Random rooms: one, or a list of `number`. Unguessable, and unique without a word between routers."""
    return secrets.randbits(ROOM_BITS) if number is None else [secrets.randbits(ROOM_BITS) for _ in range(number)]


def splice(body: bytes, head: Head, host: str, port: int | None, rooms: int | list[int]) -> bytes:
    """`body` with the three fields; for a list of rooms all three are lists of that length."""
    number = len(rooms) if isinstance(rooms, list) else None
    values = (host, port, rooms) if number is None else ([host] * number, [port] * number, rooms)
    fields = b",".join(b'"%s":%s' % (name.encode(), msgspec.json.encode(value)) for name, value in zip(FIELD_NAMES, values, strict=True))
    if head.names_rooms:
        body = without_fields(body)
    end = body.rindex(b"}")
    inside = body[:end].rstrip()
    comma = b"" if inside.endswith(b"{") and inside.lstrip() == b"{" else b","
    return body[:end] + comma + fields + body[end:]


def without_fields(body: bytes) -> bytes:
    """`body`, a valid JSON object, without top-level members of the three names."""
    start = body.index(b"{") + 1
    members: list[bytes] = []
    depth, member_start, name = 1, start, b""
    for token in TOKEN.finditer(body, start):
        first = token[0][:1]
        if depth == 1 and first in b",}":
            if name and json.loads(name) not in FIELD_NAMES:
                members.append(body[member_start : token.start()])
            if first == b"}":
                return body[:start] + b",".join(members) + body[token.start() :]
            member_start, name = token.end(), b""
        elif first == b'"':
            name = name or (token[0] if depth == 1 else b"")
        elif first in b"{[":
            depth += 1
        elif first in b"}]":
            depth -= 1
    raise AssertionError("the body was decoded before, so its braces match")


def _wrong_type(message: str) -> RequestError:
    """msgspec names the place as `$.field`."""
    _, _, place = message.partition("`$.")
    param = place.rstrip("`") or None
    return invalid(f"wrong type in the request body: {message}" if param else f"the request body must be a JSON object: {message}", param=param)
