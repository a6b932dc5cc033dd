"""KV pages over the tcp backend against a bare socket loop with the same bytes: `python bench/transfer.py`.

Two processes on loopback. Each round moves the same number of bytes four ways, one after the other, so that drift of the machine
hits all of them: sendall/recv_into of one buffer; WRITE of contiguous and of scattered pages; READ of scattered pages. Ratios of
the medians are what counts. Then the fixed cost of a transfer: one page, post to completion, against a bare round trip.
"""

import argparse
import multiprocessing
import select
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from kvtransfer.backend import Op, PageIds, PeerId, Region
from kvtransfer.tcp import TcpBackend

PAGE_NBYTES = 16 * 22_528  # 16 tokens of the embedded model (30 layers x 2 x 3 heads x 64 x bfloat16)
SMALL_PAGE_NBYTES = 4096  # shows the fixed cost without the bytes
FAR, NEAR = PeerId("far"), PeerId("near")
ACK = b"k"


@dataclass(frozen=True, slots=True)
class Shape:
    num_pages: int
    page_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.page_nbytes


def make_node(shape: Shape) -> tuple[TcpBackend, NDArray[np.uint8]]:
    pool = np.ones((shape.num_pages, shape.page_nbytes), dtype=np.uint8)  # every page touched: no page faults in the first round
    backend = TcpBackend()
    backend.register(Region(pool.ctypes.data, shape.num_pages, shape.page_nbytes, "cpu", pool))
    return backend, pool


def far_side(shape: Shape, pipe: Connection) -> None:
    """The other process: a backend, and a bare socket that takes shape.nbytes and says one byte, until it is closed."""
    backend, pool = make_node(shape)
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send((backend.describe(), server.getsockname()[1]))
        backend.accept(NEAR, pipe.recv())
        pipe.send("accepted")
        bare, _ = server.accept()
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    target = pool.data.cast("B")
    received = 0
    with bare:
        while num_bytes := bare.recv_into(target[received:]):
            received = (received + num_bytes) % shape.nbytes
            if received == 0:
                bare.sendall(ACK)
    backend.close()


class Bench:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        context = multiprocessing.get_context("spawn")
        pipe, far_pipe = context.Pipe()
        self._process = context.Process(target=far_side, args=(shape, far_pipe))
        self._process.start()
        self._backend, self._pool = make_node(shape)
        description, port = pipe.recv()
        pipe.send(self._backend.describe())
        pipe.recv()
        self._backend.connect(FAR, description)
        self._bare = socket.create_connection(("127.0.0.1", port))
        self._bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def bare(self) -> float:
        started_s = time.perf_counter()
        self._bare.sendall(self._pool.data.cast("B"))
        assert self._bare.recv(1) == ACK
        return time.perf_counter() - started_s

    def backend(self, op: Op, local: PageIds, remote: PageIds) -> float:
        started_s = time.perf_counter()
        self._backend.post(op, FAR, local, remote)
        while not (completions := self._backend.poll()):
            select.select([self._backend.completion_fd()], [], [])
        assert completions[0].error is None, completions[0].error
        return time.perf_counter() - started_s

    def close(self) -> None:
        self._backend.close()
        self._bare.close()
        self._process.join()


def measure(bench: Bench, ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median seconds of each way, rounds interleaved, the first of each dropped."""
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            times_s[name].append(way())
    return {name: statistics.median(values[1:]) for name, values in times_s.items()}


def bandwidth(num_pages: int, rounds: int) -> None:
    shape = Shape(num_pages, PAGE_NBYTES)
    bench = Bench(shape)
    in_order = np.arange(num_pages, dtype=np.int32)
    rng = np.random.default_rng(0)
    here, there = rng.permutation(in_order), rng.permutation(in_order)
    medians_s = measure(bench, {
        "bare sendall/recv_into": bench.bare,
        "WRITE contiguous": lambda: bench.backend("WRITE", in_order, in_order),
        "WRITE scattered": lambda: bench.backend("WRITE", here, there),
        "READ scattered": lambda: bench.backend("READ", here, there),
    }, rounds)  # fmt: skip
    bench.close()
    print(f"{num_pages} pages of {PAGE_NBYTES} bytes, {shape.nbytes / 1e6:.0f} MB, median of {rounds} interleaved rounds")
    bare_s = next(iter(medians_s.values()))
    for name, median_s in medians_s.items():
        print(f"  {name:24} {shape.nbytes / median_s / 1e9:6.2f} GB/s   {bare_s / median_s:5.2f} x bare")


def fixed_cost(page_nbytes: int, rounds: int) -> None:
    bench = Bench(Shape(1, page_nbytes))
    page = np.zeros(1, dtype=np.int32)
    medians_s = measure(bench, {
        "bare round trip": bench.bare,
        "WRITE": lambda: bench.backend("WRITE", page, page),
        "READ": lambda: bench.backend("READ", page, page),
    }, rounds)  # fmt: skip
    bench.close()
    print(f"one page of {page_nbytes} bytes, p50 of {rounds} interleaved rounds")
    for name, median_s in medians_s.items():
        print(f"  {name:24} {median_s * 1e6:6.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description="tcp transfer backend against a bare socket loop")
    parser.add_argument("--pages", type=int, default=512, help="pages a round; 512 are 8192 tokens of the embedded model")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    bandwidth(options.pages, options.rounds)
    fixed_cost(PAGE_NBYTES, options.rounds * 20)
    fixed_cost(SMALL_PAGE_NBYTES, options.rounds * 50)


if __name__ == "__main__":
    main()
