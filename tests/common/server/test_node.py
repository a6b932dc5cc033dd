"""A node's parent process: start, readiness, the death of a child, shutdown. Real processes, a fake scheduler."""

import asyncio
import json
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import fake_scheduler
import httpx
import psutil
import pytest
from fake_scheduler import START_VARIABLE, STEP_VARIABLE, Trigger
from http_node import write_model_dir

from common.cluster_key import ClusterKey
from common.errors import StartupError
from common.http_server import bind
from common.launch import Child, ChildDied

pytestmark = pytest.mark.system
SUPPORT = Path(fake_scheduler.__file__).parent
COMPLETION = "/v1/completions"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model"))


@dataclass
class RunningNode:
    child: Child  # a node started the way `pdserve up` starts one
    facts: dict[str, object]
    client: httpx.AsyncClient
    tmp_dir: Path

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.child.process.pid)

    def part(self, name: str) -> psutil.Process:
        return next(process for process in self.process.children() if name in " ".join(process.cmdline()))


def node_argv(**settings: object) -> list[str]:
    return [sys.executable, str(SUPPORT / "run_fake_node.py"), json.dumps({"port": 0, "served_model_name": "tiny", **settings})]


@asynccontextmanager
async def running(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float = 0.005, start: str = "",
                  **settings: object) -> AsyncIterator[RunningNode]:
    """A ready node; its temporary directory is its own. Nothing of it is left afterwards."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv(STEP_VARIABLE, str(step_s))
    monkeypatch.setenv(START_VARIABLE, start)
    child = Child("node", node_argv(model=str(model_dir), **settings))
    parts: list[psutil.Process] = []
    try:
        facts = await asyncio.wait_for(child.wait_ready(), 30)
        parts = psutil.Process(child.process.pid).children()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{facts['port']}", timeout=15) as client:
            yield RunningNode(child, facts, client, tmp_path)
    finally:
        await child.stop(10)
        _, alive = psutil.wait_procs(parts, 3)
        assert not alive
        assert run_directories(tmp_path) == []


def run_directories(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("pdserve-*"))


async def until(holds: Callable[[], bool], timeout_s: float = 5) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


def resident_mib(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / (1 << 20)


async def test_a_node_serves_is_small_idles_and_ends_with_status_0(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = ClusterKey(bytes(range(32)))
    key_file = tmp_path / "cluster.key"
    key_file.touch(mode=0o600)
    key_file.write_text(key.secret.hex())
    async with running(model_dir, tmp_path, monkeypatch, role="prefill", cluster_key_file=str(key_file)) as node:
        assert node.facts["role"] == "prefill"
        assert node.facts["bootstrap_port"] == 8998
        assert (await node.client.get("/ready")).status_code == 200
        answer = await node.client.post(COMPLETION, json={"prompt": "hello world", "max_tokens": 64})
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == 64
        assert answer.json()["choices"][0]["text"].startswith("hello world")
        stopped = await node.client.post(COMPLETION, json={"prompt": "hello world", "max_tokens": 200, "stop": "lo wo"})
        assert stopped.json()["choices"][0] == {"index": 0, "text": "hel", "logprobs": None, "finish_reason": "stop"}
        info = (await node.client.get("/server_info")).json()
        assert (info["fingerprint"], info["max_total_tokens"], info["cluster_key_id"]) == ("f00d", 4096, key.id)
        for process in (node.process, node.part("common.server.detokenizer")):
            assert resident_mib(process) < 150
            assert not [mapped.path for mapped in process.memory_maps() if "/torch/" in mapped.path or "numba" in mapped.path]
        assert await wakes_a_second(node.process) < 30
        started_s = time.monotonic()
        node.child.process.send_signal(signal.SIGTERM)
        assert await node.child.wait_death() == 0
        assert time.monotonic() - started_s < 2


async def wakes_a_second(process: psutil.Process) -> float:
    before, started_s = process.num_ctx_switches().voluntary, time.monotonic()
    await asyncio.sleep(1.0)  # not a synchronisation: the time that is measured
    return float(process.num_ctx_switches().voluntary - before) / (time.monotonic() - started_s)


@pytest.mark.parametrize("name", ["fake_scheduler", "common.server.detokenizer"])
async def test_a_child_s_death_answers_open_requests_and_ends_the_node(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with running(model_dir, tmp_path, monkeypatch, step_s=0.05) as node:
        waiting = asyncio.ensure_future(node.client.post(COMPLETION, json={"prompt": [Trigger.NEVER, 5]}))
        async with node.client.stream("POST", COMPLETION, json={"prompt": [50, 51], "max_tokens": 200, "stream": True}) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            started_s = time.monotonic()
            node.part(name).kill()
            *_, error, _, done, _ = [line async for line in lines]
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "node_failed"
            assert done == "data: [DONE]"
        answer = await waiting
        assert answer.status_code == 503
        assert "ended with status -9" in answer.json()["error"]["message"]
        assert await node.child.wait_death() == 1
        assert time.monotonic() - started_s < 2  # 0.5 on an idle machine


async def test_more_clients_than_the_usual_file_limit_allows(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node takes more requests than the soft limit it may be started with: 300 connections on a limit of 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        async with running(model_dir, tmp_path, monkeypatch) as node:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            for _ in range(300):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", int(str(node.facts["port"]))), timeout=5))
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
            assert (await node.client.post(COMPLETION, json={"prompt": "x", "max_tokens": 2})).status_code == 200


async def test_shutdown_lets_short_requests_finish_and_refuses_new_ones(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(model_dir, tmp_path, monkeypatch, step_s=0.02) as node:
        request = asyncio.ensure_future(node.client.post(COMPLETION, json={"prompt": [50, 51], "max_tokens": 40}))
        metrics = ""
        while "pdserve_open_prompts 1.0" not in metrics:
            metrics = (await node.client.get("/metrics")).text
        node.child.process.send_signal(signal.SIGTERM)
        while (await node.client.get("/ready")).status_code == 200:
            pass
        refused = await node.client.post(COMPLETION, json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"], refused.headers["retry-after"]) == (503, "shutting_down", "1")
        assert (await node.client.get("/health")).status_code == 200
        answer = await request
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 40
        assert await node.child.wait_death() == 0


async def test_shutdown_fails_what_does_not_finish_in_time(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that never reads does not hold it up."""
    async with running(model_dir, tmp_path, monkeypatch, step_s=0.02, shutdown_timeout_s=0.3) as node:
        _, writer = await asyncio.open_connection("127.0.0.1", int(str(node.facts["port"])))
        body = b'{"prompt": [50], "max_tokens": 200, "stream": true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        request = asyncio.ensure_future(node.client.post(COMPLETION, json={"prompt": [Trigger.NEVER]}))
        async with node.client.stream("POST", COMPLETION, json={"prompt": [50], "max_tokens": 200, "stream": True}) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            started_s = time.monotonic()
            node.child.process.send_signal(signal.SIGTERM)
            *_, error, _, done, _ = [line async for line in lines]
        assert "draining" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        assert (await request).status_code == 503
        assert await node.child.wait_death() == 0
        assert time.monotonic() - started_s < 4
        writer.close()


