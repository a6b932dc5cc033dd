"""What a transfer endpoint needs to know: the node's KV layout, its patience, its bounds."""

from dataclasses import dataclass

from kvtransfer.protocol import Compat

STUCK_PEER_TIMEOUTS = 10  # an owed answer or completion missing for so many peer timeouts, heartbeats or not: the peer counts as lost


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    compat: Compat
    peer_timeout_s: float = 3.0  # a peer silent for so long is lost
    offer_timeout_s: float = 30.0  # P: how long an offer waits for its request; a request waits for its offer until its deadline
    heartbeat_s: float = 0.5  # pause between heartbeats, when a link exists
    max_rooms: int = 4096  # rooms of the scheduler at a time; as many offers may be parked on P
    max_links: int = 256
    refused_retry_s: float = 5.0  # D: how long a refusal of Hello holds; the peer may have been redeployed since

    @property
    def stuck_timeout_s(self) -> float:
        return STUCK_PEER_TIMEOUTS * self.peer_timeout_s
