"""Admission in front of simulated nodes, in simulated time: whether what it admits keeps the objective, for nodes that differ in what holds
requests up. No sockets, no sleeping; the same seed gives the same run.

A prefill node computes one prompt after another, at a rate that falls with the prompt's length (attention is quadratic); a decode node has rows,
each held from before the prompt is computed (it reserves pages first) to the last token. The prediction is what a router can know: tokens that
were placed and not yet computed, by a rate that is constant. It knows nothing of rows, and may be wrong by a factor.
"""

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace

from common.config import RouterConfig
from common.errors import RequestError
from router.admission import Admission, Ticket
from router.ask import Ask
from router.keys import Client


class SimulatedLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as Admission uses, in time that passes at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now_s

    def get_debug(self) -> bool:
        return False

    def call_at(self, when: float, callback: Callable[..., object], *args: object, context: Context | None = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._due, (when, next(self._numbers), handle))
        return handle

    def call_later(self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None) -> asyncio.TimerHandle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_soon(self, callback: Callable[..., object], *args: object, context: Context | None = None) -> asyncio.TimerHandle:
        return self.call_at(self.now_s, callback, *args, context=context)

    def create_future(self) -> "asyncio.Future[object]":
        return asyncio.Future(loop=self)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays in the heap, and does nothing."""

    def advance(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            when_s, _, handle = heapq.heappop(self._due)
            self.now_s = max(self.now_s, when_s)
            if not handle.cancelled():
                handle._run()
        self.now_s = max(self.now_s, until_s)


@dataclass(frozen=True, slots=True)
class Nodes:
    """num_prefill nodes with this rate for short prompts, which is halved at half_rate_tokens; all decode rows together."""

    num_prefill: int = 1
    tokens_per_s: float = 8000.0
    half_rate_tokens: float = 32000.0
    rows: int = 1000
    tpot_s: float = 0.02
    overhead_s: float = 0.03
    belief: float = 1.0  # the rate that the prediction uses, by the true one for short prompts
    tells_rows: bool = True

    def compute_s(self, num_tokens: int) -> float:
        return num_tokens / self.tokens_per_s * (1.0 + num_tokens / self.half_rate_tokens)

    def capacity(self, mean_compute_s: float, mean_output_tokens: float) -> float:
        """Requests a second."""
        row_s = mean_compute_s + self.overhead_s + mean_output_tokens * self.tpot_s
        return min(self.num_prefill / mean_compute_s, self.rows / row_s)


@dataclass(slots=True)
class Job:
    arrived_s: float  # at the router
    num_tokens: int
    num_output_tokens: int
    ticket: Ticket | None = None
    node: int = 0
    ttft_s: float | None = None


@dataclass(slots=True)
class Simulation:
    nodes: Nodes
    loop: SimulatedLoop = field(default_factory=SimulatedLoop)
    queues: list[deque[Job]] = field(default_factory=list)
    queued_tokens: list[float] = field(default_factory=list)
    busy: list[bool] = field(default_factory=list)
    rows_free: int = 0
    wants_row: deque[Job] = field(default_factory=deque)
    admitted: list[Job] = field(default_factory=list)
    num_offered: int = 0

    def __post_init__(self) -> None:
        number = self.nodes.num_prefill
        self.queues, self.queued_tokens, self.busy = [deque() for _ in range(number)], [0.0] * number, [False] * number
        self.rows_free = self.nodes.rows

    def offer(self, config: RouterConfig, jobs: Sequence[Job], per_s: float, seconds: float, chance: random.Random) -> int:
        """Open loop: jobs come at random, at this rate, for so long; until all have ended. Returns how many were admitted."""
        num_rows = self.nodes.rows if self.nodes.tells_rows else None
        admission = Admission(config, self.predicted_ttft_s, self.loop.time, num_rows=lambda: num_rows, loop=self.loop)
        client, end_s = Client(), self.loop.now_s + seconds
        for job in itertools.cycle(jobs):
            self.loop.advance(self.loop.now_s + chance.expovariate(per_s))
            if self.loop.now_s > end_s:
                break
            self.num_offered += 1
            self._enter(admission, client, replace(job, arrived_s=self.loop.now_s))
        self.loop.advance(self.loop.now_s + 3600.0)
        return len(self.admitted)

    def _enter(self, admission: Admission, client: Client, job: Job) -> None:
        try:
            job.ticket = admission.enter(client, Ask(None, job.num_tokens), None, self.loop.now_s + 600.0)
        except RequestError:
            return
        self.admitted.append(job)
        if job.ticket.granted is None:
            self._send(job)
        else:
            job.ticket.granted.add_done_callback(lambda _: self._send(job))

    def predicted_ttft_s(self, ask: Ask) -> float:
        return (min(self.queued_tokens) + ask.num_tokens) / (self.nodes.tokens_per_s * self.nodes.belief)

    def _send(self, job: Job) -> None:
        job.node = min(range(len(self.queues)), key=self.queued_tokens.__getitem__)
        self.queued_tokens[job.node] += job.num_tokens
        self.wants_row.append(job)
        self._give_rows()

    def _give_rows(self) -> None:
        while self.rows_free and self.wants_row:
            self.rows_free -= 1
            job = self.wants_row.popleft()
            self.queues[job.node].append(job)
            self._compute(job.node)

    def _compute(self, node: int) -> None:
        if not self.busy[node] and self.queues[node]:
            self.busy[node] = True
            job = self.queues[node].popleft()
            self.loop.call_later(self.nodes.compute_s(job.num_tokens), self._computed, job)

    def _computed(self, job: Job) -> None:
        self.busy[job.node] = False
        self.queued_tokens[job.node] -= job.num_tokens
        self._compute(job.node)
        self.loop.call_later(self.nodes.overhead_s, self._first_byte, job)

    def _first_byte(self, job: Job) -> None:
        job.ttft_s = self.loop.now_s - job.arrived_s
        assert job.ticket is not None
        job.ticket.first_byte()
        self.loop.call_later(self.nodes.tpot_s * job.num_output_tokens, self._ended, job)

    def _ended(self, job: Job) -> None:
        assert job.ticket is not None
        self.rows_free += 1
        job.ticket.leave()
        self._give_rows()
