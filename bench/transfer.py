"""KV pages over each transfer backend beside its bare library with the same bytes, page lists and machine: `python bench/transfer.py`.

Two processes on loopback. Each round moves the same pages four ways, one after the other, so that drift of the machine hits all of
them: bare and ours, contiguous and scattered. What counts are the medians of the rounds' ratios. Then the fixed cost of a request:
Offer to Closed of one page, through real endpoints in two processes. `--plot FILE` draws the ratios as SVG.
"""

import argparse
import multiprocessing
import os
import select
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import transfer_raw
from transfer_plot import Bar, draw
from transfer_raw import RAW, Pool, make_pool

from kvtransfer.backend import PageIds, PeerId, Region, TransferBackend
from kvtransfer.endpoint import DecodeEndpoint, Delivered, FirstToken, OfferJoined, PrefillEndpoint
from kvtransfer.factory import BACKENDS
from kvtransfer.protocol import Compat
from kvtransfer.settings import TransferOptions, TransferSettings

PAGE_NBYTES = 16 * 22_528  # 16 tokens of the embedded model (30 layers x 2 x 3 heads x 64 x bfloat16)
FAR, NEAR = PeerId("far"), PeerId("near")
FLOOR = {"shm": 0.8, "nixl": 0.9, "mooncake": 0.9, "tcp": 0.7}  # ours / bare that this project holds itself to
SPAWN = multiprocessing.get_context("spawn")


# ---- pools and processes ------------------------------------------------------------------------------------------------------


def make_backend(name: str, pool: Pool, fd: int) -> TransferBackend:
    backend = BACKENDS[name](TransferOptions())
    num_pages, page_nbytes = pool.shape
    backend.register(Region(pool.ctypes.data, num_pages, page_nbytes, "cpu", pool, shared_fd=fd))
    return backend


def far_backend(name: str, num_pages: int, page_nbytes: int, pipe: Connection) -> None:
    """A backend that lets `near` in, until the pipe ends."""
    backend = make_backend(name, *make_pool(num_pages, page_nbytes))
    pipe.send(backend.describe())
    backend.accept(NEAR, pipe.recv())
    pipe.send("accepted")
    try:
        pipe.recv()
    except EOFError:
        backend.close()


def far_raw(name: str, num_pages: int, page_nbytes: int, pipe: Connection) -> None:
    RAW[name][1](make_pool(num_pages, page_nbytes)[0], pipe)


def near_raw(name: str, num_pages: int, page_nbytes: int, description: object, pipe: Connection) -> None:
    """Writes page lists as they come, and says how many seconds each took, until the pipe ends."""
    pool = make_pool(num_pages, page_nbytes)[0]
    raw = RAW[name][2](pool) if description is None else RAW[name][2](pool, description)
    pipe.send("ready")
    try:
        while True:
            pipe.send(transfer_raw.seconds(raw, *pipe.recv()))
    except EOFError:
        raw.close()


class RawPair:
    """The bare library, between two processes of its own. They stand still while others are measured: NIXL's progress threads, for one,
    spin on a core each."""

    def __init__(self, pipe: Connection, pids: list[int]) -> None:
        self._pipe = pipe
        self._pids = pids
        assert pipe.recv() == "ready"
        self._signal(signal.SIGSTOP)

    def write(self, local: PageIds, remote: PageIds) -> float:
        self._signal(signal.SIGCONT)
        self._pipe.send((local, remote))
        seconds: float = self._pipe.recv()
        self._signal(signal.SIGSTOP)
        return seconds

    def release(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)


@contextmanager
def raw_pair(name: str, num_pages: int, page_nbytes: int) -> Iterator[RawPair]:
    with ExitStack() as open_processes:
        pids: list[int] = []
        description: object = None
        if RAW[name][1] is not None:
            far, pid = open_processes.enter_context(other_process(far_raw, name, num_pages, page_nbytes))
            description = far.recv()
            pids.append(pid)
        near, pid = open_processes.enter_context(other_process(near_raw, name, num_pages, page_nbytes, description))
        pair = RawPair(near, [*pids, pid])
        open_processes.callback(pair.release)  # before they are joined
        yield pair


@contextmanager
def other_process(target: Callable[..., None], *arguments: object) -> Iterator[tuple[Connection, int]]:
    """`target` in a process of its own: the other end of the pipe that it is given, and its pid. It ends when the pipe does."""
    pipe, far_pipe = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*arguments, far_pipe))
    process.start()
    far_pipe.close()
    assert process.pid is not None
    try:
        yield pipe, process.pid
    finally:
        pipe.close()
        process.join()


# ---- bandwidth ----------------------------------------------------------------------------------------------------------------


