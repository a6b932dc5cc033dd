"""When may the next request come? One rate limit, as one number.

The generic cell rate algorithm (ITU-T I.371): each request moves the time at which the next one is due by 1/rate; one that comes before
that is too early, by up to a second's worth of requests: the burst. It allows what a bucket of tokens allows, which is refilled all the time.
"""

LEAST_PER_S = 1e-6  # one in eleven days; the intervals of what is less are no numbers
BURST_S = 1.0  # as many at once as come in a second: clients that start their work on the same second are not refused for that


class Rate:
    """per_s: requests a second, above 0; may be changed at any time."""

    __slots__ = ("_due_s", "_interval_s", "_tolerance_s")

    def __init__(self, per_s: float) -> None:
        self._due_s = float("-inf")
        self.set(per_s)

    def set(self, per_s: float) -> None:
        self._interval_s = 1.0 / max(per_s, LEAST_PER_S)
        self._tolerance_s = max(0.0, BURST_S - self._interval_s) + 1e-9 * self._interval_s  # sums of intervals round

    def wait_s(self, now_s: float) -> float:
        """Until a request is taken; 0 or less: now."""
        return self._due_s - self._tolerance_s - now_s

    def take(self, now_s: float) -> None:
        self._due_s = max(self._due_s, now_s) + self._interval_s
