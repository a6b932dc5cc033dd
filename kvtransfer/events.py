"""What the transfer endpoint tells its scheduler. Every room ends with exactly one terminal event: Delivered or PagesReturned.

    P   OfferJoined -> Delivered                          D   FirstToken -> Delivered
        [OfferJoined ->] RoomFailed -> PagesReturned          [FirstToken ->] RoomFailed -> PagesReturned
        abort(): PagesReturned                                abort(): PagesReturned
"""

from dataclasses import dataclass

from common.errors import Failure


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
