"""Messages survive the wire, what is no message changes nothing, and nodes that differ say in what."""

import math
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_sim import COMPAT, pages, settings

from common.errors import Failure
from kvtransfer.backend import PeerId
from kvtransfer.protocol import (
    VERSION,
    Cancel,
    Closed,
    Compat,
    FirstToken,
    Heartbeat,
    Hello,
    HelloAck,
    HelloBody,
    Offer,
    Undecodable,
    Withdraw,
    decode_to_decode,
    decode_to_prefill,
    encode,
    hello,
    hello_ack,
    hello_refusal,
    num_pages_of,
    pack_pages,
    read_hello,
    unpack_pages,
    with_checksum,
)

BODY = HelloBody(COMPAT, b"where I am", 0.5, 3.0, 17.5, ["p1"])
HEAD: dict[str, Any] = {"room": 2**63 - 1, "attempt": 7, "sender": "a", "receiver": "b"}
OFFER = Offer(**HEAD, num_prompt_tokens=9, prompt_digest=b"digest", decode_prefix_pages=1, dst_pages=pack_pages(pages(3, 4)), deadline_unix_s=1.5e9)
WITHDRAW = Withdraw(room=5, sender="a", receiver="b", failure=Failure(503, "full"))
HEARTBEAT = Heartbeat("a", "b", 17.5, 16.0)
TO_PREFILL = [hello(PeerId("d1"), BODY), OFFER, Cancel(**HEAD, failure=Failure(499, "gone")), WITHDRAW, HEARTBEAT]
TO_DECODE = [
    hello_ack(PeerId("p1"), BODY),
    hello_refusal(PeerId("p1"), "no"),
    FirstToken(**HEAD, token_id=5, num_cached_tokens=4),
    Closed(**HEAD, status="DELIVERED"),
    Closed(**HEAD, status="ABORTED", failure=Failure(503, "lost", code="peer_lost", stage="transfer", retry_after_s=1.0)),
    Closed(**HEAD, status="DELIVERED", page_digests=bytes(8)),
    HEARTBEAT,
]


@pytest.mark.parametrize("message", TO_PREFILL, ids=lambda message: type(message).__name__)
def test_messages_to_prefill_survive_the_wire(message: Any) -> None:
    assert decode_to_prefill(encode(message)) == message


@pytest.mark.parametrize("message", TO_DECODE, ids=lambda message: type(message).__name__)
def test_messages_to_decode_survive_the_wire(message: Any) -> None:
    assert decode_to_decode(encode(message)) == message


@pytest.mark.parametrize("message", [message for message in TO_DECODE if not isinstance(message, Heartbeat)])
def test_a_message_to_the_other_side_is_none(message: Any) -> None:
    with pytest.raises(Undecodable):
        decode_to_prefill(encode(message))


@given(st.binary(max_size=200))
def test_garbage_is_undecodable_and_nothing_else(frame: bytes) -> None:
    for decode in (decode_to_prefill, decode_to_decode):
        try:
            decode(frame)
        except Undecodable:
            continue
        raise AssertionError(f"{frame!r} was decoded")


@given(st.binary(max_size=200))
def test_garbage_with_the_right_checksum_is_undecodable_or_a_message(packed: bytes) -> None:
    for decode in (decode_to_prefill, decode_to_decode):
        with suppress(Undecodable):
            decode(with_checksum(packed))


@given(st.data())
def test_a_damaged_message_is_undecodable(data: st.DataObject) -> None:
    """Above all an Offer whose pages are others than D named."""
    frame = bytearray(encode(data.draw(st.sampled_from(TO_PREFILL))))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Undecodable):
        decode_to_prefill(bytes(frame))


def test_deep_nesting_is_undecodable() -> None:
    with pytest.raises(Undecodable):
        decode_to_prefill(with_checksum(b"\x91" * 100_000))


BAD_VALUES: list[dict[str, Any]] = [
    {"room": -1},
    {"room": 2**63},
    {"attempt": -1},
    {"sender": ""},
    {"receiver": "x" * 65},
    {"num_prompt_tokens": 0},
    {"decode_prefix_pages": -1},
    {"prompt_digest": b"x" * 65},
    {"deadline_unix_s": math.nan},
    {"deadline_unix_s": math.inf},
    {"deadline_unix_s": -1.0},
    {"deadline_unix_s": "soon"},
    {"digest": "yes"},
]


