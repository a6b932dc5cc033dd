"""glibc's allocator gives large blocks back to the kernel at once, and asks for them again with the next request: page faults cost more
than all else that is done with a body of 256 KB (CPU a request is 0.6 to 0.7 of what it was, measured by bench/router_overhead.py). Here it
keeps them.

mallopt(3). What is kept is bounded by what was in use at the same time.
"""

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
KEPT_NBYTES = 16 << 20  # free memory at the heap's end beyond which it is given back
TOP_PAD_NBYTES = 1 << 20  # asked for at once
MMAP_NBYTES = 32 << 20  # the most that glibc takes: blocks of this size and more are the kernel's own


def keep_freed_memory() -> None:
    """Another C library has no mallopt, and its own ways."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((M_MMAP_THRESHOLD, MMAP_NBYTES), (M_TRIM_THRESHOLD, KEPT_NBYTES), (M_TOP_PAD, TOP_PAD_NBYTES)):
            mallopt(option, value)
