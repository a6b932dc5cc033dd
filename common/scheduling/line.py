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
from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import chain

from common.scheduling.request import Place, Request


class Line:
    def __init__(self) -> None:
        self._again: list[Request] = []  # by order of arrival; producers: retraction, a room that was lost after token 1
        self._new: OrderedDict[Request, None] = OrderedDict()  # producer: the role's scheduler. Anyone may leave it, many at once
        self._rooms: Counter[int] = Counter()  # of those that are to be offered

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._again, self._new)

    @property
    def head(self) -> Request | None:
        return next(iter(self), None)

    @property
    def num_arriving(self) -> int:
        return self._rooms.total()

    def add(self, request: Request, place: Place = Place.WAITING) -> None:
        request.place = place
        self._new[request] = None
        if place is Place.ARRIVING:
            assert request.bootstrap is not None
            self._rooms[request.bootstrap.room] += 1

    def add_again(self, request: Request) -> None:
        """For a request that has output already."""
        request.place = Place.WAITING
        insort(self._again, request, key=lambda waiting: waiting.order)

    def pop(self) -> Request:
        """The head, which has its pages."""
        head = next(iter(self))
        self.remove(head)
        return head

    def remove(self, request: Request) -> None:
        if request not in self._new:
            self._again.remove(request)
            return
        del self._new[request]
        if request.place is Place.ARRIVING:
            assert request.bootstrap is not None
            room = request.bootstrap.room
            self._rooms[room] -= 1
            if not self._rooms[room]:
                del self._rooms[room]

    def has_room(self, room: int) -> bool:
        """Does a request wait to be offered for that room?"""
        return room in self._rooms
