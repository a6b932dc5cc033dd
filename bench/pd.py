"""Latency of one prefill and one decode node, a core each, beside their floors, all in one run.

    python bench/pd.py [--model DIR] [--rounds 15] [--input-len 256] [--output-len 64] [--cores 0,1]

Each round takes turns: a request through the router (PD), the same kind of request at the decode node alone (colocated), and the
bare linear layers of a prefill of that length and of one decode step (F.linear on plain weights, on the decode node's core while it
idles). Prompts are random token ids, so no prefix is cached. Medians; the router shares the prefill node's core.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np
import torch
from decode_floor import Floors

from common.engine.runner import ModelRunner
from common.launch import Child
from common.models.acquire import resolve_model


@dataclasses.dataclass(frozen=True, slots=True)
class Latency:
    ttft_ms: float
    tpot_ms: float


async def main() -> None:
    parser = argparse.ArgumentParser(description="Latency of a prefill and a decode node, a core each, beside their floors")
    parser.add_argument("--model", default="demo", help="as for `pdserve up` (default: demo)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="default: bfloat16")
    parser.add_argument("--rounds", type=int, default=15, help="turns (default: 15)")
    parser.add_argument("--input-len", type=int, default=256, help="prompt tokens (default: 256)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens generated (default: 64)")
    parser.add_argument("--cores", default="0,1", help="core of the prefill node and router, core of the decode node (default: 0,1)")
    options = parser.parse_args()
    prefill_core, decode_core = map(int, options.cores.split(","))
    model_dir = resolve_model(options.model, lambda text: print(text, file=sys.stderr))
    node = ["--model", str(model_dir), "--served-model-name", "m", "--dtype", options.dtype, "--quantization", "none"]
    node += ["--log-level", "warning", "--port", "0"]
    prefill = pinned("prefill", prefill_core, ["prefill", *node, "--bootstrap-port", "0"])
    decode = pinned("decode", decode_core, ["decode", *node])
    prefill_url, decode_url = [f"http://127.0.0.1:{(await child.wait_ready())['port']}" for child in (prefill, decode)]
    router = pinned("router", prefill_core, ["router", "--prefill", prefill_url, "--decode", decode_url, "--port", "0", "--log-level", "warning"])
    router_url = f"http://127.0.0.1:{(await router.wait_ready())['port']}"
    try:
        await measure(options, model_dir, router_url, decode_url, decode_core)
    finally:
        for child in (router, decode, prefill):
            await child.stop(10)


def pinned(name: str, core: int, arguments: list[str]) -> Child:
    return Child(name, ["taskset", "-c", str(core), sys.executable, "-m", "pdserve", *arguments])


async def measure(options: argparse.Namespace, model_dir: Path, router_url: str, decode_url: str, decode_core: int) -> None:
    rng = np.random.default_rng()
    floors = Floors(ModelRunner(model_dir, dtype=options.dtype, num_pages=2))
    prefill_floor, decode_floor = floors.plain(options.input_len, 1), floors.plain(1, 1)
    pd: list[Latency] = []
    colocated: list[Latency] = []
    floor_ms: list[tuple[float, float]] = []
    async with aiohttp.ClientSession() as session:
        await wait_ready(session, router_url)
        for turn in range(options.rounds + 2):
            through_router = await ask(session, router_url, rng, options)
            at_decode_node = await ask(session, decode_url, rng, options)
            floor = bare_ms(prefill_floor, decode_core), bare_ms(decode_floor, decode_core)
            if turn >= 2:  # the first turns fill caches
                pd.append(through_router)
                colocated.append(at_decode_node)
                floor_ms.append(floor)
    report(options, pd, colocated, floor_ms)


async def wait_ready(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        async with session.get(f"{url}/ready") as response:
            if response.status == 200:
                return
        await asyncio.sleep(0.05)


async def ask(session: aiohttp.ClientSession, url: str, rng: np.random.Generator, options: argparse.Namespace) -> Latency:
    """One streamed request on its own."""
    prompt = rng.integers(100, 40_000, options.input_len).tolist()
    body = {"model": "m", "prompt": prompt, "max_tokens": options.output_len, "ignore_eos": True, "temperature": 0, "stream": True}
    times_s: list[float] = []
    start_s = time.perf_counter()
    usage_tokens = 0
    async with session.post(f"{url}/v1/completions", json={**body, "stream_options": {"include_usage": True}}) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event["choices"]:
                    times_s.append(time.perf_counter())
                elif event["usage"]:
                    usage_tokens = event["usage"]["completion_tokens"]
    assert usage_tokens == options.output_len, usage_tokens
    return Latency((times_s[0] - start_s) * 1e3, (times_s[-1] - times_s[0]) / (usage_tokens - 1) * 1e3)


@torch.inference_mode()
def bare_ms(run: object, core: int) -> float:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    start_s = time.perf_counter()
    run()  # type: ignore[operator]
    taken_ms = (time.perf_counter() - start_s) * 1e3
    os.sched_setaffinity(0, before)
    return taken_ms


def report(options: argparse.Namespace, pd: list[Latency], colocated: list[Latency], floor_ms: list[tuple[float, float]]) -> None:
    prefill_floor, decode_floor = (statistics.median(column) for column in zip(*floor_ms, strict=True))
    ttft, local_ttft = (statistics.median(one.ttft_ms for one in rows) for rows in (pd, colocated))
    tpot, local_tpot = (statistics.median(one.tpot_ms for one in rows) for rows in (pd, colocated))
    added = statistics.median(a.ttft_ms - b.ttft_ms for a, b in zip(pd, colocated, strict=True))
    print(f"{options.input_len} prompt tokens, {options.output_len} output tokens, {options.dtype}, {len(pd)} rounds, medians in ms")
    print(f"bare linears      prefill {prefill_floor:8.1f}   decode step {decode_floor:6.2f}")
    print(f"PD                TTFT    {ttft:8.1f}   TPOT        {tpot:6.2f}   TPOT / linears {tpot / decode_floor:.2f}")
    print(f"colocated         TTFT    {local_ttft:8.1f}   TPOT        {local_tpot:6.2f}   TPOT / linears {local_tpot / decode_floor:.2f}")
    print(f"PD TTFT / (1.35 linears + 25 ms) {ttft / (1.35 * prefill_floor + 25):.2f}   PD adds to TTFT {added:.1f} ms (median of pairs)")


if __name__ == "__main__":
    asyncio.run(main())
