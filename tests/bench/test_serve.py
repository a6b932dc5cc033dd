"""bench/serve.py against a mock endpoint whose delays and faults are known."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import serve
from aiohttp import web
from serve_client import Load, Outcome, ServerSentEvents, Stream, Target, run_load
from serve_prompts import Prompt, RandomPrompts, arrival_times_s, for_round, read_requests, read_trace, trace_prompts
from serve_report import figures, percentile, ratios, table

FIRST_DELAY_S = 0.05
GAP_S = 0.01


@dataclass
class MockServer:
    """Answers with `max_tokens` tokens: the first after first_delay_s, the others gap_s apart; `fault` says what goes wrong."""

    first_delay_s: float = 0.0
    gap_s: float = 0.0
    fault: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await self._answer(request, body)
        finally:
            self.num_running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.fault == "status":
            return web.json_response({"error": {"message": "full"}}, status=503)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        num_tokens = body.get("max_tokens") or body["max_completion_tokens"]
        num_tokens -= self.fault == "short"
        chat = "messages" in body
        if chat:
            await self._event(response, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        await asyncio.sleep(self.first_delay_s)
        for position in range(num_tokens):
            if position:
                await asyncio.sleep(self.gap_s)
            if self.fault in ("event", "cut", "garbage") and position == num_tokens - 1:
                return await self._break(request, response)
            await self._event(response, {"choices": [{"delta": {"content": "x"}} if chat else {"text": "x"}]})
        finish_reason = None if self.fault == "no finish" else "length"
        await self._event(
            response, {"choices": [{"delta": {}, "finish_reason": finish_reason} if chat else {"text": "", "finish_reason": finish_reason}]}
        )
        await self._event(response, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": num_tokens}})
        if self.fault != "no done":
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _break(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        if self.fault == "cut":
            assert request.transport is not None
            request.transport.abort()
        await response.write({"event": b'data: {"error": {"message": "lost"}}\n\n', "garbage": b"data: {oops\n\n", "cut": b""}[str(self.fault)])
        return response

    async def _event(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b": ping\n\ndata: " + json.dumps(event).encode() + b"\n\n")

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "mock-model"}]})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)  # a request that hangs on purpose is not waited for
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    @contextmanager
    def in_thread(self) -> Iterator[str]:
        """For the command line, which runs an event loop of its own."""
        started, address = threading.Event(), []
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()

        async def serve_until_stopped() -> None:
            async with self.serving() as url:
                address.append(url)
                started.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve_until_stopped()))
        thread.start()
        assert started.wait(10)
        try:
            yield address[0]
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(10)
            loop.close()


def prompts(number: int, num_output_tokens: int = 4) -> list[Prompt]:
    return [Prompt([1000 + position, 2000], num_output_tokens) for position in range(number)]


async def load_on(server: MockServer, number: int = 4, max_concurrency: int | None = None, **settings: Any) -> Load:
    async with server.serving() as url:
        target = Target(url, "m", ignore_eos=True, **settings)
        return await run_load(target, prompts(number), [0.0] * number, max_concurrency, 10)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
async def test_known_delays_are_measured(endpoint: str) -> None:
    server = MockServer(FIRST_DELAY_S, GAP_S)
    async with server.serving() as url:
        content = [Prompt("words", 4)] * 3
        load = await run_load(Target(url, "m", endpoint), content, [0.0] * 3, None, 10)
    for outcome in load.outcomes:
        assert outcome.failure is None
        assert (outcome.num_input_tokens, outcome.num_output_tokens, len(outcome.text_times_s)) == (5, 4, 4)
        assert FIRST_DELAY_S <= outcome.ttft_s < outcome.e2e_s
        assert outcome.e2e_s >= FIRST_DELAY_S + 3 * GAP_S
        assert outcome.tpot_s is not None
        assert sum(outcome.itls_s) >= 3 * GAP_S * 0.9  # chunks may be read late, then the next gap is shorter
    assert load.duration_s >= FIRST_DELAY_S + 3 * GAP_S


async def test_requests_carry_what_was_asked_for() -> None:
    server = MockServer()
    await load_on(server, 1, extra_body={"top_k": 3})
    assert server.bodies == [
        {
            "model": "m", "prompt": [1000, 2000], "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True},
            "temperature": 0.0, "ignore_eos": True, "top_k": 3,
        }
    ]  # fmt: skip


async def test_more_requests_run_at_once_than_a_default_pool_holds() -> None:
    server = MockServer(first_delay_s=0.3)
    await load_on(server, 150)
    assert server.most_running > 100


async def test_concurrency_is_limited() -> None:
    server = MockServer(first_delay_s=0.005)
    load = await load_on(server, 12, max_concurrency=3)
    assert server.most_running == 3
    assert len(load.outcomes) == 12


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("status", "http 503"), ("event", "error event"), ("cut", "connection lost"), ("garbage", "malformed event"),
        ("no finish", "no finish_reason"), ("no done", "no [DONE]"), ("short", "wrong number of tokens"),
    ],
)  # fmt: skip
async def test_failures_are_counted_by_kind(fault: str, kind: str) -> None:
    load = await load_on(MockServer(fault=fault), 2)
    assert [outcome.failure for outcome in load.outcomes] == [kind, kind]
    assert (figures([load])["served"], figures([load])["failed"]) == (0, 2)


async def test_timeouts_and_refused_connections_are_failures() -> None:
    async with MockServer(first_delay_s=60).serving() as url:
        slow = await run_load(Target(url, "m"), prompts(1), [0.0], None, 0.1)
    gone = await run_load(Target(url, "m"), prompts(1), [0.0], None, 10)
    assert [load.outcomes[0].failure for load in (slow, gone)] == ["timeout", "no connection"]


def test_events_are_found_in_bytes_cut_anywhere() -> None:
    sent = b': note\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": "\xc3\xbc"}\n\ndata: [DONE]\n\n'
    for size in range(1, len(sent)):
        events = ServerSentEvents()
        found = [data for start in range(0, len(sent), size) for data in events.feed(sent[start : start + size])]
        assert found == ['{"a": 1}', '{"b": "ü"}', "[DONE]"]


def test_times_of_a_stream_come_from_chunks_with_text() -> None:
    outcome = Outcome(sent_s=10.0)
    stream = Stream(outcome)
    events = [
        {"delta": {"role": "assistant", "content": ""}},
        {"delta": {"content": "a"}},
        {"delta": {"content": "b"}},
        {"delta": {}, "finish_reason": "stop"},
    ]
    for now_s, choice in enumerate(events, start=11):
        stream.on_event(json.dumps({"choices": [choice]}), float(now_s))
    stream.on_event(json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}), 14.0)
    stream.on_event("[DONE]", 14.0)
    stream.finish(5, ignore_eos=True)
    outcome.ended_s = 16.0
    assert (outcome.failure, outcome.ttft_s, outcome.itls_s, outcome.tpot_s, outcome.e2e_s) == (None, 2.0, [1.0], 1.0, 6.0)


def test_percentiles_interpolate() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], percent) for percent in (0, 50, 90, 100)] == [1.0, 2.5, pytest.approx(3.7), 4.0]
    assert percentile([7.0], 99) == 7.0


def made_load(ttft_s: float, e2e_s: float, number: int = 2) -> Load:
    outcomes = [Outcome(0.0, 0.0, e2e_s, [ttft_s, e2e_s], 8, 11) for _ in range(number)]
    return Load([*outcomes, Outcome(0.0, ended_s=99.0, failure="http 503")], e2e_s)


def test_figures_count_served_requests_only() -> None:
    taken = figures([made_load(0.5, 2.5), made_load(0.5, 2.5)])
    assert (taken["served"], taken["failed"], taken["duration_s"], taken["output_tokens"]) == (4, 2, 5.0, 44)
    assert (taken["output_tokens_per_s"], taken["total_tokens_per_s"], taken["requests_per_s"]) == (8.8, 15.2, 0.8)
    assert (taken["ttft_ms_p50"], taken["tpot_ms_p99"], taken["itl_ms_p90"], taken["e2e_ms_p50"]) == (500, 200, 2000, 2500)


def test_ratios_are_b_over_a_in_each_round() -> None:
    a, b = [made_load(0.5, 2.0), made_load(0.5, 2.0)], [made_load(1.0, 4.0), made_load(0.25, 1.0)]
    compared = ratios(a, b)
    assert compared["ttft_ms_p50"] == [2.0, 0.5]
    assert compared["output_tokens_per_s"] == [0.5, 2.0]
    text = table([("A", a), ("B", b)])
    assert "1.250 (0.500 - 2.000)" in text
    assert "A: 2 x http 503" in text


def test_random_prompts_are_those_of_the_seed() -> None:
    source = RandomPrompts(20, 5, prefix_len=3, range_ratio=0.5, vocab_size=5000)
    drawn = source.draw(50, seed=1)
    assert drawn == source.draw(50, seed=1)
    assert drawn != source.draw(50, seed=2)
    contents = [prompt.content for prompt in drawn]
    assert {tuple(content[:3]) for content in contents} == {tuple(contents[0][:3])}
    assert {len(content) for content in contents} <= set(range(13, 34))
    assert len({len(content) for content in contents}) > 5
    assert {prompt.num_output_tokens for prompt in drawn} == {3, 4, 5, 6, 7}
    assert all(1000 <= token_id < 5000 for content in contents for token_id in content)


def test_text_prompts_have_a_word_for_each_token() -> None:
    (prompt,) = RandomPrompts(30, 5, as_text=True).draw(1, seed=0)
    assert isinstance(prompt.content, str)
    assert len(prompt.content.split()) == 30


def test_request_files_hold_prompts_messages_or_conversations(tmp_path: Path) -> None:
    lines = [
        {"prompt": "hi", "output_tokens": 3},
        {"prompt": [5, 6]},
        {"messages": [{"role": "user", "content": "x"}]},
        {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "because of that"}]},
    ]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_requests(file, 9) == [
        Prompt("hi", 3),
        Prompt([5, 6], 9),
        Prompt([{"role": "user", "content": "x"}], 9),
        Prompt([{"role": "user", "content": "why?"}], 3),
    ]
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=r"requests\.jsonl:2"):
        read_requests(file, 9)


def test_traces_keep_shared_blocks_and_scale(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 40, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 1, "hash_ids": [0, 7]},
        {"timestamp": 4000, "input_length": 5, "output_length": 5, "hash_ids": []},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second = made = trace_prompts(read_trace(file, 2), scale=0.25, speed=2.0, vocab_size=9000, seed=0)
    assert [(len(prompt.content), prompt.num_output_tokens, prompt.at_s) for prompt in made] == [(275, 10, 0.0), (256, 1, 1.5)]
    assert first.content[:128] == second.content[:128]
    assert first.content[128:256] != second.content[128:256]
    assert trace_prompts(read_trace(file, 1), 0.25, 2.0, 9000, seed=1)[0].content[:128] != first.content[:128]
    assert arrival_times_s(made, 1.0, 1.0, seed=0) == [0.0, 1.5]


def test_arrivals_have_the_rate_and_are_constant_or_random() -> None:
    many = prompts(2001)
    assert arrival_times_s(many[:3], 4.0, float("inf"), seed=0) == [0.0, 0.25, 0.5]
    assert arrival_times_s(many[:3], float("inf"), 1.0, seed=0) == [0.0, 0.0, 0.0]
    poisson = arrival_times_s(many, 10.0, 1.0, seed=0)
    assert poisson == sorted(poisson)
    assert poisson[-1] == pytest.approx(200, rel=0.1)
    assert poisson != arrival_times_s(many, 10.0, 1.0, seed=1)


async def test_open_loop_sends_at_the_times_asked_for() -> None:
    server = MockServer(first_delay_s=0.05)
    async with server.serving() as url:
        load = await run_load(Target(url, "m"), prompts(5), [0.0, 0.02, 0.04, 0.06, 0.08], None, 10)
    sent = [outcome.sent_s for outcome in load.outcomes]
    assert sent[-1] - sent[0] >= 0.08 - 0.02
    assert server.most_running > 1  # the next is sent although the one before is not answered


def test_rounds_take_the_next_prompts_of_a_file() -> None:
    assert [for_round(prompts(3), 2, number)[0].content[0] for number in range(3)] == [1000, 1002, 1001]


def test_command_line_compares_two_endpoints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fast, slow = MockServer(0.01), MockServer(0.1)
    result = tmp_path / "result.json"
    with fast.in_thread() as url_a, slow.in_thread() as url_b:
        arguments = f"--url {url_a} --compare-url {url_b} --rounds 3 --num-prompts 3 --random-input-len 8 --random-output-len 2 --ignore-eos"
        assert serve.main([*arguments.split(), "--result-filename", str(result)]) == 0
    printed = capsys.readouterr().out
    assert "B/A median" in printed
    taken = json.loads(result.read_text(), parse_constant=pytest.fail)
    assert taken["ratios"]["ttft_ms_p50"]["median"] > 1.5
    assert taken["endpoints"][0]["figures"]["served"] == 9
    assert taken["flags"]["num_prompts"] == 3
    sent_a, sent_b = ([body["prompt"] for body in server.bodies] for server in (fast, slow))
    assert sent_a == sent_b or sorted(sent_a) == sorted(sent_b)
    assert len({tuple(prompt) for prompt in sent_a[1:]}) == 9  # new prompts each round, after one for warm-up
    assert {body["model"] for body in fast.bodies} == {"mock-model"}


def test_command_line_tells_of_failures_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with MockServer(fault="no done").in_thread() as url:
        assert serve.main(["--url", url, "--num-prompts", "2", "--model", "m", "--endpoint", "/v1/chat/completions"]) == 1
    assert "A: 2 x no [DONE]" in capsys.readouterr().out
    assert serve.main(["--url", url]) == 2
    assert serve.main(["--url", url, "--model", "m", "--dataset-name", "trace"]) == 2
    assert "needs --dataset-path" in capsys.readouterr().err
