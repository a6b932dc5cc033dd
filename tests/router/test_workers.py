"""Several router processes on one port: real ones."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from mock_node import EVENTS, MockNode, Received, mock_nodes
from prometheus_client.parser import text_string_to_metric_families
from router_harness import CHAT, until

from common.config import RouterConfig
from common.errors import StartupError
from common.http_server import bind
from common.launch import Child, Reporter, python_argv
from router.workers import Supervisor, run_workers, share_of

WITHIN_S = 60.0  # processes are started, on a busy machine
NEW_NODE = "http://127.0.0.1:9"
KEY = "0123456789abcdef0123456789abcdef"

pytestmark = pytest.mark.system


class Rig:
    def __init__(self, supervisor: Supervisor, prefills: list[MockNode], decodes: list[MockNode]) -> None:
        self.supervisor = supervisor
        self.prefills = prefills
        self.decodes = decodes
        self.url = f"http://127.0.0.1:{supervisor.config.port}"

    async def ask(self, path: str = "/health") -> httpx.Response:
        """On a connection of its own: the kernel chooses a worker."""
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=10) as client:
            return await client.get(self.url + path)

    async def chat(self) -> httpx.Response:
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=10) as client:
            return await client.post(self.url + CHAT, json={})

    async def metric(self, name: str, **labels: str) -> dict[str, float]:
        """Of each worker."""
        text = (await self.ask("/metrics")).text
        found = [sample for family in text_string_to_metric_families(text) for sample in family.samples if sample.name == name]
        return {sample.labels["worker"]: sample.value for sample in found if labels.items() <= sample.labels.items()}

    async def until_metric(self, expected: dict[str, float], name: str, **labels: str) -> None:
        async def is_so() -> bool:
            try:
                return await self.metric(name, **labels) == expected
            except httpx.TransportError:  # the worker that was asked was killed
                return False

        await until(is_so, f"{name} {expected}", WITHIN_S)

    def pid(self, number: int) -> int:
        child = self.supervisor.workers[number].child
        assert child is not None
        return child.process.pid


@contextmanager
def held_port() -> Iterator[int]:
    with bind("127.0.0.1", 0, reuse_port=True, listen=False) as holder:
        yield holder.getsockname()[1]


@asynccontextmanager
async def rig(**settings: Any) -> AsyncIterator[Rig]:
    """Two workers of a supervisor in the test's own process, before mock nodes."""
    async with mock_nodes() as (prefills, decodes):
        with held_port() as port:
            config = RouterConfig(prefill=(prefills[0].url,), decode=(decodes[0].url,), port=port, workers=2, health_check_interval_s=0.1, **settings)
            supervisor = Supervisor(config, Reporter(None), True, hung_s=4.0)
            running = asyncio.ensure_future(supervisor.run())
            made = Rig(supervisor, prefills, decodes)
            try:
                await until(lambda: running.done() or all(worker.serves for worker in supervisor.workers), "all workers serve", WITHIN_S)
                if running.done():
                    running.result()
                await made.until_metric({"0": 1, "1": 1}, "pdserve_router_node_up", leg="decode", node=decodes[0].url)
                yield made
            finally:
                supervisor.stopping.set()
                assert await running == 0


