"""A prefill and a decode node on one device, and pages by NIXL between pools of two processes there. The parts of bench/gpu.py with a network."""

import asyncio
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from gpu_shapes import Result
from pd import wait_ready
from transfer import FAR, NEAR, other_process, write

from common.config import Device
from common.launch import Child
from common.models.acquire import resolve_model
from kvtransfer.backend import Region
from kvtransfer.nixl import NixlBackend
from kvtransfer.settings import TransferOptions

MEM_FRACTION = "0.3"  # of each node, of what is free when it starts: both, and what runs beside them, fit


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked, and what one transfer writes."""

    prompt_lens: tuple[int, ...]  # the last is timed
    num_new_tokens: int
    num_pages: int
    page_nbytes: int
    rounds: int


FULL = Plan((1, 17, 300, 1000), 32, 256, 2 << 20, 10)  # pages: 4096 tokens of Llama 3 8B, 16 a page
SMALL = Plan((1, 17, 40), 8, 32, 64 << 10, 2)


def pair_results(plan: Plan, device: Device, model: str) -> Iterator[Result]:
    """Answers of the pair beside those of its decode node alone."""
    same, pair_s, alone_s = asyncio.run(_ask_both(plan, device, resolve_model(model, lambda text: print(text, file=sys.stderr))))
    num_asked = len(plan.prompt_lens)
    yield Result("prefill and decode node, same answers as one", f"{same} of {num_asked}", same / num_asked, 1.0)
    yield Result(f"  {plan.prompt_lens[-1]} tokens in, {plan.num_new_tokens} out, through both", f"{pair_s * 1e3:.0f} ms")
    yield Result("  at the decode node alone", f"{alone_s * 1e3:.0f} ms")


async def _ask_both(plan: Plan, device: Device, model_dir: Path) -> tuple[int, float, float]:
    """(prompts whose answers are equal, seconds of the last through both, at the decode node alone)."""
    node = ["--model", str(model_dir), "--served-model-name", "m", "--device", device, "--mem-fraction-static", MEM_FRACTION, "--port", "0"]
    node += ["--disable-radix-cache"]  # the same prompt is asked twice, and is to be computed twice
    async with AsyncExitStack() as running:

        async def start(name: str, *arguments: str) -> str:
            child = Child(name, [sys.executable, "-m", "pdserve", name, *arguments, "--log-level", "warning"])
            running.push_async_callback(child.stop, 10)
            return f"http://127.0.0.1:{(await child.wait_ready())['port']}"

        prefill = await start("prefill", *node, "--bootstrap-port", "0")  # alone: the next one's share is of what it leaves
        decode = await start("decode", *node)
        router = await start("router", "--prefill", prefill, "--decode", decode, "--port", "0")
        session = await running.enter_async_context(aiohttp.ClientSession())
        await wait_ready(session, router)
        same, pair_s, alone_s = 0, 0.0, 0.0
        for num_tokens in plan.prompt_lens:
            answers = [await _answer(session, url, num_tokens, plan.num_new_tokens) for url in (router, decode)]
            (pair_text, pair_site, pair_s), (alone_text, alone_site, alone_s) = answers
            assert (pair_site, alone_site) == ("remote", "local"), (pair_site, alone_site)
            same += pair_text == alone_text
        return same, pair_s, alone_s


async def _answer(session: aiohttp.ClientSession, url: str, num_tokens: int, num_new_tokens: int) -> tuple[str, str, float]:
    """(text, where its prefill ran, seconds) of a prompt of token ids, the same ones at every call; the second of two, other ones, is timed."""
    for seed in (1, 0):  # the first warms up
        prompt = np.random.default_rng((num_tokens, seed)).integers(100, 40_000, num_tokens).tolist()
        body = {"model": "m", "prompt": prompt, "max_tokens": num_new_tokens, "ignore_eos": True, "temperature": 0}
        start_s = time.perf_counter()
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
    return answer["choices"][0]["text"], answer["usage"]["prefill_site"], time.perf_counter() - start_s


def transfer_results(plan: Plan, device: Device) -> Iterator[Result]:
    """Scattered pages from a pool in this process to one in another, both in the device's memory."""
    rng = np.random.default_rng(0)
    here, there = (rng.permutation(plan.num_pages).astype(np.int32) for _ in range(2))
    with other_process(_far_node, plan, device) as (pipe, _):
        backend, pool = _node(plan, device)
        pool.fill_(7)
        if device == "cuda":
            torch.cuda.synchronize()
        description = pipe.recv()
        pipe.send(backend.describe())
        pipe.recv()
        backend.connect(FAR, description)
        taken_s = [write(backend, here, there) for _ in range(plan.rounds + 1)]
        pipe.send("check")
        arrived = pipe.recv()
        backend.close()
    nbytes = plan.num_pages * plan.page_nbytes
    rate = nbytes / statistics.median(taken_s[1:])  # the first connects
    yield Result(f"nixl, {device} to {device} memory, {nbytes >> 20} MiB in {plan.num_pages} pages", f"{rate / 1e9:.1f} GB/s, bytes {arrived}")


def _node(plan: Plan, device: Device) -> tuple[NixlBackend, torch.Tensor]:
    pool = torch.zeros(plan.num_pages, plan.page_nbytes, dtype=torch.uint8, device=device)
    backend = NixlBackend(TransferOptions())
    backend.register(Region(pool.data_ptr(), plan.num_pages, plan.page_nbytes, str(pool.device), pool))
    return backend, pool


def _far_node(plan: Plan, device: Device, pipe: Connection) -> None:
    """Lets NEAR write, and says whether its bytes have come, until the pipe ends."""
    backend, pool = _node(plan, device)
    pipe.send(backend.describe())
    backend.accept(NEAR, pipe.recv())
    pipe.send("accepted")
    try:
        while pipe.recv() == "check":
            pipe.send("right" if bool((pool == 7).all()) else "WRONG")
    except EOFError:
        backend.close()
