"""What a subscriber learns from KV events is what the radix tree holds, whenever it came."""

import random
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_event_mirror import Mirror, tree_content
from scheduler_harness import Node, random_prompt

from common.errors import StartupError
from common.kvcache import events as events_module
from common.kvcache.cache import KVCache
from common.kvcache.events import TOPIC, KVEvents

PAGE = 4


class FakeXpub:
    """A socket and its context: subscriptions are put into `arrived`, what is published lies in `sent`."""

    def __init__(self) -> None:
        self.arrived: list[bytes] = []
        self.sent: list[list[bytes]] = []

    def socket(self, kind: int) -> "FakeXpub":
        assert kind == zmq.XPUB
        return self

    def set(self, option: int, value: object) -> None:
        """Any."""

    def bind(self, address: str) -> None:
        """Any."""

    def get_string(self, option: int) -> str:
        return "tcp://127.0.0.1:1"

    def get(self, option: int) -> int:
        return zmq.POLLIN if self.arrived else 0

    def recv(self, flags: int) -> bytes:
        return self.arrived.pop(0)

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        assert flags & zmq.NOBLOCK
        self.sent.append(frames)

    def close(self) -> None:
        """Nothing is open."""


def events_of(cache: KVCache, context: Any, num_pages: int, port: int = 0) -> KVEvents:
    return KVEvents(context, cache.tree, num_pages=num_pages, page_size=cache.page_size, host="127.0.0.1", port=port)


