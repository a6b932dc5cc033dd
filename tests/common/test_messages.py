"""Messages between a node's processes: each travels unchanged in its receiver's union, and no other is accepted there."""

from typing import Any

import msgspec
import pytest

from common.errors import Failure
from common.messages import (
    Abort,
    Drain,
    DropStream,
    Generate,
    NextTokens,
    NodeStatus,
    SpanOut,
    SpanOuts,
    TextOut,
    TextOuts,
    ToDetokenizer,
    TokenOut,
    TokenOuts,
    ToScheduler,
    ToTokenizer,
)  # fmt: skip
from common.request import GREEDY_TEMPERATURE, Bootstrap, SamplingParams, TextSpec

SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.5, top_k=3, seed=2**63 - 1, stop_token_ids=(1, 2))
MESSAGES: list[tuple[Any, Any]] = [
    (ToScheduler, Generate("r", [1, 2], SAMPLING, TextSpec(stop=("\n", "é")), 1.5, Bootstrap("h", 8998, 2**63 - 1))),
    (ToScheduler, Generate("r", [1], SAMPLING, TextSpec(), 1.5)),
    (ToScheduler, Generate("r", [1], SAMPLING, TextSpec(), 1.5, traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")),
    (ToScheduler, Abort("r", "client_left")),
    (ToScheduler, Drain(12.25)),
    (ToDetokenizer, TokenOuts([TokenOut("r", [5], text=TextSpec()), TokenOut("q", failure=Failure(503, "gone", stage="decode"))])),
    (ToDetokenizer, TokenOuts([NextTokens(["r", "q"], [5, 6])])),
    (ToDetokenizer, TokenOuts([TokenOut("r", [5, 2], "stop", matched_stop=2, num_prompt_tokens=9, num_cached_tokens=8, prefill_site="remote")])),
    (ToDetokenizer, DropStream("r")),
    (ToTokenizer, TextOuts([TextOut("r", "a", 1, [5], "stop", "</s>"), TextOut("q", matched_stop=7, finish_reason="stop")])),
    (ToTokenizer, SpanOuts([SpanOut("00-0a-b7-01", "prefill", 1.5, 2.25, {"n": 3, "s": "t", "l": ["stop"]}, "why"), SpanOut("t", "q", 1.0, 2.0)])),
    (ToTokenizer, NodeStatus({"free_pages": 3.0, "tokens_total": 1e12}, [{"endpoint": "h:1", "state": "up", "reason": ""}])),
]


@pytest.mark.parametrize(("union", "message"), MESSAGES)
def test_message_travels_unchanged(union: Any, message: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union) == message


@pytest.mark.parametrize(("union", "message"), MESSAGES)
def test_message_of_another_receiver_is_refused(union: Any, message: Any) -> None:
    for other in (ToScheduler, ToDetokenizer, ToTokenizer):
        if other is not union:
            with pytest.raises(msgspec.ValidationError):
                msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=other)


def test_an_ordinary_token_costs_few_bytes() -> None:
    """A decode step of 64 rows is some KiB, not tens of them."""
    step = NextTokens([f"{row:016x}" for row in range(64)], [50_000] * 64)
    assert len(msgspec.msgpack.encode(TokenOuts([step]))) < 64 * 24


def test_columns_are_the_same_outputs_in_the_same_order() -> None:
    step = TokenOuts([TokenOut("a", [5], text=TextSpec()), NextTokens(["b", "a"], [6, 7]), TokenOut("b", [8], "length")])
    assert list(step.each()) == [TokenOut("a", [5], text=TextSpec()), TokenOut("b", [6]), TokenOut("a", [7]), TokenOut("b", [8], "length")]


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        (SamplingParams(1, temperature=0.0), True),
        (SamplingParams(1, temperature=GREEDY_TEMPERATURE / 2), True),
        (SamplingParams(1, temperature=GREEDY_TEMPERATURE), False),
        (SamplingParams(1, top_k=1), True),
        (SamplingParams(1), False),
    ],
)
def test_when_sampling_is_greedy(params: SamplingParams, greedy: bool) -> None:
    assert params.greedy is greedy
