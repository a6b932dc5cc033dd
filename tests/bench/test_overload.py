"""The nodes that take their time, and the figures that are made of what clients saw."""

import asyncio
import math
import time

from aiohttp import ClientSession, web
from overload import Figures
from overload_nodes import Pair
from serve_client import Outcome


async def test_a_request_waits_for_a_row_then_for_its_prompt_and_one_that_leaves_frees_both() -> None:
    pair = Pair(tokens_per_s=1000.0, rows=1, tpot_s=0.001)
    runners = [web.AppRunner(pair.app(role), handler_cancellation=True, access_log=None) for role in ("prefill", "decode")]
    urls = []
    for runner in runners:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}/v1/completions")

    async def ask(session: ClientSession, room: int, num_tokens: int) -> tuple[float, int]:
        """Time of the last token, and how many there were."""
        body = {"prompt": [1] * num_tokens, "max_tokens": 3, "bootstrap_room": room}
        replies = await asyncio.gather(*(session.post(url, json=body) for url in urls))
        texts = [await reply.text() for reply in replies]
        return time.monotonic(), texts[1].count('"text"')

    try:
        async with ClientSession() as session:
            started_s = time.monotonic()
            leaver = asyncio.ensure_future(ask(session, 1, 100_000))
            while not pair.num_open:
                await asyncio.sleep(0.001)
            first, second = asyncio.ensure_future(ask(session, 2, 50)), asyncio.ensure_future(ask(session, 3, 100))
            leaver.cancel()
            (first_s, first_tokens), (second_s, second_tokens) = await asyncio.gather(first, second)
            assert (first_tokens, second_tokens) == (3, 3)
            assert max(first_s, second_s) - started_s >= 0.15
            assert pair.rooms == {}
    finally:
        for runner in runners:
            await runner.cleanup()


def outcome(ttft_s: float | None, failure: str | None = None, ended_s: float = 4.0) -> Outcome:
    return Outcome(sent_s=0.0, ended_s=ended_s, text_times_s=[] if ttft_s is None else [ttft_s], failure=failure)


def test_figures_count_who_left_as_late_and_refusals_apart() -> None:
    outcomes = [outcome(0.5), outcome(0.9), outcome(1.5), outcome(0.8, "timeout"), outcome(None, "timeout"), outcome(None, "http 429", 0.01),
                outcome(None, "http 503", 0.03), outcome(None, "connection lost")]  # fmt: skip
    figures = Figures(3.0, 2.0, outcomes, slo_s=1.0)
    load, offered, admitted, refused, refusal_ms, p50, p99, within, goodput = figures.row()
    assert (load, offered, admitted, refused) == ("3 x", "4.0", "3.0", "1 http 429, 1 http 503")
    assert refusal_ms == "30"
    assert (p50, p99) == ("1.20", "4.00")  # 0.5 0.8 0.9 1.5 4 4
    assert (within, goodput) == ("50.0%", "1.0")
    assert figures.unexpected() == {"connection lost": 1}


def test_a_load_that_refuses_everything_has_figures_too() -> None:
    row = Figures(1.0, 1.0, [outcome(None, "http 429")], slo_s=1.0).row()
    assert row[2] == "0.0"
    assert math.isnan(float(row[5]))
