"""Where K and V lie in the pool: page-major, contiguous, heads outermost within a page."""

import ctypes
import errno
import itertools
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from common import memfd
from common.kvcache import layout as layout_module
from common.kvcache.cache import KVCache
from common.kvcache.layout import TAKE_NBYTES, KVLayout, KVPool

CPU = torch.device("cpu")


@pytest.fixture
def pool() -> KVPool:
    return KVPool(KVLayout(num_kv_heads=3, num_layers=4, page_size=8, head_dim=16, dtype=torch.bfloat16), 6, CPU)


def test_a_page_is_one_block_and_a_head_range_one_block_in_it(pool: KVPool) -> None:
    assert pool.page_nbytes == 3 * 4 * 2 * 8 * 16 * 2
    assert pool.nbytes == 6 * pool.page_nbytes
    assert pool.tensor[2].data_ptr() == pool.base_address + 2 * pool.page_nbytes
    assert pool.tensor[2, 1].data_ptr() == pool.base_address + 2 * pool.page_nbytes + pool.page_nbytes // 3
    assert pool.tensor.is_contiguous()


def test_views_and_array_are_the_pools_own_memory(pool: KVPool) -> None:
    pool.keys(3)[2, 1, 5] = 1.0
    pool.values(3)[2, 1, 5] = 2.0
    assert pool.tensor[2, 1, 3, 0, 5].tolist() == [1.0] * 16
    assert pool.tensor[2, 1, 3, 1, 5].tolist() == [2.0] * 16
    assert pool.array is not None
    assert pool.array.dtype == np.uint16
    assert set(pool.array[2, 1, 3, 1, 5].tolist()) == {0x4000}
    assert pool.array.ctypes.data == pool.base_address


def test_a_pool_starts_zeroed(pool: KVPool) -> None:
    assert not pool.tensor.any()


def test_pages_within_a_budget() -> None:
    layout = KVLayout(3, 30, 16, 64, torch.bfloat16)  # the embedded model: 22.5 KiB a token
    assert layout.page_nbytes == 16 * 22.5 * 1024
    assert layout.num_pages_within(10 * layout.page_nbytes + 5) == 10
    assert layout.num_pages_within(-1) == 0


