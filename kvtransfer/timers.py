"""Timers of sans-IO sessions: one due time per key, on the clock of whoever calls. Nothing here reads a clock or sleeps."""

import heapq
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    def __init__(self) -> None:
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []  # may hold entries that were reset or cancelled: _due decides
        self._serial = 0  # keys need no order

    def set(self, key: K, due_s: float) -> None:
        """Replaces the key's timer."""
        self._due[key] = due_s
        self._serial += 1
        heapq.heappush(self._heap, (due_s, self._serial, key))

    def cancel(self, key: K) -> None:
        self._due.pop(key, None)

    def next_due_s(self) -> float:
        """inf when no timer is set."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def expired(self, now_s: float) -> list[K]:
        """Keys whose time has come, earliest first; their timers are gone."""
        keys = []
        while self.next_due_s() <= now_s:
            key = heapq.heappop(self._heap)[2]
            del self._due[key]
            keys.append(key)
        return keys

    def __len__(self) -> int:
        return len(self._due)
