"""A circuit breaker of one node: it answers its probes, but fails requests; so it is left alone for a while, and then tried by one.

    CLOSED --too many failures in a row--> OPEN --after `timeout_s`, a request is sent: the trial--> HALF_OPEN
       ^                                    ^                                                         |   |
       |                                    +-------------------- the trial failed -------------------+   |
       +------------------ a leg answered or ended well; the node came back from being away --------------+   (from OPEN too)

Failures are counted in a row, not as a rate in a window: one number that means the same at any traffic, and a node that fails
everything is found out after `failure_threshold` requests, not after a window. A node that fails only some requests keeps its
place; a retry hides those, and metrics show them.

Three things keep it from standing in the way of a node that is well:
- A trial whose outcome never comes (its client left) holds the breaker for `timeout_s`, then another request is the trial.
- What a leg that began before the last change of state comes to says nothing about the node of now, and is not heard: the last
  of many failures that were under way does not undo a recovery, a stream from before the trouble does not hide it.
- A trial counts as passed by the first byte of its answer; an answer may go on for minutes. Until another leg has proved the node,
  one more failure opens the breaker again.

What proves it, and ends the row of failures: a leg that ended well and began after the first of them. Where all of them were errors that the
node answered, also the first byte of such a leg: streams may be longer than it takes for some requests to fail, and a client whose
requests every node answers with 500 must not have the nodes left alone one after the other.

Times are seconds of the caller's clock, and never read here. Not thread-safe: one event loop.
"""

import math
from enum import Enum


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Event(Enum):
    FAILED = "failed"  # a leg; fewer in a row than the threshold
    FAILED_TOO_OFTEN = "failed_too_often"  # a leg; as many in a row as the threshold
    ANSWERED = "answered"  # a leg's first byte
    ENDED_WELL = "ended_well"  # a leg
    TRIED = "tried"  # a request is sent as the trial
    CAME_BACK = "came_back"  # the node was away or restarted


class IllegalEvent(Exception):
    """A fault of this program; nothing was changed."""


CLOSED, OPEN, HALF_OPEN = State

NEXT: dict[tuple[State, Event], State] = {
    (CLOSED, Event.FAILED): CLOSED,
    (CLOSED, Event.FAILED_TOO_OFTEN): OPEN,
    (CLOSED, Event.ANSWERED): CLOSED,
    (CLOSED, Event.ENDED_WELL): CLOSED,
    (CLOSED, Event.CAME_BACK): CLOSED,
    (OPEN, Event.FAILED): OPEN,  # a node that is used though, because it is the last
    (OPEN, Event.FAILED_TOO_OFTEN): OPEN,
    (OPEN, Event.ANSWERED): CLOSED,
    (OPEN, Event.ENDED_WELL): CLOSED,
    (OPEN, Event.TRIED): HALF_OPEN,
    (OPEN, Event.CAME_BACK): CLOSED,
    (HALF_OPEN, Event.FAILED): OPEN,
    (HALF_OPEN, Event.FAILED_TOO_OFTEN): OPEN,
    (HALF_OPEN, Event.ANSWERED): CLOSED,
    (HALF_OPEN, Event.ENDED_WELL): CLOSED,
    (HALF_OPEN, Event.TRIED): HALF_OPEN,  # the one before has no outcome
    (HALF_OPEN, Event.CAME_BACK): CLOSED,
}


class Breaker:
    """`state` and `num_failures` are to be read. Methods return True when the state has changed.

    began_s: when the leg began; the default is a leg that is always heard."""

    __slots__ = ("_all_answered", "_changed_s", "_failure_threshold", "_row_s", "_timeout_s", "num_failures", "state")

    def __init__(self, failure_threshold: int, timeout_s: float) -> None:
        self.state = CLOSED
        self.num_failures = 0  # in a row
        self._failure_threshold = failure_threshold
        self._timeout_s = timeout_s
        self._changed_s = self._row_s = -math.inf  # _row_s: of the first failure in the row
        self._all_answered = True  # the failures in the row, by errors

    def admits(self, now_s: float) -> bool:
        """May a request be sent? True also when it would be the trial."""
        return self.state is CLOSED or now_s >= self._changed_s + self._timeout_s

    def sent(self, now_s: float) -> bool:
        """A request is sent to the node, in whatever state."""
        return self.state is not CLOSED and self.admits(now_s) and self._apply(Event.TRIED, now_s)

    def failed(self, now_s: float, began_s: float = math.inf, *, answered: bool = False) -> bool:
        """answered: with an error of the node's own."""
        if began_s < self._changed_s:
            return False
        if not self.num_failures:
            self._row_s, self._all_answered = now_s, True
        self._all_answered &= answered
        self.num_failures += 1
        return self._apply(Event.FAILED_TOO_OFTEN if self.num_failures >= self._failure_threshold else Event.FAILED, now_s)

    def answered(self, now_s: float, began_s: float = math.inf) -> bool:
        if self.state is CLOSED:
            if self._all_answered and began_s >= max(self._changed_s, self._row_s):
                self.num_failures = 0
            return False
        if began_s < self._changed_s:
            return False
        self.num_failures = self._failure_threshold - 1
        return self._apply(Event.ANSWERED, now_s)

    def ended_well(self, now_s: float, began_s: float = math.inf) -> bool:
        if not self.num_failures or began_s < max(self._changed_s, self._row_s):
            return False
        self.num_failures = 0
        return self._apply(Event.ENDED_WELL, now_s)

    def came_back(self, now_s: float) -> bool:
        self.num_failures = 0
        return self._apply(Event.CAME_BACK, now_s)

    def _apply(self, event: Event, now_s: float) -> bool:
        state = NEXT.get((self.state, event))
        if state is None:
            raise IllegalEvent(f"{event.value} in state {self.state.value}")
        changed, self.state = state is not self.state, state
        if changed or event is Event.TRIED:
            self._changed_s = now_s
        return changed
