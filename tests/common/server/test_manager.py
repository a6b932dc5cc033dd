"""The TokenizerManager on its own: a rid leaves the table exactly once."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from fake_scheduler import FACTS, FakeScheduler, words
from http_node import write_model_dir

from common.config import NodeAddresses
from common.errors import Failure, RequestError
from common.messages import Abort, DropStream, Generate, TextOut
from common.server.health import NodeHealth
from common.server.openai_schema import RequestParser
from common.server.tokenizer import Tokenizer
from common.server.tokenizer_manager import MESSAGES_A_TURN, ClientLeft, Limits, Stream, TokenizerManager

PARSER = RequestParser("m", bootstrap_port=8998)
LIMITS = Limits(context_length=256, pool_tokens=100, vocab_size=512, max_open_prompts=8, outputs_elsewhere=False)


class Bench:
    def __init__(self, manager: TokenizerManager, scheduler: FakeScheduler, health: NodeHealth, tokenizer: Tokenizer) -> None:
        self.manager, self.scheduler, self.health, self.tokenizer = manager, scheduler, health, tokenizer

    async def open(self, timeout_s: float = 60, **fields: Any) -> Stream:
        request = PARSER.parse_completion(json.dumps({"prompt": "a", **fields}).encode())
        return await self.manager.open(request, secrets.token_hex(4), time.time() + timeout_s)

    async def generate(self) -> Generate:
        return await asyncio.wait_for(self.scheduler.generates.get(), 5)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    model_dir = write_model_dir(tmp_path / "model")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    addresses = NodeAddresses(tmp_path)
    scheduler, health = FakeScheduler(context, addresses), NodeHealth()
    manager, tokenizer = TokenizerManager(health, context, addresses), Tokenizer.from_dir(model_dir)
    manager.load(tokenizer, LIMITS)
    manager.listen()
    health.loaded(FACTS)
    yield Bench(manager, scheduler, health, tokenizer)
    manager.shut()
    scheduler.close()
    context.destroy(linger=0)


async def outputs(stream: Stream, number: int) -> list[tuple[int, TextOut]]:
    arrived: list[tuple[int, TextOut]] = []
    while len(arrived) < number:
        arrived += await asyncio.wait_for(stream.next(), 5)
    return arrived


async def test_a_burst_of_messages_arrives_whole_and_in_order(bench: Bench) -> None:
    stream = await bench.open()
    rid = (await bench.generate()).rid
    for i in range(4 * MESSAGES_A_TURN):
        bench.scheduler.emit(TextOut(rid=rid, text=str(i), num_new_tokens=1))
    bench.scheduler.emit(TextOut(rid=rid, finish_reason="stop"))
    arrived = await outputs(stream, 4 * MESSAGES_A_TURN + 1)
    assert [out.text for _, out in arrived[:-1]] == [str(i) for i in range(4 * MESSAGES_A_TURN)]
    assert bench.manager.num_open == 0


async def test_nothing_follows_a_terminal_output(bench: Bench) -> None:
    stream = await bench.open()
    rid = (await bench.generate()).rid
    bench.scheduler.emit(TextOut(rid=rid, text="a", finish_reason="stop"), TextOut(rid=rid, failure=Failure(500, "late")), TextOut(rid=rid, text="b"))
    bench.scheduler.emit(TextOut(rid="nobody", text="x"))
    assert [out.text for _, out in await outputs(stream, 1)] == ["a"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.next(), 0.05)


async def test_a_stream_that_is_closed_is_aborted_once(bench: Bench) -> None:
    stream = await bench.open(prompt=["a", "b"])
    first, second = await bench.generate(), await bench.generate()
    bench.scheduler.emit(TextOut(rid=first.rid, finish_reason="stop"))
    await outputs(stream, 1)
    bench.manager.close(stream)
    bench.manager.close(stream)
    assert bench.manager.num_open == 0
    assert await asyncio.wait_for(bench.scheduler.aborts.get(), 5) == Abort(second.rid, "client_left")
    assert await asyncio.wait_for(bench.scheduler.drops.get(), 5) == DropStream(second.rid)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(bench.scheduler.aborts.get(), 0.05)


async def test_a_client_that_left_gets_nothing(bench: Bench) -> None:
    stream = await bench.open()
    bench.scheduler.emit(TextOut(rid=(await bench.generate()).rid, text="a", num_new_tokens=1))
    waiting = asyncio.ensure_future(outputs(stream, 2))
    await asyncio.sleep(0.02)
    stream.client_left()
    with pytest.raises(ClientLeft):
        await waiting
    bench.manager.close(stream)


async def test_the_backstop_ends_what_the_scheduler_forgot(bench: Bench) -> None:
    stream = await bench.open(timeout_s=0.05)
    (index, out), = await outputs(stream, 1)
    assert index == 0
    assert out.failure is not None
    assert (out.failure.status, out.failure.code) == (504, "deadline_exceeded")
    assert (await asyncio.wait_for(bench.scheduler.aborts.get(), 5)).cause == "deadline"
    assert bench.manager.num_open == 0


async def test_failing_all_ends_every_stream_once(bench: Bench) -> None:
    streams = [await bench.open(), await bench.open(prompt=["a", "b"])]
    failure = Failure(503, "the node ends", code="node_failed")
    bench.health.fail(failure)
    bench.manager.fail_all(failure)
    bench.manager.fail_all(Failure(500, "an echo"))
    for stream in streams:
        assert [out.failure for _, out in await outputs(stream, 1)] == [failure]
    assert bench.manager.num_open == 0
    with pytest.raises(RequestError, match="the node ends"):
        await bench.open()


async def test_draining_refuses_what_was_being_tokenised(bench: Bench) -> None:
    opening = asyncio.ensure_future(bench.open(prompt="hello " * 4000))
    await asyncio.sleep(0)
    assert bench.manager.num_open == 1
    bench.health.drain()
    with pytest.raises(RequestError):
        await opening
    assert bench.manager.num_open == 0


@pytest.mark.parametrize(("fields", "message"), [
    ({"prompt": [5] * 100}, "raise --max-total-tokens"),
    ({"prompt": [5] * 60, "max_tokens": 41}, "lower max_tokens to 40"),
])  # fmt: skip
async def test_what_the_pool_can_never_hold_is_refused(bench: Bench, fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        await bench.open(**fields)
    assert caught.value.failure.code == "context_length_exceeded"


async def test_on_a_prefill_node_the_output_of_a_paired_prompt_needs_no_page(bench: Bench) -> None:
    bench.manager.load(bench.tokenizer, Limits(context_length=256, pool_tokens=100, vocab_size=512, max_open_prompts=8, outputs_elsewhere=True))
    bench.scheduler.auto = words
    pair = {"bootstrap_host": "h", "bootstrap_room": 1}
    stream = await bench.open(prompt=[5] * 60, max_tokens=100, **pair)
    await outputs(stream, 100)
    with pytest.raises(RequestError):
        await bench.open(prompt=[5] * 60, max_tokens=100)


async def test_rooms_are_free_again_when_their_request_has_ended(bench: Bench) -> None:
    pair = {"bootstrap_host": "h", "bootstrap_room": 1}
    stream = await bench.open(**pair)
    with pytest.raises(RequestError, match="another open request"):
        await bench.open(**pair)
    bench.manager.close(stream)
    bench.manager.close(await bench.open(**pair))
    assert bench.manager.num_open == 0


def test_health_is_live_by_heartbeat_and_ready_by_phase() -> None:
    now_s = 1000.0
    health = NodeHealth(clock=lambda: now_s)
    assert (health.live, health.ready) == (True, False)
    health.loaded(FACTS)
    assert (health.live, health.ready, health.refusal()) == (True, True, None)
    now_s += 31
    assert (health.live, health.ready) == (False, False)
    health.heartbeat(health.status)
    assert (health.live, health.ready) == (True, True)
    health.drain()
    assert (health.live, health.ready) == (True, False)
    health.loaded(FACTS)  # a load that ends late does not undo the shutdown
    assert not health.ready
    failure = Failure(503, "dead")
    health.fail(failure)
    health.drain()
    assert (health.live, health.ready, health.refusal()) == (False, False, failure)
