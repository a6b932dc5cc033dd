"""Tickets of one backend: each is opened once, completes exactly once, and is handed out once.

A ticket may travel in several parts (one message each). It completes when its last part is over, with the first error any part
had: until then its pages may still be touched. Parts may end on any thread; open() and drain() belong to the endpoint's.

The eventfd is readable while completions may be waiting, so that an event loop sleeps on it. After close() the fd is gone and
drain() still hands out what is left.
"""

import os
import threading

from kvtransfer.backend import Completion, Ticket, TransferError


class Tickets:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 1
        self._parts_left: dict[Ticket, int] = {}
        self._first_error: dict[Ticket, TransferError] = {}
        self._done: list[Completion] = []
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def open(self, num_parts: int) -> Ticket:
        """A new ticket of `num_parts` parts; with none it is complete at once."""
        with self._lock:
            ticket = Ticket(self._next)
            self._next += 1
            if num_parts:
                self._parts_left[ticket] = num_parts
            else:
                self._complete(ticket)
            return ticket

    def failed(self, error: TransferError) -> Ticket:
        """A new ticket that is over already."""
        ticket = self.open(1)
        self.part_done(ticket, error)
        return ticket

    def part_done(self, ticket: Ticket, error: TransferError | None) -> None:
        with self._lock:
            if error is not None:
                self._first_error.setdefault(ticket, error)
            self._parts_left[ticket] -= 1
            if not self._parts_left[ticket]:
                del self._parts_left[ticket]
                self._complete(ticket)

    @property
    def num_open(self) -> int:
        with self._lock:
            return len(self._parts_left)

    def drain(self) -> list[Completion]:
        """Completions since the last call, in order of completion."""
        with self._lock:
            done, self._done = self._done, []
            if done and self._fd >= 0:
                os.eventfd_read(self._fd)
            return done

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _complete(self, ticket: Ticket) -> None:
        self._done.append(Completion(ticket, self._first_error.pop(ticket, None)))
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)
