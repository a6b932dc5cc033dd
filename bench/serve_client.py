"""Load on an OpenAI endpoint: one streaming request, and many of them, with the times at which things arrived.

A request counts as served only when its stream says so: HTTP 200, no error event, a finish_reason, [DONE], and, where end-of-text is
ignored, exactly the tokens asked for. Anything else is a failure with a short name of its kind, and its times are not counted.
Times are taken when bytes reach this process. Output tokens are the server's own count (usage); a server that gives none is counted by chunks.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from serve_prompts import Prompt

CHAT_ENDPOINT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what they all carry. url: without path."""

    url: str
    model: str
    endpoint: str = "/v1/completions"
    ignore_eos: bool = False
    temperature: float = 0.0
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: Prompt) -> dict[str, Any]:
        if self.endpoint.endswith(CHAT_ENDPOINT):
            content = prompt.content
            if isinstance(content, list) and content and isinstance(content[0], int):
                raise ValueError("chat endpoints take no token ids; use --prompt-format text")
            messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
            asked: dict[str, Any] = {"messages": messages, "max_completion_tokens": prompt.num_output_tokens}
        else:
            asked = {"prompt": _as_completion_prompt(prompt.content), "max_tokens": prompt.num_output_tokens}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        ignore_eos = {"ignore_eos": True} if self.ignore_eos else {}
        return {"model": self.model, **asked, **stream, "temperature": self.temperature, **ignore_eos, **self.extra_body}


def _as_completion_prompt(content: list[int] | str | list[dict[str, Any]]) -> list[int] | str:
    """A conversation for a completion endpoint is its texts, one a line."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part["content"]) for part in content if isinstance(part, dict)) or [part for part in content if isinstance(part, int)]


@dataclass(slots=True)
class Outcome:
    """One request. Times in seconds, on one monotonic clock; `failure` is None when it was served."""

    sent_s: float
    late_s: float = 0.0  # sent after its time: this process was behind
    ended_s: float = 0.0
    text_times_s: list[float] = field(default_factory=list)  # arrival of each chunk with text
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    failure: str | None = None

    @property
    def ttft_s(self) -> float:
        """To the first text; to the end when there was none."""
        return (self.text_times_s[0] if self.text_times_s else self.ended_s) - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time for each output token after the first."""
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None

    @property
    def itls_s(self) -> list[float]:
        """Between chunks with text."""
        return [after - before for before, after in zip(self.text_times_s, self.text_times_s[1:], strict=False)]


class ServerSentEvents:
    """The data of complete events, out of bytes cut anywhere. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, received: bytes) -> list[str]:
        *lines, self._pending = (self._pending + received).split(b"\n")
        return [line[5:].strip().decode() for line in lines if line.startswith(b"data:")]


class Stream:
    """What the events of one answer said."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._finish_reason: str | None = None
        self._done = False
        self._error: str | None = None
        self._usage: Mapping[str, int] | None = None

    def on_event(self, data: str, now_s: float) -> None:
        if data == "[DONE]":
            self._done = True
            return
        event = json.loads(data)
        if "error" in event:
            self._error = "error event"
            return
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
                self._outcome.text_times_s.append(now_s)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def finish(self, num_asked_tokens: int, ignore_eos: bool) -> None:
        """Judge the answer, once its bytes have ended."""
        outcome, usage = self._outcome, self._usage or {}
        outcome.num_input_tokens = usage.get("prompt_tokens", 0)
        outcome.num_output_tokens = usage.get("completion_tokens", len(outcome.text_times_s))
        if self._error is not None:
            outcome.failure = self._error
        elif self._finish_reason is None:
            outcome.failure = "no finish_reason"
        elif not self._done:
            outcome.failure = "no [DONE]"
        elif ignore_eos and self._usage is not None and outcome.num_output_tokens != num_asked_tokens:
            outcome.failure = "wrong number of tokens"


async def send(session: aiohttp.ClientSession, target: Target, prompt: Prompt) -> Outcome:
    """One request from sending to the end of its stream. Never raises for what the server does."""
    body = json.dumps(target.body(prompt)).encode()
    outcome = Outcome(sent_s=time.perf_counter())
    try:
        headers = {"content-type": "application/json", **target.headers}
        async with session.post(target.url.rstrip("/") + target.endpoint, data=body, headers=headers) as response:
            if response.status != 200:
                outcome.failure = f"http {response.status}"
                await response.read()
            else:
                await _read_stream(response, outcome, prompt.num_output_tokens, target.ignore_eos)
    except TimeoutError:
        outcome.failure = "timeout"
    except aiohttp.ClientConnectorError:
        outcome.failure = "no connection"
    except aiohttp.ClientError:
        outcome.failure = "connection lost"
    except (ValueError, KeyError, TypeError, AttributeError):
        outcome.failure = "malformed event"
    outcome.ended_s = time.perf_counter()
    return outcome


async def _read_stream(response: aiohttp.ClientResponse, outcome: Outcome, num_asked_tokens: int, ignore_eos: bool) -> None:
    events, stream = ServerSentEvents(), Stream(outcome)
    async for received in response.content.iter_any():
        now_s = time.perf_counter()
        for data in events.feed(received):
            stream.on_event(data, now_s)
    stream.finish(num_asked_tokens, ignore_eos)


@dataclass(frozen=True, slots=True)
class Load:
    """All requests of one run against one endpoint. duration_s: from the first request sent to the last one ended."""

    outcomes: list[Outcome]
    duration_s: float


async def run_load(target: Target, prompts: Sequence[Prompt], at_s: Sequence[float], max_concurrency: int | None, timeout_s: float) -> Load:
    """Send every prompt at its time (open loop); with `max_concurrency`, no more than that at once (closed loop when all times are 0)."""
    connector = aiohttp.TCPConnector(limit=0)  # no pool limit: the default of 100 would be measured instead of the server
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        gate = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None
        started_s = time.perf_counter()

        async def one(prompt: Prompt, due_s: float) -> Outcome:
            await asyncio.sleep(started_s + due_s - time.perf_counter())
            async with AsyncExitStack() as stack:
                late_s = time.perf_counter() - started_s - due_s
                if gate is not None:
                    await stack.enter_async_context(gate)
                outcome = await send(session, target, prompt)
                outcome.late_s = max(0.0, late_s)
                return outcome

        outcomes = await asyncio.gather(*(one(prompt, due_s) for prompt, due_s in zip(prompts, at_s, strict=True)))
        return Load(list(outcomes), time.perf_counter() - started_s)


async def first_model(url: str, headers: Mapping[str, str]) -> str:
    """The first model that the endpoint lists."""
    async with aiohttp.ClientSession() as session, session.get(url.rstrip("/") + "/v1/models", headers=headers) as response:
        response.raise_for_status()
        return str((await response.json(content_type=None))["data"][0]["id"])
