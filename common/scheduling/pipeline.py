"""Which launched steps were not processed yet, oldest first; and when must one be waited for?

    serial        launch N, wait for N, process N, plan N + 1
    overlapped    launch N, wait for N - 1, process N - 1 and plan N + 1 while the device works on N

Both are this object: `depth` says how many steps may be under way when the next one is planned. On a device that has finished when
launch() returns (CPU) nothing is ever under way, and the two are the same. (After NanoFlow, Zhu et al., OSDI'25, and the schedulers of
SGLang and vLLM.)

A launched step names its requests; while one does, the request's pages are not given to others: requests finish here one step late,
and the device may still write for them (pages.py).
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.engine.launched import Launched, Ready

Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True)
class Landed(Generic[Plan]):
    """A step that has run: its tokens, one a row that samples, and how long the device had it."""

    plan: Plan
    tokens: NDArray[np.int64]
    seconds: float


class Pipeline(Generic[Plan]):
    def __init__(self, depth: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._depth = depth
        self._clock = clock
        self._flights: deque[tuple[Plan, Launched, float]] = deque()
        self._landed_s = 0.0

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, plan: Plan, launched: Launched, launched_s: float) -> None:
        self._flights.append((plan, launched, launched_s))

    def ready(self) -> Ready | None:
        """Passes when everything launched so far has run; None: it has."""
        return self._flights[-1][1].ready if self._flights else None

    def landed(self, *, wait: bool) -> Iterator[Landed[Plan]]:
        """Steps to process now: those that have run, and those too many to be under way. wait: at least one, if there is one."""
        while self._flights:
            plan, launched, launched_s = self._flights[0]
            if not (wait or len(self._flights) > self._depth or launched.done()):
                return
            tokens = launched.tokens()
            self._flights.popleft()
            now_s = self._clock()
            started_s, self._landed_s = max(launched_s, self._landed_s), now_s
            wait = False
            yield Landed(plan, tokens, now_s - started_s)
