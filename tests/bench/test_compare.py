"""bench/compare.py with two small programs in the systems' places, whose answers and delays are known."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import compare
import psutil
import pytest
from compare import Case
from compare_systems import Program, RunningProgram, RunningSystem, System, SystemFailed, default_preload, free_ports, ours, vllm
from serve_client import Load, Outcome

from pdserve import build_parser

SLOW_FIRST_S = 0.2
CASE = Case(2, 8, 3, output_len=2, at_most={"ttft_ms_p50": 0.9}, at_least={"output_tokens_per_s": 100.0})
SERVER = """
import asyncio, json, subprocess, sys
from aiohttp import web

port, answer, first_delay_s, bodies, stubborn_child = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4], sys.argv[5] == "child"
if stubborn_child:
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    child.stdout.readline()

async def complete(request):
    body = await request.json()
    with open(bodies, "a") as file:
        print(json.dumps(body["prompt"]), file=file)
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": answer}]})
    response = web.StreamResponse()
    await response.prepare(request)
    await asyncio.sleep(first_delay_s)
    for _ in range(body["max_tokens"]):
        await response.write(b'data: {"choices": [{"text": "x"}]}\\n\\n')
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    for event in ({"choices": [{"text": "", "finish_reason": "length"}]}, {"choices": [], "usage": usage}):
        await response.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
    await response.write(b"data: [DONE]\\n\\n")
    return response

async def ready(request):
    return web.Response()

