"""A router in the test's own event loop, with mock nodes behind it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from mock_node import MockNode, mock_nodes

from common.config import RouterConfig
from common.http_server import bind
from common.launch import Reporter
from router.main import Router
from router.nodes import Node, NodeTable

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass
class Rig:
    prefills: list[MockNode]
    decodes: list[MockNode]
    router: Router
    client: httpx.AsyncClient
    url: str
    running: "asyncio.Task[int]"

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def node(self, mock: MockNode) -> Node:
        return next(node for node in self.router.nodes.all if node.url == mock.url)

    async def info(self) -> Any:
        return (await self.client.get("/server_info")).json()

    async def metric(self, name: str) -> dict[str, float]:
        """Samples of one metric, by their labels as written."""
        text = (await self.client.get("/metrics")).text
        samples = [line[len(name) :].rsplit(" ", 1) for line in text.splitlines() if line.startswith((name + "{", name + " "))]
        return {labels: float(value) for labels, value in samples}

    async def retries(self) -> float:
        return sum((await self.metric("pdserve_router_retries_total")).values())


@asynccontextmanager
async def rig(num_prefill: int = 1, num_decode: int = 1, *, ready: bool = True, **settings: Any) -> AsyncIterator[Rig]:
    async with mock_nodes(num_prefill, num_decode) as (prefills, decodes), routed(prefills, decodes, ready=ready, **settings) as made:
        yield made


@asynccontextmanager
async def routed(prefills: list[MockNode], decodes: list[MockNode], *, ready: bool = True, **settings: Any) -> AsyncIterator[Rig]:
    """Round robin, so that the first request meets the first nodes; probes 20 times a second."""
    fixed: dict[str, Any] = {"policy": "round_robin", "health_check_interval_s": 0.05, "shutdown_timeout_s": 0.2, "port": 0}
    config = RouterConfig(prefill=tuple(node.url for node in prefills), decode=tuple(node.url for node in decodes), **{**fixed, **settings})
    with bind("127.0.0.1", 0) as listener:
        router = Router(config, listener, Reporter(None), True, NodeTable.of(config))
        running = asyncio.ensure_future(router.run())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False, verify=False) as client:
                made = Rig(prefills, decodes, router, client, url, running)
                if ready:
                    await until(lambda: all(node.usable for node in router.nodes.all), "all nodes usable")
                yield made
        finally:
            router.stop.set()
            assert await running == 0


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = 5.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                outcome = condition()
                if outcome if isinstance(outcome, bool) else await outcome:
                    return
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None


def events(text: str) -> list[Any]:
    """The data of each event; every event must be complete and readable, [DONE] stays a string."""
    assert text.endswith("\n\n"), text[-80:]
    return [part if part == "[DONE]" else json.loads(part) for part in (event.removeprefix("data: ") for event in text[:-2].split("\n\n"))]
