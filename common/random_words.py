"""Random 64-bit numbers from the kernel, many at a time: a system call for each costs more than what is done with it."""

import os
import struct
from collections.abc import Iterator

NUM_AT_ONCE = 64


def random_words() -> Iterator[int]:
    """Unguessable; without an end. Not to be shared by a process with the children that it forks."""
    while True:
        yield from struct.unpack(f"{NUM_AT_ONCE}Q", os.urandom(8 * NUM_AT_ONCE))
