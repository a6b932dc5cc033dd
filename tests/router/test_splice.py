"""Everything but the named members stays as the client wrote it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import RequestError
from router.splice import LONG_VALUES, MAX_PROMPTS, mint_rooms, num_prompts, read_head, splice

NAMED = ("bootstrap_room", "kv_transfer_params", "max_tokens", "stop", *LONG_VALUES)  # that Head has, has as None, does not have
keys = st.one_of(st.sampled_from([*NAMED, "model", "stream", "a"]), st.text(max_size=4))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
spaces = st.text(" \t\r\n", max_size=2)
TYPED = {"model": st.none() | st.text(max_size=4), "stream": st.none() | st.booleans(), "max_tokens": st.none() | st.integers(0, 99)}


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, list[tuple[str, str]], str, str]:
    """A JSON object as text, its members as (key, their own text), and what is around them. Keys may come twice."""
    ascii_only, before, after = draw(st.booleans()), draw(spaces), draw(spaces)
    members = []
    for key in draw(st.lists(keys, max_size=6)):
        value = draw(TYPED.get(key, values))
        name = json.dumps(key, ensure_ascii=ascii_only)
        if draw(st.booleans()):  # the same key, written with escapes
            name = '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 0xD800 else json.dumps(c)[1:-1] for c in key) + '"'
        members.append((key, draw(spaces) + name + draw(spaces) + ":" + draw(spaces) + json.dumps(value, ensure_ascii=ascii_only) + draw(spaces)))
    return before + "{" + ",".join(text for _, text in members) + "}" + after, members, before, after


@given(documents(), st.dictionaries(st.sampled_from(NAMED), values, max_size=3), st.sets(st.sampled_from(NAMED)))
def test_everything_else_stays_byte_for_byte(document: tuple[str, list[tuple[str, str]], str, str], put: dict[str, Any], drop: set[str]) -> None:
    text, members, before, after = document
    kept = [member for key, member in members if key not in put and key not in drop]
    body = text.encode()
    spliced = splice(body, read_head(body), {name: json.dumps(value).encode() for name, value in put.items()}, drop).decode()
    pairs: list[tuple[str, Any]] = json.loads(spliced, object_pairs_hook=list)
    at_the_end = pairs[len(pairs) - len(put) :]
    assert [key for key, _ in at_the_end] == list(put)
    assert not {key for key, _ in pairs[: len(pairs) - len(put)]} & {*put, *drop}
    ours = [f'"{name}":{json.dumps(value)}' for name, value in put.items()]
    if not kept and not ours and members:  # what was between the braces may stay or go
        assert json.loads(spliced) == {}
    else:
        assert spliced == before + "{" + ",".join([*kept, *ours]) + "}" + after


@pytest.mark.parametrize("second", ["1", "12", '"a"', '"ab"', "[1]", "[1,2]", "{}", "null"])
@pytest.mark.parametrize("first", ["1", "12", '"a"', '"ab"', "[1]", "[1,2]", "{}", "null"])
def test_a_value_given_twice_is_taken_out_twice(first: str, second: str) -> None:
    """Head has the second one, which may begin as the first one does."""
    body = f'{{"prompt":{first},"x":1,"prompt" : {second} ,"y":2}}'.encode()
    assert splice(body, read_head(body), {"z": b"3"}, ("prompt",)) == b'{"x":1,"y":2,"z":3}'


def test_members_of_an_object_with_nothing_in_it() -> None:
    for body in (b"{}", b" { } "):
        assert json.loads(splice(body, read_head(body), {"a": b"1", "b": b"[]"})) == {"a": 1, "b": []}
        assert splice(body, read_head(body), {}, ("prompt", "stop")) == body


def test_nested_members_of_the_same_name_stay() -> None:
    body = b'{"messages":[{"stop":1,"messages":2}],"stop":{"stop":[{"stop":"}"}]},"n":1}'
    assert splice(body, read_head(body), {}, ("stop",)) == b'{"messages":[{"stop":1,"messages":2}],"n":1}'


@pytest.mark.parametrize(
    ("prompt", "number"),
    [('"a"', None), ("[1, 2]", None), ("[]", None), (' [ "a" ]', 1), ('["a","b"]', 2), ("[[1,2],[3]]", 2), ("null", None), ("7", None)],
)
def test_rooms_are_counted_by_prompts(prompt: str, number: int | None) -> None:
    head = read_head(b'{"prompt":%s}' % prompt.encode())
    assert num_prompts(head) == number


@pytest.mark.parametrize(("field", "number"), [("text", 2), ("input_ids", None)])
def test_prompts_of_sglangs_own_endpoint_are_counted(field: str, number: int | None) -> None:
    prompts = {"text": ["a", "b"], "input_ids": [1, 2]}[field]
    assert num_prompts(read_head(json.dumps({field: prompts}).encode())) == number


def test_rooms_are_63_bits_and_differ() -> None:
    rooms = mint_rooms(3)
    assert isinstance(rooms, list)
    assert len(set(rooms)) == 3
    assert all(0 <= room < 1 << 63 for room in rooms)


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
