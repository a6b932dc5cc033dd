"""More load than a cluster can take: what is admitted, what is refused and how soon, and whether the admitted keep the objective.

    python bench/overload.py                     a router of ours before nodes that only take their time; without --ttft-slo, then with it
    python bench/overload.py --bound decode      the same where decode rows are what is short
    python bench/overload.py --url http://10.0.0.1:8000 --ttft-slo 2      a cluster as it is; its router has the same --ttft-slo, or none

Requests come open loop, at random, at multiples of the capacity (measured first, by a closed loop that keeps the cluster full, unless given).
A client whose answer is not complete within --patience leaves. TTFT is that of all admitted requests: who left without a first token counts
with the time that he waited. Goodput: answers a second whose first token kept the objective.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
from compare_systems import Program, RunningProgram, free_ports
from serve_client import Load, Outcome, Target, first_model, run_load
from serve_prompts import RandomPrompts, arrival_times_s
from serve_report import percentile

BOUNDS = {  # about 10 requests a second with the default prompts
    "prefill": ["--tokens-per-s", "8000", "--rows", "256", "--tpot", "0.02"],
    "decode": ["--tokens-per-s", "32000", "--rows", "8", "--tpot", "0.025"],
}
COLUMNS = ("load", "offered/s", "admitted/s", "refused", "p99 refusal ms", "TTFT p50 s", "p99 s", "within SLO", "goodput/s")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one load, over the time in which requests came."""

    load: float
    seconds: float
    outcomes: Sequence[Outcome]
    slo_s: float

    @property
    def refused(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failure in ("http 429", "http 503")]

    @property
    def admitted(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failure not in ("http 429", "http 503")]

    def row(self) -> list[str]:
        admitted, refused = self.admitted, self.refused
        in_time = [outcome for outcome in admitted if outcome.text_times_s and outcome.ttft_s <= self.slo_s]
        good = [outcome for outcome in in_time if outcome.failure is None]
        ttfts_s = [outcome.ttft_s for outcome in admitted]
        by_status = ", ".join(f"{number} {failure}" for failure, number in Counter(outcome.failure for outcome in refused).items())
        return [
            f"{self.load:g} x", f"{len(self.outcomes) / self.seconds:.1f}", f"{len(admitted) / self.seconds:.1f}", by_status or "0",
            f"{percentile([outcome.e2e_s for outcome in refused], 99) * 1e3:.0f}" if refused else "-",
            f"{percentile(ttfts_s, 50):.2f}", f"{percentile(ttfts_s, 99):.2f}", f"{len(in_time) / max(1, len(admitted)):.1%}",
            f"{len(good) / self.seconds:.1f}",
        ]  # fmt: skip

    def unexpected(self) -> dict[str, int]:
        """Failures beyond refusals and clients that left."""
        return dict(Counter(outcome.failure for outcome in self.admitted if outcome.failure not in (None, "timeout")))


@contextmanager
def nodes(bound: str) -> Iterator[dict[str, int]]:
    """Ports of both."""
    argv = [sys.executable, str(Path(__file__).with_name("overload_nodes.py")), *BOUNDS[bound]]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


@asynccontextmanager
async def router(ports: dict[str, int], flags: Sequence[str], log_dir: Path) -> AsyncIterator[str]:
    """Its URL."""
    [port] = free_ports(1)
    argv = [sys.executable, "-P", "-m", "pdserve", "router", "--port", str(port), "--log-level", "error", *flags]
    argv += [word for role, node_port in ports.items() for word in (f"--{role}", f"http://127.0.0.1:{node_port}")]
    program = Program("router", frozenset(range(psutil.cpu_count() or 1)), argv, f"http://127.0.0.1:{port}/ready")
    running = RunningProgram(program, log_dir / f"router-{port}.log")
    try:
        async with aiohttp.ClientSession() as session:
            await running.wait_ready(session)
        yield f"http://127.0.0.1:{port}"
    finally:
        await running.stop()


