"""A device without a model: each step takes a time that is given, behind the step before it. The host finds out as it does with CUDA: an event
that it may ask, or sleep on.

    step N starts when it is launched or when step N - 1 ends, whichever is later

Two clocks. WallClock is the time of day. HostClock counts the host's own processor time, and the time it waits for the device; what else runs on
the machine is left out, as far as it does not share caches. Both wait by sleeping.
"""

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scheduler_load import FIRST_TOKEN_ID, VOCABULARY

from common.engine.batch import Batch, DecodeBatch


class Clock(Protocol):
    def now_s(self) -> float: ...

    def wait_until(self, moment_s: float) -> None:
        """Returns at once if that has passed."""


class WallClock:
    def now_s(self) -> float:
        return time.perf_counter()

    def wait_until(self, moment_s: float) -> None:
        if (left_s := moment_s - time.perf_counter()) > 0:
            time.sleep(left_s)


class HostClock:
    """Of the thread that asks."""

    def __init__(self) -> None:
        self._waited_s = 0.0

    def now_s(self) -> float:
        return time.thread_time() + self._waited_s

    def wait_until(self, moment_s: float) -> None:
        if (left_s := moment_s - self.now_s()) > 0:
            time.sleep(left_s)
            self._waited_s += max(0.0, moment_s - self.now_s())  # it woke in time, never mind what the machine did


class SyntheticDevice:
    """A Runner (common/engine/launched.py) of decode steps. Draws arbitrary tokens."""

    def __init__(self, clock: Clock, decode_step_s: float, *, max_rows: int) -> None:
        self.clock = clock
        self.decode_step_s = decode_step_s
        self._drawn = np.random.default_rng(0).integers(FIRST_TOKEN_ID, VOCABULARY, max_rows, dtype=np.int64)
        self._free_s: float | None = None  # when the step launched last ends
        self.num_steps = 0
        self.idle_s = 0.0  # between steps

    def launch(self, batch: Batch) -> "SyntheticStep":
        assert isinstance(batch, DecodeBatch), "prompts are computed elsewhere"
        now_s = self.clock.now_s()
        start_s = now_s if self._free_s is None else max(now_s, self._free_s)
        self.idle_s += 0.0 if self._free_s is None else start_s - self._free_s
        self._free_s = start_s + self.decode_step_s
        self.num_steps += 1
        return SyntheticStep(self.clock, self._free_s, self._drawn[: len(batch.rows)])


@dataclass(frozen=True, slots=True)
class SyntheticStep:
    """A Launched, and its own Ready."""

    clock: Clock
    ends_s: float
    drawn: NDArray[np.int64]

    def query(self) -> bool:
        return self.clock.now_s() >= self.ends_s

    @property
    def ready(self) -> "SyntheticStep | None":
        return None if self.query() else self

    def done(self) -> bool:
        return self.query()

    def tokens(self) -> NDArray[np.int64]:
        self.clock.wait_until(self.ends_s)
        return self.drawn
