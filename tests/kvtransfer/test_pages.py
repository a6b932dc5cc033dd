"""Page lists as byte runs, and the socket loops that move them, for every way a kernel may cut them."""

import itertools
import socket

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.backend import Region
from kvtransfer.pages import MAX_IOVECS, PageMemory, byte_runs, first_outside, merged_runs
from kvtransfer.tcp_wire import receive_all, send_all

PAGE_LISTS = st.lists(st.integers(0, 40), max_size=60)


class CuttingSocket:
    """Takes and gives as many bytes a call as it was told to; stands for a socket with a capricious kernel."""

    def __init__(self, data: bytes, cuts: list[int]) -> None:
        self.data = data
        self.sent = b""
        self._cuts = cuts

    def _next(self, offered: int) -> int:
        return min(offered, self._cuts.pop(0) if self._cuts else offered)

    def sendmsg(self, buffers: list[memoryview]) -> int:
        whole = b"".join(buffers)
        taken = self._next(len(whole))
        self.sent += whole[:taken]
        return taken

    def recvmsg_into(self, buffers: list[memoryview], _ancillary: int, flags: int) -> tuple[int, list[object], int, object]:
        assert flags == socket.MSG_WAITALL
        given = left = self._next(sum(map(len, buffers)))
        for buffer in buffers:
            part = min(left, len(buffer))
            buffer[:part], self.data, left = self.data[:part], self.data[part:], left - part
        return given, [], 0, None


def memory(num_pages: int, page_nbytes: int) -> tuple[np.ndarray, PageMemory]:
    pool = np.random.default_rng(0).integers(0, 256, (num_pages, page_nbytes), dtype=np.uint8)
    return pool, PageMemory(Region(pool.ctypes.data, num_pages, page_nbytes, "cpu", pool))


@given(PAGE_LISTS, st.integers(1, 7))
def test_byte_runs_cover_the_pages_in_order_and_neighbours_are_one(pages: list[int], page_nbytes: int) -> None:
    starts, stops = byte_runs(np.array(pages, dtype=np.int32), page_nbytes)
    covered = [offset for start, stop in zip(starts, stops, strict=True) for offset in range(start, stop)]
    assert covered == [page * page_nbytes + offset for page in pages for offset in range(page_nbytes)]
    assert not (starts[1:] == stops[:-1]).any()


def test_offsets_do_not_overflow_32_bits() -> None:
    starts, stops = byte_runs(np.array([2**31 - 1], dtype=np.int32), 1 << 20)
    assert (starts[0], stops[0]) == ((2**31 - 1) << 20, 2**31 << 20)


def test_long_lists_are_split_below_the_kernels_limit() -> None:
    _, pages = memory(5000, 8)
    every_other = np.arange(0, 5000, 2, dtype=np.int32)
    batches = list(pages.iovecs(every_other))
    assert [len(batch) for batch in batches] == [MAX_IOVECS, MAX_IOVECS, 2500 - 2 * MAX_IOVECS]
    assert [len(batch) for batch in pages.iovecs(np.arange(5000, dtype=np.int32))] == [1]


@given(PAGE_LISTS.filter(bool), st.lists(st.integers(1, 50), max_size=30))
def test_pages_survive_any_cutting_by_the_kernel(page_list: list[int], cuts: list[int]) -> None:
    pool, pages = memory(41, 24)
    ids = np.array(page_list, dtype=np.int32)
    wire = CuttingSocket(b"", list(cuts))
    for buffers in pages.iovecs(ids):
        send_all(wire, [b"head", *buffers])  # type: ignore[arg-type]
    assert wire.sent == b"head" + pool[ids].tobytes()

    target, target_pages = memory(41, 24)
    target[:] = 0
    unique = np.array(sorted(set(page_list)), dtype=np.int32)
    wire = CuttingSocket(pool[unique].tobytes(), list(cuts))
    for buffers in target_pages.iovecs(unique):
        receive_all(wire, buffers)  # type: ignore[arg-type]
    expected = np.zeros_like(pool)
    expected[unique] = pool[unique]
    assert (target == expected).all()


def test_first_outside_finds_either_end() -> None:
    for pages, outside in (([], None), ([0, 4], None), ([0, 5], 5), ([-1, 2], -1)):
        assert first_outside(np.array(pages, dtype=np.int32), 5) == outside


# ---- runs of both sides -------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60))
def test_merged_runs_are_the_same_copies_and_no_two_could_be_one(pairs: list[tuple[int, int]]) -> None:
    local, remote = (np.array([pair[side] for pair in pairs], np.int32) for side in (0, 1))
    runs = list(zip(*(column.tolist() for column in merged_runs(local, remote)), strict=True))
    assert [(here + i, there + i) for here, there, count in runs for i in range(count)] == pairs
    assert all((here + count, there + count) != (after[0], after[1]) for (here, there, count), after in itertools.pairwise(runs))
    assert all(count >= 1 for _, _, count in runs)