def store(cache: KVCache, tokens: list[int]) -> None:
    """As a request does: match, allocate the rest, offer the full pages, let go."""
    matched = cache.match(tokens)
    row = np.concatenate([matched, cache.alloc(-(-len(tokens) // cache.page_size) - len(matched))])
    cache.insert(tokens, row)
    cache.release(row)


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def subscriber(context: "zmq.Context[zmq.Socket[bytes]]", events: KVEvents, topic: bytes = b"", **options: int) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.SUB)
    socket.set(zmq.RCVTIMEO, 5000)
    for name, value in options.items():
        socket.set(getattr(zmq, name), value)
    socket.subscribe(topic)
    socket.connect(f"tcp://127.0.0.1:{events.port}")
    return socket


def publish_until_seen(events: KVEvents, socket: "zmq.Socket[bytes]", mirror: Mirror) -> None:
    """Until the subscriber has read everything, a snapshot first."""
    for _ in range(5000):
        more = events.publish()
        while socket.poll(0 if more else 1):
            mirror.take(socket.recv_multipart())
        if mirror.complete and not more and mirror.next == events.num_published:
            return
    raise AssertionError("not all that was published has come")


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 30), slice_tokens=st.sampled_from([PAGE, 3 * PAGE, 1000]))
def test_whoever_subscribes_whenever_learns_the_tree(seed: int, slice_tokens: int) -> None:
    rng = random.Random(seed)
    num_pages = 24
    cache, xpub = KVCache(num_pages, PAGE), FakeXpub()
    events = events_of(cache, xpub, num_pages)
    mirror, held = Mirror(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events_module, "SNAPSHOT_TOKENS", slice_tokens)
        for _ in range(60):
            action = rng.random()
            tokens = [rng.randrange(2) for _ in range(PAGE * rng.randrange(1, 7))]  # prefixes meet, and branch
            if action < 0.5 and cache.available() >= len(tokens) // PAGE:
                store(cache, tokens)
            elif action < 0.6 and cache.available() >= 6:
                held.append(cache.alloc(rng.randrange(1, 6)))  # evicts
            elif action < 0.7 and held:
                cache.release(held.pop())
            elif action < 0.75:
                xpub.arrived.append(b"\1")
            elif action < 0.78:
                xpub.arrived.append(b"\0")
            else:
                events.publish()
        xpub.arrived.append(b"\1" + TOPIC)
        while events.publish():
            if rng.random() < 0.3 and cache.available() >= 2:
                store(cache, [rng.randrange(2) for _ in range(2 * PAGE)])
        events.publish()
    for frames in xpub.sent:
        mirror.take(frames)
    assert mirror.prefixes() == tree_content(cache)
    assert mirror.num_gaps == 0


def test_a_late_subscriber_gets_a_snapshot_and_then_what_changes(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    cache = KVCache(300, PAGE)
    events = events_of(cache, context, 300)
    rng = random.Random(1)
    for _ in range(20):
        store(cache, [rng.randrange(50) for _ in range(40)])
    assert events.num_published == 0
    early, late, elsewhere = subscriber(context, events), Mirror(), subscriber(context, events, b"other topic")
    first = Mirror()
    publish_until_seen(events, early, first)
    assert first.prefixes() == tree_content(cache)
    store(cache, list(range(100, 140)))
    cache.release(cache.alloc(280))  # evicts all but a few
    with subscriber(context, events, TOPIC) as socket:
        publish_until_seen(events, socket, late)
        assert late.prefixes() == tree_content(cache)
        while first.next != events.num_published:
            first.take(early.recv_multipart())
        assert first.prefixes() == tree_content(cache)  # it was told all of it a second time
        assert first.num_gaps == 0
    assert not elsewhere.poll(0)
    elsewhere.close()
    early.close()
    events.close()


def test_a_snapshot_goes_out_in_bounded_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "SNAPSHOT_TOKENS", 5 * PAGE)
    cache, xpub = KVCache(100, PAGE), FakeXpub()
    events = events_of(cache, xpub, 100)
    for branch in range(3):
        store(cache, [1] * 12 + [branch] * 48)
    xpub.arrived.append(b"\1")
    while events.publish():
        pass
    stored = [[len(event[1]) for event in msgspec.msgpack.decode(frames[2])[1] if event[0] == "BlockStored"] for frames in xpub.sent]
    assert all(sum(pages) <= 5 for pages in stored)
    assert sum(map(sum, stored)) == 3 + 3 * 12


def test_without_a_subscriber_nothing_is_kept_or_sent() -> None:
    cache, xpub = KVCache(50, PAGE), FakeXpub()
    events = events_of(cache, xpub, 50)
    xpub.arrived += [b"\1", b"\0", b"\1not ours", b"something else", b""]
    for token in range(30):
        store(cache, [token] * 20)
        assert not events.publish()
    assert not xpub.sent
    assert not any(events._hashes)
    assert not events._events


def test_other_engines_subscribers_read_the_messages() -> None:
    """Structs with the fields of vLLM 0.11 and of SGLang, which decode arrays by position and type."""

    class Batch(msgspec.Struct, array_like=True):
        ts: float
        events: list[msgspec.Raw]
        data_parallel_rank: int | None = None

    class VllmStored(msgspec.Struct, array_like=True, tag="BlockStored"):
        block_hashes: list[bytes | int]
        parent_block_hash: bytes | int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None

    class SglangStored(msgspec.Struct, array_like=True, tag="BlockStored"):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None

    class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
        block_hashes: list[int]

    class Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
        pass

    cache, xpub = KVCache(4, PAGE), FakeXpub()
    events = events_of(cache, xpub, 4)
    xpub.arrived.append(b"\1")
    events.publish()
    store(cache, [7] * 8)
    store(cache, [7] * 12)
    cache.release(cache.alloc(3))
    events.publish()
    assert [frames[:2] for frames in xpub.sent] == [[b"kv-events", bytes(8)], [b"kv-events", bytes(7) + b"\1"]]
    first, second = (msgspec.msgpack.decode(frames[2], type=Batch) for frames in xpub.sent)
    assert msgspec.msgpack.decode(first.events[0], type=Cleared) == Cleared()
    for kind in (VllmStored, SglangStored):
        stored = [msgspec.msgpack.decode(event, type=kind) for event in second.events[:2]]
        assert [event.token_ids for event in stored] == [[7] * 8, [7] * 4]
        assert (stored[0].parent_block_hash, stored[1].parent_block_hash) == (None, stored[0].block_hashes[1])
        assert {event.block_size for event in stored} == {PAGE}
    removed = msgspec.msgpack.decode(second.events[2], type=Removed)
    assert removed.block_hashes == [stored[1].block_hashes[0], stored[0].block_hashes[1], stored[0].block_hashes[0]]


def test_a_slow_subscriber_loses_messages_and_sees_it(context: "zmq.Context[zmq.Socket[bytes]]", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "QUEUED_MESSAGES", 2)
    size = 20_000
    cache = KVCache(3, size)
    events = events_of(cache, context, 3)
    with subscriber(context, events, RCVHWM=2) as socket:
        mirror = Mirror()
        publish_until_seen(events, socket, mirror)
        prompt = list(range(size))
        for token in range(400):  # 24 MB, more than a loopback connection takes in: it would stand still if publishing could wait
            store(cache, [token, *prompt[1:]])
            events.publish()
        while socket.poll(200):
            mirror.take(socket.recv_multipart())
        store(cache, prompt)
        events.publish()
        mirror.take(socket.recv_multipart())
        assert mirror.num_gaps >= 1
        socket.unsubscribe(b"")
        socket.subscribe(b"")
        mirror.complete = False
        publish_until_seen(events, socket, mirror)
        assert mirror.prefixes() == tree_content(cache)
    events.close()


def test_a_port_that_is_taken_is_said(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    cache = KVCache(4, PAGE)
    events = events_of(cache, context, 4)
    with pytest.raises(StartupError, match=rf"KV events cannot be published on 127.0.0.1:{events.port}.*--kv-events-port"):
        events_of(cache, context, 4, port=events.port)
    events.close()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_schedulers_publish_what_they_keep_also_when_they_retract(role: str, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    node = Node(role, num_pages=80, page_size=PAGE, max_running=8, context_length=512, preemption="recompute")
    events = node.scheduler._events = events_of(node.cache, context, 80)
    rng = np.random.default_rng(3)
    system = random_prompt(rng, 10)
    with subscriber(context, events) as socket:
        mirror = Mirror()
        prompts = [system + random_prompt(rng, 6) for _ in range(6)]
        rids = [node.submit(prompt, 180) for prompt in prompts]
        node.run_until_answered(*rids)
        publish_until_seen(events, socket, mirror)
        assert mirror.prefixes() == tree_content(node.cache)
        rids = [node.submit(prompt, 180) for prompt in prompts]
        node.run_until_answered(*rids)
        publish_until_seen(events, socket, mirror)
        assert mirror.prefixes() == tree_content(node.cache)
        assert mirror.num_gaps == 0
        assert mirror.num_removed > 0
    assert node.num_retracted() > 0
    node.assert_idle()
    events.close()


def test_hashes_name_blocks_with_all_before_them() -> None:
    cache, xpub = KVCache(20, PAGE), FakeXpub()
    events = events_of(cache, xpub, 20)
    xpub.arrived.append(b"\1")
    events.publish()
    for start in (1, 2):
        store(cache, [start] * PAGE + [5] * PAGE)
    events.publish()
    hashes = [event[1] for event in msgspec.msgpack.decode(xpub.sent[1][2])[1]]
    assert len({*hashes[0], *hashes[1]}) == 4
    assert all(struct.pack(">Q", value) for value in (*hashes[0], *hashes[1]))
