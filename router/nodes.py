"""What the router knows of each node: whether it may be used, what it said of itself, and how much is under way there.

    unknown --good probe--> usable --failed probe, or blame--> unusable(reason) --good probe--> usable

Two things speak about a node. A probe (health.py) may say yes or no; a request whose connection failed may only say no (blame),
and asks for a probe at once. Neither says anything for longer than until the next probe: no node is struck off for good. A probe
that was on its way when a request blamed the node is too old to clear it. Until that probe's verdict the node is a suspect: it is
not used, but a request that has no other node waits for the verdict.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from common.config import RouterConfig
from router.connection import Address

Leg = Literal["prefill", "decode"]

AGREED_FACTS = ("fingerprint", "dtype", "kv_cache_dtype", "page_size", "protocol_version", "context_length", "transfer_backend", "cluster_key_id")
FITS_ALL = {"transfer_backend": "auto"}  # a value that agrees with every other; whether two do have a common way, their own Hello says


class NodeInfo(msgspec.Struct, frozen=True):
    """GET /server_info of a node, as far as the router uses it; every field may be missing (other servers speak the protocol too)."""

    served_model_name: str | None = None
    version: str | None = None
    incarnation: int | str | None = None
    fingerprint: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    page_size: int | None = None
    protocol_version: int | str | None = None
    context_length: int | None = None  # tokens
    transfer_backend: str | None = None
    cluster_key_id: str | None = None  # "none": it has no key
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    disaggregation_bootstrap_port: int | None = None  # SGLang's name


@dataclass(slots=True, eq=False)
class Node:
    """One node of one role. `reason`: why it is not usable, None when it is."""

    leg: Leg
    url: str
    configured_bootstrap_port: int | None = None
    reason: str | None = "not probed yet"
    info: NodeInfo = field(default_factory=NodeInfo)
    probed: bool = False  # a probe has succeeded once
    num_blames: int = 0
    address: Address = field(init=False)
    host_header: bytes = field(init=False)
    path_prefix: bytes = field(init=False)
    num_silent_probes: int = 0  # in a row
    num_in_flight: int = 0  # requests
    prompt_bytes_in_flight: int = 0
    probe_now: asyncio.Event = field(default_factory=asyncio.Event)
    verdict: asyncio.Event | None = None  # while it is a suspect: set when the probe that follows the blame has ended

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        tls = parts.scheme == "https"
        self.address = Address(parts.hostname or "", parts.port or (443 if tls else 80), tls)
        self.host_header, self.path_prefix = parts.netloc.rpartition("@")[2].encode(), parts.path.encode()

    @property
    def usable(self) -> bool:
        return self.reason is None

    @property
    def load(self) -> int:
        """What a further request would queue behind: prompt bytes to compute, or rows in the decode batch."""
        return self.prompt_bytes_in_flight if self.leg == "prefill" else self.num_in_flight

    @property
    def bootstrap_host(self) -> str:
        return self.info.bootstrap_host or urlsplit(self.url).hostname or ""

    @property
    def bootstrap_port(self) -> int | None:
        return self.configured_bootstrap_port or self.info.bootstrap_port or self.info.disaggregation_bootstrap_port

    def blame(self, reason: str) -> None:
        """A request's connection to it failed."""
        self.num_blames += 1
        self.reason = reason
        self.probe_now.set()
        if self.verdict is None:
            self.verdict = asyncio.Event()

    def probe_succeeded(self, info: NodeInfo, num_blames: int) -> bool:
        """num_blames: as it was when the probe began. True when the node became usable."""
        self.info = info
        self.probed = True
        was_usable = self.usable
        if num_blames == self.num_blames:
            self.reason = None
        return self.usable and not was_usable

    def probe_failed(self, reason: str) -> bool:
        """True when the node was usable until now."""
        was_usable = self.usable
        self.reason = reason
        return was_usable

    def probe_ended(self, num_blames: int) -> None:
        """Whatever it found."""
        if num_blames == self.num_blames and self.verdict is not None:
            self.verdict.set()
            self.verdict = None

    def serves(self, model: str | None) -> bool:
        return model is None or self.info.served_model_name in (model, None)

    def begin(self, prompt_bytes: int) -> None:
        self.num_in_flight += 1
        self.prompt_bytes_in_flight += prompt_bytes

    def end(self, prompt_bytes: int) -> None:
        self.num_in_flight -= 1
        self.prompt_bytes_in_flight -= prompt_bytes


def disagreement(prefill: Node, decode: Node) -> str | None:
    """Why the two cannot be a pair; None when they can. What one of them does not report is left to their own Hello."""
    for name in AGREED_FACTS:
        ours, theirs = getattr(prefill.info, name), getattr(decode.info, name)
        if ours is not None and theirs is not None and ours != theirs and FITS_ALL.get(name) not in (ours, theirs):
            return f"{name} is {ours} on {prefill.url} and {theirs} on {decode.url}"
    return None


@dataclass(frozen=True, slots=True)
class NodeTable:
    prefill: tuple[Node, ...]
    decode: tuple[Node, ...]

    @classmethod
    def of(cls, config: RouterConfig) -> "NodeTable":
        prefill, decode = dict.fromkeys(config.prefill), dict.fromkeys(config.decode)  # without repetitions
        return cls(tuple(_node("prefill", text) for text in prefill), tuple(_node("decode", text) for text in decode))

    @property
    def all(self) -> tuple[Node, ...]:
        return self.prefill + self.decode

    @property
    def models(self) -> dict[str, Node]:
        """Every model a node has reported, also of nodes that are away; with one node that serves it, a usable one if there is."""
        nodes = sorted((node for node in self.all if node.probed), key=lambda node: node.usable)
        return {node.info.served_model_name: node for node in nodes if node.info.served_model_name is not None}


def _node(leg: Leg, text: str) -> Node:
    """text: URL or URL,BOOTSTRAP_PORT."""
    url, _, port = text.partition(",")
    return Node(leg, url.rstrip("/"), int(port) if port else None)
