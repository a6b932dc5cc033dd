"""A region's pages as bytes: views of the pool's memory, and page lists as few contiguous runs.

Nothing here copies. The memory is the pool's own, addressed from Region.base; the view holds Region.keepalive.
"""

import ctypes
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvtransfer.backend import PageIds, Region, TransferError

MAX_IOVECS = 1022  # sendmsg and recvmsg take 1024 (UIO_MAXIOV); two are left for a header and its page ids


class PageMemory:
    """The bytes of a CPU region."""

    def __init__(self, region: Region) -> None:
        if region.device != "cpu":
            raise ValueError(f"the region lies on {region.device}; this backend reads and writes host memory only")
        self.num_pages = region.num_pages
        self.page_nbytes = region.page_nbytes
        self._keepalive = region.keepalive
        nbytes = region.num_pages * region.page_nbytes
        self._bytes = memoryview((ctypes.c_ubyte * nbytes).from_address(region.base)).cast("B")  # uint8[num_pages * page_nbytes], writable

    def rows(self) -> NDArray[np.uint8]:
        """uint8[num_pages, page_nbytes], a view."""
        return np.frombuffer(self._bytes, dtype=np.uint8).reshape(self.num_pages, self.page_nbytes)

    def iovecs(self, pages: PageIds) -> Iterator[list[memoryview]]:
        """The pages' bytes in order, neighbours merged, in lists short enough for one system call."""
        starts, stops = byte_runs(pages, self.page_nbytes)
        for first in range(0, len(starts), MAX_IOVECS):
            batch = slice(first, first + MAX_IOVECS)
            yield [self._bytes[start:stop] for start, stop in zip(starts[batch].tolist(), stops[batch].tolist(), strict=True)]


def byte_runs(pages: PageIds, page_nbytes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Byte ranges [starts[i], stops[i]) that cover `pages` in order; page ids that follow each other share one range."""
    wide = pages.astype(np.int64)
    if not len(wide):
        return wide, wide
    breaks = np.flatnonzero(np.diff(wide) != 1)
    starts = wide[np.concatenate(([0], breaks + 1))]
    stops = wide[np.concatenate((breaks, [len(wide) - 1]))] + 1
    return starts * page_nbytes, stops * page_nbytes


def merged_runs(local_pages: PageIds, remote_pages: PageIds) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The copies local[i] <-> remote[i] as runs that are contiguous on both sides: (first local page, first remote page, number of
    pages) of each, int64[runs]. One run is one descriptor of a transfer library."""
    local, remote = local_pages.astype(np.int64), remote_pages.astype(np.int64)
    if not len(local):
        return local, remote, local
    starts = np.concatenate(([0], np.flatnonzero((np.diff(local) != 1) | (np.diff(remote) != 1)) + 1))
    return local[starts], remote[starts], np.diff(np.concatenate((starts, [len(local)])))


def check_local(local_pages: PageIds, remote_pages: PageIds, num_pages: int) -> None:
    """Raises ValueError unless the two lists belong together and every local page exists."""
    for side, pages in (("local", local_pages), ("remote", remote_pages)):
        if pages.dtype != np.int32 or pages.ndim != 1:
            raise ValueError(f"{side} pages are {pages.dtype}[{', '.join(map(str, pages.shape))}]; page lists are int32[n]")
    if len(local_pages) != len(remote_pages):
        raise ValueError(f"{len(local_pages)} local pages for {len(remote_pages)} remote pages; the lists must be of one length")
    outside = first_outside(local_pages, num_pages)
    if outside is not None:
        raise ValueError(f"local page {outside} is outside the region of {num_pages} pages")


def check_remote(remote_pages: PageIds, num_pages: int) -> TransferError | None:
    """Why the peer would refuse these pages of its region, or None."""
    outside = first_outside(remote_pages, num_pages)
    return None if outside is None else TransferError(f"remote page {outside} is outside the peer's region of {num_pages} pages")


def first_outside(pages: PageIds, num_pages: int) -> int | None:
    """A page id outside [0, num_pages), or None."""
    if not len(pages) or (int(pages.min()) >= 0 and int(pages.max()) < num_pages):
        return None
    return int(pages[(pages < 0) | (pages >= num_pages)][0])
