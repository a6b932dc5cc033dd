"""Who goes next of those that wait; fair to clients, by priority, and nobody waits for ever.

A request of priority p that came at t stands at t + p * STEP_S: one step of priority (lower is better) is worth STEP_S of waiting. Where it stands
never changes, so neither does who stands before whom. Two laws follow:

    within a client    the request that stands first goes first. One of priority p is overtaken by one of priority q < p only if that came less
                       than (p - q) * STEP_S later
    between clients    the client goes next whose turn stands first: at the time of its last turn (or when it began to wait) plus its best
                       priority's steps. With equal priorities clients take turns, however many requests each has; a client whose requests are
                       p - q steps worse has its turn at the latest (p - q) * STEP_S and one round after its last

With the 21 priorities of keys.py nobody is overtaken by who came 20 s later, which is within the default --queue-timeout. When the room is
full, a newcomer takes the place of the last of the longest line, where that client has at least two more waiting and the request is no better
than the newcomer; else of whoever stands last of all, if that is behind the newcomer. So neither a client that fills the room nor background work
keeps others out.

A turn is found by looking at every client that waits, which are few: --queue-size bounds them.
"""

from collections import deque
from typing import Generic, Protocol, TypeVar

from router.keys import Client

STEP_S = 1.0  # a request with the best priority goes before all that came less than 20 s before it; more would let the worst time out


class Waiter(Protocol):
    @property
    def client(self) -> Client: ...
    @property
    def priority(self) -> int: ...
    @property
    def arrived_s(self) -> float: ...


W = TypeVar("W", bound=Waiter)


def stands_at_s(waiter: Waiter) -> float:
    return waiter.arrived_s + waiter.priority * STEP_S


class Line(Generic[W]):
    """What waits of one client: by priority, in the order of arrival."""

    __slots__ = ("levels", "num", "turn_s")

    def __init__(self, turn_s: float) -> None:
        self.turn_s = turn_s
        self.num = 0
        self.levels: dict[int, deque[W]] = {}

    def add(self, waiter: W) -> None:
        level = self.levels.get(waiter.priority)
        if level is None:
            level = self.levels[waiter.priority] = deque()
        level.append(waiter)
        self.num += 1

    def remove(self, waiter: W) -> None:
        level = self.levels[waiter.priority]
        level.remove(waiter)
        if not level:
            del self.levels[waiter.priority]
        self.num -= 1

    @property
    def stands_at_s(self) -> float:
        return self.turn_s + min(self.levels) * STEP_S

    @property
    def first(self) -> W:
        return min((level[0] for level in self.levels.values()), key=stands_at_s)

    @property
    def last(self) -> W:
        return max((level[-1] for level in self.levels.values()), key=stands_at_s)

    def num_up_to(self, priority: int) -> int:
        return sum(len(level) for found, level in self.levels.items() if found <= priority)


class WaitingRoom(Generic[W]):
    def __init__(self) -> None:
        self._lines: dict[Client, Line[W]] = {}  # of those who wait; of equal turns the least recent is first
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, waiter: W) -> None:
        line = self._lines.get(waiter.client)
        if line is None:
            line = self._lines[waiter.client] = Line(waiter.arrived_s)
        line.add(waiter)
        self._num += 1

    def remove(self, waiter: W) -> None:
        line = self._lines[waiter.client]
        line.remove(waiter)
        self._num -= 1
        if not line.num:
            del self._lines[waiter.client]

    def take_next(self, now_s: float) -> W:
        """The room is not empty."""
        client = min(self._lines, key=lambda client: self._lines[client].stands_at_s)
        line = self._lines[client]
        waiter = line.first
        self.remove(waiter)
        if line.num:
            del self._lines[client]
            line.turn_s = now_s
            self._lines[client] = line
        return waiter

    def displaced_by(self, newcomer: Waiter) -> W | None:
        """Who makes way for it; None: it is the newcomer that finds no place."""
        longest = max(self._lines.values(), key=lambda line: line.num, default=None)
        if longest is None:
            return None
        own = self._lines.get(newcomer.client)
        if longest.num > (own.num if own is not None else 0) + 1 and longest.last.priority >= newcomer.priority:
            return longest.last
        last = max((line.last for line in self._lines.values()), key=stands_at_s)
        return last if stands_at_s(last) > stands_at_s(newcomer) else None

    def num_ahead(self, client: Client, priority: int) -> int:
        """About how many go before a request that comes now: all of its client's, and of each other client one for each of these turns."""
        own = self._lines.get(client)
        turns = own.num_up_to(priority) if own is not None else 0
        return turns + sum(min(turns + 1, line.num_up_to(priority)) for other, line in self._lines.items() if other is not client)
