"""A room on P: its states, and what is known of it.

    AWAIT_OFFER  the request is here, D's offer is not
    PARKED       the offer is here, the request is not; bounded, and expires
    WAITING      both are here (OfferJoined); nothing computed yet
    COMPUTING    pages are written as they are handed over
    SENDING      finish(): all handed over, writes outstanding
    DRAINING     given up, for whatever cause; writes outstanding
    CLOSED       forgotten, but for the memory that refuses a late duplicate
"""

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.errors import Failure
from kvtransfer.backend import PageIds, PeerId
from kvtransfer.machine import Machine, Table, from_each
from kvtransfer.protocol import ClosedStatus

OfferId = tuple[PeerId, int]  # the D process, and its number of the offer


class SenderState(enum.Enum):
    NEW = enum.auto()
    AWAIT_OFFER = enum.auto()
    PARKED = enum.auto()
    WAITING = enum.auto()
    COMPUTING = enum.auto()
    SENDING = enum.auto()
    DRAINING = enum.auto()
    CLOSED = enum.auto()


class SenderEvent(enum.Enum):
    EXPECT = enum.auto()
    OFFER = enum.auto()
    PAGES = enum.auto()
    TOKEN = enum.auto()
    FINISH = enum.auto()
    FAIL = enum.auto()
    DRAINED = enum.auto()


S, E = SenderState, SenderEvent
SENDER_TABLE = Table(
    "room on the prefill node",
    {
        (S.NEW, E.EXPECT): S.AWAIT_OFFER,
        (S.NEW, E.OFFER): S.PARKED,
        (S.AWAIT_OFFER, E.OFFER): S.WAITING,
        (S.PARKED, E.EXPECT): S.WAITING,
        (S.WAITING, E.PAGES): S.COMPUTING,
        (S.WAITING, E.TOKEN): S.COMPUTING,
        (S.COMPUTING, E.PAGES): S.COMPUTING,
        (S.COMPUTING, E.TOKEN): S.COMPUTING,
        (S.COMPUTING, E.FINISH): S.SENDING,
        (S.SENDING, E.DRAINED): S.CLOSED,
        **from_each((S.AWAIT_OFFER, S.PARKED, S.WAITING, S.COMPUTING, S.SENDING, S.DRAINING), E.FAIL, S.DRAINING),
        **{(S.DRAINING, late): S.DRAINING for late in (E.PAGES, E.TOKEN, E.FINISH)},  # the scheduler does not know yet
        (S.DRAINING, E.DRAINED): S.CLOSED,
    },
)
STAGE = {S.WAITING: "queue", S.COMPUTING: "prefill"}  # where a deadline strikes; elsewhere "transfer"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What request and offer must agree on."""

    num_tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class HeldOffer:
    id: OfferId
    prompt: Prompt
    decode_prefix_pages: int
    dst_pages: PageIds
    deadline_s: float


@dataclass(slots=True)
class Room:
    room: int
    machine: Machine[SenderState, SenderEvent] = field(default_factory=lambda: Machine(SENDER_TABLE, S.NEW))
    request: Prompt | None = None
    request_deadline_s: float = 0.0
    offer: HeldOffer | None = None
    handed_over: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))  # of the offer's pages
    token_sent: bool = False
    num_outstanding: int = 0
    failure: Failure | None = None  # the first cause
    status: ClosedStatus = "DELIVERED"
    peer_gone: bool = False


@dataclass(slots=True)
class Ended:
    """A room that is over. `failure`: what a latecomer is told; None once both sides have met."""

    offer_id: OfferId | None
    failure: Failure | None


def duplicate_room(room_id: int) -> Failure:
    return Failure(400, f"bootstrap_room {room_id} is taken or was used before; draw a new one", code="duplicate_room", stage="transfer")


def prompt_mismatch(request: Prompt, offer: Prompt) -> Failure:
    lengths = f"{request.num_tokens} tokens here, {offer.num_tokens} at the decode node"
    return Failure(400, f"the two nodes were given different prompts ({lengths})", code="prompt_mismatch", stage="transfer")


def write_failed(error: Exception) -> Failure:
    return Failure(503, f"KV pages could not be written to the decode node: {error}", code="transfer_failed", stage="transfer")
