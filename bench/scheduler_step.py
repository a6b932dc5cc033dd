"""What scheduling costs: decode throughput as a share of what the device could do, and the host's time for a step.

    python bench/scheduler_step.py [--clock host|wall] [--rounds N] [--plot FILE]

The decode node's scheduler is the real one, with its pages, its radix cache and its sockets; a process of its own takes the outputs and sends new
requests (scheduler_load.py). The device is synthetic and a step takes what it is told (scheduler_device.py), so there is no GPU and no model, and
what a launch costs the host on CUDA is not in the figures. The prefill node is one that delivers at once.

    steady   B requests run, and go on for ever
    churn    prompts of 512 tokens, answers of 100 to 300: requests end and others take their place all the time

--clock host (the default) leaves out what else runs on the machine; wall is the time of day and wants a quiet one.
"""

import argparse
import gc
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray
from scheduler_device import Clock, HostClock, SyntheticDevice, WallClock
from scheduler_load import FIRST_TOKEN_ID, VOCABULARY, Load
from scheduler_plot import Line, Panel, draw

from common.config import NodeAddresses
from common.errors import Failure
from common.kvcache.cache import KVCache
from common.messages import NodeStatus, SpanOuts, TokenOuts, ToScheduler
from common.scheduling.host_backup import HostBackup
from common.scheduling.intake import Intake
from common.scheduling.outbox import Outbox
from common.scheduling.pages import RequestPages
from common.scheduling.work import Limits, Work
from common.sockets import Receiver, Sender
from decode_node.scheduler import DecodeScheduler
from kvtransfer.endpoint import DecodeEndpoint, Delivered, Event, FirstToken

BATCH_SIZES = (1, 8, 32, 64, 128, 256)
QUEUE_LENGTHS, SERVED_BEFORE = (0, 100, 1000, 10_000), (0, 1000, 10_000)
PAGE_SIZE = 16
PROMPT_TOKENS, OUTPUT_TOKENS = 512, (100, 300)
FOR_EVER = 4096  # output tokens: outlasts a measurement
CONTEXT_LENGTH = 8192
WARMUP_STEPS = 50
CLOCKS: dict[str, Callable[[], Clock]] = {"host": HostClock, "wall": WallClock}


# ---- a decode node without a device --------------------------------------------------------------------------------------------


