"""Workers of one router: commands that hold for all, one page of metrics; over real sockets, in one event loop."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as CounterMetric
from prometheus_client.parser import text_string_to_metric_families

from common.config import JsonObject
from common.errors import RequestError, invalid
from common.metrics import render
from router import siblings as siblings_module
from router import worker_metrics
from router.siblings import Hub, Siblings

STATIC = "http://static:1"


def command(kind: str, url: str, **more: object) -> JsonObject:
    return {"command": kind, "url": url, **more}


@dataclass
class Worker:
    """What it was told, in order; it refuses URLs that say so."""

    siblings: Siblings
    applied: list[JsonObject]

    def go(self) -> None:
        """As a process's death."""
        self.siblings.close()


@dataclass
class Cluster:
    hub: Hub
    workers: dict[int, Worker] = field(default_factory=dict)
    _started: list[Worker] = field(default_factory=list)
    _links: list["asyncio.Task[None]"] = field(default_factory=list)

    async def start(self, number: int) -> Worker:
        applied: list[JsonObject] = []

        def apply(told: JsonObject) -> Any:
            if "refused" in told["url"]:
                raise invalid(f"{told['url']} is refused", param="url")
            if "broken" in told["url"]:
                raise LookupError("a bug")
            applied.append(told)
            return {"by": number, "told": told}

        registry = CollectorRegistry()
        Gauge("number", "Of the worker", registry=registry).set(number)
        ours, theirs = socket.socketpair()
        siblings = Siblings(lambda: render(registry), apply)
        self._links.append(asyncio.ensure_future(self.hub.serve(number, ours)))
        async with asyncio.timeout(5):
            await siblings.join(theirs)
        self.workers[number] = Worker(siblings, applied)
        self._started.append(self.workers[number])
        return self.workers[number]

    def freeze(self, number: int) -> socket.socket:
        """A worker that is there and does nothing."""
        ours, theirs = socket.socketpair()
        self._links.append(asyncio.ensure_future(self.hub.serve(number, ours)))
        return theirs

    async def end(self) -> None:
        for worker in self._started:
            worker.go()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)


@asynccontextmanager
async def cluster(num_started: int, num_workers: int | None = None) -> AsyncIterator[Cluster]:
    made = Cluster(Hub(num_workers or num_started, (STATIC,)))
    try:
        for number in range(num_started):
            await made.start(number)
        yield made
    finally:
        await made.end()


async def test_a_command_holds_in_every_worker_and_is_answered_by_the_one_that_was_asked() -> None:
    async with cluster(3) as made:
        told = command("add", "http://new:1", role="decode", bootstrap_port=None)
        assert await made.workers[1].siblings.broadcast(told) == {"by": 1, "told": told}
        assert [worker.applied for worker in made.workers.values()] == [[told]] * 3


async def test_a_refusal_is_the_askers_and_nobody_follows() -> None:
    async with cluster(2) as made:
        with pytest.raises(RequestError) as refused:
            await made.workers[0].siblings.broadcast(command("add", "http://refused:1"))
        assert (refused.value.failure.status, refused.value.failure.param) == (400, "url")
        assert made.workers[1].applied == []
        assert (await made.start(1)).applied == []


async def test_all_workers_carry_out_all_commands_in_one_order() -> None:
    async with cluster(3) as made:
        asked = [command("drain", f"http://n{number}:1") for number in range(30)]
        await asyncio.gather(*(made.workers[number % 3].siblings.broadcast(told) for number, told in enumerate(asked)))
        orders = [[told["url"] for told in worker.applied] for worker in made.workers.values()]
        assert orders[0] == orders[1] == orders[2]
        assert Counter(orders[0]) == Counter(told["url"] for told in asked)


async def test_a_worker_that_starts_later_knows_what_holds_before_it_serves() -> None:
    async with cluster(2, 3) as made:
        for told in (
            command("add", "http://stays:1", role="prefill"),
            command("add", "http://leaves:1,8998", role="prefill"),
            command("drain", "http://leaves:1"),
            command("drain", "http://stays:1"),
            command("undrain", "http://stays:1"),
            command("drain", "http://stays:1"),
            command("remove", "http://leaves:1/"),
            command("add", STATIC, role="prefill"),
            command("remove", STATIC),
            command("drain", "http://pod:1"),
            command("remove", "http://pod:1"),
        ):
            await made.workers[0].siblings.broadcast(told)
        late = await made.start(2)
        assert [(told["command"], told["url"]) for told in late.applied] == [
            ("add", "http://stays:1"), ("undrain", "http://stays:1"), ("drain", "http://stays:1"),
            ("remove", STATIC), ("remove", "http://pod:1"),
        ]  # fmt: skip


