"""Our router in front of two real vLLM nodes on CPU, joined by NixlConnector. VLLM_PYTHON: the python of vLLM's environment (bench/README.md).

Text is never compared: on CPU this engine's greedy answers to longer prompts are wrong with the embedded model, with and without a router
(cause not found). What is checked is what a router answers for: status, form, counts, and that the decode node read the prefill node's pages.
"""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from compare_systems import MODEL, RunningProgram, RunningSystem, System, default_preload, vllm
from mock_vllm import REFUSED
from router_harness import until

from common.config import RouterConfig
from common.http_server import bind
from common.launch import Reporter
from common.models.acquire import resolve_model
from router.main import Router
from router.nodes import NodeTable

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Write a long story about a river, please."}]
TOOL_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}]
SPLIT: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 5}),
    "stream": (CHAT, {"messages": MESSAGES, "max_completion_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}),
    "prompt": (COMPLETIONS, {"prompt": "The capital of France is", "max_tokens": 5, "min_tokens": 5, "stop_token_ids": [7]}),
    "one token": (COMPLETIONS, {"prompt": ["The capital of France is"], "max_tokens": 1}),
    "token ids": (COMPLETIONS, {"prompt": list(range(100, 400)), "max_tokens": 4}),
    "logprobs": (CHAT, {"messages": MESSAGES, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}),
    "tools": (CHAT, {"messages": MESSAGES, "max_tokens": 4, "tools": TOOLS}),
    "a tool it must use": (CHAT, {"messages": MESSAGES, "max_tokens": 4, "tools": TOOLS, "tool_choice": "required", "ignore_eos": True}),
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "n": (CHAT, {"messages": MESSAGES, "n": 2}),
    "batch": (COMPLETIONS, {"prompt": ["a b c", "d e f"]}),
}


@asynccontextmanager
async def vllm_nodes(log_dir: Path) -> AsyncIterator[tuple[str, str]]:
    """URLs of a prefill and a decode node."""
    python = Path(os.environ["VLLM_PYTHON"])
    cores = sorted(os.sched_getaffinity(0))
    whole = vllm(python, resolve_model("demo", print), (cores[0], cores[-1]), False, default_preload(python))
    nodes = [replace(program, argv=[*program.argv, *TOOL_FLAGS]) for program in whole.stages[0]]
    started: list[RunningProgram] = []
    try:
        await RunningSystem.start(System("vLLM", "", [nodes]), log_dir, started)
        prefill, decode = (program.program.ready_url.removesuffix("/health") for program in started)
        yield prefill, decode
    finally:
        await asyncio.gather(*(program.stop() for program in started))


@dataclass
class Served:
    prefill: str
    decode: str
    client: httpx.AsyncClient  # of our router

    async def read_by(self, node: str, source: str) -> int:
        """Prompt tokens of a node by where their pages came from: "external_kv_transfer" or "local_compute"."""
        text = (await self.client.get(f"{node}/metrics")).text
        pattern = rf'^vllm:prompt_tokens_by_source_total\{{[^}}]*source="{source}"[^}}]*\}} (\S+)$'
        return sum(int(float(value)) for value in re.findall(pattern, text, re.MULTILINE))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with vllm_nodes(tmp_path_factory.mktemp("vllm")) as (prefill, decode):
        config = RouterConfig(prefill=(prefill,), decode=(decode,), port=0, request_timeout_s=300.0)
        with bind("127.0.0.1", 0) as listener:
            router = Router(config, listener, Reporter(None), True, NodeTable.of(config))
            running = asyncio.ensure_future(router.run())
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            try:
                async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:
                    await until(lambda: all(node.usable for node in router.nodes.all), "both nodes usable", 60)
                    assert {node.engine for node in router.nodes.all} == {"vllm"}
                    yield Served(prefill, decode, client)
            finally:
                router.stop.set()
                await running


@pytest.mark.parametrize("name", SPLIT)
async def test_the_decode_node_reads_all_of_the_prompt_from_the_prefill_node(served: Served, name: str) -> None:
    path, body = SPLIT[name]
    before = [await served.read_by(served.decode, source) for source in ("external_kv_transfer", "local_compute")]
    reply = await served.client.post(path, json={"model": MODEL, "temperature": 0, "ignore_eos": True, **body})
    assert reply.status_code == 200, reply.text
    if body.get("stream"):
        *events, done, end = reply.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        answers = [json.loads(event.removeprefix("data: ")) for event in events]
        usage = answers[-1]["usage"]
        assert answers[-2]["choices"][0]["finish_reason"] == "length"
    else:
        usage = reply.json()["usage"]
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    assert usage["completion_tokens"] == limit
    after = [await served.read_by(served.decode, source) for source in ("external_kv_transfer", "local_compute")]
    assert after == [before[0] + usage["prompt_tokens"], before[1]]


@pytest.mark.parametrize("name", WHOLE)
async def test_what_cannot_be_split_is_computed_by_the_decode_node(served: Served, name: str) -> None:
    path, body = WHOLE[name]
    before = await served.read_by(served.prefill, "local_compute"), await served.read_by(served.decode, "external_kv_transfer")
    reply = await served.client.post(path, json={"model": MODEL, "temperature": 1, "max_tokens": 3, "ignore_eos": True, **body})
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"]) == 2
    assert before == (await served.read_by(served.prefill, "local_compute"), await served.read_by(served.decode, "external_kv_transfer"))


@pytest.mark.parametrize("name", REFUSED)
async def test_what_the_mock_refuses_real_nodes_refuse(served: Served, name: str) -> None:
    path, body = REFUSED[name]
    for node in (served.prefill, served.decode):
        reply = await served.client.post(node + path, json={"model": MODEL, **body})
        assert reply.status_code == 400, reply.text


async def test_refusals_reach_the_client(served: Served) -> None:
    for body in ({"prompt": ""}, {"prompt": "a", "max_tokens": 3, "min_tokens": 9}, {"prompt": "a " * 6000}):
        reply = await served.client.post(COMPLETIONS, json={"model": MODEL, **body})
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["message"]
    assert (await served.client.post(COMPLETIONS, json={"model": "another", "prompt": "a"})).status_code == 404


async def test_many_at_once(served: Served) -> None:
    bodies = [{"model": MODEL, "prompt": f"{n} rivers " * (n + 1), "max_tokens": 4, "ignore_eos": True} for n in range(8)]
    for reply in await asyncio.gather(*(served.client.post(COMPLETIONS, json=body) for body in bodies)):
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 4
