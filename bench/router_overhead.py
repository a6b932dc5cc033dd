"""What a router costs: pdserve's beside sglang-router and vllm-router, alone on one core, before nodes that need no time.

    python bench/router_overhead.py [--full] [--sglang-python PATH] [--vllm-python PATH] [--parts bodies,streams,memory,faults]

PATH is the python of an environment that has sglang-router (or vllm-router); without it that router is left out. pdserve is measured with its
default policy, with round_robin, and with --engine vllm (one leg after the other, as vllm-router does it).

    bodies    requests that are not streamed, of 1 KB to 256 KB: CPU of the router a request and requests a second with 32 clients, and what the
              router adds to the median latency of one client
    streams   CPU of the router a relayed chunk, with 64 streams of a chunk in 10 ms and 500 of one in 50 ms; from a chunk's writing at the node to
              its reading by the client
    memory    resident memory before and after many requests, no two prompts alike
    faults    2,000 slow streams and 50 requests a second at five nodes, when one decode node dies, or stands still: what the others notice

CPU is user and system time of the router's processes. Clients and nodes share the other core, so that they are the bottleneck of a fast router:
requests a second are a lower bound, CPU a request is not. Systems take turns in every round; ratios are made within a round, and quoted are their
median and extremes. Exit code 1: a request failed that should not have. 2: something did not start.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import uvloop
from compare_systems import SystemFailed
from router_load import Request, Steady, Tally, call_for, call_often, open_callers
from router_report import DIRECT, OURS_ROUND_ROBIN, OURS_VLLM, PARTS, Round, table, verdicts
from router_systems import OURS, SGLANG, VLLM, Nodes, RouterKind, RunningRouter, ours, running, rust

from common.http_server import raise_file_limit

SIZES_KB = (1, 4, 16, 64, 256)
CLIENTS = 32
NUM_PAIRS = 2
STREAMS = ((64, 0.010), (500, 0.050))  # how many, seconds from chunk to chunk
FOR_EVER = 1_000_000  # chunks: outlasts a measurement
SLOW_STREAMS, SLOW_GAP_S, REQUEST_RATE = 2000, 0.5, 50.0
SILENT_S = 4 * SLOW_GAP_S
NODE_NOTICED_S = 6.0  # after a node's death: two silent probes and more


@dataclass(frozen=True, slots=True)
class Effort:
    rounds: int
    seconds: float  # of a measurement
    requests: int  # of the memory part
    peers_throughout: bool  # in memory and faults too


SHORT, FULL = Effort(2, 0.5, 100_000, False), Effort(5, 2.0, 1_000_000, True)


# ---- what is measured of one system ---------------------------------------------------------------------------------------------


class Failed(Exception):
    """A request that should have been answered was not."""


def checked(tally: Tally) -> Tally:
    if tally.errors:
        raise Failed(f"{len(tally.errors)} requests failed, the first with {tally.errors[0]!r}")
    return tally


async def measure_bodies(router: RunningRouter, size_kb: int, seconds: float, direct_us: float) -> dict[str, float]:
    """direct_us: median latency without a router."""
    request = Request(size_kb << 10)
    checked(await call_for(router.port, request, CLIENTS, seconds / 5))
    before_s, started_s = router.cpu_s(), time.monotonic()
    busy = checked(await call_for(router.port, request, CLIENTS, seconds))
    cpu_s, elapsed_s, number = router.cpu_s() - before_s, time.monotonic() - started_s, len(busy.latencies_s)
    latency = await measure_latency(router.port, size_kb, seconds)
    return {
        f"CPU us/request, {size_kb} KB": cpu_s / number * 1e6,
        f"requests/s, {size_kb} KB": number / elapsed_s,
        **latency,
        f"added p50 us, {size_kb} KB": latency[f"p50 us, {size_kb} KB"] - direct_us,
    }


async def measure_latency(port: int, size_kb: int, seconds: float) -> dict[str, float]:
    alone = checked(await call_for(port, Request(size_kb << 10), 1, seconds / 2))
    return {f"p50 us, {size_kb} KB": median(alone.latencies_s) * 1e6}


async def measure_streams(port: int, router: RunningRouter | None, number: int, gap_s: float, seconds: float) -> dict[str, float]:
    """router: None when `port` is a node's."""
    tally = Tally(open=False)
    callers = await open_callers(port, Request(1024, num_chunks=FOR_EVER, gap_s=gap_s), tally, number, lambda caller: caller.send(), within_s=1.0)
    try:
        await asyncio.sleep(2 * gap_s)
        before_s, tally.open = 0.0 if router is None else router.cpu_s(), True
        await asyncio.sleep(2 * seconds)
        after_s, tally.open = 0.0 if router is None else router.cpu_s(), False
    finally:
        for caller in callers:
            caller.close()
    cpu = {} if router is None else {f"CPU us/chunk, {number} streams": (after_s - before_s) / tally.num_chunks * 1e6}
    return {**cpu, **quantiles_ms("gap p", checked(tally).gaps_s, f", {number} streams")}