async def test_commands_go_on_while_workers_come_and_go() -> None:
    async with cluster(2) as made:
        made.workers[1].go()
        await made.workers[0].siblings.broadcast(command("add", "http://a:1"))
        back = await made.start(1)
        await back.siblings.broadcast(command("add", "http://b:1"))
        assert [told["url"] for told in back.applied] == [told["url"] for told in made.workers[0].applied] == ["http://a:1", "http://b:1"]


async def test_a_worker_that_does_not_answer_is_not_waited_for_and_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(siblings_module, "APPLY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(siblings_module, "METRICS_TIMEOUT_S", 0.05)
    async with cluster(1, 2) as made:
        with made.freeze(1) as frozen:
            while 1 not in made.hub._channels:
                await asyncio.sleep(0)
            told = command("add", "http://a:1")
            assert await made.workers[0].siblings.broadcast(told) == {"by": 0, "told": told}
            assert "worker 1 does not follow" in caplog.text
            frozen.setblocking(False)
            assert b"http://a:1" in frozen.recv(1 << 16)
            assert not await made.hub.ping(1, 0.05)
            page = samples((await made.workers[0].siblings.metrics()).decode())
            assert page["pdserve_router_worker_up", ("0",)] == 1
            assert page["pdserve_router_worker_up", ("1",)] == 0
            assert page["number", ("0",)] == 0
            assert ("number", ("1",)) not in page


async def test_a_fault_in_a_worker_is_logged_there_and_a_500_here(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(2) as made:
        with pytest.raises(RequestError) as failed:
            await made.workers[0].siblings.broadcast(command("add", "http://broken:1"))
        assert failed.value.failure.status == 500
        assert "LookupError: a bug" in caplog.text


async def test_metrics_are_of_all_workers_whoever_is_asked() -> None:
    async with cluster(3) as made:
        made.hub.num_restarts[2] = 4
        pages = [samples((await worker.siblings.metrics()).decode()) for worker in made.workers.values()]
        assert pages[0] == pages[1] == pages[2]
        assert {key: value for key, value in pages[0].items() if key[0] == "number"} == {("number", (str(n),)): n for n in range(3)}
        assert pages[0]["pdserve_router_worker_restarts_total", ("2",)] == 4


async def test_without_the_hub_there_is_a_sentence_or_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings_module, "APPLY_TIMEOUT_S", 0.01)
    monkeypatch.setattr(siblings_module, "METRICS_TIMEOUT_S", 0.01)
    async with cluster(1) as made:
        siblings, hub = made.workers[0].siblings, made.hub
        await hub._one_command.acquire()  # it is busy with others' commands
        assert await siblings.broadcast(command("drain", "http://a:1")) is None
        hub._one_command.release()
        await made.end()
        for asked in (siblings.metrics(), siblings.broadcast(command("drain", "http://a:1"))):
            with pytest.raises(RequestError, match="the supervisor of this router's workers"):
                await asked


async def test_ping() -> None:
    async with cluster(1, 2) as made:
        assert await made.hub.ping(0, 5)
        assert await made.hub.ping(1, 5)  # it is not there, which is noticed elsewhere


async def test_a_router_of_one_process_has_the_same_two_methods() -> None:
    applied: list[JsonObject] = []
    alone = Siblings(lambda: b"text", applied.append)
    await alone.join(None)
    assert await alone.metrics() == b"text"
    await alone.broadcast(command("drain", "http://a:1"))
    assert applied == [command("drain", "http://a:1")]
    alone.close()


@given(st.lists(st.text(max_size=12), min_size=1, max_size=4, unique=True))
def test_what_is_merged_reads_as_what_went_in(values: list[str]) -> None:
    texts, expected = {}, {}
    for number in range(3):
        registry = CollectorRegistry()
        counter = CounterMetric("requests", 'Says "this" {and} that', ("path", "status"), registry=registry)
        Gauge("plain", "No label", registry=registry).set(number + 0.5)
        histogram = Histogram("seconds", "With buckets", ("node",), buckets=(0.1, 1), registry=registry)
        for value in values:
            counter.labels(value, "200").inc(number)
            histogram.labels(value).observe(number)
        texts[number] = render(registry)
        for family in text_string_to_metric_families(texts[number].decode()):
            for sample in family.samples:
                expected[sample.name, tuple(sorted({**sample.labels, "worker": str(number)}.items()))] = sample.value
    families = list(text_string_to_metric_families(worker_metrics.merge(texts).decode()))
    assert {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples} == expected
    assert max(Counter(family.name for family in families).values()) == 1
    assert {family.name: family.documentation for family in families}["requests"] == 'Says "this" {and} that'


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """By name and labels' values."""
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, tuple(sample.labels.values())): sample.value for sample in found}
