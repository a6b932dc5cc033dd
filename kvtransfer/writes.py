"""P's writes: when a batch of a room leaves, and what has become of it.

It leaves when every event of it has passed (outgoing.py) and while D is known not to have dropped this node (lease.py). Otherwise its
room is held back and looked at again in every tick: an echo that renews the lease is a frame, and so a tick; events have no descriptor
that could be waited for, and are asked again and again.
"""

import logging
import math
from collections.abc import Callable, Iterator

from common.errors import Failure
from kvtransfer.backend import PageIds, PeerUnknown, Ticket, TransferBackend, TransferError
from kvtransfer.digest import PageDigests
from kvtransfer.failures import internal_error, peer_lost, write_failed
from kvtransfer.figures import Stats, WriteFigures
from kvtransfer.link_accept import AcceptedLinks
from kvtransfer.outgoing import Batch
from kvtransfer.sender_room import HeldOffer, Room
from kvtransfer.settings import TransferSettings

logger = logging.getLogger(__name__)

LEAST_POLL_S, MOST_POLL_S = 100e-6, 1e-3  # how often events are asked: after a tenth of the wait so far, within these bounds


class Writes:
    def __init__(self, settings: TransferSettings, links: AcceptedLinks, backend: TransferBackend, clock: Callable[[], float] | None) -> None:
        """`clock`: looked at right before each post; without one, the time that a method was called with counts."""
        self._page_nbytes = settings.compat.page_nbytes
        self._links = links
        self._backend = backend
        self._clock = clock
        self._digests = PageDigests(settings.region) if settings.region is not None else None
        self._tickets: dict[Ticket, tuple[Room, int]] = {}  # with the number of pages
        self._held_back: dict[int, Room] = {}
        self._unready_since_s = self._poll_at_s = math.inf
        self._figures = WriteFigures()

    @property
    def can_digest(self) -> bool:
        return self._digests is not None

    def post_due(self, room: Room, now_s: float) -> Failure | None:
        """Post the batches of the room that may leave, and hold the rest back. A Failure when one cannot be posted."""
        assert room.offer is not None
        while (batch := room.outgoing.first) and batch.is_ready():
            if room.offer.digest and not batch.digested and (failure := self._digest(room, batch)):
                return failure
            if not self._links.may_post(room.offer.id[0], now_s if self._clock is None else self._clock()):
                break
            room.outgoing.take()
            if failure := self._post(room, room.offer, batch.local_pages, room.offer.dst_pages[batch.slots], now_s):
                return failure
        if batch is None:
            self.forget(room)
        else:
            self._held_back[room.room] = room
        return None

    def tick(self, now_s: float) -> list[tuple[Room, Failure]]:
        """Post what was held back and may leave by now. Rooms that failed in it."""
        posted = [(room, self.post_due(room, now_s)) for room in list(self._held_back.values())]
        unready = any(batch.ready for room in self._held_back.values() if (batch := room.outgoing.first))
        self._unready_since_s = min(self._unready_since_s, now_s) if unready else math.inf
        self._poll_at_s = now_s + min(max((now_s - self._unready_since_s) / 10, LEAST_POLL_S), MOST_POLL_S) if unready else math.inf
        return [(room, failure) for room, failure in posted if failure]

    def next_due_s(self) -> float:
        return self._poll_at_s

    def forget(self, room: Room) -> None:
        """Nothing of the room is to be posted any more."""
        self._held_back.pop(room.room, None)

    def completed(self, now_s: float) -> Iterator[tuple[Room, Failure | None]]:
        """Rooms with a write that is over, and why it failed."""
        for completion in self._backend.poll():
            room, num_pages = self._tickets.pop(completion.ticket)
            room.num_outstanding -= 1
            self._figures.completed(0 if completion.error else num_pages * self._page_nbytes, now_s)
            yield room, write_failed(completion.error) if completion.error else None

    def stats(self, now_s: float) -> Stats:
        return self._figures.stats(now_s)

    def _digest(self, room: Room, batch: Batch) -> Failure | None:
        assert self._digests is not None, "such an offer was refused"
        try:
            room.digests[batch.slots] = self._digests.of(batch.local_pages)
        except ValueError as error:
            return _defect(room, error)
        batch.digested = True
        return None

    def _post(self, room: Room, offer: HeldOffer, local_pages: PageIds, remote_pages: PageIds, now_s: float) -> Failure | None:
        try:
            ticket = self._backend.post("WRITE", offer.id[0], local_pages, remote_pages)
        except PeerUnknown as error:  # lost in this very step: the news is on its way
            return peer_lost("decode", str(error))
        except TransferError as error:
            return write_failed(error)
        except ValueError as error:
            return _defect(room, error)
        self._figures.posted(local_pages, remote_pages, now_s)
        self._tickets[ticket] = room, len(local_pages)
        room.num_outstanding += 1
        return None


def _defect(room: Room, error: ValueError) -> Failure:
    logger.exception("room %d: the scheduler handed over pages that this node does not have", room.room)
    return internal_error(error)