@dataclass
class Rounds:
    """Seconds a round, by way."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, way: str, seconds: float) -> None:
        self.seconds.setdefault(way, []).append(seconds)

    def median_s(self, way: str) -> float:
        return statistics.median(self.seconds[way][1:])  # the first round warms up

    def ratio(self, ours: str, bare: str) -> float:
        """Speed of one way in terms of another's: the median of the rounds' ratios."""
        return statistics.median(theirs / mine for theirs, mine in zip(self.seconds[bare][1:], self.seconds[ours][1:], strict=True))


def write(backend: TransferBackend, local: PageIds, remote: PageIds) -> float:
    started_s = time.perf_counter()
    backend.post("WRITE", FAR, local, remote)
    while not (completions := backend.poll()):
        select.select([backend.completion_fd()], [], [])
    assert completions[0].error is None, completions[0].error
    return time.perf_counter() - started_s


def bandwidth(name: str, num_pages: int, rounds: int) -> list[Bar]:
    title = RAW[name][0]
    in_order = np.arange(num_pages, dtype=np.int32)
    rng = np.random.default_rng(0)
    here, there = rng.permutation(in_order), rng.permutation(in_order)
    times = Rounds()
    pool, fd = make_pool(num_pages, PAGE_NBYTES)
    with other_process(far_backend, name, num_pages, PAGE_NBYTES) as (pipe, _), raw_pair(name, num_pages, PAGE_NBYTES) as raw:
        backend = make_backend(name, pool, fd)
        description = pipe.recv()
        pipe.send(backend.describe())
        pipe.recv()
        backend.connect(FAR, description)
        for _ in range(rounds + 1):
            times.add("bare contiguous", raw.write(in_order, in_order))
            times.add("contiguous", write(backend, in_order, in_order))
            times.add("bare scattered", raw.write(here, there))
            times.add("scattered", write(backend, here, there))
        backend.close()
    nbytes = num_pages * PAGE_NBYTES
    print(f"\n{name} beside {title}: {num_pages} pages of {PAGE_NBYTES} bytes, {nbytes / 1e6:.0f} MB, {rounds} interleaved rounds")
    for way in times.seconds:
        print(f"  {way:18} {nbytes / times.median_s(way) / 1e9:6.2f} GB/s")
    to_bare = times.ratio("contiguous", "bare contiguous"), times.ratio("scattered", "bare scattered")
    print(f"  of bare: contiguous {to_bare[0]:.2f}, scattered {to_bare[1]:.2f} (floor {FLOOR[name]})", end="")
    print(f"; scattered of contiguous {times.ratio('scattered', 'contiguous'):.2f} (floor 0.8)")
    return [
        Bar(f"{name}, contiguous pages", nbytes / times.median_s("contiguous") / 1e9, nbytes / times.median_s("bare contiguous") / 1e9),
        Bar(f"{name}, scattered pages", nbytes / times.median_s("scattered") / 1e9, nbytes / times.median_s("bare scattered") / 1e9),
    ]


# ---- Offer to Closed ----------------------------------------------------------------------------------------------------------

PAGE_SIZE, NUM_PAGES = 16, 64


def settings() -> TransferSettings:
    return TransferSettings(compat=Compat("bench", "bfloat16", "bfloat16", PAGE_SIZE, 30, 3, 64, PAGE_NBYTES, 8192, 49152))


def far_prefill(name: str, pipe: Connection) -> None:
    """A prefill node that has computed every prompt already."""
    endpoint = PrefillEndpoint(settings(), make_backend(name, *make_pool(NUM_PAGES, PAGE_NBYTES)), "127.0.0.1", 0)
    pipe.send(endpoint.port)
    page = np.zeros(1, np.int32)
    deadline_s = time.time() + 3600
    for room in range(1 << 30):
        refused = endpoint.expect(room, PAGE_SIZE, b"same", deadline_s)
        assert refused is None, refused
        joined = False
        while not joined:
            readable, _, _ = select.select([endpoint.wake_fd, pipe.fileno()], [], [])
            if pipe.fileno() in readable:
                endpoint.close()
                return
            joined = any(isinstance(event, OfferJoined) for event in endpoint.poll())
        endpoint.send_first_token(room, 1, 0)
        endpoint.send_pages(room, 0, page)
        endpoint.finish(room)


def fixed_cost(name: str, rounds: int) -> None:
    costs_s: list[float] = []
    with other_process(far_prefill, name) as (pipe, _):
        endpoint = DecodeEndpoint(settings(), make_backend(name, *make_pool(NUM_PAGES, PAGE_NBYTES)))
        port = pipe.recv()
        for room in range(rounds):
            started_s = time.perf_counter()
            refused = endpoint.offer(room, "127.0.0.1", port, PAGE_SIZE, b"same", 0, np.array([room % NUM_PAGES], np.int32), time.time() + 60)
            assert refused is None, refused
            wait_delivered(endpoint)
            costs_s.append(time.perf_counter() - started_s)
        endpoint.close()
    costs_s = sorted(costs_s[10:])
    p50, p99 = costs_s[len(costs_s) // 2], costs_s[int(len(costs_s) * 0.99)]
    print(f"  {name:9} Offer to Closed, 1 page of {PAGE_NBYTES} bytes: p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms")


def wait_delivered(endpoint: DecodeEndpoint) -> None:
    while True:
        select.select([endpoint.wake_fd], [], [])
        for event in endpoint.poll():
            if isinstance(event, Delivered):
                return
            assert isinstance(event, FirstToken), event


def main() -> None:
    parser = argparse.ArgumentParser(description="transfer backends beside their bare libraries")
    parser.add_argument("--backends", nargs="+", default=[name for name in RAW if name in BACKENDS], choices=list(RAW))
    parser.add_argument("--pages", type=int, default=256, help="pages a round; 256 are 4096 tokens of the embedded model (default: 256)")
    parser.add_argument("--rounds", type=int, default=20, help="turns (default: 20)")
    parser.add_argument("--plot", type=Path, help="SVG file to draw the speeds into")
    options = parser.parse_args()
    print(f"UCX_TLS={os.environ.get('UCX_TLS', '(not set: the library chooses)')}")
    bars = [bar for name in options.backends for bar in bandwidth(name, options.pages, options.rounds)]
    print()
    for name in options.backends:
        fixed_cost(name, options.rounds * 25)
    if options.plot:
        options.plot.write_text(draw(bars, "GB/s on loopback: ours (filled) and the bare library (outline)"))


if __name__ == "__main__":
    main()
