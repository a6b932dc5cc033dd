"""Nodes in simulated time, for what a routing policy does to queues and caches: a discrete-event simulation around the router's own Pairing.

A prefill node computes prompts one after another, `prompt_s` and the tokens that its cache lacks at `tokens_per_s`; its cache holds
blocks of BLOCK_TOKENS, least recently used first to go. A decode node gives a request a row and the pages for prompt and answer, or lets it wait,
first come first served; it steps all rows together, a step taking longer with more of them. The first token is there when the
prompt is computed and the decode node has room for it. Of the real system nothing else is modelled: no transfer times, no chunks, no failures.

What the router knows comes from the simulation as it would from nodes: probes once a second, ends of prefills and streams.
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.config import RouterConfig
from router.ask import Ask, block_hashes
from router.node import NodeInfo, PageCounts
from router.nodes import NodeTable
from router.pairing import Pairing, Placement

BLOCK_TOKENS = 512
BLOCK_BYTES = 4 * BLOCK_TOKENS
PROBE_S = 1.0
PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Job:
    """blocks: ids of the prompt's blocks; equal ids at the same place after equal ids are the same text."""

    arrives_s: float
    num_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...]
    ask: Ask


def job(arrives_s: float, num_tokens: int, num_output_tokens: int, blocks: Sequence[int] = ()) -> Job:
    raw = b"".join(b"%015d " % block * (BLOCK_BYTES // 16) for block in blocks)[: 4 * num_tokens]
    return Job(arrives_s, num_tokens, num_output_tokens, tuple(blocks), Ask(None, num_tokens, num_output_tokens, block_hashes(raw, 0), len(raw)))


@dataclass(frozen=True, slots=True)
class PrefillSpec:
    tokens_per_s: float = 15_000.0
    prompt_s: float = 0.02
    cache_tokens: int = 500_000


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    rows: int = 64
    step_s: float = 0.02
    row_s: float = 0.0003  # a step takes longer by this for each row
    pool_tokens: int = 500_000
    prompts: PrefillSpec = PrefillSpec()  # those that it computes itself


@dataclass(frozen=True, slots=True)
class Answered:
    job: Job
    prefill: str | None  # URLs
    decode: str
    ttft_s: float
    e2e_s: float
    num_cached_tokens: int
    num_predicted_tokens: int  # cached, as the router thought


class Timeline:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now_s

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), event))

    def run(self) -> None:
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()


