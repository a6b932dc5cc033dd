"""What the bytes of an event stream say, as far as the router reads them: where events end, [DONE], an error.

JSON holds no raw newline, so a line that begins with `data:` is never text that a model wrote.
"""

import re

import msgspec

from common.errors import Failure

MAX_HELD_BYTES = 1 << 20  # of an event that has not ended; more is taken as it is
DONE_BEGINNINGS = (b"data: [DONE]", b"data:[DONE]")
DONE_LINES = tuple(b"\n" + beginning for beginning in DONE_BEGINNINGS)
ERROR_LINE = re.compile(rb'(?:^|\n)data: ?(\{\s*"(?:error"\s*:\s*\{|object"\s*:\s*"error")[^\r\n]*)')
STATUS_OF_TYPE = {"invalid_request_error": 400, "authentication_error": 401, "not_found_error": 404, "rate_limit_error": 429}


def is_event_stream(content_type: str) -> bool:
    return content_type.startswith("text/event-stream")


def end_of_events(part: bytes) -> int:
    """Where the last complete event in `part` ends."""
    if part.endswith(b"\n\n") or len(part) > MAX_HELD_BYTES:
        return len(part)
    newline, both = part.rfind(b"\n\n"), part.rfind(b"\r\n\r\n")
    return max(newline + 2 if newline >= 0 else 0, both + 4 if both >= 0 else 0)


def has_done(events: bytes) -> bool:
    # a regular expression took 60 us for 8 KiB
    return b"[DONE]" in events and (events.startswith(DONE_BEGINNINGS) or any(line in events for line in DONE_LINES))


def error_in(events: bytes) -> bytes | None:
    """The JSON of the first event that is an error object."""
    found = ERROR_LINE.search(events) if b'"error"' in events else None
    return None if found is None else found[1]


def failure_of(error: bytes, stage: str) -> Failure:
    """What an error event says. Its status line was 200, so the status is the `code`, where that is a number (SGLang's), or the type's."""
    message, kind, code = openai_error(error) or ("an error event that cannot be read", None, None)
    status = code if isinstance(code, int) and 400 <= code < 600 else STATUS_OF_TYPE.get(str(kind), 500)
    return Failure(status, message, code=code if isinstance(code, str) else None, stage=stage)


def openai_error(body: bytes) -> tuple[str, object, object] | None:
    """(message, type, code) of an OpenAI error object, {"error": {...}}, or of the flat form of SGLang and older vLLM, {"object": "error", ...};
    None when `body` is neither."""
    try:
        said = msgspec.json.decode(body)
        error = said if said.get("object") == "error" else said["error"]
        return str(error["message"]), error.get("type"), error.get("code")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError, IndexError):
        return None
