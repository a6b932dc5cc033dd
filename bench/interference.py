"""What separate prefill and decode nodes are for, measured: how much arriving prompts disturb running streams, at what price.

    python bench/interference.py --model DIR --out DIR [--quick]
    python bench/interference.py --report DIR/interference.json [--out DIR]

The same engine on the same two cores. PD: a prefill node and the router on one, a decode node on the other. Colocated: one decode node with
both cores and two compute threads, or two decode nodes of a core each between which requests take turns; both tuned over chunk sizes and
turn rules. Steps:

1. References: a lone request of each length, and the streams alone. From them follow the limits (interference_figures.py).
2. Sweep: every system meets the same streams and the same prompts. The colocated one with the least strain is the baseline; PD
   is not tuned.
3. Load: PD and the baseline, both up, take turns at each rate and seed. Goodput comes from here.
4. Map: no streams; requests of one kind, prompt length by output length, at the same rate for both.

It wants two idle cores. Results are written after every step, so that a run that ends early has what it measured.
"""

import argparse
import asyncio
import importlib.util
import json
import math
import os
import platform
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

from interference_figures import Episode, Limits, attained, figures, goodput, strain
from interference_load import StreamBroken, Workload, run
from interference_report import markdown
from interference_systems import System, serving

from common.errors import StartupError
from common.launch import ChildDied
from common.models.acquire import resolve_model

