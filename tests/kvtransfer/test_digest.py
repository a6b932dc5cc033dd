"""Checksums of pages, in place or through the device's pool."""

import zlib

import numpy as np
import pytest

from kvtransfer.backend import Region
from kvtransfer.digest import PageDigests, pack_digests, unpack_digests

PAGES = np.arange(4 * 24, dtype=np.uint8).reshape(4, 24)


class DevicePool:
    def page_bytes(self, page: int) -> bytes:
        return PAGES[page].tobytes()


def host_region() -> Region:
    return Region(PAGES.ctypes.data, 4, 24, "cpu", PAGES)


@pytest.mark.parametrize("region", [host_region(), Region(0, 4, 24, "cuda:0", DevicePool())], ids=["host", "device"])
def test_checksums_are_those_of_the_bytes(region: Region) -> None:
    digests = PageDigests(region).of(np.array([2, 0], np.int32))
    assert digests.tolist() == [zlib.crc32(PAGES[2].tobytes()), zlib.crc32(PAGES[0].tobytes())]


@pytest.mark.parametrize("page", [-1, 4])
def test_a_page_that_is_none_is_refused(page: int) -> None:
    with pytest.raises(ValueError, match=f"page {page} is outside the region of 4 pages"):
        PageDigests(host_region()).of(np.array([0, page], np.int32))


def test_checksums_survive_the_wire_and_their_number_is_checked() -> None:
    digests = np.array([0, 0xFFFFFFFF, 7], np.uint32)
    unpacked = unpack_digests(pack_digests(digests), 3)
    assert unpacked is not None
    assert unpacked.tolist() == digests.tolist()
    for packed in (pack_digests(digests), b"", b"\0\0\0"):
        assert unpack_digests(packed, 2) is None
