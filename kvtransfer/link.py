"""Links: what the two sides of a control connection share.

A link is one connection between a D and a P, and ends with it: nothing is carried over to the next one, so no message is ever
replayed into another process (R4). D dials (link_dial.py), P accepts (link_accept.py). Both are sans-IO: frames and the time come
in, frames go out through a wire, and what the room sessions must know is left in `news`.

A peer is a process, named by its incarnation. It is lost when its connection ends, when nothing was heard of it for
peer_timeout_s, or when a session finds it stuck; the backend has then forgotten it, before the sessions hear of it.
"""

import logging
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from common.errors import Failure
from kvtransfer.backend import NO_FENCE, Fence, PeerId

WARN_EVERY_S = 5.0
FENCE_POLL_S = 0.05  # how often a fence that has not passed in time is asked again


class Address(NamedTuple):
    """A prefill node's control endpoint, as the router names it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


# ---- news of links, for the room sessions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerUp:
    """D: offers parked for `address` may leave."""

    address: Address
    peer: PeerId


@dataclass(frozen=True, slots=True)
class DialFailed:
    """D: offers parked for `address` will not leave."""

    address: Address
    failure: Failure


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The backend has been told to disconnect it; its fence runs from now."""

    peer: PeerId
    reason: str
    fence: Fence = field(default=NO_FENCE, compare=False)


LinkNews = PeerUp | DialFailed | PeerLost


# ---- what carries the frames ---------------------------------------------------------------------------------------------


class AcceptWire(Protocol):
    """P's end: connections that peers made, each named by a route."""

    def send(self, route: bytes, frame: bytes) -> bool:
        """Never blocks. False: the route is gone, or its peer takes nothing any more."""


class DialWire(Protocol):
    """D's end: each link is one connection attempt and at most one connection, never made again."""

    def open(self, address: Address) -> int:
        """A new link, connecting; frames sent meanwhile wait for it. Raises ValueError for an address that cannot be one."""

    def send(self, link: int, frame: bytes) -> bool:
        """Never blocks. False: the link is gone, or its peer takes nothing any more."""

    def close(self, link: int) -> None:
        """What was sent just before still leaves, if it can at once."""


class RareWarning:
    """A warning that anybody on the network can provoke: one line in WARN_EVERY_S, with the number left out."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next_s = 0.0
        self._num_muted = 0

    def __call__(self, now_s: float, message: str) -> None:
        if now_s < self._next_s:
            self._num_muted += 1
            return
        self._logger.warning("%s%s", message, f" ({self._num_muted} more like it)" if self._num_muted else "")
        self._next_s, self._num_muted = now_s + WARN_EVERY_S, 0
