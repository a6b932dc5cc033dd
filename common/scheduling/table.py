"""The requests a scheduler has not answered yet, and when each must be answered at the latest (R5)."""

import heapq
import time
from collections.abc import Callable, Iterable

from common.errors import Failure, deadline_exceeded
from common.messages import Generate
from common.scheduling.request import Request, request_from

SHUTTING_DOWN = Failure(503, "the node is shutting down", code="shutting_down", stage="queue", retry_after_s=1.0)


class RequestTable:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_rid: dict[str, Request] = {}
        self._timers: list[tuple[float, int, str, Failure]] = []  # heap by time; names only, so that an answered request is let go at once
        self._num_seen = 0
        self._num_timers_seen = 0
        self.draining = False

    def __len__(self) -> int:
        return len(self._by_rid)

    def open(self, message: Generate, *, max_new_tokens: int | None = None) -> Request:
        request = request_from(message, self._num_seen, max_new_tokens=max_new_tokens)
        self._num_seen += 1
        self._by_rid[request.rid] = request
        self._set_timer(request, request.deadline_s, deadline_exceeded("generation"))
        return request

    def take(self, rid: str) -> Request | None:
        """Remove and return an unanswered request."""
        return self._by_rid.pop(rid, None)

    def forget(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._by_rid.pop(request.rid, None)

    def expired(self) -> list[tuple[Request, Failure]]:
        """Unanswered requests whose time is up, with what to tell the client; each comes once."""
        now_s = self._clock()
        late: list[tuple[Request, Failure]] = []
        while self._timers and (self._timers[0][0] <= now_s or self._timers[0][2] not in self._by_rid):
            _, _, rid, failure = heapq.heappop(self._timers)
            request = self._by_rid.get(rid)
            if request is not None and not request.over:
                late.append((request, failure))
        return late

    def next_timer_in_s(self) -> float:
        return self._timers[0][0] - self._clock() if self._timers else float("inf")

    def drain(self, deadline_unix_s: float) -> None:
        """Nothing new is coming; what is not answered by the deadline ends with 503."""
        self.draining = True
        deadline_s = self._clock() + deadline_unix_s - time.time()
        for request in self._by_rid.values():
            self._set_timer(request, deadline_s, SHUTTING_DOWN)

    @property
    def drained(self) -> bool:
        return self.draining and not self._by_rid

    def _set_timer(self, request: Request, deadline_s: float, failure: Failure) -> None:
        self._num_timers_seen += 1
        heapq.heappush(self._timers, (deadline_s, self._num_timers_seen, request.rid, failure))