NUM_STREAMS = 6
PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 16
LIMIT_SCALES = (0.5, 0.75, 1.0, 1.5, 2.0)  # the limits times this, for goodput under tighter and looser ones
MAP_LOAD = 0.7  # of what a prefill node can take, or of the streams' token rate where that is less
PD = System("PD")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything. sweep_fraction, load_fractions: rates, as fractions of what a prefill node can take. A cell of the map has as many
    requests as arrive in map_window_s, but no fewer than the first and no more than the second of map_requests."""

    sweep: tuple[System, ...]
    sweep_fraction: float
    sweep_window_s: float
    load_fractions: tuple[float, ...]
    load_window_s: float
    seeds: int
    lone_requests: int
    map_prompt_tokens: tuple[int, ...]
    map_output_tokens: tuple[int, ...]
    map_window_s: float
    map_requests: tuple[int, int]


FULL = Plan(
    sweep=tuple(
        [System("one node", chunk, 1) for chunk in (32, 64, 128, 256, 512, 1024)]
        + [System("one node", chunk, 4) for chunk in (32, 64, 128, 256)]  # four chunks in a row: as far apart as with one of four times the size
        + [System("two nodes", chunk, 1) for chunk in (32, 64, 128, 256)]
        + [System("two nodes", chunk, 4) for chunk in (32, 64)]
    ),
    sweep_fraction=0.7,
    sweep_window_s=8.0,
    load_fractions=(0.4, 0.6, 0.8, 1.0),
    load_window_s=10.0,
    seeds=3,
    lone_requests=2,
    map_prompt_tokens=(128, 512, 2048),
    map_output_tokens=(16, 64, 256),
    map_window_s=10.0,
    map_requests=(4, 24),
)
QUICK = Plan(
    sweep=(System("one node", 64, 1), System("one node", 256, 1), System("two nodes", 64, 1)),
    sweep_fraction=0.7,
    sweep_window_s=6.0,
    load_fractions=(0.5, 0.9),
    load_window_s=9.0,
    seeds=1,
    lone_requests=1,
    map_prompt_tokens=(128, 512),
    map_output_tokens=(16, 128),
    map_window_s=6.0,
    map_requests=(4, 12),
)


@dataclass(slots=True)
class Bench:
    plan: Plan
    model_dir: Path
    cores: tuple[int, int]
    out: Path
    results: dict[str, Any]

    async def run(self) -> None:
        started_s = time.monotonic()
        limits, lone_s, streams_per_s = await self.references()
        baseline = await self.sweep(limits, lone_s)
        async with self.up(PD) as pd_urls, self.up(baseline) as baseline_urls:
            both = {"PD": pd_urls, "colocated": baseline_urls}
            await self.lone("colocated", baseline_urls)
            await self.load(limits, lone_s, both)
            await self.map(lone_s, streams_per_s, both)
        self.keep("took_s", time.monotonic() - started_s)

    @asynccontextmanager
    async def up(self, system: System) -> AsyncIterator[list[str]]:
        """Started, ready, and every node has computed a prompt."""
        async with serving(system, self.model_dir, self.cores) as urls:
            await run(urls, Workload(0, PROMPT_TOKENS, 2, len(urls), 0.0, seed=1))
            yield urls

    # ---- references ---------------------------------------------------------------------------------------------------

    async def references(self) -> tuple[Limits, dict[int, float], float]:
        """The limits; a lone request's TTFT by prompt length in seconds; tokens/s of the streams alone. All through PD."""
        async with self.up(PD) as urls:
            lone_s = await self.lone("PD", urls)
            alone = await run(urls, Workload(NUM_STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS, 0, self.plan.sweep_window_s, seed=2))
            gaps_s = [gap_s for stream in alone.stream_gaps_s() for gap_s in stream]
            if not gaps_s:
                raise StreamBroken(f"streams alone got no token within {alone.window_s:g} s: cores {self.cores} are not free")
            limits = Limits.multiples_of(lone_s[PROMPT_TOKENS], fmean(gaps_s))
            self.keep("streams_alone", _plain(figures([alone])))
            self.keep("limits", asdict(limits))
            await self.sweep_one(PD, urls, limits, lone_s)
        return limits, lone_s, len(gaps_s) / alone.window_s

    async def lone(self, name: str, urls: Sequence[str]) -> dict[int, float]:
        lengths = sorted({*self.plan.map_prompt_tokens, PROMPT_TOKENS})
        taken = {}
        for length in lengths:
            workloads = [Workload(0, length, OUTPUT_TOKENS, 1, 0.0, seed=100 + turn) for turn in range(self.plan.lone_requests)]
            asked = [(await run(urls, workload)).prompts[0] for workload in workloads]
            if failure := next((one.failure for one in asked if one.failure), None):
                raise StreamBroken(f"a lone request of {length} tokens failed at {name}: {failure}")
            taken[length] = median(one.ttft_s for one in asked)
            tpot_ms = median(one.tpot_s or math.nan for one in asked) * 1e3
            self.add("lone", {"system": name, "prompt_tokens": length, "ttft_ms": taken[length] * 1e3, "tpot_ms": tpot_ms})
        return taken

    # ---- sweep --------------------------------------------------------------------------------------------------------

    async def sweep(self, limits: Limits, lone_s: dict[int, float]) -> System:
        """The colocated system with the least strain."""
        strains = {}
        for system in self.plan.sweep:
            async with self.up(system) as urls:
                strains[system] = await self.sweep_one(system, urls, limits, lone_s)
        baseline = min(strains, key=lambda system: (math.isnan(strains[system]), strains[system]))
        self.keep("baseline", baseline.label)
        return baseline

    async def sweep_one(self, system: System, urls: Sequence[str], limits: Limits, lone_s: dict[int, float]) -> float:
        window_s = self.plan.sweep_window_s
        num_prompts = max(2, round(self.plan.sweep_fraction / lone_s[PROMPT_TOKENS] * window_s))
        episode = await run(urls, Workload(NUM_STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS, num_prompts, window_s, seed=200))
        at_strain = strain([episode], limits)
        self.add("sweep", {"system": system.label, **asdict(system), "rate": num_prompts / window_s, **self.described([episode], limits)})
        return at_strain

    # ---- load ---------------------------------------------------------------------------------------------------------

    async def load(self, limits: Limits, lone_s: dict[int, float], both: dict[str, list[str]]) -> None:
        window_s, episodes = self.plan.load_window_s, dict[tuple[str, float], list[Episode]]()
        numbers = [max(1, round(fraction / lone_s[PROMPT_TOKENS] * window_s)) for fraction in self.plan.load_fractions]
        for seed in range(self.plan.seeds):
            for turn, num_prompts in enumerate(numbers):
                rate = num_prompts / window_s
                workload = Workload(NUM_STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS, num_prompts, window_s, seed=1000 + 100 * seed + turn)
                for name in _in_turn(both, seed + turn):
                    episode = await run(both[name], workload)
                    episodes.setdefault((name, rate), []).append(episode)
                    self.add("load_by_seed", {"system": name, "rate": rate, "seed": seed, **self.described([episode], limits)})
        for (name, rate), of_rate in sorted(episodes.items()):
            self.add("load", {"system": name, "rate": rate, **self.described(of_rate, limits)})
        for name in both:
            points = [(rate, strain(of_rate, limits)) for (of_name, rate), of_rate in episodes.items() if of_name == name]
            self.keep(f"goodput {name}", [{"scale": scale, "rate": goodput(points, scale)} for scale in LIMIT_SCALES])

    # ---- map ----------------------------------------------------------------------------------------------------------

    async def map(self, lone_s: dict[int, float], streams_per_s: float, both: dict[str, list[str]]) -> None:
        cells = [(prompt, output) for prompt in self.plan.map_prompt_tokens for output in self.plan.map_output_tokens]
        fewest, most = self.plan.map_requests
        for turn, (prompt_tokens, output_tokens) in enumerate(cells):
            rate = MAP_LOAD * min(1 / lone_s[prompt_tokens], streams_per_s / output_tokens)
            num_prompts = max(fewest, min(most, round(rate * self.plan.map_window_s)))
            workload = Workload(0, prompt_tokens, output_tokens, num_prompts, num_prompts / rate, seed=5000 + turn)
            for name in _in_turn(both, turn):
                taken = _plain(figures([await run(both[name], workload)]))
                self.add("map", {"system": name, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "rate": rate, **taken})

    # ---- results ------------------------------------------------------------------------------------------------------

    def described(self, episodes: Sequence[Episode], limits: Limits) -> dict[str, float | None]:
        return _plain({"strain": strain(episodes, limits), "attained": attained(episodes, limits), **figures(episodes)})

    def add(self, step: str, row: dict[str, Any]) -> None:
        self.results.setdefault(step, []).append(row)
        shown = {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}
        print(f"{step}: {shown}", file=sys.stderr, flush=True)
        self.write()

    def keep(self, name: str, value: object) -> None:
        self.results[name] = value
        self.write()

    def write(self) -> None:
        (self.out / "interference.json").write_text(json.dumps(self.results, indent=1, allow_nan=False) + "\n", "utf-8")


