"""The control protocol between a decode node (D) and a prefill node (P): what travels, and what must agree first.

    D -> P   Hello        who I am, what my pool looks like, how to reach it
    P -> D   HelloAck     the same of P, or a refusal with the reason; a refusal on a link that is up means "I do not know you"
    D -> P   Offer        pages for the KV of one prompt
    P -> D   FirstToken   token 1, as soon as it is sampled
    P -> D   Closed       the end of one Offer (R3): no write of it is outstanding. Sent once; a REFUSED Closed answers a Cancel
                          (or an Offer there is no room for) of which P holds nothing
    D -> P   Cancel       D gives the offer up; Closed answers it
    D -> P   Withdraw     D will make no offer for this room; the only message that needs no link: a D that was refused sends it too
    both     Heartbeat    I am here; and how lately D heard of P (lease.py)

Identity (R4): a message about a room names the room, D's number of the offer (`attempt`, unique per D process), and both
processes by incarnation. The encoding is msgpack, one message a frame, and its CRC-32 behind it: a page id that a fault of the network
changed would be written to. Hello and HelloAck have an outer form that never changes; what a version may change is in their `body`,
read only when the versions are equal. What cannot be decoded changes nothing.
"""

import math
import zlib
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from common.errors import Failure
from kvtransfer.backend import PageIds, PeerId

VERSION = 3
CHECKSUM_NBYTES = 4  # little endian
MAX_FRAME_NBYTES = 1 << 22  # a prompt of 16M tokens at 16 tokens a page

MAX_ROOM = 2**63 - 1

ERROR_STATUSES = range(400, 600)  # of a peer's Failure, as are the bounds that follow
MAX_MESSAGE_CHARACTERS, MAX_WORD_CHARACTERS = 2000, 64
MAX_RETRY_AFTER_S = 3600.0

