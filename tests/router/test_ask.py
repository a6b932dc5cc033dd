"""What placing reads of a body: blocks that a longer conversation shares, and what keeps two prompts apart."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ask import BOUNDARIES, EXPECTED_OUTPUT_TOKENS, LONG_BLOCK, SHORT_END, block_end, block_hashes, num_blocks, read_ask
from router.splice import read_head


def asked(body: object, model: str | None = "m", **json_style: object) -> list[int]:
    return list(read_ask(read_head(json.dumps(body, **json_style).encode()), model).blocks)  # type: ignore[arg-type]


def turns(number: int) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": f"turn {n} " + "word " * 150} for n in range(number)]


@pytest.mark.parametrize("json_style", [{}, {"separators": (",", ":")}, {"ensure_ascii": False}, {"indent": 1}])
def test_next_turn_shares_every_block_of_the_last(json_style: dict[str, object]) -> None:
    for number in range(1, 12, 2):
        short, long = (asked({"model": "m", "messages": turns(n)}, **json_style) for n in (number, number + 2))
        if json_style == {"indent": 1}:  # here the last turn's bytes do not go on as they end; all but one block still agree
            short = short[:-1]
        assert long[: len(short)] == short
        assert len(long) > len(short)


def test_conversations_that_differ_late_share_their_beginning_only() -> None:
    first, second = turns(9), turns(9)
    second[8] = {"role": "user", "content": "something else " * 80}
    ours, theirs = asked({"messages": first}), asked({"messages": second})
    common = sum(a == b for a, b in zip(ours, theirs, strict=False))
    before = len(json.dumps(first[:8])) - 1
    assert block_end(common) <= before + 40
    assert before < block_end(common + 1)


def test_text_and_token_prompts_share_prefixes_too() -> None:
    text = "some words " * 400
    assert asked({"prompt": text + "and more"})[:10] == asked({"prompt": text})[:10]
    ids = list(range(1000, 1900))
    short, long = asked({"prompt": ids}), asked({"prompt": [*ids, 7, 8, 9, *ids]})
    assert long[: len(short)] == short
    assert asked({"input": text}) == asked({"prompt": text})


def test_same_text_under_another_model_adapter_tools_or_salt_is_another_prompt() -> None:
    body = {"messages": turns(5)}
    variants = [asked(body), asked(body, "other"), asked(body, None)]
    fields = (("tools", [{"type": "function"}]), ("tools", []), ("lora_path", "a"), ("lora_path", "b"), ("cache_salt", "a"), ("extra_key", "a"),
              ("system", "be brief"), ("instructions", "be brief"))
    variants += [asked({**body, name: value}) for name, value in fields]
    seen = [block for blocks in variants for block in blocks]
    assert len(set(seen)) == len(seen)
    assert asked({**body, "temperature": 0.5, "max_tokens": 9, "stream": True}) == asked(body)


def test_tokens_are_counted_for_ids_and_estimated_for_text() -> None:
    def num_tokens(body: object) -> int:
        return read_ask(read_head(json.dumps(body).encode()), None).num_tokens

    assert num_tokens({"prompt": list(range(123))}) == 123
    assert num_tokens({"prompt": [[1, 2, 3], [4], [5, 6]]}) == 6
    assert num_tokens({"prompt": [7]}) == 1
    assert 900 < num_tokens({"prompt": "word " * 800}) < 1100
    assert num_tokens({"messages": turns(3)}) == len(json.dumps(turns(3))) // 4 + 1
    assert num_tokens({"prompt": ["1, 2, 3", "4, 5"]}) < 10  # texts that hold commas
    assert num_tokens({}) == 1


def test_longest_answer_is_what_the_body_allows_or_the_usual() -> None:
    def most(body: object) -> int:
        return read_ask(read_head(json.dumps(body).encode()), None).max_output_tokens

    assert most({}) == most({"max_tokens": None}) == most({"max_tokens": 0}) == EXPECTED_OUTPUT_TOKENS
    assert most({"max_tokens": 5}) == most({"max_completion_tokens": 5, "max_tokens": 9}) == most({"max_output_tokens": 5}) == 5


@given(st.integers(0, 200_000), st.integers(0, 200_000))
def test_blocks_end_where_the_position_says(one: int, other: int) -> None:
    short, long = sorted((one, other))
    blocks = block_hashes(bytes(short), 1)
    assert block_hashes(bytes(long), 1)[: len(blocks)] == blocks
    assert block_end(len(blocks)) <= short < block_end(len(blocks) + 1)


def test_blocks_grow() -> None:
    assert SHORT_END == 64 << 10
    assert len(BOUNDARIES) == 28
    assert len(block_hashes(bytes(4 << 10), 0)) == 16
    assert len(block_hashes(bytes(4 << 20), 0)) == 28 + ((4 << 20) - SHORT_END) // LONG_BLOCK


def before(messages: list[dict[str, str]], **json_style: object) -> tuple[int, int] | None:
    return read_ask(read_head(json.dumps({"messages": messages}, **json_style).encode()), None).turn_before()  # type: ignore[arg-type]


@pytest.mark.parametrize("json_style", [{}, {"separators": (",", ":")}, {"indent": 1}])
@pytest.mark.parametrize("num_new", [1, 2, 3])
def test_decode_node_holds_the_turn_before_and_its_answer(num_new: int, json_style: dict[str, object]) -> None:
    old, answer = turns(5), {"role": "assistant", "content": 'says "role": "user" and more ' * 40}
    new = [{"role": "user", "content": f"and {n}? "} for n in range(num_new)]
    sent = read_ask(read_head(json.dumps({"messages": old}, **json_style).encode()), None)  # type: ignore[arg-type]
    found = before([*old, answer, *new], **json_style)
    assert found is not None
    needed, held = found
    assert needed <= sent.num_tokens
    assert needed >= block_end(len(sent.blocks)) // 4 - 2
    total = read_ask(read_head(json.dumps({"messages": [*old, answer, *new]}, **json_style).encode()), None).num_tokens  # type: ignore[arg-type]
    assert total - held <= 20 * num_new


def test_no_turn_before() -> None:
    assert before(turns(1)) is None
    assert before(turns(4)) is None  # ends with words put into the assistant's mouth
    assert before([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "?"}]) is None  # short
    assert before([{"role": "user", "content": "word " * 200}] * 20) is None
    assert read_ask(read_head(b'{"prompt": "text"}'), None).turn_before() is None


@given(st.integers(0, 300_000))
def test_number_of_blocks(num_bytes: int) -> None:
    assert num_blocks(num_bytes) == len(block_hashes(bytes(num_bytes), 0))
