"""What an engine decides: the form of the two legs of a request.

The router picks the nodes, sends the legs and relays the answer the same way for all; an engine says what is written into the
client's body for each leg, and whether the decode leg has to wait for what the prefill node answers. Engines hold no state.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from router.splice import Head

if TYPE_CHECKING:
    from router.node import Node


class LegRequest(NamedTuple):
    """What one node is sent. headers: further lines of the head, each "name: value\\r\\n". local_reason: why the decode node has to
    compute the prompt after all; None when it has not."""

    body: bytes
    headers: bytes = b""
    local_reason: str | None = None


@dataclass(slots=True)
class Outgoing:
    """One attempt at one request. prefill: None when the decode node computes the prompt. rooms: one, or one a prompt, new for
    every attempt. dual: the leg that is the same for both nodes, made once."""

    body: bytes
    head: Head
    prefill: "Node | None"
    decode: "Node"
    rooms: int | list[int]
    request_id: str
    dual: LegRequest | None = None


class Engine(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def sequential(self) -> bool:
        """False: both legs go out at once. True: the prefill leg first, the decode leg with what it answered."""

    @property
    def decode_computes(self) -> bool:
        """A decode node of this engine answers a request that names no prefill node."""

    def local_reason(self, head: Head) -> str | None:
        """Why this engine cannot split this request, so that the decode node must compute the prompt; None when it can."""

    def prefill_leg(self, out: Outgoing) -> LegRequest: ...

    def decode_leg(self, out: Outgoing, prefill_reply: bytes | None) -> LegRequest:
        """prefill_reply: the body of a sequential engine's prefill leg. Without a prefill node: the body without any field that
        names one. Raises RequestError 502 when the reply is not what such a node answers."""
