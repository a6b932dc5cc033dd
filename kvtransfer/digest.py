"""Checksums of KV pages, for --kv-transfer-digest: both ends read every page of a room once.

CRC-32 by zlib: a fault of memory or network, not an adversary, is to be found. Host pages are read in place; the pages of a device
are copied to the host one by one by the pool that owns them (Region.keepalive).
"""

import zlib
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.backend import PageIds, Region
from kvtransfer.pages import PageMemory, first_outside

Digests = NDArray[np.uint32]


class DevicePool(Protocol):
    def page_bytes(self, page: int) -> bytes:
        """The page's bytes, copied to the host."""


class PageDigests:
    def __init__(self, region: Region) -> None:
        self._num_pages = region.num_pages
        self._memory = PageMemory(region).rows() if region.device == "cpu" else None
        self._pool: DevicePool = region.keepalive  # type: ignore[assignment]  # what a device region's owner must be

    def of(self, pages: PageIds) -> Digests:
        """uint32[n] of `pages`, which must be complete: nothing is waited for here. Raises ValueError for a page that is none."""
        outside = first_outside(pages, self._num_pages)
        if outside is not None:
            raise ValueError(f"page {outside} is outside the region of {self._num_pages} pages")
        return np.array([zlib.crc32(self._bytes(page)) for page in pages.tolist()], np.uint32)

    def _bytes(self, page: int) -> bytes | memoryview:
        return self._pool.page_bytes(page) if self._memory is None else self._memory[page].data


def pack_digests(digests: Digests) -> bytes:
    return digests.astype("<u4").tobytes()


def unpack_digests(packed: bytes, count: int) -> Digests | None:
    """None unless there are `count` of them."""
    return np.frombuffer(packed, "<u4").astype(np.uint32) if len(packed) == 4 * count else None