class Sweep:
    def __init__(self, flags: argparse.Namespace) -> None:
        self._flags = flags
        self._prompts = RandomPrompts(flags.input_len, flags.output_len, range_ratio=flags.range_ratio, vocab_size=flags.vocab_size)
        self._headers = dict(header.split("=", 1) for header in flags.header)

    async def capacity_per_s(self, url: str) -> float:
        """Requests a second that a full cluster ends; the first ones, which find it empty, are left out."""
        target = await self._target(url)
        number: int = self._flags.capacity_requests
        load = await run_load(target, self._prompts.draw(number, seed=-1), [0.0] * number, max_concurrency=number // 4, timeout_s=600.0)
        ends_s = sorted(outcome.ended_s for outcome in load.outcomes if outcome.failure is None)
        if len(ends_s) < number:
            raise SystemExit(f"{number - len(ends_s)} of {number} requests failed while the capacity was measured: {_failures(load)}")
        first, last = number // 4, number - number // 4
        return (last - first) / (ends_s[last - 1] - ends_s[first - 1])

    async def run(self, url: str, capacity_per_s: float) -> list[Figures]:
        target = await self._target(url)
        found = []
        for number, load in enumerate(self._flags.loads):
            rate_per_s = load * capacity_per_s
            prompts = self._prompts.draw(max(1, round(rate_per_s * self._flags.seconds)), seed=self._flags.seed + number)
            at_s = arrival_times_s(prompts, rate_per_s, 1.0, seed=self._flags.seed + number)
            ran = await run_load(target, prompts, at_s, None, timeout_s=self._flags.patience)
            found.append(Figures(load, at_s[-1] or 1.0, ran.outcomes, self._flags.ttft_slo))
        return found

    async def _target(self, url: str) -> Target:
        model = self._flags.model or await first_model(url, self._headers)
        return Target(url, model, ignore_eos=self._flags.ignore_eos, headers=self._headers)


def _failures(load: Load) -> dict[str | None, int]:
    return dict(Counter(outcome.failure for outcome in load.outcomes if outcome.failure is not None))


def report(title: str, capacity_per_s: float, found: Sequence[Figures]) -> None:
    print(f"\n{title}; capacity {capacity_per_s:.1f} requests/s\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for figures in found:
        print(f"| {' | '.join(figures.row())} |")
    late_s = max(percentile([outcome.late_s for outcome in figures.outcomes], 99) for figures in found)
    print(f"\nthis process sent late: {late_s * 1e3:.0f} ms at the 99th percentile, at worst", flush=True)
    for figures in found:
        if unexpected := figures.unexpected():
            print(f"at {figures.load:g} x failed otherwise: {unexpected}")


async def measure(flags: argparse.Namespace) -> None:
    sweep = Sweep(flags)
    if flags.url is not None:
        capacity_per_s = flags.capacity or await sweep.capacity_per_s(flags.url)
        report(flags.url, capacity_per_s, await sweep.run(flags.url, capacity_per_s))
        return
    with nodes(flags.bound) as ports, tempfile.TemporaryDirectory() as log_dir:
        capacity_per_s = flags.capacity
        for slo in ([], ["--ttft-slo", str(flags.ttft_slo)]):
            async with router(ports, [*slo, *flags.router_flag], Path(log_dir)) as url:
                capacity_per_s = capacity_per_s or await sweep.capacity_per_s(url)
                title = f"bound by {flags.bound}, {' '.join(slo) or 'without --ttft-slo'}; objective {flags.ttft_slo:g} s"
                report(title, capacity_per_s, await sweep.run(url, capacity_per_s))


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--url", help="a router to be measured as it is; default: one of ours, before nodes that take their time")
    flags.add_argument("--bound", choices=sorted(BOUNDS), default="prefill", help="what is short at these nodes (default: %(default)s)")
    flags.add_argument("--router-flag", action="append", default=[], help="of our router, such as --router-flag=--policy=cost; repeatable")
    flags.add_argument("--ttft-slo", type=float, default=1.0, help="objective, s (default: %(default)s)")
    flags.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.9, 1.5, 3.0], help="of the capacity (default: %(default)s)")
    flags.add_argument("--seconds", type=float, default=8.0, help="in which requests of one load come (default: %(default)s)")
    flags.add_argument("--patience", type=float, default=5.0, help="s after which a client leaves (default: %(default)s)")
    flags.add_argument("--capacity", type=float, help="requests/s; default: measured")
    flags.add_argument("--capacity-requests", type=int, default=80, help="for measuring it, a quarter of them at once (default: %(default)s)")
    flags.add_argument("--input-len", type=int, default=800, help="tokens (default: %(default)s)")
    flags.add_argument("--output-len", type=int, default=32, help="tokens (default: %(default)s)")
    flags.add_argument("--range-ratio", type=float, default=0.8, help="lengths are spread by this fraction both ways (default: %(default)s)")
    flags.add_argument("--vocab-size", type=int, default=30_000, help="token ids are drawn below this (default: %(default)s)")
    flags.add_argument("--model", help="default: the first that the endpoint lists")
    flags.add_argument("--ignore-eos", action="store_true", help="generate the full output length")
    flags.add_argument("--header", action="append", default=[], metavar="KEY=VALUE", help="sent with every request; repeatable")
    flags.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: %(default)s)")
    return flags


if __name__ == "__main__":
    asyncio.run(measure(parser().parse_args()))
