"""What the router knows of one node: whether it may be used, what it said of itself, and how much is under way there.

    unknown --good probe--> usable --failed probe, or blame--> unusable(reason) --good probe--> usable

Two things speak about whether a node can be reached. A probe (health.py) may say yes or no; a request whose connection failed may
only say no (blame), and asks for a probe at once. Neither says anything for longer than until the next probe: no node is struck
off for good. A probe that was on its way when a request blamed the node is too old to clear it. Until that probe's verdict the
node is a suspect: it is not used, but a request that has no other node waits for the verdict.

A node that answers its probes and fails its requests all the same is another matter: its breaker decides (breaker.py). So a node
that could not be reached is used again as soon as a probe succeeds, with a closed breaker; one that failed too many requests in a
row stays usable, is left alone for a while, and comes back by a request that it serves. What fails while a node is a suspect
is one failure, however many requests were under way there: they were one event.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from router.breaker import Breaker
from router.connection import Address
from router.load import DecodeLoad, PrefillLoad

Leg = Literal["prefill", "decode"]
Clock = Callable[[], float]

AGREED_FACTS = ("fingerprint", "dtype", "kv_cache_dtype", "page_size", "protocol_version", "context_length", "transfer_backend", "cluster_key_id")
REMOVED = "was removed"
NEVER = 1 << 62  # failures in a row: the breaker of a node outside a table does not open

# Numbers that are reckoned with: beyond these bounds they would draw all requests, or none, to who states them.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]


class PageCounts(msgspec.Struct, frozen=True):
    """Of a node's KV pool, at its last probe."""

    free: Count = 0
    cached: Count = 0  # hold a known prefix, and are given up for a request that needs them
    total: Count = 0


class NodeInfo(msgspec.Struct, frozen=True):
    """What a node says of itself, as far as the router uses it; every field may be missing (other servers speak the protocol too)."""

    served_model_name: str | None = None
    other_model_names: tuple[str, ...] = ()  # aliases, and adapters of it
    version: str | None = None
    incarnation: int | str | None = None
    fingerprint: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    page_size: Size | None = None
    protocol_version: int | str | None = None
    context_length: Size | None = None  # tokens
    transfer_backend: str | None = None
    cluster_key_id: str | None = None  # "none": it has no key
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    disaggregation_bootstrap_port: int | None = None  # SGLang's name
    disaggregation_mode: str | None = None  # the role it was started in
    role: str | None = None  # pdserve's; "router" is none of a node's
    kv_events_port: int | None = None
    kv_engine_ids: tuple[str, ...] = ()  # a vLLM prefill node's, by data parallel rank, as its Mooncake bootstrap server tells them
    max_running_requests: Size | None = None
    # load, of all routers' requests together
    pages: PageCounts | None = None
    running: Count | None = None  # requests
    waiting: Count | None = None  # requests

    @property
    def model_names(self) -> tuple[str, ...]:
        return () if self.served_model_name is None else (self.served_model_name, *self.other_model_names)

    @property
    def pages_free(self) -> int | None:
        """Pages that a new request could have: free ones, and those that only a cache holds."""
        return None if self.pages is None else self.pages.free + self.pages.cached

    @property
    def pages_total(self) -> int | None:
        return None if self.pages is None else self.pages.total

    @property
    def tokens_free(self) -> int | None:
        return None if self.pages_free is None or self.page_size is None else self.pages_free * self.page_size

    @property
    def tokens_total(self) -> int | None:
        return None if self.pages_total is None or self.page_size is None else self.pages_total * self.page_size


PAIRING_FACTS = (*AGREED_FACTS, "served_model_name", "other_model_names", "incarnation", "kv_events_port")


def _nothing(*_: object) -> None:
    """Nobody wants to know."""