@dataclass(slots=True)
class PrefillMachine:
    time: Timeline
    spec: PrefillSpec
    free_s: float = 0.0
    busy_s: float = 0.0
    num_computed_tokens: int = 0
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _waiting: deque[tuple[Job, Callable[[int], None]]] = field(default_factory=deque)

    def submit(self, job: Job, done: Callable[[int], None]) -> None:
        """done: called with the tokens that were cached, when the prompt is computed."""
        self._waiting.append((job, done))
        if len(self._waiting) == 1:
            self._start()

    def _start(self) -> None:
        job, done = self._waiting[0]
        hit = min(sum(1 for _ in itertools.takewhile(self.cached.__contains__, job.blocks)) * BLOCK_TOKENS, job.num_tokens - 1)
        spent_s = self.spec.prompt_s + (job.num_tokens - hit) / self.spec.tokens_per_s
        self.busy_s += spent_s
        self.num_computed_tokens += job.num_tokens - hit

        def end() -> None:
            self.keep(job)
            self._waiting.popleft()
            if self._waiting:
                self._start()
            done(hit)

        self.time.at(self.time.now_s + spent_s, end)

    def keep(self, job: Job) -> None:
        for block in reversed(job.blocks[: job.num_tokens // BLOCK_TOKENS]):
            self.cached[block] = None
            self.cached.move_to_end(block)
        while len(self.cached) * BLOCK_TOKENS > self.spec.cache_tokens:
            self.cached.popitem(last=False)


@dataclass(slots=True)
class DecodeMachine:
    """Steps are shared evenly: the count of steps made so far grows at the pace of the present batch; a row ends when it reaches its mark."""

    time: Timeline
    spec: DecodeSpec
    prompts: PrefillMachine
    num_held: int = 0  # requests with a row and pages
    held_tokens: int = 0
    peak_held: int = 0
    num_steps: float = 0.0
    _changed_s: float = 0.0
    _changes: int = 0
    _marks: list[tuple[float, int, Job, Callable[[], None]]] = field(default_factory=list)
    _waiting: deque[tuple[Job, Callable[[], None]]] = field(default_factory=deque)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def info(self) -> NodeInfo:
        used, total = self.held_tokens // PAGE_TOKENS, self.spec.pool_tokens // PAGE_TOKENS
        return NodeInfo(page_size=PAGE_TOKENS, pages=PageCounts(total - used, 0, total), running=self.num_held, waiting=len(self._waiting),
                        max_running_requests=self.spec.rows)

    def admit(self, job: Job, admitted: Callable[[], None]) -> None:
        self._waiting.append((job, admitted))
        self._admit_all()

    def _admit_all(self) -> None:
        while self._waiting and self.num_held < self.spec.rows:
            job, admitted = self._waiting[0]
            need = job.num_tokens + job.num_output_tokens
            if self.num_held and self.held_tokens + need > self.spec.pool_tokens:  # alone anything fits: lengths are not checked here
                return
            self._waiting.popleft()
            self.num_held += 1
            self.held_tokens += need
            self.peak_held = max(self.peak_held, self.num_held)
            admitted()

    def decode(self, job: Job, ended: Callable[[], None]) -> None:
        self._step()
        heapq.heappush(self._marks, (self.num_steps + job.num_output_tokens, next(self._numbers), job, ended))
        self._plan()

    @property
    def _pace_s(self) -> float:
        return self.spec.step_s + self.spec.row_s * len(self._marks)

    def _step(self) -> None:
        if self._marks:
            self.num_steps += (self.time.now_s - self._changed_s) / self._pace_s
        self._changed_s = self.time.now_s

    def _plan(self) -> None:
        self._changes += 1
        if self._marks:
            changes, left = self._changes, max(self._marks[0][0] - self.num_steps, 0.0)
            self.time.at(self.time.now_s + left * self._pace_s, lambda: self._end() if changes == self._changes else None)

    def _end(self) -> None:
        self._step()
        mark, _, job, ended = heapq.heappop(self._marks)
        self.num_steps = max(self.num_steps, mark)
        self.num_held -= 1
        self.held_tokens -= job.num_tokens + job.num_output_tokens
        self.prompts.keep(job)
        ended()
        self._admit_all()
        self._plan()


class Cluster:
    """Routers' pairing with simulated nodes behind it; config's other settings than nodes are used as they are. Several routers take turns
    at the requests, and know of each other what probes say."""

    def __init__(self, prefills: Sequence[PrefillSpec], decodes: Sequence[DecodeSpec], config: RouterConfig, num_routers: int = 1) -> None:
        self.time = Timeline()
        self.prefills = {f"http://p{n}:1": PrefillMachine(self.time, spec) for n, spec in enumerate(prefills)}
        self.decodes = {f"http://d{n}:1": DecodeMachine(self.time, spec, PrefillMachine(self.time, spec.prompts)) for n, spec in enumerate(decodes)}
        self.answered: list[Answered] = []
        self.routers: list[Pairing] = []
        for _ in range(num_routers):
            nodes = NodeTable(clock=self.time)
            for url, machine in self.prefills.items():
                num_pages = machine.spec.cache_tokens // PAGE_TOKENS
                info = NodeInfo(page_size=PAGE_TOKENS, pages=PageCounts(num_pages, 0, num_pages))
                nodes.add("prefill", url).probe_succeeded(info, 0)
            for url in self.decodes:
                nodes.add("decode", url)
            self.routers.append(Pairing(nodes, config, self.time))
        self._arrivals = itertools.cycle(self.routers)
        self._probe()

    def run(self, jobs: Sequence[Job]) -> list[Answered]:
        """In order of their ends."""
        for each in jobs:
            self.time.at(each.arrives_s, lambda each=each: self._arrive(each))  # type: ignore[misc]
        last_s = jobs[-1].arrives_s

        def probe() -> None:
            self._probe()
            if self.time.now_s < last_s or len(self.answered) < len(jobs):
                self.time.at(self.time.now_s + PROBE_S, probe)

        self.time.at(PROBE_S, probe)
        self.time.run()
        return self.answered

    def _probe(self) -> None:
        for router in self.routers:
            for node in router.nodes.decode:
                node.probe_succeeded(self.decodes[node.url].info(), node.num_blames)

    def _arrive(self, each: Job) -> None:
        placement = next(self._arrivals).place(each.ask)
        decode = self.decodes[placement.decode.url]
        cached: list[int] = []
        admitted: list[None] = []

        def computed(num_cached_tokens: int) -> None:
            cached.append(num_cached_tokens)
            first_token()

        def has_room() -> None:
            admitted.append(None)
            first_token()

        def first_token() -> None:
            if not cached or not admitted:
                return
            ttft_s = self.time.now_s - each.arrives_s
            placement.prefill_ended(True)
            decode.decode(each, lambda: self._ended(each, placement, ttft_s, cached[0]))

        (decode.prompts if placement.prefill is None else self.prefills[placement.prefill.url]).submit(each, computed)
        decode.admit(each, has_room)

    def _ended(self, each: Job, placement: Placement, ttft_s: float, num_cached_tokens: int) -> None:
        placement.decode_ended()
        prefill = None if placement.prefill is None else placement.prefill.url
        self.answered.append(Answered(each, prefill, placement.decode.url, ttft_s, self.time.now_s - each.arrives_s, num_cached_tokens,
                                      placement.num_hit_tokens))
