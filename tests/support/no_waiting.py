"""Does anything wait for the device?"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

BUSY_CYCLES = 6_000_000_000  # three seconds of an H200; what is watched takes milliseconds


@contextmanager
def no_waiting() -> Iterator[None]:
    """What waits for the device inside raises, if torch knows that it waits; else it is noticed, because the device is kept busy.

    torch warns that it does not know of all (once a process): tests that use this ignore that warning.
    """
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.query(), "something waited for the device"
    torch.cuda.synchronize()
