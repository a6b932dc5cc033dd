"""Everything but the three fields stays as the client wrote it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import RequestError
from router.splice import FIELD_NAMES, MAX_PROMPTS, mint_rooms, num_prompts, read_head, splice, without_fields

keys = st.one_of(st.sampled_from([*FIELD_NAMES, "model", "prompt"]), st.text(max_size=4))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
spaces = st.text(" \t\r\n", max_size=2)


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, list[tuple[str, str]], str, str]:
    """A JSON object as text, its members as (key, their own text), and what is around them."""
    ascii_only, before, after = draw(st.booleans()), draw(spaces), draw(spaces)
    members = []
    for key, value in draw(st.lists(st.tuples(keys.filter(lambda key: key not in ("model", "prompt")), values), max_size=5)):
        name = json.dumps(key, ensure_ascii=ascii_only)
        if draw(st.booleans()):  # the same key, written with escapes
            name = '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 0xD800 else json.dumps(c)[1:-1] for c in key) + '"'
        members.append((key, draw(spaces) + name + draw(spaces) + ":" + draw(spaces) + json.dumps(value, ensure_ascii=ascii_only) + draw(spaces)))
    return before + "{" + ",".join(text for _, text in members) + "}" + after, members, before, after


@given(documents())
def test_everything_else_stays_byte_for_byte(document: tuple[str, list[tuple[str, str]], str, str]) -> None:
    text, members, before, after = document
    kept = [member for key, member in members if key not in FIELD_NAMES]
    body = text.encode()
    head = read_head(body)
    room = mint_rooms(None)
    ours = f'"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":{room}'
    spliced = splice(body, head, "10.0.0.1", 8998, room).decode()
    pairs: list[tuple[str, Any]] = json.loads(spliced, object_pairs_hook=list)
    assert pairs[-3:] == [("bootstrap_host", "10.0.0.1"), ("bootstrap_port", 8998), ("bootstrap_room", room)]
    assert not {key for key, _ in pairs[:-3]} & set(FIELD_NAMES)
    assert spliced == before + "{" + ",".join(kept) + ("," if kept else "") + ours + "}" + after


@given(documents())
def test_cutting_nothing_changes_nothing(document: tuple[str, list[tuple[str, str]], str, str]) -> None:
    text, members, before, after = document
    kept = [member for key, member in members if key not in FIELD_NAMES]
    assert without_fields(text.encode()).decode() == before + "{" + ",".join(kept) + "}" + after


@pytest.mark.parametrize(
    ("prompt", "number"),
    [('"a"', None), ("[1, 2]", None), ("[]", None), (' [ "a" ]', 1), ('["a","b"]', 2), ("[[1,2],[3]]", 2), ("null", None), ("7", None)],
)
def test_rooms_are_counted_by_prompts(prompt: str, number: int | None) -> None:
    head = read_head(b'{"prompt":%s}' % prompt.encode())
    assert num_prompts(head) == number


def test_list_of_prompts_gets_lists() -> None:
    body = b'{"prompt":["a","b","c"]}'
    rooms = mint_rooms(3)
    sent = json.loads(splice(body, read_head(body), "h", None, rooms))
    assert sent["bootstrap_host"] == ["h"] * 3
    assert sent["bootstrap_port"] == [None] * 3
    assert len(set(sent["bootstrap_room"])) == 3
    assert all(0 <= room < 1 << 63 for room in sent["bootstrap_room"])


def test_too_many_prompts_are_refused() -> None:
    body = json.dumps({"prompt": ["x"] * (MAX_PROMPTS + 1)}).encode()
    with pytest.raises(RequestError, match=str(MAX_PROMPTS)):
        num_prompts(read_head(body))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None), (b"{", None), (b"[]", None), (b"3", None), (b'"x"', None), (b"null", None), (b'{"a":1}x', None),
        (b'{"a":NaN}', None), (b"\xff", None),
        (b'{"a":"\xff"}', None), (b'{"a":"\xed\xa0\x80"}', None), (b'{"a":' + b"[" * 100_000, None), (b'{"model":3}', "model"),
        (b'{"stream":1}', "stream"),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused(body: bytes, param: str | None) -> None:
    with pytest.raises(RequestError) as error:
        read_head(body)
    assert error.value.failure.status == 400
    assert error.value.failure.param == param
