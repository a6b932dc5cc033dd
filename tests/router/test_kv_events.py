"""The router's knowledge of what nodes hold follows their KV events, and falls back to guesses where they leave something open."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from http_node import write_model_dir
from router_harness import until
from scheduler_harness import Node as SchedulerNode

from common.config import RouterConfig
from common.errors import StartupError
from common.kvcache.cache import KVCache
from common.kvcache.events import KVEvents
from router.ask import Ask, read_ask
from router.kv_events import KnownPrefixes
from router.nodes import Node, NodeInfo, NodeTable
from router.pairing import Pairing
from router.prefix_index import PrefixIndex
from router.prompt_tokens import PromptReader
from router.splice import read_head

PAGE = 4
NUM_PAGES = 20
EXPECTED_IS_OVER_S = 1000.0


class Publisher:
    """A node's tree and its events."""

    def __init__(self, context: Any, port: int = 0) -> None:
        self.cache = KVCache(NUM_PAGES, PAGE)
        self.events = KVEvents(context, self.cache.tree, num_pages=NUM_PAGES, page_size=PAGE, host="127.0.0.1", port=port)

    def store(self, tokens: list[int]) -> None:
        matched = self.cache.match(tokens)
        row = np.concatenate([matched, self.cache.alloc(len(tokens) // PAGE - len(matched))])
        self.cache.insert(tokens, row)
        self.cache.release(row)

    def evict_all(self) -> None:
        self.cache.release(self.cache.alloc(NUM_PAGES - 1))


class World:
    """Two prefill nodes that publish and one that does not; a decode node."""

    def __init__(self, tmp_path: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.now_s = 0.0
        self.publishers = [Publisher(self.context) for _ in range(2)]
        self.config = RouterConfig(prefill=tuple(f"http://127.0.0.1:{port}" for port in (1, 2, 3)), decode=("http://127.0.0.1:9",), policy="cost")
        self.table = NodeTable.of(self.config)
        self.nodes = self.table.prefill
        for number, node in enumerate(self.table.all):
            port = self.publishers[number].events.port if number < 2 else None
            self.say(node, served_model_name="m", page_size=PAGE, incarnation=number, kv_events_port=port)
        self.guesses = PrefixIndex(1000)
        self.known = KnownPrefixes(self.table, self.guesses, PromptReader.from_dir(str(write_model_dir(tmp_path))), clock=lambda: self.now_s)
        self.pairing = Pairing(self.table, self.config, knowledge=self.known)

    def say(self, node: Node, **facts: Any) -> None:
        """As its /server_info has it from now on."""
        node.engine = "pdserve"
        node.probe_succeeded(replace_info(node.info, **facts), node.num_blames)

    def hits(self, ask: Ask) -> list[int]:
        found = self.known.match(ask)
        return [found.get(node, 0) for node in self.nodes]

    async def ask(self, tokens: list[int] | str, **fields: Any) -> Ask:
        head = read_head(msgspec.json.encode({"model": "m", "prompt": tokens, **fields}))
        ask = read_ask(head, "m")
        await self.known.read(ask)
        return ask

    async def settled(self, condition: Callable[[], bool], what: str) -> None:
        """While the nodes publish and the router follows its table."""

        def look() -> bool:
            self.known.refresh()
            for publisher in self.publishers:
                publisher.events.publish()
            return condition()

        await until(look, what)

    async def ready(self) -> None:
        held = [lambda node=node: self.known._subscriptions[node].held for node in self.nodes[:2]]
        await self.settled(lambda: all(each().complete for each in held), "both nodes have told everything")


def replace_info(info: NodeInfo, **facts: Any) -> NodeInfo:
    return msgspec.structs.replace(info, **facts)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    try:
        yield made
    finally:
        made.known.close()
        for publisher in made.publishers:
            publisher.events.close()
        made.context.destroy(linger=0)


PROMPT = list(range(100, 133))


async def test_the_longest_real_prefix_is_found_where_the_guess_is_wrong(world: World) -> None:
    """Both nodes were sent the prompt, so the guess is that both hold it; one has evicted it since, and a third never says what it has."""
    first, second = world.publishers
    ask = await world.ask(PROMPT)
    assert ask.exact is None  # nobody publishes yet
    await world.ready()
    long = list(range(100, 300))  # bytes enough for the guess to have blocks
    ask = await world.ask(long)
    world.known.placed(world.nodes[:3], ask)
    world.now_s += EXPECTED_IS_OVER_S
    first.store(long[:40])
    second.store(long[:60])
    await world.settled(lambda: world.hits(ask)[:2] == [40, 60], "what was stored is known")
    assert ask.num_tokens == 200
    assert world.hits(ask)[2] > 100  # guessed
    second.evict_all()
    second.store(long[:8])
    await world.settled(lambda: world.hits(ask)[:2] == [40, 8], "what was evicted is known")
    guessed = world.guesses.match(ask)
    assert guessed[world.nodes[0]] == guessed[world.nodes[1]] > 100
    world.table.retire(world.nodes[2])
    for _ in range(4):
        placement = world.pairing.place(ask)
        assert (placement.prefill, placement.num_hit_tokens) == (world.nodes[0], 40)
        placement.decode_ended()
        world.now_s += EXPECTED_IS_OVER_S


async def test_a_prompt_under_way_counts_as_held(world: World) -> None:
    await world.ready()
    world.publishers[0].store(PROMPT[:4])
    ask = await world.ask(PROMPT)
    await world.settled(lambda: world.hits(ask) == [4, 0, 0], "it is known")
    world.known.placed(world.nodes[:1], ask)
    assert world.hits(await world.ask(PROMPT)) == [32, 0, 0]
    world.now_s += EXPECTED_IS_OVER_S
    assert world.hits(await world.ask(PROMPT)) == [4, 0, 0]


async def test_text_is_looked_up_by_its_tokens_and_salted_prompts_are_not(world: World) -> None:
    await world.ready()
    messages = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog."}]
    head = read_head(msgspec.json.encode({"messages": messages}))
    ask = read_ask(head, "m")
    await world.known.read(ask)
    tokens = np.frombuffer(ask.exact.packed, np.uint32).tolist()  # type: ignore[attr-defined]
    world.publishers[1].store(tokens[: len(tokens) // PAGE * PAGE])
    await world.settled(lambda: world.hits(ask)[1] == (len(tokens) - 1) // PAGE * PAGE, "the conversation is known")
    for field in ("lora_path", "cache_salt", "extra_key"):
        assert (await world.ask(PROMPT, **{field: "x"})).exact is None
    assert (await world.ask("text")).exact is not None
    world.say(world.table.decode[0], served_model_name="other")
    world.table.version += 1
    assert (await world.ask("text")).exact is None  # whose tokenizer is it?
    assert (await world.ask(PROMPT)).exact is not None


async def test_after_a_gap_everything_is_learnt_anew(world: World) -> None:
    await world.ready()
    publisher, ask, lost = world.publishers[0], await world.ask(PROMPT), await world.ask(list(range(500, 520)))
    publisher.store(PROMPT[:20])
    await world.settled(lambda: world.hits(ask)[0] == 20, "it is known")
    publisher.evict_all()
    publisher.store(list(range(500, 516)))
    publisher.events._events.clear()  # lost, with its number
    publisher.events.num_published += 1
    publisher.store(PROMPT[:12])
    await world.settled(lambda: world.known.counts.gaps == 1, "the gap is seen")
    await world.settled(lambda: (world.hits(ask)[0], world.hits(lost)[0], world.known.num_blocks[world.nodes[0]]) == (12, 16, 7), "what it holds")
    assert world.known.counts.gaps == 1


@pytest.mark.parametrize("same_port", [True, False])
async def test_a_restarted_node_holds_nothing_that_it_held_before(world: World, same_port: bool) -> None:
    await world.ready()
    ask = await world.ask(PROMPT)
    world.publishers[0].store(PROMPT[:20])
    await world.settled(lambda: world.hits(ask)[0] == 20, "it is known")
    port = world.publishers[0].events.port
    world.publishers[0].events.close()
    world.publishers[0] = await restarted(world, port if same_port else 0)
    world.publishers[0].store(PROMPT[:8])
    # other engines do not say that they are new: the other port does
    world.say(world.nodes[0], incarnation=77 if same_port else 0, kv_events_port=world.publishers[0].events.port)
    await world.settled(lambda: world.hits(ask)[0] == 8 and world.known.num_blocks[world.nodes[0]] == 2, "what it holds now")


async def restarted(world: World, port: int) -> Publisher:
    made: list[Publisher] = []

    def try_it() -> bool:
        try:
            made.append(Publisher(world.context, port))
        except StartupError:  # the closed socket's port is given back by ZMQ's own thread
            return False
        return True

    await until(try_it, "the port is free again")
    return made[0]


async def test_a_node_that_leaves_is_forgotten(world: World) -> None:
    await world.ready()
    ask = await world.ask(PROMPT)
    world.publishers[0].store(PROMPT[:20])
    await world.settled(lambda: world.hits(ask)[0] == 20, "it is known")
    world.table.remove(world.nodes[0])
    assert world.nodes[0] not in world.known.match(ask)
    world.known.refresh()
    assert list(world.known.num_blocks) == [world.nodes[1]]
    world.table.remove(world.nodes[1])
    assert (await world.ask(PROMPT)).exact is None


async def test_garbage_is_counted_and_passed_over(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """From a socket that says anything: the events between are believed."""
    socket = world.context.socket(zmq.PUB)
    socket.set(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    world.say(world.nodes[2], kv_events_port=port)
    event = {"type": "BlockStored", "block_hashes": [b"x"], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}
    stored = msgspec.msgpack.encode([0.0, [event]])
    frames = [[b"junk"], [b"", b"short", stored], [b"", bytes(8), b"\xc1" * 40], [b"", bytes(8), b""], [b"", bytes(8), b"\x92\x01\x91\x05"]]
    world.known.refresh()

    def send() -> bool:
        for message in frames:
            socket.send_multipart(message)
        socket.send_multipart([b"", bytes(7) + b"\3", stored])
        return world.known.counts.not_events > 5

    await until(send, "it has come")
    ask = await world.ask([1, 2, 3])
    await until(lambda: world.hits(ask)[2] == 2, "the event is believed")
    assert [record.levelname for record in caplog.records if "passed over" in record.message] == ["WARNING"]
    socket.close()


async def test_a_node_that_tells_no_snapshot_is_guessed_where_nothing_is_known(world: World) -> None:
    """vLLM's and SGLang's: what was stored before the router subscribed stays unknown."""
    socket = world.context.socket(zmq.PUB)
    socket.set(zmq.LINGER, 0)
    world.say(world.nodes[2], kv_events_port=socket.bind_to_random_port("tcp://127.0.0.1"))
    await world.ready()
    long, other = list(range(100, 300)), list(range(500, 700))
    world.known.placed(world.nodes[2:3], await world.ask(long))
    world.now_s += EXPECTED_IS_OVER_S
    number = 0

    def send() -> bool:
        nonlocal number
        event = ["BlockStored", [number], None, other[:16], 16, None, "GPU"]
        socket.send_multipart([b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [event], 0])])
        number += 1
        return bool(world.known.num_blocks[world.nodes[2]])

    await until(send, "an event has come")
    assert world.hits(await world.ask(other))[2] == 16
    assert world.hits(await world.ask(long))[2] > 100
    world.table.remove(world.nodes[0])
    number, other[0] = number + 3, 1  # a gap: what was stored may have been removed
    send()
    await until(lambda: world.known.counts.gaps == 1, "the gap is seen")
    assert world.hits(await world.ask(other))[2] == 16
    assert world.hits(await world.ask([500, *other[1:]]))[2] == 0
    socket.close()


async def test_a_real_schedulers_prompts_are_found(world: World) -> None:
    """What a node computed, it holds and publishes; what it then needed the pages for, it does not."""
    world.publishers[0].events.close()
    scheduler = SchedulerNode("prefill", num_pages=NUM_PAGES, page_size=PAGE)
    events = KVEvents(world.context, scheduler.cache.tree, num_pages=NUM_PAGES, page_size=PAGE, host="127.0.0.1", port=0)
    scheduler.scheduler._events = world.publishers[0].events = events
    world.say(world.nodes[0], incarnation=5, kv_events_port=events.port)
    await world.ready()
    scheduler.run_until_answered(scheduler.submit(PROMPT, 2))
    ask = await world.ask([*PROMPT, 1, 2, 3, 4])
    await world.settled(lambda: world.hits(ask)[0] == 32, "the prompt is held")
    scheduler.run_until_answered(scheduler.submit(list(range(500, 560)), 2))
    rest = scheduler.cache.match(PROMPT)
    scheduler.cache.release(rest)
    assert len(rest) < 8
    await world.settled(lambda: world.hits(ask)[0] == len(rest) * PAGE, "what is left of it")


def test_kv_events_need_a_tokenizer(tmp_path: Path) -> None:
    config = RouterConfig(kv_events=True)
    with pytest.raises(StartupError, match="give --tokenizer-path DIRECTORY"):
        KnownPrefixes.of(config, NodeTable.of(config))
    with pytest.raises(StartupError, match=r"has no tokenizer\.json"):
        KnownPrefixes.of(replace(config, tokenizer_path=str(tmp_path)), NodeTable.of(config))


async def test_following_ends_with_its_subscriptions(world: World) -> None:
    task = asyncio.ensure_future(world.known.follow())
    await until(lambda: len(world.known.num_blocks) == 2, "both are subscribed to")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.known.num_blocks == {}
    world.known = KnownPrefixes(world.table, world.guesses, world.known._reader)  # closed by the fixture
