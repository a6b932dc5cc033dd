"""Who gets pages next? Requests that held pages before, oldest first; behind them new ones, first come first served.

Every request of a node that holds no pages and wants some stands in this one line, whatever it wants them for, and only its head
is served: who waits for much is not overtaken by those who want little, so nobody waits for ever. Taking pages away goes the other
way round: the newest running request first (running.py). Together this bounds every wait:

    Let R be the oldest unanswered request that has held pages. While R runs, it loses its pages only when every other page is with
    a prefill node, with a prompt being computed, or in quarantine. Once R waits it is the head and nobody else is admitted, so the
    others finish, or are retracted into places behind it, until the pages suffice for R; alone they suffice, or R was refused at
    intake. R comes back to at least one token: computing its tokens again yields one, and a copy's first step needs no page beyond
    those it was admitted with. So the oldest request always ends, and then the next oldest is the oldest.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import chain

from common.scheduling.request import Place, Request


class Line:
    def __init__(self) -> None:
        self._again: list[Request] = []  # by order of arrival; producers: retraction, a room that was lost after token 1
        self._new: deque[Request] = deque()  # producer: the role's scheduler

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._again, self._new)

    @property
    def head(self) -> Request | None:
        if self._again:
            return self._again[0]
        return self._new[0] if self._new else None

    def add(self, request: Request, place: Place = Place.WAITING) -> None:
        request.place = place
        self._new.append(request)

    def add_again(self, request: Request) -> None:
        """For a request that has output already."""
        request.place = Place.WAITING
        insort(self._again, request, key=lambda waiting: waiting.order)

    def pop(self) -> Request:
        """The head, which has its pages."""
        return self._again.pop(0) if self._again else self._new.popleft()

    def remove(self, request: Request) -> None:
        if request in self._again:
            self._again.remove(request)
        else:
            self._new.remove(request)

    def num_arriving(self) -> int:
        return sum(request.place is Place.ARRIVING for request in self)
