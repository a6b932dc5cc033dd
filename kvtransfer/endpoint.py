"""The transfer endpoint of a node: what the schedulers see of kvtransfer.  (contract; to be implemented)"""

from dataclasses import dataclass
from typing import Protocol

from common.errors import Failure
from kvtransfer.backend import PageIds

# ---- events to the schedulers -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OfferJoined:
    """P: the room's offer and request have met. Pages [decode_prefix_pages, num_prompt_pages) are wanted by D."""

    room: int
    decode_prefix_pages: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """D: P sampled token 1."""

    room: int
    token_id: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """P: every write landed and D was told. D: every prompt page from the offer on is filled; pages are the request's.
    Terminal for the room: no other event of it follows. On D, FirstToken always came before."""

    room: int


@dataclass(frozen=True, slots=True)
class RoomFailed:
    """The room will not be delivered; answer the client now. Pages stay the transfer's until PagesReturned follows."""

    room: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class PagesReturned:
    """After RoomFailed or abort(): no write of this room is outstanding (P), or can land any more (D); pages may be freed.
    Terminal for the room."""

    room: int


Event = OfferJoined | FirstToken | Delivered | RoomFailed | PagesReturned


class PrefillEndpoint(Protocol):
    """P's side. All calls return at once; none raises for a room that ended meanwhile (they are ignored)."""

    def expect(self, room: int, num_prompt_tokens: int, prompt_digest: bytes, deadline_s: float) -> Failure | None:
        """P's scheduler holds the request of `room`. Joined with D's offer (before or after): OfferJoined. Returns a
        Failure (and takes nothing) for a duplicate room or a full table."""

    def send_pages(self, room: int, first_page: int, local_pages: PageIds) -> None:
        """Prompt pages [first_page, first_page + n) of the room are complete in `local_pages`: write them to D's pages.
        Pages below the offer's decode_prefix_pages are skipped."""

    def send_first_token(self, room: int, token_id: int, num_cached_tokens: int) -> None:
        """Token 1, to be streamed by D at once."""

    def finish(self, room: int) -> None:
        """All pages were handed over: Closed(DELIVERED) goes out when their writes have completed; then Delivered."""

    def abort(self, room: int, failure: Failure) -> None:
        """Give the room up: Closed with `failure` goes out when no write is outstanding; then PagesReturned (no RoomFailed)."""


class DecodeEndpoint(Protocol):
    """D's side."""

    def offer(self, room: int, host: str, port: int, num_prompt_tokens: int, prompt_digest: bytes,
              decode_prefix_pages: int, dst_pages: PageIds, deadline_s: float) -> Failure | None:
        """Offer `dst_pages` (prompt pages from decode_prefix_pages on, in order) to the prefill node at host:port, connecting
        to it if need be. Returns a Failure (and takes nothing) for a duplicate room or a full table."""

    def abort(self, room: int, failure: Failure) -> None:
        """D gives the room up: P is told; PagesReturned follows once P has closed it or is fenced (no RoomFailed)."""
