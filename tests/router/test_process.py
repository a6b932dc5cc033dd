"""The router as a process: its start, its end, its size."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest
from mock_node import EVENTS, MockNode, Received, hang, mock_nodes
from router_harness import CHAT, events, until

from common.errors import StartupError
from common.launch import Child, ChildDied, python_argv

MAX_RESIDENT_BYTES = 90_000_000
FORBIDDEN = ("aiohttp", "torch", "transformers", "numpy", "numba", "kvtransfer", "common.server", "zmq", "tokenizers", "huggingface_hub")

pytestmark = pytest.mark.system


@asynccontextmanager
async def process(prefills: list[MockNode], decodes: list[MockNode], *flags: str) -> AsyncIterator[tuple[Child, str]]:
    nodes = [word for mocks, flag in ((prefills, "--prefill"), (decodes, "--decode")) for mock in mocks for word in (flag, mock.url)]
    child = Child("router", python_argv("pdserve", "router", *nodes, "--port", "0", "--health-check-interval", "0.1", *flags))
    try:
        facts: dict[str, Any] = await child.wait_ready()
        url = f"http://127.0.0.1:{facts['port']}"
        async with httpx.AsyncClient(verify=False, trust_env=False) as client:

            async def is_ready() -> bool:
                return (await client.get(f"{url}/ready")).status_code == 200

            await until(is_ready, "ready", 20)
        yield child, url
    finally:
        await child.stop(10)


async def stream_on(request: Received) -> None:
    await request.head(200, "text/event-stream")
    await request.chunk(EVENTS[0])
    await asyncio.Event().wait()


async def test_sigterm_ends_streams_in_band_and_refuses_new_requests() -> None:
    async with mock_nodes() as (prefills, decodes), process(prefills, decodes, "--shutdown-timeout", "0.5") as (child, url):
        decodes[0].behave = stream_on
        async with httpx.AsyncClient(base_url=url, verify=False, trust_env=False, timeout=10) as client, httpx.AsyncClient(
            base_url=url, verify=False, trust_env=False, timeout=10
        ) as other:
            await other.get("/health")
            async with client.stream("POST", CHAT, json={"stream": True}) as reply:
                chunks = reply.aiter_text()
                text = await anext(chunks)
                began_s = time.monotonic()
                child.process.send_signal(signal.SIGTERM)

                async def is_draining() -> bool:
                    return (await other.get("/ready")).status_code == 503

                await until(is_draining, "draining")
                refused = await other.post(CHAT, json={})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
                text += "".join([chunk async for chunk in chunks])
        said, error, done = events(text)
        assert said["choices"]
        assert error["error"]["code"] == "shutting_down"
        assert done == "[DONE]"
        assert await child.wait_death() == 0
        assert 0.4 < time.monotonic() - began_s < 5


async def test_sigterm_lets_a_stream_finish() -> None:
    async with mock_nodes() as (prefills, decodes), process(prefills, decodes, "--shutdown-timeout", "8") as (child, url):
        go = asyncio.Event()

        async def decode(request: Received) -> None:
            await go.wait()
            await decodes[0].serve_well(request)

        decodes[0].behave = decode
        async with httpx.AsyncClient(base_url=url, verify=False, trust_env=False, timeout=10) as client:
            asking = asyncio.ensure_future(client.post(CHAT, json={"stream": True}))
            await decodes[0].wait_posts(1)
            child.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            go.set()
            assert (await asking).text.endswith("data: [DONE]\n\n")
        assert await child.wait_death() == 0


async def test_second_signal_hurries() -> None:
    async with mock_nodes() as (prefills, decodes), process(prefills, decodes, "--shutdown-timeout", "60") as (child, url):
        decodes[0].behave = prefills[0].behave = hang
        async with httpx.AsyncClient(base_url=url, verify=False, trust_env=False, timeout=10) as client:
            asking = asyncio.ensure_future(client.post(CHAT, json={}))
            await decodes[0].wait_posts(1)
            began_s = time.monotonic()
            child.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            child.process.send_signal(signal.SIGTERM)
            assert (await asking).status_code == 503
        assert await child.wait_death() == 0
        assert time.monotonic() - began_s < 4


async def test_sigint_alone_ends_a_router_without_a_parent() -> None:
    argv = python_argv("pdserve", "router", "--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9", "--port", "0")
    router = await asyncio.create_subprocess_exec(*argv, stderr=subprocess.PIPE)
    assert router.stderr is not None
    async with asyncio.timeout(20):
        assert b"serving on http://127.0.0.1:" in await router.stderr.readline()
        router.send_signal(signal.SIGINT)
        assert b"Traceback" not in await router.stderr.read()
        assert await router.wait() == 0


async def test_router_ends_with_its_parent() -> None:
    async with mock_nodes() as (prefills, decodes), process(prefills, decodes) as (child, _):
        assert child.process.stdin is not None
        child.process.stdin.close()
        async with asyncio.timeout(5):
            await child.wait_death()


async def test_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        child = Child("router", python_argv("pdserve", "router", "--prefill", "http://h:1", "--decode", "http://h:2", "--port", str(port)))
        with pytest.raises(StartupError, match=f"cannot serve HTTP on 127.0.0.1:{port}"):
            await child.wait_ready()
        assert await child.wait_death() == 2


async def test_resident_memory() -> None:
    async with mock_nodes() as (prefills, decodes), process(prefills, decodes) as (child, url):
        async with httpx.AsyncClient(base_url=url, verify=False, trust_env=False, timeout=20) as client:
            for _ in range(4):
                replies = await asyncio.gather(*(client.post(CHAT, json={"stream": True, "text": "x" * 20_000}) for _ in range(50)))
                assert {reply.status_code for reply in replies} == {200}
            assert (await client.get("/metrics")).status_code == 200
        assert psutil.Process(child.process.pid).memory_info().rss < MAX_RESIDENT_BYTES


async def test_router_without_sockets_blames_no_node() -> None:
    async with mock_nodes() as (prefills, decodes), process(prefills, decodes) as (child, url):
        router = psutil.Process(child.process.pid)
        async with httpx.AsyncClient(base_url=url, verify=False, trust_env=False, timeout=10) as client:
            assert (await client.get("/health")).status_code == 200  # this connection stays
            limits = router.rlimit(psutil.RLIMIT_NOFILE)
            router.rlimit(psutil.RLIMIT_NOFILE, (1, limits[1]))
            for _ in range(3):
                reply = await client.post(CHAT, json={})
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "overloaded")
                assert reply.headers["retry-after"] == "1"
                assert "no socket left" in reply.json()["error"]["message"]
            assert (await client.get("/ready")).status_code == 200
            router.rlimit(psutil.RLIMIT_NOFILE, limits)
            assert (await client.post(CHAT, json={})).status_code == 200


def test_imports_nothing_of_an_engine() -> None:
    code = f"import json, sys, router.main; print(json.dumps([name for name in {FORBIDDEN!r} if name in sys.modules]))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env={**os.environ}).stdout
    assert json.loads(out) == []


async def test_child_that_is_killed_is_noticed() -> None:
    child = Child("router", python_argv("pdserve", "router", "--prefill", "http://h:1", "--decode", "http://h:2", "--port", "0"))
    child.process.kill()
    with pytest.raises(ChildDied):
        await child.wait_ready()
    assert await child.wait_death() == -signal.SIGKILL