Id = Annotated[int, Meta(ge=0, le=MAX_ROOM)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Incarnation = Annotated[str, Meta(min_length=1, max_length=64)]
Seconds = Annotated[float, Meta(ge=0, le=1e11)]

ClosedStatus = Literal["DELIVERED", "FAILED", "ABORTED", "REFUSED"]


class Compat(msgspec.Struct, frozen=True):
    """What both nodes of a pair must have in common (R8)."""

    model: str  # fingerprint of the checkpoint
    dtype: str  # of weights and activations
    kv_cache_dtype: str  # of the pages
    page_size: int  # tokens
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_nbytes: int
    context_length: int  # tokens
    vocab_size: int


class HelloBody(msgspec.Struct, frozen=True):
    """`heartbeat_s`: send me something at least this often. `peer_timeout_s`: when I have heard nothing of you for so long I drop you,
    and not before unless the connection ends. `sent_s`: of P, as in Heartbeat. `live`: incarnations of the P processes D holds a link to."""

    compat: Compat
    description: Annotated[bytes, Meta(max_length=65536)]  # TransferBackend.describe()
    heartbeat_s: Annotated[float, Meta(ge=0.01, le=3600)]
    peer_timeout_s: Annotated[float, Meta(ge=0.05, le=86400)]
    sent_s: Seconds = 0.0
    live: Annotated[list[Incarnation], Meta(max_length=4096)] = []


class Hello(msgspec.Struct, frozen=True, tag=True):
    version: Count
    incarnation: Incarnation
    body: bytes  # HelloBody


class HelloAck(msgspec.Struct, frozen=True, tag=True):
    """`ok` False: `reason` says why there is no link; `body` is empty."""

    version: Count
    incarnation: Incarnation
    ok: bool
    reason: str = ""
    body: bytes = b""  # HelloBody


class RoomMessage(msgspec.Struct, frozen=True, kw_only=True):
    room: Id
    attempt: Id
    sender: Incarnation
    receiver: Incarnation


class Offer(RoomMessage, frozen=True, tag=True, kw_only=True):
    """`dst_pages`: little-endian int32, D's pages of prompt pages [decode_prefix_pages, number of prompt pages), in order.
    `digest`: Closed is to carry a checksum of each."""

    num_prompt_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    prompt_digest: Annotated[bytes, Meta(max_length=64)]
    decode_prefix_pages: Count
    dst_pages: bytes
    deadline_unix_s: Seconds
    digest: bool = False


class FirstToken(RoomMessage, frozen=True, tag=True, kw_only=True):
    token_id: Count
    num_cached_tokens: Count


class Closed(RoomMessage, frozen=True, tag=True, kw_only=True):
    """`failure` is set unless the status is DELIVERED. `page_digests`: little-endian uint32, CRC-32 of each page of the offer, if it
    asked for them and the status is DELIVERED."""

    status: ClosedStatus
    failure: Failure | None = None
    page_digests: bytes = b""


class Cancel(RoomMessage, frozen=True, tag=True, kw_only=True):
    failure: Failure


class Withdraw(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Of a room that was never offered: it has no attempt."""

    room: Id
    sender: Incarnation
    receiver: Incarnation
    failure: Failure


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """`sent_s`: of P, its monotonic clock. `echo_s`: of D, the newest sent_s that it heard of P by this link."""

    sender: Incarnation
    receiver: Incarnation
    sent_s: Seconds = 0.0
    echo_s: Seconds = 0.0


ToPrefill = Hello | Offer | Cancel | Withdraw | Heartbeat
ToDecode = HelloAck | FirstToken | Closed | Heartbeat
Message = ToPrefill | ToDecode


AnyMessage = TypeVar("AnyMessage", bound=Message)


class Undecodable(Exception):
    """A frame that is no message of this protocol."""


_to_prefill = msgspec.msgpack.Decoder(ToPrefill)
_to_decode = msgspec.msgpack.Decoder(ToDecode)
_hello_body = msgspec.msgpack.Decoder(HelloBody)


def encode(message: Message) -> bytes:
    return with_checksum(msgspec.msgpack.encode(message))


def with_checksum(packed: bytes) -> bytes:
    return packed + zlib.crc32(packed).to_bytes(CHECKSUM_NBYTES, "little")


def _checked(frame: bytes) -> memoryview:
    """What stands before the checksum. Raises Undecodable."""
    packed, checksum = memoryview(frame)[:-CHECKSUM_NBYTES], frame[-CHECKSUM_NBYTES:]
    if len(checksum) < CHECKSUM_NBYTES or zlib.crc32(packed) != int.from_bytes(checksum, "little"):
        raise Undecodable(f"frame of {len(frame)} bytes without the right checksum")
    return packed


def _bounded(message: AnyMessage) -> AnyMessage:
    """A peer's failure reaches clients and logs: it is an error, and no longer than one."""
    failure = message.failure if isinstance(message, Cancel | Withdraw | Closed) else None
    if failure is None:
        return message
    code, param, stage = (text and text[:MAX_WORD_CHARACTERS] for text in (failure.code, failure.param, failure.stage))
    retry_after_s = failure.retry_after_s if failure.retry_after_s is not None and 0 <= failure.retry_after_s <= MAX_RETRY_AFTER_S else None
    status = failure.status if failure.status in ERROR_STATUSES else 502
    within = Failure(status, failure.message[:MAX_MESSAGE_CHARACTERS], code, param, stage, retry_after_s)
    return message if within == failure else msgspec.structs.replace(message, failure=within)


def decode_to_prefill(frame: bytes) -> ToPrefill:
    """Raises Undecodable."""
    try:
        return _bounded(_to_prefill.decode(_checked(frame)))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Undecodable(str(error)) from error


def decode_to_decode(frame: bytes) -> ToDecode:
    """Raises Undecodable."""
    try:
        return _bounded(_to_decode.decode(_checked(frame)))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Undecodable(str(error)) from error


def hello(incarnation: PeerId, body: HelloBody) -> Hello:
    return Hello(VERSION, incarnation, msgspec.msgpack.encode(body))


def hello_ack(incarnation: PeerId, body: HelloBody) -> HelloAck:
    return HelloAck(VERSION, incarnation, True, body=msgspec.msgpack.encode(body))


def hello_refusal(incarnation: PeerId, reason: str) -> HelloAck:
    return HelloAck(VERSION, incarnation, False, reason)


def read_hello(message: Hello | HelloAck, ours: Compat) -> HelloBody | str:
    """Its body, or why no link can be: the sentence names what differs, and both values. It is read on either node: a Hello is a decode
    node's, a HelloAck a prefill node's."""

    def both(what: str, here: object, there: object) -> str:
        prefill, decode = (here, there) if isinstance(message, Hello) else (there, here)
        return f"{what}: {prefill} on the prefill node, {decode} on the decode node"

    if message.version != VERSION:
        return both("transfer protocol version", VERSION, message.version)
    try:
        body = _hello_body.decode(message.body)
    except (msgspec.DecodeError, ValueError) as error:
        return f"the peer's Hello cannot be read: {error}"
    differences = [
        both(field.replace("_", " "), getattr(ours, field), getattr(body.compat, field))
        for field in Compat.__struct_fields__
        if getattr(ours, field) != getattr(body.compat, field)
    ]
    return "; ".join(differences) or body


def pack_pages(pages: PageIds) -> bytes:
    return pages.astype("<i4").tobytes()


def unpack_pages(packed: bytes) -> PageIds:
    """Raises ValueError unless they are distinct page ids."""
    if len(packed) % 4:
        raise ValueError(f"{len(packed)} bytes of pages; a page id has 4")
    pages = np.frombuffer(packed, dtype="<i4").astype(np.int32)
    if len(pages) and (int(pages.min()) < 0 or len(np.unique(pages)) != len(pages)):
        raise ValueError("a page is negative or named twice")
    return pages


def num_pages_of(num_tokens: int, page_size: int) -> int:
    return math.ceil(num_tokens / page_size)
