"""Where a token's K and V lie in the pool. The only file that knows.

    [page, kv_head, layer, 2 (K, V), page_size, head_dim]      contiguous, page-major

A page of all layers is one block (one transfer descriptor), and a range of heads within a page is contiguous too. Attention reads
per-layer strided views. Page 0 belongs to nobody: padding in page tables points at it. The memory is one allocation whose address
never changes, because the transfer layer writes into it from other threads.

Host memory comes in huge pages: a decode step touches each page once a layer, and with 4 KiB pages each touch misses the TLB (4 % of
a step of 8 rows at 1024 tokens, SmolLM2-135M, a 2-core x86-64 VM). Private memory gets them by madvise when it is first touched.
Shared memory does not on most machines, so use() asks for each of them when its first page is about to be used. That takes 0.25 ms each, and
9 ms on a virtual machine whose host has to find the memory first: 100 ms for a prompt of 1024 tokens of SmolLM2-135M, in which no running
request gets a token (its p99 gap was 69 ms instead of 38, bench/interference.py). So a thread of the least priority takes memory ahead.
"""

import ctypes
import logging
import mmap
import os
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from common import memfd
from common.layers.arrays import Array, as_array

logger = logging.getLogger(__name__)

PADDING_PAGE = 0
AHEAD_NBYTES = 1 << 30  # beyond what is used: some prompts' worth of any model, and no more than a node may well take
LAST = 19  # of nice values
TAKE_NBYTES = 8 * memfd.HUGE_NBYTES  # at a time: a call for each huge page takes twice as long in all, more on a busy machine
ITEM_NBYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float8_e4m3fn: 1}  # the last on CUDA only, and not chosen by any flag yet


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one page. Two nodes can exchange pages if and only if their layouts are equal."""

    num_kv_heads: int
    num_layers: int
    page_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_kv_heads, self.num_layers, 2, self.page_size, self.head_dim)

    @property
    def page_nbytes(self) -> int:
        return self.num_kv_heads * self.num_layers * 2 * self.page_size * self.head_dim * ITEM_NBYTES[self.dtype]

    def num_pages_within(self, nbytes: int) -> int:
        """Pages, the padding page included, that a budget holds."""
        return max(0, nbytes // self.page_nbytes)


class KVPool:
    """The memory of all pages, zeroed (masked reads of never written slots must not meet a NaN)."""

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device, *, shared: bool = False) -> None:
        """num_pages: the padding page included. shared: other processes may map the memory by `shared_fd`; host memory only.
        Raises OSError or RuntimeError when there is no such memory."""
        assert num_pages >= 2, f"a pool of {num_pages} pages has none to give"
        self.layout = layout
        self.num_pages = num_pages
        self._shared = SharedMemory(self.nbytes) if shared and device.type == "cpu" else None
        self.tensor = _allocate(layout, num_pages, device, self._shared)  # [num_pages, *page_shape]
        self.array: Array | None = as_array(self.tensor) if device.type == "cpu" else None

    @property
    def shared_fd(self) -> int:
        """The memfd that holds the pool from offset 0 on, open as long as the pool lives; -1: the memory is not shared."""
        return -1 if self._shared is None else self._shared.fd

    def use(self, pages: NDArray[np.int32]) -> None:
        """To be called before pages are used for the first time, here or by a peer: it is then that memory is taken for them.
        Whoever forgets it gets small pages, and a slower step."""
        if self._shared is not None and len(pages):
            self._shared.take((int(pages.max()) + 1) * self.page_nbytes)

    def page_bytes(self, page: int) -> bytes:
        """A copy of one page's bytes, on the host."""
        return self.tensor[page].view(torch.uint8).cpu().numpy().tobytes()

    @property
    def base_address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def page_nbytes(self) -> int:
        return self.layout.page_nbytes

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.layout.page_nbytes

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    def keys(self, layer: int) -> torch.Tensor:
        """View [page, kv_head, page_size, head_dim]."""
        return self.tensor[:, :, layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """View [page, kv_head, page_size, head_dim]."""
        return self.tensor[:, :, layer, 1]


class SharedMemory:
    """A memfd, mapped, with huge pages up to where it was taken: a little beyond what is used, so that nobody waits for more."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError."""
        self.fd = memfd.create("pdserve-kv", nbytes)
        weakref.finalize(self, os.close, self.fd)
        self.buffer = memfd.mapped(self.fd, nbytes)
        self._nbytes = nbytes
        self._lock = threading.Lock()  # of what follows
        self._nbytes_used = 0
        self._nbytes_taken = 0
        self._goes_ahead = False
        self._has_small_pages = False

    def take(self, nbytes: int) -> None:
        """Back the first `nbytes` with huge pages, where the kernel gives them, and have a thread go on to AHEAD_NBYTES beyond. With 4 KiB pages a
        first touch takes 14 times as long, and a peer that copies to it would have to wait for it."""
        with self._lock:
            self._nbytes_used = max(self._nbytes_used, nbytes)
            while self._nbytes_taken < min(nbytes, self._nbytes):
                self._take(TAKE_NBYTES)
            if not self._goes_ahead and self._nbytes_taken < self._nbytes_wanted:
                self._goes_ahead = True
                threading.Thread(target=self._go_ahead, name="kv-pool", daemon=True).start()

    @property
    def _nbytes_wanted(self) -> int:
        return min(self._nbytes, self._nbytes_used + AHEAD_NBYTES)

    def _go_ahead(self) -> None:
        """The thread: behind everybody else, and a huge page at a time, since take() waits for it."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LAST)
        while self._goes_ahead:
            with self._lock:
                self._goes_ahead = self._nbytes_taken < self._nbytes_wanted
                if self._goes_ahead:
                    self._take(memfd.HUGE_NBYTES)

    def _take(self, nbytes: int) -> None:
        part_nbytes = min(nbytes, memfd.whole_huge_pages(self._nbytes - self._nbytes_taken))
        try:
            memfd.make_huge(ctypes.addressof(self.buffer) + self._nbytes_taken, part_nbytes)
        except OSError as error:  # the next ones may be had: none are free now, or this kernel has none for shared memory
            if not self._has_small_pages:
                logger.info("KV pool in small pages from %d MiB on, decode steps may take longer: %s", self._nbytes_taken >> 20, error)
            self._has_small_pages = True
        self._nbytes_taken += part_nbytes


def _allocate(layout: KVLayout, num_pages: int, device: torch.device, shared: SharedMemory | None) -> torch.Tensor:
    shape = (num_pages, *layout.page_shape)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=layout.dtype, device=device)
    if shared is not None:
        return torch.frombuffer(shared.buffer, dtype=layout.dtype).view(shape)
    memory = mmap.mmap(-1, num_pages * layout.page_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zeros, taken when first written
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=layout.dtype).view(shape)
