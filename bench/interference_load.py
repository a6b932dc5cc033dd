"""The load of bench/interference.py: streams that go on while prompts arrive in an open loop.

Streams are asked for with common words, so that what they say is text and every token of it shows. A system has one URL, or several at
which requests take turns. The same seed gives the same prompts at the same times; another seed, or another length, gives others, so that no
prefix is ever cached.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import aiohttp
from interference_figures import Episode
from serve_client import Outcome, ServerSentEvents, Stream, Target, send
from serve_prompts import Prompt, RandomPrompts

MODEL = "m"
STREAM_PROMPT_TOKENS = 64
STREAM_TOKENS = 1024  # outlasts a window; a stream that ends begins anew
SETTLE_S = 1.0  # from the last stream's first token to the window
SILENCE_S = 120.0  # an answer of which nothing comes for this long has failed
DRAIN_S = 60.0  # after the window; a prompt that is not answered by then has failed: a hopeless system ends too
READY_PROBE_S = 0.05
SEEDS_APART = 1 << 20  # beyond any prompt's length


class StreamBroken(Exception):
    """A steady stream failed: there is nothing to measure."""


@dataclass(frozen=True, slots=True)
class Workload:
    """num_prompts arrive within window_s, at times drawn from the seed."""

    num_streams: int
    prompt_tokens: int
    output_tokens: int
    num_prompts: int
    window_s: float
    seed: int

    def prompts(self) -> list[Prompt]:
        """Prompts of different lengths differ from the first token on."""
        return RandomPrompts(self.prompt_tokens, self.output_tokens).draw(self.num_prompts, self.seed * SEEDS_APART + self.prompt_tokens)

    def arrivals_s(self) -> list[float]:
        """A Poisson process, given how many arrive: the times are then uniform and independent. So the offered load is exact."""
        source = random.Random(f"arrivals {self.seed}")
        return sorted(source.uniform(0, self.window_s) for _ in range(self.num_prompts))

    def stream_prompts(self, stream: int) -> Iterator[Prompt]:
        """What one stream asks for, one after the other."""
        for number in count():
            yield from RandomPrompts(STREAM_PROMPT_TOKENS, STREAM_TOKENS, as_text=True).draw(1, (self.seed * 1000 + stream) * 1000 + number)


async def run(urls: Sequence[str], workload: Workload) -> Episode:
    """Start the streams; when all run, let the prompts come; end when every prompt is answered, or given up. Raises StreamBroken."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    targets = [Target(url, MODEL, ignore_eos=True) for url in urls]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        try:
            async with asyncio.TaskGroup() as group:
                return await _run(group, session, targets, workload)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None


async def _run(group: asyncio.TaskGroup, session: aiohttp.ClientSession, targets: Sequence[Target], workload: Workload) -> Episode:
    begun: list[Outcome] = []
    speaking = asyncio.Semaphore(0)
    streams = [
        group.create_task(_keep_streaming(session, targets[number % len(targets)], workload.stream_prompts(number), begun, speaking))
        for number in range(workload.num_streams)
    ]
    for _ in streams:
        await speaking.acquire()
    if streams:
        await asyncio.sleep(SETTLE_S)
    started_s, cpu_s = time.perf_counter(), time.process_time()

    async def ask(prompt: Prompt, due_s: float, target: Target) -> Outcome:
        await asyncio.sleep(started_s + due_s - time.perf_counter())
        return await send(session, target, prompt)

    due = zip(workload.prompts(), workload.arrivals_s(), strict=True)
    prompts = [group.create_task(ask(*one, targets[number % len(targets)])) for number, one in enumerate(due)]
    await asyncio.sleep(workload.window_s)
    client_cpu_s = time.process_time() - cpu_s
    if prompts:
        await asyncio.wait(prompts, timeout=DRAIN_S)
    answers = [prompt.result() if prompt.done() else Outcome(started_s, failure="not answered in time") for prompt in prompts]
    for task in (*streams, *prompts):
        task.cancel()
    return Episode(begun, answers, started_s, workload.window_s, client_cpu_s)


async def _keep_streaming(
    session: aiohttp.ClientSession, target: Target, prompts: Iterator[Prompt], begun: list[Outcome], speaking: asyncio.Semaphore
) -> None:
    """One answer after the other, each put into `begun` as it starts, so that what arrived is known when this is cancelled.
    `speaking` is released at the first text of each."""
    for prompt in prompts:
        begun.append(outcome := Outcome(sent_s=time.perf_counter()))
        try:
            await _stream(session, target, prompt, outcome, speaking)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise StreamBroken(f"a stream of {target.url} broke: {error!r}") from error
        if outcome.failure is not None:
            raise StreamBroken(f"a stream of {target.url} failed: {outcome.failure}")


async def _stream(session: aiohttp.ClientSession, target: Target, prompt: Prompt, outcome: Outcome, speaking: asyncio.Semaphore) -> None:
    events, stream = ServerSentEvents(), Stream(outcome)
    headers = {"content-type": "application/json"}
    async with session.post(target.url + target.endpoint, data=json.dumps(target.body(prompt)).encode(), headers=headers) as response:
        if response.status != 200:
            outcome.failure = f"http {response.status}: {(await response.text())[:300]}"
            return
        async for received in response.content.iter_any():
            now_s, was_silent = time.perf_counter(), not outcome.text_times_s
            for data in events.feed(received):
                stream.on_event(data, now_s)
            if was_silent and outcome.text_times_s:
                speaking.release()
    stream.finish(prompt.num_output_tokens, ignore_eos=True)


async def wait_ready(url: str, timeout_s: float) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session:
        while True:
            with suppress(aiohttp.ClientConnectionError):
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(READY_PROBE_S)
