"""KV events of every engine, as it encodes them, are read; what is none is refused whole, and never more than refused."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.kv_event_wire import Cleared, NotAnEvent, Removed, Stored, read_message

encode = msgspec.msgpack.encode
TOKENS = list(range(100, 132))
VLLM_0_32 = bytes.fromhex(
    "93cb3ff00000000000009481a474797065b0416c6c426c6f636b73436c65617265648ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf800000"
    "000000000507b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980001020304050607aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469"
    "756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c0c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474"
    "656e74696f6e88a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c420787878787878787878787878787878787878787878787878787878787878"
    "7878b1706172656e745f626c6f636b5f6861736807a9746f6b656e5f6964739409090909aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c"
    "6f72615f6e616d65c084a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739107a66d656469756da3475055a967726f75705f6964780000"
)  # its own structs and encoder: everything cleared, two blocks of 4 tokens, one below the second with a hash of 32 bytes, the second removed


def message(batch: Any, sequence: int = 5) -> list[bytes]:
    return [b"kv-events", sequence.to_bytes(8, "big"), encode(batch)]


def read(*events: Any) -> list[Any]:
    return read_message(message([1.5, list(events)]))[1]


def test_arrays_as_vllm_had_them_and_sglang_has_them() -> None:
    """vLLM 0.8 to 0.23: each version a field more. SGLang: hashes are numbers, its newer ones with a medium and metadata."""
    for more in ([], [None], [None, "GPU"], [None, "GPU", None], [None, "GPU", None, [None, None]], [None, "GPU", None, None, 0]):
        (event,) = read(["BlockStored", [1 << 63, b"\1" * 32], None, TOKENS, 16, *more])
        assert isinstance(event, Stored)
        assert event.block_hashes == [1 << 63, b"\1" * 32]
        assert (event.parent_block_hash, event.token_ids, event.block_size, event.plain) == (None, TOKENS, 16, True)
    others = read(["BlockRemoved", [3]], ["BlockRemoved", [3], "GPU", 0], ["AllBlocksCleared"])
    assert [type(event) for event in others] == [Removed, Removed, Cleared]
    sequence, _ = read_message(message([1.5, [["AllBlocksCleared"]], 0], sequence=1 << 40))  # with a data-parallel rank
    assert sequence == 1 << 40


def test_maps_as_vllm_has_them() -> None:
    """From 0.24 on (vllm-project/vllm#42892); the batch is an array, in some builds a map too."""
    stored = {
        "type": "BlockStored", "block_hashes": [15760518052499183552], "parent_block_hash": 7, "token_ids": TOKENS[:16], "block_size": 16,
        "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None], "group_idx": 0, "locality": None,
    }  # fmt: skip
    removed = {"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU", "group_idx": 0}
    events = [stored, removed, {"type": "AllBlocksCleared"}]
    for batch in ([1789095808.8, events, 0], {"ts": 1.0, "events": events, "data_parallel_rank": 0}):
        found = read_message(message(batch))[1]
        assert [type(event) for event in found] == [Stored, Removed, Cleared]
        assert isinstance(found[0], Stored)
        assert (found[0].parent_block_hash, found[0].plain) == (7, True)


def test_bytes_that_vllm_wrote() -> None:
    _, (cleared, first, second, removed) = read_message([b"", bytes(8), VLLM_0_32])
    assert isinstance(cleared, Cleared)
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (first.block_hashes, first.token_ids, first.plain) == ([(1 << 63) + 5, 7], list(range(8)), True)
    assert (second.block_hashes, second.parent_block_hash, second.block_size) == ([b"x" * 32], 7, 4)
    assert removed == Removed(block_hashes=[7], medium="GPU", group_idx=0)


def test_what_tokens_alone_do_not_decide_is_not_plain() -> None:
    for more in ([3], [None, "GPU", "adapter"], [None, "GPU", {"cache_salt": "a"}], [None, "GPU", None, [["picture", 3], None]]):
        (event,) = read(["BlockStored", [1, 2], None, TOKENS, 16, *more])
        assert not event.plain


def test_other_tiers_caches_and_kinds_are_passed_over() -> None:
    cpu = ["BlockStored", [1, 2], None, TOKENS, 16, None, "CPU"]
    second_cache = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 1}
    assert read(cpu, ["BlockRemoved", [1], "STORAGE"], second_cache, ["BlockMoved", 1, 2], {"type": "New"}) == []


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored"], ["BlockStored", [1], None, TOKENS, 16], ["BlockStored", [], None, [], 16], ["BlockStored", [1], None, [1, -1], 2],
        ["BlockStored", [1], None, [1, 1 << 32], 2], ["BlockStored", [1], None, ["a"], 1], ["BlockStored", [1], None, [1], 0],
        ["BlockStored", ["a"], None, [1], 1], ["BlockRemoved", 3], ["BlockRemoved", None], [], [[]], {}, {"type": []}, 3, None,
        {"type": "BlockStored", "block_hashes": [1]}, ["BlockStored", [b"x" * 65], None, [1], 1],
    ],
)  # fmt: skip
def test_malformed_events_are_refused(event: Any) -> None:
    with pytest.raises(NotAnEvent):
        read(["AllBlocksCleared"], event)


@pytest.mark.parametrize("frames", [[], [b""], [b"", b"", b""], [b"", bytes(8), b""], [b"", bytes(8), b"\xc1"], message(3), message([1]), message({}),
                                    message([1, 2]), [*message([1.0, []]), b"more"], [b"", bytes(8), b"\x91" * 100_000]])  # fmt: skip
def test_malformed_messages_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(NotAnEvent):
        read_message(frames)


SCALARS = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.sampled_from(["type", "block_hashes"]), SCALARS)
ARRAYS = st.builds(lambda name, rest: [name, *rest], st.sampled_from(["BlockStored", "BlockRemoved"]), st.lists(VALUES, max_size=9))


@settings(max_examples=50, deadline=None)
@given(events=st.lists(VALUES | ARRAYS, max_size=3))
def test_no_value_does_more_than_be_refused(events: list[Any]) -> None:
    with suppress(NotAnEvent):
        read_message(message([0.0, events]))


@settings(max_examples=50, deadline=None)
@given(payload=st.binary(max_size=60))
def test_no_bytes_do_more_than_be_refused(payload: bytes) -> None:
    with suppress(NotAnEvent):
        read_message([b"", bytes(8), payload])
