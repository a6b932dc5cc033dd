"""What a transfer endpoint needs to know: the node's KV layout, its patience, its bounds."""

from dataclasses import dataclass
from typing import Literal

from kvtransfer.backend import Region
from kvtransfer.protocol import Compat

BEATS_PER_TIMEOUT = 6  # heartbeats in a peer timeout, at least: a few may be late or lost
POST_TOKENS = 1024  # tokens' worth of pages that are posted at once: few descriptors, and the transfer still overlaps the next chunk
LEAST_BEAT_S = 0.01
TICK_S = 0.01  # how late a timer may strike
STUCK_PEER_TIMEOUTS = 10  # an owed answer or completion missing for so many peer timeouts, heartbeats or not: the peer counts as lost


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """What a backend can be told; each takes what concerns it."""

    host: str = "127.0.0.1"  # address to listen at
    port: int = 0  # 0: any free one
    advertise_host: str | None = None  # where peers reach us, if not at `host`
    lanes: int = 1  # streams (tcp, mooncake: 1 leaves it its own number), copying threads (shm), worker threads (nixl) a peer
    ib_device: str | None = None  # mlx5_0,mlx5_1: NICs to use; None: the library's choice
    protocol: Literal["auto", "tcp", "rdma"] = "auto"  # mooncake; auto: rdma where there is a device


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    compat: Compat
    region: Region | None = None  # the pool; needed where page checksums are asked for
    digest: bool = False  # D: ask for checksums of the pages, and compare them
    post_tokens: int = POST_TOKENS
    peer_timeout_s: float = 3.0  # a peer silent for so long is lost
    offer_timeout_s: float = 30.0  # P: how long an offer waits for its request; a request waits for its offer until its deadline
    heartbeat_s: float = 0.5  # longest pause between heartbeats, when a link exists
    max_rooms: int = 4096  # rooms of the scheduler at a time; as many offers may be parked on P
    max_links: int = 256
    refused_retry_s: float = 5.0  # D: how long a refusal of Hello holds; the peer may have been redeployed since

    @property
    def beat_s(self) -> float:
        """Pause between heartbeats."""
        return max(min(self.heartbeat_s, self.peer_timeout_s / BEATS_PER_TIMEOUT), LEAST_BEAT_S)

    @property
    def silent_s(self) -> float:
        """The timer of silence: with its lateness, a peer is lost within peer_timeout_s of what was last heard of it."""
        return self.peer_timeout_s - min(TICK_S, self.peer_timeout_s / 10)

    @property
    def stuck_timeout_s(self) -> float:
        return STUCK_PEER_TIMEOUTS * self.peer_timeout_s
