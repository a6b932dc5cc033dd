"""Memory that another process of this host can map: a memfd. Nothing of it is left behind, however its processes end.

A mapping lives as long as somebody refers to its buffer. It starts at a multiple of 2 MiB, so that huge pages can back it.
"""

import ctypes
import os
import weakref
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE

HUGE_NBYTES = 1 << 21  # of x86-64, and of arm64 with 4 KiB pages
MAP_FIXED = 0x10
MAP_FAILED = ctypes.c_void_p(-1).value
PROT_NONE = 0
MADV_COLLAPSE = 25  # Linux 6.1; Python has no name for it

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Buffer = ctypes.Array[ctypes.c_ubyte]


def create(name: str, nbytes: int) -> int:
    """A memfd of at least `nbytes` zero bytes, whole huge pages; its size is sealed, so that no process that maps it can be made to
    read or write beyond its end. Memory is taken when first touched. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, whole_huge_pages(nbytes))
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def mapped(fd: int, nbytes: int, *, writable: bool = True) -> Buffer:
    """The first `nbytes` of the file; the fd may be closed afterwards. Unmapped when the buffer is gone, views and tensors of it
    included. Raises OSError."""
    size = whole_huge_pages(nbytes)
    # Address space for any alignment; what the mapping does not cover goes back at once.
    reserved = _mmap(None, size + HUGE_NBYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1)
    start = whole_huge_pages(reserved)
    for waste, waste_nbytes in ((reserved, start - reserved), (start + size, reserved + HUGE_NBYTES - start)):
        if waste_nbytes:
            _libc.munmap(waste, waste_nbytes)
    try:
        _mmap(start, size, PROT_READ | (PROT_WRITE if writable else 0), MAP_SHARED | MAP_FIXED, fd)
    except OSError:
        _libc.munmap(start, size)
        raise
    _libc.madvise(start, size, MADV_HUGEPAGE)  # heeded where shmem_enabled is "advise"; make_huge() works without
    buffer = (ctypes.c_ubyte * nbytes).from_address(start)
    unmap = weakref.finalize(buffer, _libc.munmap, start, size)
    unmap.atexit = False  # threads may still be using it then
    return buffer


def make_huge(address: int, nbytes: int) -> None:
    """Back a part of a mapping, whole multiples of 2 MiB, with huge pages, now. Unlike MADV_HUGEPAGE this works for shared memory
    whatever shmem_enabled says. What the memory holds stays, and may be used meanwhile. See MADV_COLLAPSE in madvise(2).
    Raises OSError when some stay small: EINVAL where the kernel cannot do it, ENOMEM, EAGAIN or EBUSY where it has none to give now."""
    for at in range(address, address + nbytes, HUGE_NBYTES):
        ctypes.string_at(at, 1)  # at least one small page must be there
    if _libc.madvise(address, nbytes, MADV_COLLAPSE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def whole_huge_pages(nbytes: int) -> int:
    return -(-nbytes // HUGE_NBYTES) * HUGE_NBYTES


def _mmap(address: int | None, nbytes: int, prot: int, flags: int, fd: int) -> int:
    start: int | None = _libc.mmap(address, nbytes, prot, flags, fd, 0)
    if start is None or start == MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return start