async def test_shutdown_does_not_wait_for_a_stuck_scheduler(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(model_dir, tmp_path, monkeypatch, shutdown_timeout_s=0.2) as node:
        request = asyncio.ensure_future(node.client.post(COMPLETION, json={"prompt": [Trigger.NEVER]}))
        await until_open(node)
        scheduler = node.part("fake_scheduler")
        scheduler.suspend()
        started_s = time.monotonic()
        node.child.process.send_signal(signal.SIGTERM)
        answer = await request
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert await node.child.wait_death() == 0
        assert time.monotonic() - started_s < 5


async def test_a_scheduler_that_fails_while_it_stops_is_not_status_0(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(model_dir, tmp_path, monkeypatch, start="leave badly") as node:
        node.child.process.send_signal(signal.SIGTERM)
        assert await node.child.wait_death() == 1


async def test_a_second_signal_hurries(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(model_dir, tmp_path, monkeypatch, shutdown_timeout_s=60) as node:
        request = asyncio.ensure_future(node.client.post(COMPLETION, json={"prompt": [Trigger.NEVER]}))
        await until_open(node)
        started_s = time.monotonic()
        node.child.process.send_signal(signal.SIGTERM)
        while (await node.client.get("/ready")).status_code == 200:
            pass
        node.child.process.send_signal(signal.SIGTERM)
        assert (await request).status_code == 503
        assert await node.child.wait_death() == 0
        assert time.monotonic() - started_s < 3


async def until_open(node: RunningNode) -> None:
    while "pdserve_open_prompts 0.0" in (await node.client.get("/metrics")).text:
        pass


@pytest.mark.parametrize(
    ("start", "error", "says"),
    [("refuse", StartupError, "cannot read its weights"), ("crash", ChildDied, "scheduler.*ended with status 5")],
)
async def test_a_child_that_does_not_start_ends_the_node(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        async with running(model_dir, tmp_path, monkeypatch, start=start):
            pass


async def test_a_startup_error_is_exit_code_2_and_a_port_in_use_is_one(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        process = await asyncio.create_subprocess_exec(*node_argv(model=str(model_dir), port=port), stderr=asyncio.subprocess.PIPE)
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.decode().splitlines() == [f"cannot serve HTTP on 127.0.0.1:{port}: Address already in use; choose another with --host and --port"]


async def test_a_missing_tokenizer_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = write_model_dir(tmp_path / "model")
    (model_dir / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        async with running(model_dir, tmp_path, monkeypatch):
            pass


async def test_a_signal_while_loading_ends_with_status_0(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a loading node already answers: live, not ready."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv(START_VARIABLE, "hang")
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    said: list[str] = []
    child = Child("node", node_argv(model=str(model_dir), port=port), on_progress=said.append)
    await until(lambda: "scheduler: pretending to load weights" in said, 20)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        answer = await client.post(COMPLETION, json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    started_s = time.monotonic()
    child.process.send_signal(signal.SIGTERM)
    assert await child.wait_death() == 0
    assert time.monotonic() - started_s < 3
    assert run_directories(tmp_path) == []


async def test_a_gone_parent_takes_the_node_and_its_children(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(model_dir, tmp_path, monkeypatch) as node:
        parts = [node.process, *node.process.children()]
        assert node.child.process.stdin is not None
        node.child.process.stdin.close()  # what the kernel does for a parent that was killed
        assert await node.child.wait_death() == 1
        _, alive = psutil.wait_procs(parts, 3)
        assert not alive
        for left in run_directories(tmp_path):  # a killed node cannot tidy up
            shutil.rmtree(left)


async def test_sigint_of_an_unsupervised_node_ends_it_with_status_0(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = await asyncio.create_subprocess_exec(*node_argv(model=str(model_dir)), stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    lines: list[str] = []
    while not lines or "ready after" not in lines[-1]:
        lines.append((await asyncio.wait_for(process.stderr.readline(), 20)).decode())
    os.kill(process.pid, signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert run_directories(tmp_path) == []