def _in_turn(both: dict[str, list[str]], turn: int) -> list[str]:
    """Who comes first changes."""
    names = list(both)
    return names if turn % 2 == 0 else names[::-1]


def _plain(taken: dict[str, float]) -> dict[str, float | None]:
    """As JSON has it: null for what could not be measured, and for infinity."""
    return {name: value if math.isfinite(value) else None for name, value in taken.items()}


def machine(options: argparse.Namespace) -> dict[str, object]:
    cpus = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": date.today().isoformat(), "quick": options.quick, "cpu": cpus[0] if cpus else platform.processor(), "num_cores": os.cpu_count(),
        "load_average_before": os.getloadavg()[0], "python": platform.python_version(), "torch": version("torch"), "model": options.model,
    }  # fmt: skip


async def measure(options: argparse.Namespace) -> None:
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    loop.add_signal_handler(signal.SIGTERM, this.cancel)  # as Ctrl-C: what was started is stopped
    model_dir = resolve_model(options.model, lambda text: print(text, file=sys.stderr))
    first, second = (int(core) for core in options.cores.split(","))
    await Bench(QUICK if options.quick else FULL, model_dir, (first, second), options.out, {"machine": machine(options)}).run()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="as for `pdserve up` (default: demo)")
    parser.add_argument("--out", type=Path, help="directory for interference.json, interference.png, interference_map.png")
    parser.add_argument("--quick", action="store_true", help="fewer of everything, in a fifth of the time; says whether it works, and little more")
    parser.add_argument("--cores", default="0,1", help="the two cores (default: 0,1)")
    report_help = "measure nothing; print the tables of an earlier run as markdown, and draw it anew into --out"
    parser.add_argument("--report", type=Path, metavar="JSON", help=report_help)
    options = parser.parse_args(arguments)
    if options.out is None and options.report is None:
        parser.error("--out or --report is needed")
    if options.out is not None:
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("the plots need matplotlib: pip install -c constraints.txt '.[bench]'")
        options.out.mkdir(parents=True, exist_ok=True)
    try:
        if options.report is None:
            asyncio.run(measure(options))
    except (StartupError, ChildDied, StreamBroken, TimeoutError, ValueError) as error:
        print(f"bench/interference.py: {error or type(error).__name__}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    results = json.loads((options.report or options.out / "interference.json").read_text("utf-8"))
    if options.out is not None:
        from interference_plot import draw

        draw(results, options.out)
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