class InstantPrefill:
    """Endpoint of a decode node whose prefill nodes need no time."""

    def __init__(self) -> None:
        self.num_delivered = 0
        self._events: list[Event] = []

    def offer(self, room: int, host: str, port: int, num_prompt_tokens: int, digest: bytes, num_prefix_pages: int,
              pages: NDArray[np.int32], deadline_s: float, rid: str) -> Failure | None:  # fmt: skip
        self._events += [FirstToken(room, FIRST_TOKEN_ID, 0), Delivered(room)]
        self.num_delivered += 1
        return None

    def poll(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def peers(self) -> list[dict[str, str]]:
        return []

    def stats(self) -> dict[str, float]:
        return {}


class NoHostMemory:
    num_slots, page_nbytes = 0, 1

    def save(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        raise AssertionError("nothing is swapped here")

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        raise AssertionError("nothing is swapped here")


@dataclass(frozen=True, slots=True)
class Node:
    scheduler: DecodeScheduler
    work: Work
    outbox: Outbox
    intake: Intake
    endpoint: InstantPrefill
    device: SyntheticDevice

    @property
    def num_open(self) -> int:
        """Requests that came and were not answered."""
        return int(self.scheduler.stats()["open_requests"])

    @property
    def num_decoded_tokens(self) -> int:
        """Handed out; token 1 of a request is its prefill node's."""
        return self.outbox.num_output_tokens - self.endpoint.num_delivered

    def step(self) -> None:
        if not self.scheduler.step():
            self.intake.wait(1.0)

    def run_until(self, condition: Callable[[], bool], limit_s: float = 300.0) -> None:
        ends_s = time.monotonic() + limit_s
        while not condition():
            self.step()
            if time.monotonic() > ends_s:
                raise TimeoutError(f"not reached within {limit_s:g} s: {self.scheduler.stats()}")


def make_node(device: SyntheticDevice, outbox: Outbox, intake: Intake, *, max_running: int, overlap: bool) -> Node:
    """With pages for as many requests as may run, so that none is retracted."""
    limits = Limits(frozenset({2}), CONTEXT_LENGTH, max_running, 4, 8192, VOCABULARY, overlap)
    cache = KVCache(1 + max_running * (PROMPT_TOKENS + FOR_EVER) // PAGE_SIZE, PAGE_SIZE)
    work = Work(device, RequestPages(cache, HostBackup(NoHostMemory(), extend_prior_tokens_per_s=1e6)), outbox, limits)
    endpoint = InstantPrefill()
    return Node(DecodeScheduler(work, intake, outbox, cast(DecodeEndpoint, endpoint), limits), work, outbox, intake, endpoint, device)


@contextmanager
def node(device: SyntheticDevice, load: Load, *, max_running: int, overlap: bool) -> Iterator[Node]:
    """A scheduler whose text processes keep up `load`."""
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        addresses = NodeAddresses(Path(directory))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        inbox: Receiver[ToScheduler] = Receiver(context, addresses.scheduler, ToScheduler)
        to_detokenizer: Sender[TokenOuts] = Sender(context, addresses.detokenizer)
        to_tokenizer: Sender[NodeStatus | SpanOuts] = Sender(context, addresses.tokenizer)
        outbox, intake = Outbox(to_detokenizer.send, to_tokenizer.send), Intake(inbox, None)
        command = [sys.executable, str(Path(__file__).with_name("scheduler_load.py")), directory, msgspec.json.encode(load).decode()]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as texts:
            try:
                yield make_node(device, outbox, intake, max_running=max_running, overlap=overlap)
            finally:
                assert texts.stdin is not None
                texts.stdin.close()
                texts.wait()
                for socket in (inbox, to_detokenizer, to_tokenizer):
                    socket.close()
                context.term()
        if texts.returncode:
            raise RuntimeError(f"{command[1]} ended with status {texts.returncode}")


# ---- measuring -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    ideal: float  # output tokens over what the device makes of full batches that follow one another without a gap
    median_us: float  # processor time of a step, waiting left out
    mean_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured."""

    kind: str  # "steady" or "churn"
    batch_size: int
    step_ms: float
    overlap: bool = True
    num_waiting: int = 0
    num_served: int = 0  # before

    def load(self) -> Load:
        if self.kind == "churn":  # as many wait as run: no row is free because the load is late
            return Load(2 * self.batch_size + self.num_waiting, PROMPT_TOKENS, OUTPUT_TOKENS, self.num_served)
        return Load(self.batch_size + self.num_waiting, PROMPT_TOKENS, (FOR_EVER, FOR_EVER), self.num_served)


def run(case: Case, clock: Clock, num_steps: int) -> Measured:
    device, load = SyntheticDevice(clock, 0.0, max_rows=case.batch_size), case.load()
    with node(device, load, max_running=case.batch_size, overlap=case.overlap) as served:

        def is_full() -> bool:
            done, running = served.outbox.num_finished, len(served.work.running)
            return done >= case.num_served and running >= case.batch_size and served.num_open >= load.num_open

        served.run_until(is_full)
        device.decode_step_s = case.step_ms / 1e3
        return measure(served, case.batch_size, num_steps)


def measure(served: Node, batch_size: int, num_steps: int) -> Measured:
    gc.collect()
    gc.freeze()  # a collection of all that was loaded before takes longer than a step, comes seldom, and is no part of this
    for _ in range(WARMUP_STEPS):
        served.step()
    device, clock = served.device, served.device.clock
    started_s, num_before, host_us = clock.now_s(), served.num_decoded_tokens, []
    for _ in range(num_steps):
        before_s = time.thread_time()
        served.step()
        host_us.append((time.thread_time() - before_s) * 1e6)
    seconds, num_tokens = clock.now_s() - started_s, served.num_decoded_tokens - num_before
    gc.unfreeze()
    ideal = num_tokens * device.decode_step_s / (batch_size * seconds)
    return Measured(ideal, statistics.median(host_us), statistics.fmean(host_us), float(np.quantile(host_us, 0.99)))


def run_all(cases: Iterable[Case], clock: Callable[[], Clock], num_steps: int, num_rounds: int) -> dict[Case, Measured]:
    """In turns; medians of the rounds."""
    found: dict[Case, list[Measured]] = {case: [] for case in cases}
    for _ in range(num_rounds):
        for case, rounds in found.items():
            rounds.append(run(case, clock(), num_steps))
            print(f"{case}: {rounds[-1]}", file=sys.stderr, flush=True)
    return {case: Measured(*(statistics.median(values) for values in zip(*map(astuple, rounds), strict=True))) for case, rounds in found.items()}


# ---- what is printed -----------------------------------------------------------------------------------------------------------

KINDS, STEPS_MS = ("steady", "churn"), (10.0, 5.0)
BY_SIZE = [Case(kind, size, step_ms, overlap) for size in BATCH_SIZES for kind in KINDS for step_ms in STEPS_MS for overlap in (True, False)]
BACK_TO_BACK = [Case("steady", size, 0.0) for size in BATCH_SIZES]  # on a device that needs no time: the host's caches stay warm
BY_QUEUE = [Case("steady", 64, 5.0, num_waiting=length) for length in QUEUE_LENGTHS]
BY_SERVED = [Case("steady", 64, 5.0, num_served=number) for number in SERVED_BEFORE]


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def tables(measured: dict[Case, Measured]) -> str:
    def shares(kind: str, size: int) -> list[str]:
        found = [measured[Case(kind, size, step_ms, overlap)] for step_ms in STEPS_MS for overlap in (True, False)]
        return [f"{m.ideal:.1%}" for m in found]

    def host(*cases: Case) -> list[str]:
        return [f"{m.median_us:.0f} / {m.mean_us:.0f} / {m.p99_us:.0f}" for m in map(measured.__getitem__, cases)]

    at = "batch 64, steady, a step in 5 ms"
    forms = [f"{step_ms:g} ms {form}" for step_ms in STEPS_MS for form in ("overlapped", "serial")]
    return "\n".join(
        [
            *(table(f"Of ideal, {kind}", ["batch", *forms], ([str(size), *shares(kind, size)] for size in BATCH_SIZES)) for kind in KINDS),
            table(
                "Host, us a step: median / mean / p99", ["batch", "steady, steps back to back", *(f"{kind}, a step in 5 ms" for kind in KINDS)],
                ([str(size), *host(Case("steady", size, 0.0), *(Case(kind, size, 5.0) for kind in KINDS))] for size in BATCH_SIZES),
            ),
            table(f"Likewise, {at}, by requests that wait", ["waiting", "us"], ([str(case.num_waiting), *host(case)] for case in BY_QUEUE)),
            table(f"Likewise, {at}, by requests served before", ["served", "us"], ([str(case.num_served), *host(case)] for case in BY_SERVED)),
        ]
    )  # fmt: skip


def plot(measured: dict[Case, Measured]) -> str:
    def line(label: str, kind: str, step_ms: float, overlap: bool, value: Callable[[Measured], float]) -> Line:
        points = [(size, value(measured[Case(kind, size, step_ms, overlap)])) for size in BATCH_SIZES]
        return Line(label, points, dashed=not overlap)

    def percent(m: Measured) -> float:
        return 100 * m.ideal

    shares = [
        line(f"{step_ms:g} ms steps, {form}", "churn", step_ms, overlap, percent)
        for step_ms in STEPS_MS
        for overlap, form in ((True, "overlapped"), (False, "serial"))
    ]
    hosts = [line(f"{kind}, a step in 5 ms", kind, 5.0, True, lambda m: m.median_us) for kind in KINDS]
    hosts.append(line("steady, steps back to back", "steady", 0.0, True, lambda m: m.median_us))
    top = 250.0 * math.ceil(max(value for one in hosts for _, value in one.points) / 250)
    return draw([
        Panel("Decode throughput, % of ideal (requests come and go)", "rows of the batch", shares, 100.0),
        Panel("Host time, us a step, median", "rows of the batch", hosts, top),
    ])  # fmt: skip


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--clock", choices=sorted(CLOCKS), default="host")
    flags.add_argument("--steps", type=int, default=300, help="measured steps of each figure (default: %(default)s)")
    flags.add_argument("--rounds", type=int, default=1, help="turns through all figures, whose median is printed (default: %(default)s)")
    flags.add_argument("--plot", type=Path, help="draw two of the tables as SVG")
    options = flags.parse_args()
    measured = run_all([*BY_SIZE, *BACK_TO_BACK, *BY_QUEUE, *BY_SERVED], CLOCKS[options.clock], options.steps, options.rounds)
    print(tables(measured))
    if options.plot is not None:
        options.plot.write_text(plot(measured))


if __name__ == "__main__":
    main()
