"""What can end a room, as Failures, and the one line that each side logs of it."""

import logging

from common.errors import Failure

logger = logging.getLogger(__name__)

CLIENT_GONE_STATUS = 499

# the codes that a room's failure can have: the sessions', and the two schedulers' when they give a room up
CAUSES = (
    "bad_offer", "cancelled", "context_length_exceeded", "corrupt_kv", "deadline_exceeded", "duplicate_room", "incompatible_peer", "internal_error",
    "non_finite_logits", "offer_expired", "overloaded", "peer_lost", "peer_unreachable", "prompt_mismatch", "protocol_error", "shutting_down",
    "transfer_failed", "unknown_offer",
)  # fmt: skip


def log_failed_room(room: int, rid: str, peer: str | None, failure: Failure) -> None:
    """One line a failed room a side: WARNING, or debug when its client gave it up."""
    level = logging.DEBUG if failure.status == CLIENT_GONE_STATUS else logging.WARNING
    cause = f"{failure.message} ({failure.code or failure.status})"
    logger.log(level, "room %d, request %s, peer %s: failed in %s: %s", room, rid or "unknown", peer or "unknown", failure.stage or "transfer", cause)


def peer_lost(peer_is: str, reason: str) -> Failure:
    return Failure(503, f"the {peer_is} node of this request was lost: {reason}", code="peer_lost", stage="transfer")


def write_failed(error: Exception) -> Failure:
    return Failure(503, f"KV pages could not be written to the decode node: {error}", code="transfer_failed", stage="transfer")


def internal_error(error: Exception) -> Failure:
    return Failure(500, f"internal error: {error}", code="internal_error", stage="transfer")


def duplicate_room(room_id: int) -> Failure:
    return Failure(400, f"bootstrap_room {room_id} is taken or was used before; draw a new one", code="duplicate_room", stage="transfer")


def prompt_mismatch(num_tokens_here: int, num_tokens_at_d: int) -> Failure:
    lengths = f"{num_tokens_here} tokens here, {num_tokens_at_d} at the decode node"
    return Failure(400, f"the two nodes were given different prompts ({lengths})", code="prompt_mismatch", stage="transfer")


def unknown_offer() -> Failure:
    return Failure(503, "the prefill node holds no such offer", code="unknown_offer", stage="transfer")


def corrupt_page(prompt_page: int, pool_page: int, sent: int, arrived: int) -> Failure:
    sentence = f"KV page {prompt_page} of the prompt (page {pool_page} of the pool) arrived damaged: checksum {arrived:08x}, sent as {sent:08x}"
    return Failure(503, sentence, code="corrupt_kv", stage="transfer")


def protocol_error(sentence: str) -> Failure:
    return Failure(503, f"the prefill node {sentence}", code="protocol_error", stage="transfer")