# ---- shared --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> KVPool:
    """Two and a half steps of taking memory, none of it ahead, and pages that straddle them."""
    monkeypatch.setattr(layout_module, "AHEAD_NBYTES", 0)
    layout = KVLayout(num_kv_heads=3, num_layers=30, page_size=16, head_dim=64, dtype=torch.bfloat16)
    return KVPool(layout, 5 * TAKE_NBYTES // 2 // layout.page_nbytes, CPU, shared=True)


def smaps(pool: KVPool) -> dict[str, int]:
    """Of the pool's mapping, in KiB."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{pool.base_address:08x}-"):
            break
    fields = itertools.takewhile(lambda line: "-" not in line.split()[0], lines)
    return {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in fields) if rest.endswith(" kB")}


def test_a_shared_pool_is_the_file_from_offset_zero_on(shared: KVPool) -> None:
    assert not shared.tensor.any()
    shared.keys(7)[3, 2] = 1.5
    page = os.pread(shared.shared_fd, shared.page_nbytes, 3 * shared.page_nbytes)
    assert page == shared.page_bytes(3)
    peers = memfd.mapped(shared.shared_fd, shared.nbytes)
    peers[5 * shared.page_nbytes] = 77
    assert shared.page_bytes(5)[0] == 77


def test_a_shared_pool_cannot_be_cut_short_by_who_holds_its_descriptor(shared: KVPool) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(shared.shared_fd, 4096)


def test_a_shared_pool_takes_memory_as_its_pages_are_used(shared: KVPool) -> None:
    assert smaps(shared)["Rss"] == 0
    shared.use(np.array([3, 4], np.int32))
    first = smaps(shared)["Rss"]
    assert 0 < first <= TAKE_NBYTES // 1024
    shared.use(np.array([1], np.int32))
    shared.use(np.array([], np.int32))
    assert smaps(shared)["Rss"] == first
    shared.use(np.array([shared.num_pages - 1], np.int32))
    assert first < smaps(shared)["Rss"] <= memfd.whole_huge_pages(shared.nbytes) // 1024


def test_a_shared_pool_lies_in_huge_pages_where_the_kernel_has_them(shared: KVPool) -> None:
    probe = memfd.mapped(shared.shared_fd, memfd.HUGE_NBYTES)
    try:
        memfd.make_huge(ctypes.addressof(probe), memfd.HUGE_NBYTES)
    except OSError as error:
        pytest.skip(f"no huge pages for shared memory here: {error}")
    shared.tensor[0] = 3.0  # small pages, with something in them
    shared.use(np.array([shared.num_pages - 1], np.int32))
    assert smaps(shared)["ShmemPmdMapped"] >= 2048
    assert (shared.tensor[0] == 3.0).all()
    assert not shared.tensor[1:].any()


def test_a_kernel_without_huge_pages_for_shared_memory_costs_nothing_but_them(
    shared: KVPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(memfd, "make_huge", refuse)
    with caplog.at_level(logging.INFO):
        shared.use(np.array([1], np.int32))
        shared.use(np.array([shared.num_pages - 1], np.int32))
    assert len(caplog.messages) == 1
    shared.tensor[-1] = 1.0
    assert (shared.tensor[-1] == 1.0).all()


def test_the_memory_of_a_shared_pool_goes_with_its_last_view(shared: KVPool) -> None:
    layout = shared.layout
    mapped = Path("/proc/self/maps").read_text().count("pdserve-kv")
    pool = KVPool(layout, 4, CPU, shared=True)
    view, fd = pool.keys(0)[1], pool.shared_fd
    view[:] = 2.0
    del pool
    assert (view == 2.0).all()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    del view
    assert Path("/proc/self/maps").read_text().count("pdserve-kv") == mapped


def test_page_bytes_are_the_pages(pool: KVPool) -> None:
    pool.tensor.copy_(torch.arange(pool.tensor.numel()).view(pool.tensor.shape))
    assert pool.array is not None
    assert pool.page_bytes(4) == pool.array[4].tobytes()
    assert pool.shared_fd == -1
    pool.use(np.array([5], np.int32))


def test_pages_are_in_use_from_their_allocation_on(shared: KVPool) -> None:
    cache = KVCache(shared.num_pages, shared.layout.page_size, on_alloc=shared.use)
    cache.alloc(cache.available())
    assert smaps(shared)["Rss"] > 0


def test_memory_is_taken_ahead_of_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little of it at first, then as far as wanted by a thread that ends; a caller who needs more than was taken takes it itself."""
    taken: list[tuple[str, int]] = []
    monkeypatch.setattr(memfd, "make_huge", lambda address, nbytes: taken.append((threading.current_thread().name, nbytes)))
    monkeypatch.setattr(layout_module, "AHEAD_NBYTES", 6 * memfd.HUGE_NBYTES)
    memory = layout_module.SharedMemory(40 * memfd.HUGE_NBYTES)
    memory.take(3 * memfd.HUGE_NBYTES)
    wait_for_thread()
    assert taken[0] == ("MainThread", TAKE_NBYTES)
    assert sum(nbytes for _, nbytes in taken) == 9 * memfd.HUGE_NBYTES
    assert {nbytes for name, nbytes in taken if name == "kv-pool"} == {memfd.HUGE_NBYTES}
    taken.clear()
    memory.take(9 * memfd.HUGE_NBYTES)
    wait_for_thread()
    assert {name for name, _ in taken} == {"kv-pool"}, "nobody waits for what was taken already"
    taken.clear()
    memory.take(40 * memfd.HUGE_NBYTES)
    wait_for_thread()
    assert sum(nbytes for _, nbytes in taken) == 25 * memfd.HUGE_NBYTES, "to the end, and nothing twice"


def wait_for_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == "kv-pool":
            thread.join(10)