@pytest.mark.parametrize("bad", BAD_VALUES, ids=str)
def test_values_out_of_bounds_are_refused_at_the_wire(bad: dict[str, Any]) -> None:
    fields = msgspec.to_builtins(OFFER, builtin_types=(bytes,))
    assert decode_to_prefill(with_checksum(msgspec.msgpack.encode(fields))) == OFFER
    with pytest.raises(Undecodable):
        decode_to_prefill(with_checksum(msgspec.msgpack.encode({**fields, **bad})))


DIFFERENT: dict[str, Any] = {
    "model": "model-b",
    "dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "page_size": 32,
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 16,
    "page_nbytes": 128,
    "context_length": 256,
    "vocab_size": 151936,
}


def test_equal_nodes_fit() -> None:
    assert read_hello(hello(PeerId("d1"), BODY), COMPAT) == BODY


@pytest.mark.parametrize("field", Compat.__struct_fields__)
def test_a_difference_is_named_with_both_values(field: str) -> None:
    theirs = settings(**{field: DIFFERENT[field]}).compat
    reason = read_hello(hello(PeerId("d1"), HelloBody(theirs, b"", 0.5, 3.0)), COMPAT)
    assert reason == f"{field.replace('_', ' ')}: {getattr(COMPAT, field)} on the prefill node, {DIFFERENT[field]} on the decode node"


def test_all_differences_are_named() -> None:
    reason = read_hello(hello(PeerId("d1"), HelloBody(settings(page_size=32, dtype="bfloat16").compat, b"", 0.5, 3.0)), COMPAT)
    assert reason == "dtype: float32 on the prefill node, bfloat16 on the decode node; page size: 4 on the prefill node, 32 on the decode node"


def test_another_version_is_refused_whatever_its_body() -> None:
    reason = read_hello(Hello(VERSION + 1, "d1", b"another world"), COMPAT)
    assert reason == f"transfer protocol version: {VERSION} on the prefill node, {VERSION + 1} on the decode node"
    reason = read_hello(HelloAck(VERSION + 1, "p1", True, body=b"another world"), COMPAT)
    assert reason == f"transfer protocol version: {VERSION + 1} on the prefill node, {VERSION} on the decode node"


def test_a_body_that_cannot_be_read_is_refused() -> None:
    assert "cannot be read" in str(read_hello(Hello(VERSION, "d1", b"\x80"), COMPAT))


def test_a_peer_cannot_ask_for_a_flood_of_heartbeats() -> None:
    assert "cannot be read" in str(read_hello(hello(PeerId("d1"), HelloBody(COMPAT, b"", 1e-9, 3.0)), COMPAT))


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf])
def test_a_peer_timeout_out_of_bounds_is_refused(timeout_s: float) -> None:
    assert "cannot be read" in str(read_hello(hello(PeerId("d1"), HelloBody(COMPAT, b"", 0.5, timeout_s)), COMPAT))


@given(st.lists(st.integers(0, 2**31 - 1), unique=True, max_size=50))
def test_pages_survive_the_wire(ids: list[int]) -> None:
    unpacked = unpack_pages(pack_pages(pages(*ids)))
    assert unpacked.dtype == np.int32
    assert unpacked.tolist() == ids


@pytest.mark.parametrize("packed", [b"\0\0\0", pack_pages(pages(1, 2, 1)), pack_pages(pages(-1))], ids=["length", "twice", "negative"])
def test_page_lists_that_do_not_hold_together_are_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match="page"):
        unpack_pages(packed)


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_of_a_prompt(num_tokens: int, expected: int) -> None:
    assert num_pages_of(num_tokens, 4) == expected


# ---- a peer's failure ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [-1, 0, 7, 200, 302, 600, 10**9])
def test_a_peers_failure_is_an_error_whatever_it_says(status: int) -> None:
    told = Failure(status, "m" * 100_000, "c" * 1000, "p" * 1000, "s" * 1000, -3.0)
    cancel = decode_to_prefill(encode(Cancel(room=1, attempt=1, sender="d1", receiver="p1", failure=told)))
    assert isinstance(cancel, Cancel)
    heard = cancel.failure
    assert (heard.status, heard.message, heard.retry_after_s) == (502, "m" * 2000, None)
    assert (heard.code, heard.param, heard.stage) == ("c" * 64, "p" * 64, "s" * 64)


def test_an_honest_failure_arrives_as_it_left() -> None:
    told = Failure(503, "out of pages", "overloaded", None, "prefill", 1.0)
    closed = decode_to_decode(encode(Closed(room=1, attempt=1, sender="p1", receiver="d1", status="FAILED", failure=told)))
    assert isinstance(closed, Closed)
    assert closed.failure == told
