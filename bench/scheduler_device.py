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

from common.engine.batch import Batch, DecodeBatch

FIRST_TOKEN_ID, VOCABULARY = 1000, 32_000  # what is drawn is at least the one, below the other


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
    """A Runner (common/engine/launched.py). Draws arbitrary tokens."""

    def __init__(self, clock: Clock, decode_step_s: float, *, max_rows: int, extend_s_per_token: float = 0.0) -> None:
        self.clock = clock
        self.decode_step_s = decode_step_s
        self._extend_s_per_token = extend_s_per_token
        self._drawn = np.random.default_rng(0).integers(FIRST_TOKEN_ID, VOCABULARY, max_rows, dtype=np.int64)
        self._free_s: float | None = None  # when the step launched last ends
        self.num_steps = 0
        self.num_rows = 0  # of all decode steps
        self.busy_s = 0.0
        self.idle_s = 0.0  # between steps
        self.waited_s = 0.0  # the host, for steps

    def launch(self, batch: Batch) -> "SyntheticStep":
        now_s = self.clock.now_s()
        start_s = now_s if self._free_s is None else max(now_s, self._free_s)
        self.idle_s += 0.0 if self._free_s is None else start_s - self._free_s
        if isinstance(batch, DecodeBatch):
            step_s, num_drawn = self.decode_step_s, len(batch.rows)
            self.num_rows += num_drawn
        else:
            step_s, num_drawn = self._extend_s_per_token * len(batch.token_ids), len(batch.sample_rows)
        self._free_s = start_s + step_s
        self.busy_s += step_s
        self.num_steps += 1
        return SyntheticStep(self, self._free_s, self._drawn[:num_drawn])


@dataclass(frozen=True, slots=True)
class SyntheticStep:
    """A Launched, and its own Ready."""

    device: SyntheticDevice
    ends_s: float
    drawn: NDArray[np.int64]

    def query(self) -> bool:
        return self.device.clock.now_s() >= self.ends_s

    @property
    def ready(self) -> "SyntheticStep | None":
        return None if self.query() else self

    def done(self) -> bool:
        return self.query()

    def tokens(self) -> NDArray[np.int64]:
        clock = self.device.clock
        asked_s = clock.now_s()
        clock.wait_until(self.ends_s)
        self.device.waited_s += max(0.0, clock.now_s() - asked_s)
        return self.drawn