@dataclass(slots=True, eq=False)
class Node:
    """One node of one role. `reason`: why it is not usable, None when it is. Times are of `clock`, in seconds."""

    leg: Leg
    url: str
    configured_bootstrap_port: int | None = None
    breaker: Breaker = field(default_factory=lambda: Breaker(NEVER, 0.0))
    clock: Clock = time.monotonic
    changed: Callable[[], None] = _nothing  # called when something has that decides who is used
    restarted: "Callable[[Node], None]" = _nothing  # called when it has: what it had in memory is gone
    reason: str | None = "not probed yet"
    engine: str | None = None  # "pdserve", "sglang", "vllm"; None until it is known
    info: NodeInfo = field(default_factory=NodeInfo)
    since_s: float = 0.0  # since when it is usable, or is not
    probed: bool = False  # a probe has succeeded once
    lonely_reason: str | None = None  # why nothing could be a pair with it, as the log has it
    probed_once: bool = False  # or failed: whoever waits for this node can read in the log why it is not used
    away: bool = False  # the last probe to end has failed
    gone: bool = False  # nothing accepted connections since the last good probe
    draining: bool = False  # no new requests
    leaving: bool = False  # removed when nothing is under way any longer
    num_blames: int = 0
    echoes_ids: bool = False  # its last reply on a new connection had the request's id
    address: Address = field(init=False)
    host_header: bytes = field(init=False)
    path_prefix: bytes = field(init=False)
    num_silent_probes: int = 0  # in a row
    num_in_flight: int = 0  # requests
    prefill_load: PrefillLoad = field(default_factory=PrefillLoad)
    decode_load: DecodeLoad = field(default_factory=DecodeLoad)
    probe_now: asyncio.Event = field(default_factory=asyncio.Event)
    verdict: asyncio.Event | None = None  # while it is a suspect: set when the probe that follows the blame has ended

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        tls = parts.scheme == "https"
        self.address = Address(parts.hostname or "", parts.port or (443 if tls else 80), tls)
        self.host_header, self.path_prefix = parts.netloc.rpartition("@")[2].encode(), parts.path.encode()
        self.since_s = self.clock()

    @property
    def usable(self) -> bool:
        return self.reason is None

    @property
    def bootstrap_host(self) -> str:
        return self.info.bootstrap_host or self.address.host

    @property
    def bootstrap_port(self) -> int | None:
        return self.configured_bootstrap_port or self.info.bootstrap_port or self.info.disaggregation_bootstrap_port

    def serves(self, model: str | None) -> bool:
        names = self.info.model_names
        return model is None or not names or model in names

    def sent(self) -> None:
        """A request goes to it. To be called for every one: it may be the breaker's trial."""
        if self.breaker.sent(self.clock()):
            self.changed()

    def blame(self, reason: str, *, began_s: float = math.inf, answered: bool = False) -> None:
        """A request failed at it. began_s: when it was sent. answered: with an error of its own, so it can be reached, and no probe
        would tell more."""
        if (self.verdict is None or answered) and self.breaker.failed(self.clock(), began_s, answered=answered):
            self.changed()
        if answered:
            return
        self.num_blames += 1
        self._set_reason(reason)
        self.probe_now.set()
        if self.verdict is None:
            self.verdict = asyncio.Event()

    def answered(self, began_s: float = math.inf) -> None:
        """The first byte of an answer came from it. began_s: when the request was sent."""
        if self.breaker.answered(self.clock(), began_s):
            self.changed()

    def succeeded(self, began_s: float = math.inf) -> None:
        """A request ended well at it. began_s: when it was sent."""
        if self.breaker.ended_well(self.clock(), began_s):
            self.changed()

    def probe_succeeded(self, info: NodeInfo, num_blames: int, engine: str | None = None) -> bool:
        """num_blames: as it was when the probe began. True when the node became usable."""
        was, was_usable = self._facts(), self.usable
        incarnation = self.info.incarnation
        # without an incarnation to compare, a process that accepted nothing is taken to have been another one
        restarted = self.probed and (incarnation not in (None, info.incarnation) or (info.incarnation is None and self.gone))
        self.info, self.engine = info, engine or self.engine
        self.decode_load.probed(info.running, info.waiting, info.max_running_requests, info.tokens_free, info.tokens_total)
        if self.away or restarted:
            self.breaker.came_back(self.clock())
        self.probed, self.away, self.gone = True, False, False
        if was != self._facts():
            self.changed()
        if restarted:
            self.restarted(self)
        if num_blames == self.num_blames:
            self._set_reason(None)
        return self.usable and not was_usable

    def probe_failed(self, reason: str, *, gone: bool = False) -> bool:
        """gone: nothing accepts connections there. True when the node was usable until now."""
        was_usable = self.usable
        self.away, self.gone = True, self.gone or gone
        self._set_reason(reason)
        return was_usable

    def probe_ended(self, num_blames: int) -> None:
        """Whatever it found."""
        if num_blames == self.num_blames and self.verdict is not None:
            self.verdict.set()
            self.verdict = None

    def _facts(self) -> tuple[object, ...]:
        """What decides who is used and which pairs there are."""
        return (self.probed, self.engine, self.breaker.state, *(getattr(self.info, name) for name in PAIRING_FACTS))

    def _set_reason(self, reason: str | None) -> None:
        if self.reason == REMOVED:
            return
        was_usable, self.reason = self.usable, reason
        if was_usable != self.usable:
            self.since_s = self.clock()
            self.changed()