app = web.Application()
app.router.add_post("/v1/completions", complete)
app.router.add_get("/ready", ready)
web.run_app(app, host="127.0.0.1", port=port, print=None)
"""


def server(folder: Path, name: str, answer: str = " Paris.", first_delay_s: float = 0.0, child: str = "") -> System:
    """A system of one program. Its prompts go to a file of its name, a line each."""
    (port,) = free_ports(1)
    argv = [sys.executable, "-c", SERVER, str(port), answer, str(first_delay_s), str(folder / f"{name}.prompts"), child]
    program = Program(name, frozenset({min(os.sched_getaffinity(0))}), argv, f"http://127.0.0.1:{port}/ready")
    return System(name, f"http://127.0.0.1:{port}", [[program]])


def survivors(folder: Path) -> list[int]:
    """Processes that were started for this test and are still there."""
    found = [process for process in psutil.process_iter(["cmdline"]) if any(str(folder) in part for part in process.info["cmdline"] or [])]
    return [process.pid for process in found]


@asynccontextmanager
async def running(system: System, folder: Path) -> AsyncIterator[RunningSystem]:
    started: list[RunningProgram] = []
    try:
        yield await RunningSystem.start(system, folder, started)
    finally:
        await asyncio.gather(*(program.stop() for program in started))


async def test_systems_take_turns_with_the_same_new_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systems = [server(tmp_path, "quick"), server(tmp_path, "slow", first_delay_s=SLOW_FIRST_S)]
    rounds = await compare.compare(systems, [CASE], 2, tmp_path)
    assert survivors(tmp_path) == []
    turns = [line.split()[3] for line in capsys.readouterr().err.splitlines() if line.startswith("round")]
    assert turns == ["quick", "slow", "slow", "quick"]
    quick, slow = ([json.loads(line) for line in (tmp_path / f"{name}.prompts").read_text().splitlines()] for name in ("quick", "slow"))
    assert quick[0] == slow[0] == compare.QUESTION
    measured = [[prompt for position, prompt in enumerate(of_one[1:]) if position % 4] for of_one in (quick, slow)]  # without the waking one
    assert sorted(measured[0]) == sorted(measured[1])
    assert len({tuple(prompt) for prompt in quick[1:] + slow[1:]}) == 6 + 2
    assert all(outcome.failure is None for loads in rounds["2x8"] for load in loads for outcome in load.outcomes)
    assert all(outcome.ttft_s >= SLOW_FIRST_S for load in rounds["2x8"][1] for outcome in load.outcomes)


async def test_a_wrong_answer_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemFailed, match=r"wrong was asked 'The capital of France is' and answered, with status 200: .*Rome"):
        await compare.compare([server(tmp_path, "right"), server(tmp_path, "wrong", answer=" Rome.")], [CASE], 1, tmp_path)
    assert survivors(tmp_path) == []


async def test_a_program_that_ends_is_named_with_its_log(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", f"print('no such flag {tmp_path}'); raise SystemExit(3)"]
    broken = System("broken", "http://127.0.0.1:1", [[Program("the node", frozenset({0}), argv, "http://127.0.0.1:1/ready")]])
    with pytest.raises(SystemFailed, match=r"(?s)the node ended with status 3; its log .*the-node\.log ends with:.*no such flag"):
        await compare.compare([server(tmp_path, "right"), broken], [CASE], 1, tmp_path)
    assert survivors(tmp_path) == []


async def test_a_signal_stops_everything(tmp_path: Path) -> None:
    silent = System("silent", "http://127.0.0.1:1", [[Program("silent", frozenset({0}), ["sleep", "600"], "http://127.0.0.1:1/ready")]])
    task = asyncio.create_task(compare.compare([server(tmp_path, "right"), silent], [CASE], 1, tmp_path))
    while not (tmp_path / "silent.log").exists():
        await asyncio.sleep(0.01)
        assert not task.done()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert survivors(tmp_path) == []


async def test_a_group_is_paused_pinned_and_stopped_as_one(tmp_path: Path) -> None:
    async with running(server(tmp_path, "one", child="child"), tmp_path) as system:
        (program,) = system.programs
        processes = list(program.processes())
        assert len(processes) == 2
        cores = os.sched_getaffinity(0)
        assert system.keep_to_cores() == 0
        if len(cores) > 1:
            os.sched_setaffinity(processes[1].pid, cores)
            assert [system.keep_to_cores(), system.keep_to_cores()] == [1, 0]
        system.pause()
        while {process.status() for process in processes} != {psutil.STATUS_STOPPED}:
            await asyncio.sleep(0.01)
        system.resume()
        await compare.answer_rightly(system)
        system.pause()  # what stands still can be stopped too
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        await asyncio.sleep(0.01)  # killed; the kernel is at it


def load(ttft_s: float) -> Load:
    return Load([Outcome(0.0, 0.0, 10.0, [time_s, 10.0], 8, 11) for time_s in (ttft_s, 1.0)], 2.0)


def test_report_holds_ratios_of_rounds_and_goals() -> None:
    rounds = {"2x8": [[load(0.1), load(0.3)], [load(0.2), load(0.4)]]}
    lines = compare.table(["mine", "peer"], [CASE], rounds).splitlines()
    assert lines[2] == "| 2x8 | TTFT p50, ms | 650.0 | 700.0 | 0.92 (0.92 - 0.93) | <= 0.9: missed |"
    assert "| >= 100.0: missed |" in lines[4]
    held = compare.results(["mine", "peer"], [CASE], rounds)["2x8"]
    assert held["ratios"]["output_tokens_per_s"]["rounds"] == [1.0, 1.0]
    json.dumps(held, allow_nan=False)


def test_commands_use_flags_that_the_product_has(tmp_path: Path) -> None:
    parser, _ = build_parser()
    for colocated in (False, True):
        system = ours(tmp_path, (0, 1), colocated)
        for program in [program for stage in system.stages for program in stage]:
            parser.parse_args(program.argv[program.argv.index("pdserve") + 1 :])
    pair = [program for stage in ours(tmp_path, (0, 1), False).stages for program in stage]
    assert [(program.name, set(program.cores)) for program in pair] == [("pdserve prefill", {0}), ("pdserve decode", {1}), ("pdserve router", {0})]
    peers = [program for stage in vllm(tmp_path / "bin/python", tmp_path, (0, 1), False, "x.so").stages for program in stage]
    assert [(program.name, set(program.cores)) for program in peers] == [("vllm prefill", {0}), ("vllm decode", {1}), ("vllm-router", {0})]
    assert [program.environment.get("VLLM_CPU_OMP_THREADS_BIND") for program in peers] == ["0", "1", None]
    assert [program.environment.get("LD_PRELOAD") for program in peers] == ["x.so", "x.so", None]


def test_preload_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libiomp5.so").touch()
    assert default_preload(tmp_path / "bin/python").split(":")[0] == str(tmp_path / "lib/libiomp5.so")


def test_command_line_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--peer-python", str(tmp_path / "python")]) == 2
    assert f"there is no {tmp_path / 'python'}" in capsys.readouterr().err
    assert compare.main(["--peer-python", sys.executable, "--cases", "1x256,9x9"]) == 2
    assert "--cases 9x9: choose from 1x256," in capsys.readouterr().err
