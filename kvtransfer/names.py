"""Host names to numeric addresses, without anybody waiting: a lookup may take as long as a name server is silent, and ZMQ would make it
in the one thread that carries every connection of the process.
"""

import os
import socket
import threading
from collections import deque
from contextlib import suppress

MAX_LOOKUPS = 32  # at a time; each is a thread


class Names:
    """One thread calls the methods; `fd` is readable while answers() has something to return."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._answers: deque[tuple[int, str, str]] = deque()
        self._num_under_way = 0
        self._closed = False

    def look_up(self, key: int, host: str) -> None:
        """Answered by answers(), under `key`. Raises ValueError when too many are under way."""
        with self._lock:
            if self._num_under_way >= MAX_LOOKUPS:
                raise ValueError(f"{self._num_under_way} other host names are being looked up; does the name server answer?")
            self._num_under_way += 1
        threading.Thread(target=self._look_up, args=(key, host), name="kv-names", daemon=True).start()

    def answers(self) -> list[tuple[int, str, str]]:
        """(key, numeric address or "", why there is none) of each lookup that has ended. IPv4 is preferred."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        with self._lock:
            answers = list(self._answers)
            self._answers.clear()
        return answers

    def close(self) -> None:
        """Lookups under way end by themselves, and answer nobody."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)

    def _look_up(self, key: int, host: str) -> None:
        numeric, reason = "", ""
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            numeric = str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
        except (OSError, UnicodeError) as error:
            reason = f"its name does not resolve: {getattr(error, 'strerror', None) or error}"
        with self._lock:
            self._num_under_way -= 1
            if not self._closed:
                self._answers.append((key, numeric, reason))
                os.eventfd_write(self.fd, 1)