async def measure_memory(router: RunningRouter, number: int) -> dict[str, float]:
    """`number` requests of 1 KB. Of the growth only that after the first tenth is a leak."""
    found = {"RSS MiB, start": router.rss_mib()}
    checked(await call_often(router.port, Request(1024), CLIENTS, number // 10))
    found["RSS MiB, after a tenth"] = router.rss_mib()
    checked(await call_often(router.port, Request(1024), CLIENTS, number - number // 10))
    return {**found, "RSS MiB, end": router.rss_mib()}


async def measure_fault(router: RunningRouter, name: str, victim: Nodes, break_it: Callable[[Nodes], None], seconds: float) -> dict[str, float]:
    """Requests and streams before and after one node, of those that `victim` is, breaks."""
    streams, requests = Tally(open=False), Steady(router.port, Request(1024), REQUEST_RATE)
    slow = Request(1024, num_chunks=FOR_EVER, gap_s=SLOW_GAP_S)
    callers = await open_callers(router.port, slow, streams, SLOW_STREAMS, lambda caller: caller.close(), within_s=4.0)
    running_requests = asyncio.ensure_future(requests.run())
    try:
        await asyncio.sleep(SLOW_GAP_S)
        found = await _observe(requests.tally, streams, f"{name}: before", 4 * seconds)
        checked(requests.tally)
        break_it(victim)
        found |= await _observe(requests.tally, streams, f"{name}: after", NODE_NOTICED_S + 4 * seconds)
        silent_since_s = time.monotonic() - SILENT_S
        lost = sum(caller.heard_s < silent_since_s and caller.node not in victim.names for caller in callers)
        waiting = requests.num_waiting
    finally:
        running_requests.cancel()
        for caller in callers:
            caller.close()
        await asyncio.gather(running_requests, return_exceptions=True)
    return {**found, f"{name}: requests failed": len(requests.tally.errors), f"{name}: requests without an answer": waiting,
            f"{name}: streams lost at other nodes": lost}  # fmt: skip


async def _observe(requests: Tally, streams: Tally, name: str, seconds: float) -> dict[str, float]:
    for tally in (requests, streams):
        tally.open = True
        del tally.latencies_s[:], tally.gaps_s[:]
    await asyncio.sleep(seconds)
    streams.open = False
    return {**quantiles_ms(f"{name}, request p", requests.latencies_s), **quantiles_ms(f"{name}, gap p", streams.gaps_s)}


def quantiles_ms(name: str, values_s: Sequence[float], after: str = "") -> dict[str, float]:
    """Median and 99th percentile; nothing of nothing."""
    return {f"{name}{share} ms{after}": float(np.percentile(values_s, share)) * 1e3 for share in (50, 99)} if len(values_s) else {}


# ---- rounds ---------------------------------------------------------------------------------------------------------------------


class Bench:
    """All systems before the same nodes. One measures at a time; the others wait for requests."""

    def __init__(self, kinds: Sequence[RouterKind], cores: tuple[int, int], effort: Effort, log_dir: Path, say: Callable[[str], None]) -> None:
        self._kinds = kinds
        self._router_core, self._other_core = cores
        self._effort = effort
        self._log_dir = log_dir
        self._say = say
        self.rounds: list[Round] = [{} for _ in range(effort.rounds)]
        self.failed: dict[str, str] = {}  # by system, the first

    async def run(self, parts: Sequence[str]) -> None:
        """Fills `rounds`."""
        with Nodes(NUM_PAIRS, NUM_PAIRS, self._other_core) as nodes:
            async with AsyncExitStack() as stack:
                routers = [await stack.enter_async_context(running(kind, [nodes], self._router_core, self._log_dir)) for kind in self._kinds]
                for turn, found in enumerate(self.rounds):
                    first = turn % len(routers)
                    for part in (self._bodies, self._streams):
                        if part.__name__.strip("_") in parts:
                            await part(found, [*routers[first:], *routers[:first]], nodes.decode[0])
            if "memory" in parts:
                await self._memory(nodes)
        if "faults" in parts:
            await self._faults()

    async def _bodies(self, found: Round, routers: Sequence[RunningRouter], node: int) -> None:
        seconds = self._effort.seconds
        for size_kb in SIZES_KB:
            await self._note(found, DIRECT, measure_latency(node, size_kb, seconds))
            for router in routers:
                await self._note(found, router.name, measure_bodies(router, size_kb, seconds, found[DIRECT][f"p50 us, {size_kb} KB"]))

    async def _streams(self, found: Round, routers: Sequence[RunningRouter], node: int) -> None:
        for number, gap_s in STREAMS:
            await self._note(found, DIRECT, measure_streams(node, None, number, gap_s, self._effort.seconds))
            for router in routers:
                await self._note(found, router.name, measure_streams(router.port, router, number, gap_s, self._effort.seconds))

    async def _memory(self, nodes: Nodes) -> None:
        for kind in self._once():
            async with running(kind, [nodes], self._router_core, self._log_dir) as router:
                await self._note(self.rounds[0], kind.name, measure_memory(router, self._effort.requests))

    async def _faults(self) -> None:
        faults: tuple[tuple[str, Callable[[Nodes], None]], ...] = (("node killed", Nodes.kill), ("node frozen", Nodes.freeze))
        for name, break_it in faults:
            for kind in self._once():
                with Nodes(NUM_PAIRS, NUM_PAIRS, self._other_core) as nodes, Nodes(0, 1, self._other_core) as victim:
                    async with running(kind, [nodes, victim], self._router_core, self._log_dir, plain=False) as router:
                        await self._note(self.rounds[0], kind.name, measure_fault(router, name, victim, break_it, self._effort.seconds))

    def _once(self) -> list[RouterKind]:
        """Those of the parts that are measured once, not in each round."""
        names = (OURS, SGLANG, VLLM) if self._effort.peers_throughout else (OURS,)
        return [kind for kind in self._kinds if kind.name in names]

    async def _note(self, found: Round, system: str, measurement: Coroutine[Any, Any, dict[str, float]]) -> None:
        try:
            figures = await measurement
        except Failed as error:
            self.failed.setdefault(system, str(error))
            self._say(f"{system}: {error}")
        else:
            found.setdefault(system, {}).update(figures)
            self._say(f"{system}: " + ", ".join(f"{name}: {value:.1f}" for name, value in figures.items()))


# ---- the command line -----------------------------------------------------------------------------------------------------------

def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--full", action="store_true", help="five rounds, a million requests, peers in all parts: half an hour, not three minutes")
    flags.add_argument("--sglang-python", type=Path, metavar="PATH", help="python of an environment that has sglang-router")
    flags.add_argument("--vllm-python", type=Path, metavar="PATH", help="python of an environment that has vllm-router")
    flags.add_argument("--parts", default=",".join(PARTS), help="what is measured (default: %(default)s)")
    flags.add_argument("--rounds", type=int, help="turns of bodies and streams (default: 2, 5 with --full)")
    flags.add_argument("--cores", default="0,1", help="core of the routers, core of clients and nodes (default: %(default)s)")
    flags.add_argument("--log-dir", type=Path, help="where the routers' logs go (default: a new temporary folder, named at the start)")
    flags.add_argument("--result-filename", type=Path, help="write every round's figures as JSON")
    return flags


def peer_version(python: Path, package: str) -> str:
    """Raises ValueError when it is not there."""
    program = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        found = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"{python} cannot be run: {error.strerror}; it must be the python of an environment with {package}") from None
    if found.returncode:
        raise ValueError(f"{python} has no {package}; `{python} -m pip install {package}`")
    return f"{package} {found.stdout.strip()}"


def chosen_kinds(sglang_python: Path | None, vllm_python: Path | None) -> tuple[list[RouterKind], list[str]]:
    """The routers, and the versions of the peers. Raises ValueError."""
    kinds, versions = [ours(OURS), ours(OURS_ROUND_ROBIN, "--policy", "round_robin")], []
    if sglang_python is not None:
        versions.append(peer_version(sglang_python, SGLANG))
        kinds.append(rust(SGLANG, sglang_python, "sglang_router.launch_router", "--pd-disaggregation", prefill_suffix=["8998"]))
    if vllm_python is not None:
        versions.append(peer_version(vllm_python, VLLM))
        kinds.append(ours(OURS_VLLM, "--engine", "vllm"))
        kinds.append(rust(VLLM, vllm_python, "vllm_router.launch_router", "--vllm-pd-disaggregation", "--kv-connector", "nixl"))
    return kinds, versions


def chosen_parts(names: str) -> list[str]:
    """Raises ValueError for a name that is none."""
    if unknown := [name for name in names.split(",") if name not in PARTS]:
        raise ValueError(f"--parts {','.join(unknown)}: choose from {', '.join(PARTS)}")
    return names.split(",")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    effort = FULL if options.full else SHORT
    effort = replace(effort, rounds=options.rounds or effort.rounds)
    try:
        parts, (kinds, versions) = chosen_parts(options.parts), chosen_kinds(options.sglang_python, options.vllm_python)
        router_core, other_core = map(int, options.cores.split(","))
        log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="pdserve-router-"))
        log_dir.mkdir(parents=True, exist_ok=True)
        for flag, name, python in (("--sglang-python", SGLANG, options.sglang_python), ("--vllm-python", VLLM, options.vllm_python)):
            if python is None:
                say(f"{name} is left out: no {flag}")
        say(f"logs: {log_dir}")
        raise_file_limit()  # for the nodes and routers too, which inherit it
        os.sched_setaffinity(0, {other_core})
        bench = Bench(kinds, (router_core, other_core), effort, log_dir, say)
        uvloop.run(bench.run(parts))
    except (ValueError, OSError, SystemFailed) as error:
        print(f"bench/router_overhead.py: {error}", file=sys.stderr)
        return 2
    systems = [DIRECT, *(kind.name for kind in kinds)]
    print(f"{', '.join(versions) or 'no peers'}; {effort.rounds} rounds; medians, ratios with extremes\n")
    print(*(f"{text}\n" for part in PARTS if (text := table(bench.rounds, systems, part))), *verdicts(bench.rounds), sep="\n")
    if options.result_filename is not None:
        options.result_filename.write_text(json.dumps({"versions": versions, "rounds": bench.rounds}, indent=1) + "\n", "utf-8")
    for system, failure in bench.failed.items():
        print(f"bench/router_overhead.py: {system}: {failure}", file=sys.stderr)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
