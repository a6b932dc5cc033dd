"""A room on P: its states, and what is known of it.

    AWAIT_OFFER  the request is here, D's offer is not
    PARKED       the offer is here, the request is not; bounded, and expires
    WAITING      both are here (OfferJoined); nothing computed yet
    COMPUTING    pages are handed over, gathered and written
    SENDING      finish(): all handed over, writes to come or outstanding
    DRAINING     given up, for whatever cause; writes outstanding
    CLOSED       forgotten, but for the memory that refuses a late duplicate
"""

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.errors import Failure
from kvtransfer.backend import PageIds, PeerId
from kvtransfer.digest import Digests
from kvtransfer.machine import Machine, Table, from_each
from kvtransfer.outgoing import Outgoing
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
    digest: bool


@dataclass(slots=True)
class Room:
    room: int
    outgoing: Outgoing
    machine: Machine[SenderState, SenderEvent] = field(default_factory=lambda: Machine(SENDER_TABLE, S.NEW))
    request: Prompt | None = None
    request_deadline_s: float = 0.0
    rid: str = ""
    expected_s: float = 0.0
    finished_s: float = 0.0
    offer: HeldOffer | None = None
    handed_over: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))  # of the offer's pages
    digests: Digests = field(default_factory=lambda: np.zeros(0, np.uint32))  # the same, if D asked for them
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

