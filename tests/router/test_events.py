"""Ends, [DONE] and errors in the bytes of a stream."""

import pytest

from router.events import end_of_events, error_in, failure_of, has_done, openai_error


@pytest.mark.parametrize(
    ("events", "done"),
    [(b"data: [DONE]\n\n", True), (b"data:[DONE]", True),
     (b"data: {}\n\ndata: [DONE]\r\n\r\n", True), (b"data: {}\r\n\r\ndata:[DONE]\n\n: x\n\n", True),
     (b'data: {"a":"data: [DONE]"}\n\n', False), (b": data: [DONE]\n\n", False), (b"", False)],
)  # fmt: skip
def test_done(events: bytes, done: bool) -> None:
    assert has_done(events) is done


@pytest.mark.parametrize(("part", "end"), [(b"a\n\n", 3), (b"a\n\nb", 3), (b"a\r\n\r\nb\n", 5), (b"a\n", 0), (b"a\n\nb\r\n\r\nc", 8)])
def test_end_of_the_last_whole_event(part: bytes, end: int) -> None:
    assert end_of_events(part) == end


def test_error_event() -> None:
    assert error_in(b'data: {"choices":[]}\n\ndata: {"error": {"message":"m","code":503}}\n\n') == b'{"error": {"message":"m","code":503}}'
    assert error_in(b'data: {"choices":[{"text":"\\"error\\":{"}]}\n\n') is None
    assert error_in(b'data: {"choices":[],"error":null}\n\n') is None
    flat = b'{"object":"error","message":"m","type":"BadRequest","param":null,"code":400}'
    assert error_in(b"data: " + flat + b"\n\n") == flat
    assert failure_of(flat, "prefill").status == 400
    failure = failure_of(b'{"error":{"message":"m","code":503}}', "prefill")
    assert (failure.status, failure.message, failure.stage) == (503, "m", "prefill")
    assert failure_of(b'{"error":{', "decode").status == 500


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error":{"message":"m","type":"t","param":null,"code":"c"}}', ("m", "t", "c")),
        (b'{"error":{"message":"m","type":"BadRequestError","code":400}}', ("m", "BadRequestError", 400)),
        (b'{"object":"error","message":"m","type":"BadRequest","code":400}', ("m", "BadRequest", 400)),
        (b'{"error":"m"}', ("m", None, None)),
        (b'{"error":null}', None), (b'{"detail":"Not Found"}', None), (b"[]", None), (b"7", None), (b'{"error":{}}', None),
        (b"", None), (b"\xff", None), (b"[" * 100_000, None),
    ],
)  # fmt: skip
def test_error_objects_of_engines(body: bytes, said: tuple[str, object, object] | None) -> None:
    assert openai_error(body) == said