async def test_workers_share_the_port_the_admins_commands_and_the_metrics_page_and_come_back_when_killed(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    async with rig(admin_api_key_file=str(tmp_path / "key")) as made:
        while len([count for count in (await made.metric("pdserve_http_requests_total", path=CHAT)).values() if count]) < 2:
            assert (await made.chat()).status_code == 200

        async with httpx.AsyncClient(verify=False, trust_env=False, headers={"authorization": f"Bearer {KEY}"}) as admin:
            assert (await admin.post(f"{made.url}/workers", json={"url": NEW_NODE, "role": "decode"})).status_code == 201
            assert (await admin.post(f"{made.url}/workers", json={"url": NEW_NODE, "role": "decode"})).status_code == 409
        assert await made.metric("pdserve_router_node_up", node=NEW_NODE) == {"0": 0, "1": 0}

        os.kill(made.pid(1), signal.SIGKILL)
        await until(lambda: not made.supervisor.workers[1].serves, "its death is noticed", WITHIN_S)
        assert {(await made.chat()).status_code for _ in range(20)} == {200}
        await made.until_metric({"0": 1, "1": 1}, "pdserve_router_worker_up")
        assert await made.metric("pdserve_router_worker_restarts_total") == {"0": 0, "1": 1}
        assert await made.metric("pdserve_router_node_up", node=NEW_NODE) == {"0": 0, "1": 0}
        await made.until_metric({"0": 1, "1": 1}, "pdserve_router_node_up", leg="decode", node=made.decodes[0].url)

        frozen = made.pid(0)
        os.kill(frozen, signal.SIGSTOP)
        await until(lambda: made.pid(0) != frozen and made.supervisor.workers[0].serves, "a frozen worker is replaced", WITHIN_S)
        assert not psutil.pid_exists(frozen)
        assert {(await made.chat()).status_code for _ in range(10)} == {200}


@asynccontextmanager
async def process(*flags: str) -> AsyncIterator[tuple[Child, str, list[MockNode]]]:
    """`pdserve router` with two workers, before mock nodes; its decode node."""
    async with mock_nodes() as (prefills, decodes):
        argv = ["router", "--prefill", prefills[0].url, "--decode", decodes[0].url, "--port", "0", "--workers", "2", "--health-check-interval", "0.1"]
        child = Child("router", python_argv("pdserve", *argv, *flags))
        try:
            facts = await child.wait_ready()
            yield child, f"http://127.0.0.1:{facts['port']}", decodes
        finally:
            await child.stop(15)


async def test_sigterm_drains_every_worker_and_leaves_no_process() -> None:
    go = asyncio.Event()

    async def decode(request: Received) -> None:
        await request.head(200, "text/event-stream")
        await request.chunk(EVENTS[0])
        await go.wait()
        await request.chunk(b"data: [DONE]\n\n")
        await request.end()

    async with process("--shutdown-timeout", "8") as (child, url, decodes):
        decodes[0].behave = decode
        workers = psutil.Process(child.process.pid).children()
        assert len(workers) == 2

        async def stream() -> str:
            async with httpx.AsyncClient(verify=False, trust_env=False, timeout=20) as client:
                return (await client.post(url + CHAT, json={"stream": True})).text

        async with AsyncExitStack() as stack:  # each keeps its connection, so its worker; one of eight is most likely another's
            clients = [await stack.enter_async_context(httpx.AsyncClient(verify=False, trust_env=False, timeout=20)) for _ in range(8)]

            async def all_answer(status: int) -> bool:
                return {(await client.get(f"{url}/ready")).status_code for client in clients} == {status}

            await until(lambda: all_answer(200), "ready", WITHIN_S)
            streams = [asyncio.ensure_future(stream()) for _ in range(8)]
            await decodes[0].wait_posts(8)
            child.process.send_signal(signal.SIGTERM)
            await until(lambda: all_answer(503), "all are draining", WITHIN_S)
            go.set()
            texts = await asyncio.gather(*streams)
        assert all(text.endswith("data: [DONE]\n\n") and "error" not in text for text in texts)
        assert await child.wait_death() == 0
        assert not any(worker.is_running() for worker in workers)


async def test_a_worker_that_cannot_start_is_its_sentence() -> None:
    body = ("import common.errors, common.launch", "def main(*_): raise common.errors.StartupError('no such file')", "common.launch.run_child(main)")
    supervisor = Supervisor(RouterConfig(port=9, workers=2), Reporter(None), True, program=(sys.executable, "-c", "\n".join(body)))
    with pytest.raises(StartupError, match=r"^no such file$"):
        await supervisor.run()
    assert all(worker.child is not None and worker.child.process.returncode == 2 for worker in supervisor.workers)


@pytest.mark.parametrize("reuse_port", [False, True])
def test_a_port_that_others_listen_on_is_one_sentence_even_when_they_would_share(reuse_port: bool) -> None:
    with bind("127.0.0.1", 0, reuse_port=reuse_port) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"cannot serve HTTP on 127.0.0.1:{port}"):
            run_workers(RouterConfig(port=port, workers=2))


def test_a_port_that_is_held_takes_no_connection_until_a_worker_listens() -> None:
    with held_port() as port:
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            pass
        with bind("127.0.0.1", port, reuse_port=True), socket.create_connection(("127.0.0.1", port)), pytest.raises(StartupError):
            bind("127.0.0.1", port)


def test_limits_of_the_router_are_divided_and_none_becomes_nothing() -> None:
    share = share_of(RouterConfig(workers=4, max_concurrent_requests=10, queue_size=0, rate_limit=2.0, prefix_index_size=1 << 17))
    assert (share.max_concurrent_requests, share.queue_size, share.rate_limit, share.prefix_index_size) == (3, 0, 0.5, 1 << 15)
    assert share_of(RouterConfig(workers=64, max_concurrent_requests=1)).max_concurrent_requests == 1
    assert share_of(config := RouterConfig()) == replace(config)
