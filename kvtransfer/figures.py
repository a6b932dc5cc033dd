"""What the sessions count, in the keys of NodeStatus (common/metrics.py says how labels are written).

The transfer thread counts, the scheduler's thread reads; a reader sees figures of one moment or the next, never a table in change.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable
from enum import Enum

import numpy as np

from kvtransfer.backend import PageIds
from kvtransfer.failures import CAUSES

Stats = dict[str, float]

OTHER_CAUSE = "other"
MAX_CAUSES = 32  # causes come from peers too: what is beyond counts as OTHER_CAUSE
CAUSE = re.compile(r"[a-z0-9_]{1,40}")
RATE_WINDOW_S = 10.0
RATE_STEP_S = 0.5


class RoomFigures:
    """Rooms of one endpoint: how they ended and how long they waited."""

    def __init__(self, *waits: str) -> None:
        """waits: what waited() will be told, each two totals: seconds and times."""
        names = ["offers", "delivered", "failed", *(f"{wait}{unit}" for wait in waits for unit in ("_seconds", "s"))]
        self._totals: dict[str, float] = dict.fromkeys(names, 0.0)
        self._causes: Counter[str] = Counter(dict.fromkeys((*CAUSES, OTHER_CAUSE), 0))  # an alert on a rate needs a value before the first one

    def count(self, what: str, number: float = 1) -> None:
        self._totals[what] = self._totals.get(what, 0.0) + number

    def waited(self, what: str, seconds: float) -> None:
        self.count(f"{what}_seconds", max(seconds, 0.0))
        self.count(f"{what}s")

    def failed(self, cause: str | None) -> None:
        if cause is None or not CAUSE.fullmatch(cause) or (cause not in self._causes and len(self._causes) >= MAX_CAUSES):
            cause = OTHER_CAUSE
        self._causes[cause] += 1

    def stats(self) -> Stats:
        return {
            **{f"transfer_{what}_total": number for what, number in list(self._totals.items())},
            **{f'transfer_failures_total{{cause="{cause}"}}': number for cause, number in list(self._causes.items())},
        }


class WriteFigures:
    """P's writes. Busy is the time in which at least one is outstanding: overlapping ones count once. The rate is that of the last
    RATE_WINDOW_S of busy time, 0 when nothing has ended for as long, and anew after such a pause."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter(posts=0, pages=0, descriptors=0, bytes_written=0)
        self._num_outstanding = 0
        self._busy_since_s = 0.0  # busy time is counted up to here: the last write that ended, or the first one after a pause
        self._busy_s = 0.0
        self._window: deque[tuple[float, int]] = deque([(0.0, 0)])  # busy seconds and bytes so far, one entry each RATE_STEP_S

    def posted(self, local_pages: PageIds, remote_pages: PageIds, now_s: float) -> None:
        self._totals["posts"] += 1
        self._totals["pages"] += len(local_pages)
        self._totals["descriptors"] += num_descriptors(local_pages, remote_pages)
        if not self._num_outstanding:
            if self._is_idle(now_s):
                self._window = deque([(self._busy_s, self._totals["bytes_written"])])
            self._busy_since_s = now_s
        self._num_outstanding += 1

    def completed(self, num_bytes: int, now_s: float) -> None:
        """`num_bytes`: 0 of a write that failed."""
        self._totals["bytes_written"] += num_bytes
        self._num_outstanding -= 1
        self._busy_s, self._busy_since_s = self._busy_s + max(now_s - self._busy_since_s, 0.0), now_s
        if self._busy_s - self._window[-1][0] >= RATE_STEP_S:
            self._window.append((self._busy_s, self._totals["bytes_written"]))
            while len(self._window) > 1 and self._window[1][0] <= self._busy_s - RATE_WINDOW_S:
                self._window.popleft()

    def _is_idle(self, now_s: float) -> bool:
        return now_s - self._busy_since_s >= RATE_WINDOW_S

    def stats(self, now_s: float) -> Stats:
        busy_s, num_bytes = self._window[0]
        span_s = 0.0 if self._is_idle(now_s) else self._busy_s - busy_s
        return {
            **{f"transfer_{what}_total": number for what, number in list(self._totals.items())},
            "transfer_seconds_total": self._busy_s,
            "transfer_gigabytes_per_second": (self._totals["bytes_written"] - num_bytes) / span_s / 1e9 if span_s > 0 else 0.0,
        }


def num_descriptors(local_pages: PageIds, remote_pages: PageIds) -> int:
    """How many runs pages.merged_runs() would find; at least one page. Only counted here: in a third of the time, on each post."""
    return 1 + int(np.count_nonzero((local_pages[1:] != local_pages[:-1] + 1) | (remote_pages[1:] != remote_pages[:-1] + 1)))


def peer_stats(known: type[Enum], states: Iterable[str], heard_s: list[float], now_s: float) -> Stats:
    """Peers by state, also 0 of a state, and the age of the oldest last heartbeat. known: the states that a peer can be in, named in
    `states` in lower case."""
    peers = Counter(dict.fromkeys((state.name.lower() for state in known), 0))
    peers.update(states)
    return {
        **{f'transfer_peers{{state="{state}"}}': number for state, number in peers.items()},
        "transfer_heartbeat_age_seconds": max(now_s - min(heard_s), 0.0) if heard_s else 0.0,
    }
