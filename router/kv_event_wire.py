"""KV events as engines write them, read.

A message is [topic, sequence number (8 bytes, big-endian), batch], a batch MessagePack of (unix time, events, ...). vLLM up to 0.23, SGLang and
pdserve write an event as an array whose first element names it, vLLM since then as a map with a `type`, and the batch itself is a map in some
of its builds (vllm/distributed/kv_events.py, sglang/srt/disaggregation/kv_events.py). Hashes are 64-bit numbers or bytes. Fields that came
later stand at the end, or have names of their own; what is not known here is passed over, and so is an event of another kind.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

DEFAULT_PORT = 5557  # of vLLM and SGLang, which do not say over HTTP where they publish

MAX_NAME_NBYTES = 64  # of a block's hash: SHA-512; names are kept

POSITIONS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys", "group_idx"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


class NotAnEvent(Exception):
    """What came is no message of KV events."""


class _Event(msgspec.Struct, kw_only=True):
    medium: str | None = None  # None and "GPU": where attention reads; others are tiers behind it
    group_idx: int | None = None  # vLLM's models of several kinds of attention have a cache for each; the first decides

    @property
    def counts(self) -> bool:
        return self.medium in (None, "GPU") and self.group_idx in (None, 0)


class Stored(_Event):
    """block_hashes: one a block, of block_size token_ids each; at least one."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: Any = None
    lora_name: Any = None
    extra_keys: Any = None  # None, or one a block, None for a plain one

    @property
    def plain(self) -> bool:
        """Does the KV follow from the tokens alone?"""
        extra = self.extra_keys
        return self.lora_id is None and self.lora_name is None and (extra is None or (isinstance(extra, list) and not any(extra)))


class Removed(_Event):
    block_hashes: list[int | bytes]


class Cleared(_Event):
    """The node holds nothing."""


Event = Stored | Removed | Cleared
KINDS: dict[str, type[Event]] = {"BlockStored": Stored, "BlockRemoved": Removed, "AllBlocksCleared": Cleared}


def read_message(frames: list[bytes]) -> tuple[int, list[Event]]:
    """Sequence number and events. Raises NotAnEvent."""
    if len(frames) != 3 or len(frames[1]) != 8:
        raise NotAnEvent(f"{len(frames)} frames of {[len(frame) for frame in frames[:4]]} bytes")
    try:
        batch = msgspec.msgpack.decode(frames[2])
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        return int.from_bytes(frames[1], "big"), list(_events(events))
    except (msgspec.DecodeError, TypeError, LookupError, RecursionError, ValueError) as error:  # msgspec's ValidationError is a DecodeError
        raise NotAnEvent(f"{type(error).__name__}: {error}") from None


def _events(events: list[Any]) -> Iterator[Event]:
    for event in events:
        name = event["type"] if isinstance(event, dict) else event[0]
        if name not in KINDS:
            continue
        fields = event if isinstance(event, dict) else dict(zip(POSITIONS[name], event[1:], strict=False))
        read = msgspec.convert(fields, KINDS[name])
        if isinstance(read, Stored):
            _check(read)
        if read.counts:
            yield read


def _check(event: Stored) -> None:
    if event.block_size < 1 or not event.block_hashes or len(event.token_ids) != event.block_size * len(event.block_hashes):
        raise NotAnEvent(f"{len(event.block_hashes)} blocks of {event.block_size} tokens have {len(event.token_ids)} tokens")
    if any(isinstance(name, bytes) and len(name) > MAX_NAME_NBYTES for name in event.block_hashes):
        raise NotAnEvent(f"the hash of a block has more than {MAX_NAME_NBYTES} bytes")
    if min(event.token_ids) < 0 or max(event.token_ids) >> 32:
        raise NotAnEvent("a token id is no 32-bit number")
