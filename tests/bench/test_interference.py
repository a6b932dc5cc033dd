"""bench/interference.py: its statistics on made-up times, its load against a mock endpoint, its report on made-up results."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import interference_load
import pytest
from aiohttp import web
from interference import main
from interference_figures import Episode, Limits, attained, figures, goodput, prompt_strain, share_of, strain, stream_strain
from interference_load import StreamBroken, Workload, run
from interference_report import load_ratios, map_ratios, markdown
from serve_client import Outcome

PROMPT_OUTPUT_TOKENS = 3
LIMITS = Limits(ttft_s=2.0, tpot_s=0.1, itl_p99_s=0.4)


def prompt(ttft_s: float, tpot_s: float = 0.01, failure: str | None = None) -> Outcome:
    """Five tokens."""
    times_s = [ttft_s + tpot_s * number for number in range(5)]
    return Outcome(sent_s=0.0, ended_s=times_s[-1], text_times_s=times_s, num_output_tokens=5, failure=failure)


def stream(gaps_s: list[float], start_s: float = 0.0) -> Outcome:
    times_s = [start_s]
    for gap_s in gaps_s:
        times_s.append(times_s[-1] + gap_s)
    return Outcome(sent_s=start_s, text_times_s=times_s)


def episode(streams: list[Outcome], prompts: list[Outcome], window_s: float = 100.0) -> Episode:
    return Episode(streams, prompts, started_s=0.0, window_s=window_s, client_cpu_s=1.0)


# ---- statistics ---------------------------------------------------------------------------------------------------------


def test_share_is_met_by_that_many_values_or_more() -> None:
    values = [float(number) for number in range(1, 11)]
    assert [share_of(values, share) for share in (0.1, 0.5, 0.9, 0.91, 1.0)] == [1.0, 5.0, 9.0, 10.0, 10.0]
    assert share_of([3.0], 0.9) == 3.0
    assert share_of([1.0] * 9 + [math.inf], 0.9) == 1.0
    assert share_of([1.0] * 8 + [math.inf] * 2, 0.9) == math.inf
    assert math.isnan(share_of([], 0.9))


def test_strain_of_a_request_is_that_of_its_worst_limit() -> None:
    assert prompt_strain(prompt(1.0), LIMITS) == pytest.approx(0.5)
    assert prompt_strain(prompt(1.0, tpot_s=0.2), LIMITS) == pytest.approx(2.0)
    assert prompt_strain(prompt(1.0, failure="timeout"), LIMITS) == math.inf
    assert stream_strain([0.05] * 100, LIMITS) == pytest.approx(0.5)
    assert stream_strain([0.01] * 95 + [0.8] * 5, LIMITS) == pytest.approx(2.0)  # the mean is well within its limit


def test_strain_of_an_episode_is_that_of_its_worse_kind() -> None:
    fast, slow = [prompt(1.0)] * 9, [prompt(6.0)]
    assert strain([episode([stream([0.05] * 50)], fast + slow)], LIMITS) == pytest.approx(0.5)  # one in ten may
    assert strain([episode([stream([0.05] * 50)], fast + slow * 2)], LIMITS) == pytest.approx(3.0)
    assert strain([episode([stream([0.3] * 50)], fast)], LIMITS) == pytest.approx(3.0)  # many good prompts do not pay for one bad stream
    assert strain([episode([], fast)], LIMITS) == pytest.approx(0.5)
    assert math.isnan(strain([], LIMITS))


def test_attained_counts_every_request_of_all_episodes() -> None:
    good, bad = episode([stream([0.05] * 50)], [prompt(1.0)]), episode([stream([0.3] * 50)], [prompt(1.0, failure="http 503")])
    assert attained([good, bad], LIMITS) == 0.5
    assert math.isnan(attained([], LIMITS))


def test_goodput_is_the_rate_at_which_the_strain_first_exceeds_one() -> None:
    assert goodput([(0.5, 0.4), (0.2, 0.2), (1.0, 1.4)]) == pytest.approx(0.8)
    assert goodput([(0.2, 0.5), (0.4, 2.0), (0.6, 0.5)]) == pytest.approx(0.2 + 0.2 / 3)  # what comes after is luck
    assert goodput([(0.2, 0.5), (0.4, 1.0)]) == 0.4
    assert goodput([(0.2, 0.5), (0.4, math.inf)]) == 0.2
    assert goodput([(0.2, 0.5), (0.4, math.nan)]) == 0.2
    assert goodput([(0.2, 1.1), (0.4, 0.5)]) == 0.0
    assert goodput([(0.2, 0.5), (0.4, 1.5)], scale=2.0) == 0.4
    assert goodput([]) == 0.0


def test_gaps_count_whole_when_a_part_lies_in_the_window() -> None:
    before, over_the_start, over_the_end = stream([1.0], -2.0), stream([1.0, 2.0, 1.0], -2.0), stream([4.0, 50.0, 1.0], 5.0)
    over_all_of_it = stream([90.0], -9.0)
    taken = episode([before, over_the_start, over_the_end, over_all_of_it], [], window_s=10.0)
    assert taken.stream_gaps_s() == [[], [2.0, 1.0], [4.0, 50.0], [90.0]]


def test_streams_that_got_nothing_are_no_success() -> None:
    starved = episode([stream([]), stream([])], [prompt(1.0)])
    assert strain([starved], LIMITS) == math.inf
    assert attained([starved], LIMITS) == 0.5
    assert strain([episode([stream([]), stream([0.05] * 50)], [prompt(1.0)])], LIMITS) == pytest.approx(0.5)  # it had just begun anew


def test_figures_are_of_all_episodes_in_ms_and_of_what_was_served() -> None:
    taken = figures([episode([stream([0.1, 0.2, 0.3])], [prompt(1.0), prompt(9.0, failure="timeout")]), episode([stream([0.2])], [prompt(3.0)])])
    assert (taken["prompts"], taken["failed"], taken["gaps"]) == (3, 1, 4)
    assert taken["itl_ms_p50"] == pytest.approx(200)
    assert taken["ttft_ms_p50"] == pytest.approx(2000)
    assert taken["tpot_ms_p50"] == pytest.approx(10)
    assert (taken["stream_tokens_per_s"], taken["client_cpu"]) == (4 / 200, 2 / 200)


# ---- load ---------------------------------------------------------------------------------------------------------------


def test_offered_load_is_that_of_the_seed() -> None:
    def workload(seed: int) -> Workload:
        return Workload(num_streams=2, prompt_tokens=12, output_tokens=3, num_prompts=40, window_s=5.0, seed=seed)

    first = workload(1)
    assert (first.prompts(), first.arrivals_s()) == (workload(1).prompts(), workload(1).arrivals_s())
    assert first.arrivals_s() == sorted(first.arrivals_s()) != workload(2).arrivals_s()
    assert len(first.arrivals_s()) == 40
    assert all(0 <= at_s <= 5 for at_s in first.arrivals_s())
    contents = [tuple(one.content) for seed in (1, 2) for one in workload(seed).prompts()]
    assert len(set(contents)) == 80
    shorter, longer = (Workload(0, length, 3, 1, 1.0, seed=1).prompts()[0].content for length in (12, 24))
    assert longer[:12] != shorter  # or the longer one's prefix would be cached
    streams = [next(workload(seed).stream_prompts(number)).content for seed in (1, 2) for number in (0, 1)]
    assert len(set(map(str, streams))) == 4


@dataclass
class Endpoint:
    """Answers a token every millisecond. Of the requests in the order of arrival, the one numbered `fails` ends with an error event.
    Prompts are answered once `holds_for` requests have come."""

    fails: int | None = None
    holds_for: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        async with self.arrived:
            self.bodies.append(body)
            fails = len(self.bodies) - 1 == self.fails
            self.arrived.notify_all()
            if body["max_tokens"] == PROMPT_OUTPUT_TOKENS:
                await self.arrived.wait_for(lambda: len(self.bodies) >= self.holds_for)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(min(body["max_tokens"], 5 if fails else 10**9)):
            await self.event(response, {"choices": [{"text": "x"}]})
            await asyncio.sleep(0.001)
        if fails:
            await self.event(response, {"error": {"message": "lost"}})
            return response
        await self.event(response, {"choices": [{"text": "", "finish_reason": "length"}]})
        await self.event(response, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": body["max_tokens"]}})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def event(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@pytest.fixture(autouse=True)
def _no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference_load, "SETTLE_S", 0.0)


async def test_streams_go_on_while_prompts_come_and_all_take_turns_at_the_urls() -> None:
    first, second = Endpoint(), Endpoint()
    async with first.serving() as first_url, second.serving() as second_url:
        taken = await run([first_url, second_url], Workload(4, 7, 3, 6, 0.1, seed=1))
    assert [outcome.failure for outcome in taken.prompts] == [None] * 6
    assert [outcome.num_output_tokens for outcome in taken.prompts] == [3] * 6
    assert len(taken.streams) == len(taken.stream_gaps_s()) == 4
    assert all(outcome.text_times_s for outcome in taken.streams)
    for endpoint in (first, second):
        assert sorted(body["max_tokens"] for body in endpoint.bodies) == [3, 3, 3, interference_load.STREAM_TOKENS, interference_load.STREAM_TOKENS]
    sent = [body["prompt"] for body in first.bodies + second.bodies if body["max_tokens"] == 3]
    assert sorted(sent) == sorted(one.content for one in Workload(4, 7, 3, 6, 0.1, seed=1).prompts())
    assert taken.client_cpu_s > 0


async def test_a_stream_that_ends_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference_load, "STREAM_TOKENS", 4)
    endpoint = Endpoint(holds_for=4)
    async with endpoint.serving() as url:
        taken = await run([url], Workload(1, 7, PROMPT_OUTPUT_TOKENS, 1, 0.0, seed=1))
    assert len(taken.streams) >= 3
    asked = [body["prompt"] for body in endpoint.bodies if body["max_tokens"] == 4]
    assert len(set(asked)) == len(asked) >= 3
    assert all(len(gaps_s) <= 3 for gaps_s in taken.stream_gaps_s())  # between two answers is no gap


async def test_prompts_that_are_not_answered_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference_load, "DRAIN_S", 0.02)
    async with Endpoint(holds_for=99).serving() as url:
        taken = await run([url], Workload(1, 7, PROMPT_OUTPUT_TOKENS, 2, 0.0, seed=1))
    assert [outcome.failure for outcome in taken.prompts] == ["not answered in time"] * 2
    assert strain([taken], LIMITS) == math.inf


async def test_a_broken_stream_ends_the_run() -> None:
    async with Endpoint(fails=1).serving() as url:
        with pytest.raises(StreamBroken, match="error event"):
            await run([url], Workload(3, 7, 3, 2, 30.0, seed=1))
    with pytest.raises(StreamBroken, match="broke"):
        await run([url], Workload(1, 7, 3, 0, 0.1, seed=1))


# ---- report -------------------------------------------------------------------------------------------------------------


def load_row(system: str, rate: float, itl_ms_p99: float | None, **more: Any) -> dict[str, Any]:
    taken = {"itl_ms_p50": 30.0, "itl_ms_p99": itl_ms_p99, "ttft_ms_p50": 900.0, "ttft_ms_p90": 1500.0, "tpot_ms_p50": 40.0}
    counts = {"prompts": 9, "failed": 0, "attained": 1.0, "strain": 0.5, "client_cpu": 0.02}
    return {"system": system, "rate": rate, **taken, **counts, **more}


def results() -> dict[str, Any]:
    cells = [(128, 16, 0.5, 2.0), (2048, 16, 1.0, 0.25), (2048, 256, 1.02, None)]
    map_rows = []
    for prompt_tokens, output_tokens, ttft_ratio, itl_ratio in cells:
        cell = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "rate": 0.7}
        pd = {"ttft_ms_p50": 100.0 * ttft_ratio, "prompt_itl_ms_p99": None if itl_ratio is None else 40.0 * itl_ratio, "e2e_ms_p50": 7.0}
        map_rows += [{**cell, "system": "PD", **pd}]
        map_rows += [{**cell, "system": "colocated", "ttft_ms_p50": 100.0, "prompt_itl_ms_p99": 40.0, "e2e_ms_p50": 10.0}]
    return {
        "baseline": "one node, chunk 64, delay 1",
        "load": [load_row(name, rate, itl) for rate in (0.2, 0.4) for name, itl in (("PD", 40.0), ("colocated", 160.0))],
        "load_by_seed": [
            load_row(name, 0.2, itl_ms_p99, seed=seed)
            for name, of_seeds in (("PD", (40.0, 30.0)), ("colocated", (160.0, 300.0)))
            for seed, itl_ms_p99 in enumerate(of_seeds)
        ],
        "goodput PD": [{"scale": 1.0, "rate": 0.4}],
        "goodput colocated": [{"scale": 1.0, "rate": 0.31}],
        "map": map_rows,
    }


def test_ratios_are_pd_over_colocated() -> None:
    assert load_ratios(results(), "itl_ms_p99") == {0.2: [0.25, 0.1]}
    assert map_ratios(results(), "prompt_itl_ms_p99") == {(128, 16): 2.0, (2048, 16): 0.25, (2048, 256): None}


def test_report_names_where_each_system_is_better() -> None:
    lines = markdown(results()).splitlines()
    assert "- TTFT p50: PD is better at 128 / 16; colocated is better at none." in lines
    assert "- p99 ITL: PD is better at 2048 / 16; colocated is better at 128 / 16." in lines
    assert "| 2048 / 256 | 0.70 | 1.02 | - | 0.70 |" in lines


def test_report_says_which_goodput_is_a_lower_bound() -> None:
    lines = markdown(results()).splitlines()
    assert "| PD | >= 0.40 |" in lines
    assert "| colocated | 0.31 |" in lines


def test_report_says_how_many_prompts_are_in_no_percentile() -> None:
    made = results()
    made["load"][0]["failed"] = 2
    assert "| 900 / 1500 (2 of 9 failed) : 900 / 1500 |" in markdown(made)


def test_report_has_the_steps_that_were_run() -> None:
    whole = markdown(results())
    assert "| 0.20 | 30 / 40 : 30 / 160 |" in whole
    assert "0.17 (0.10 - 0.25) |" in whole
    assert "Sweep" not in whole
    assert markdown({"baseline": "x"}) == ""


def test_command_line_asks_for_what_it_needs(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--out or --report" in capsys.readouterr().err
    file = tmp_path / "interference.json"
    file.write_text(json.dumps(results()))
    assert main(["--report", str(file)]) == 0
    assert "Map, PD over colocated" in capsys.readouterr().out
