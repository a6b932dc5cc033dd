"""The bytes of the tcp backend: handshake, frames, and socket calls over lists of buffers.

A connection carries one direction of asking: the caller sends requests, the listener answers them in order.

    listener -> caller   CHALLENGE  nonce
    caller -> listener   HELLO      lane, page size, the caller's incarnation, proof
    listener -> caller   WELCOME    verdict, proof
    caller -> listener   WRITE      page ids, then their bytes     ->  WRITTEN
    caller -> listener   READ       page ids                       ->  PAGES, then their bytes

Each side proves that it holds both secrets (its own, and the one in the other's description) by an HMAC over the nonce: a
secret never travels here, a recorded handshake is of no use, and a process restarted behind the same address is found out on
either side. Everything is little-endian; page ids are int32. A message moves at most MAX_PAGES_PER_MESSAGE pages, which bounds
what a listener holds for a caller; larger posts are several messages. Whatever does not fit raises WireError, and the connection
ends before any page was touched.
"""

import enum
import hashlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

MAGIC = b"pdkv"
VERSION = 1
NONCE_NBYTES = 16
INCARNATION_NBYTES = 16
SECRET_NBYTES = 16
PAGE_ID_NBYTES = 4
MAX_LANES = 8  # connections one peer may hold to one listener
MAX_PAGES_PER_MESSAGE = 8192  # 32 KiB of page ids

CHALLENGE = struct.Struct(f"<4sH2x{NONCE_NBYTES}s")
HELLO = struct.Struct(f"<4sHHQ{INCARNATION_NBYTES}s32s")
WELCOME = struct.Struct("<4sHH32s")
FRAME = struct.Struct("<4sHHIQ")  # magic, version, kind, number of pages, sequence

SILENT_PEER_S = 30.0  # the kernel gives a connection up when a peer acknowledges nothing for so long. Generous: a scheduler that compiles
# a kernel starves its reader threads for seconds, and dead peers are found by heartbeats (peer_timeout_s) long before
KEEPALIVE_S = 10  # idle connections are probed: no middlebox forgets them, and a vanished peer is noticed


class WireError(Exception):
    """The other side does not speak this protocol, or is not who it must be."""


class Verdict(enum.IntEnum):
    WELCOME = 1
    REFUSED = 2  # said aloud, because a caller may take it for proof that nothing of it can land any more; a cut connection is none


class Kind(enum.IntEnum):
    WRITE = 1
    READ = 2
    WRITTEN = 3
    PAGES = 4


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    num_pages: int
    sequence: int  # of the request on its connection; a reply repeats it

    def encode(self) -> bytes:
        return FRAME.pack(MAGIC, VERSION, self.kind, self.num_pages, self.sequence)

    @classmethod
    def decode(cls, encoded: bytes | bytearray) -> "Frame":
        magic, version, kind, num_pages, sequence = FRAME.unpack(encoded)
        check_magic(magic, version)
        if kind not in Kind.__members__.values():
            raise WireError(f"frame of unknown kind {kind}")
        if not 1 <= num_pages <= MAX_PAGES_PER_MESSAGE:
            raise WireError(f"frame of {num_pages} pages; one moves 1 to {MAX_PAGES_PER_MESSAGE}")
        return cls(Kind(kind), num_pages, sequence)


def check_magic(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise WireError(f"not the transfer protocol: it starts with {magic!r}")
    if version != VERSION:
        raise WireError(f"transfer protocol version {version}; this node speaks {VERSION}")


class Identity(msgspec.Struct, frozen=True):
    """One process's backend."""

    incarnation: bytes  # random, new per process
    secret: bytes


def proof(role: bytes, listener: Identity, caller: Identity, nonce: bytes, lane: int, page_nbytes: int) -> bytes:
    """What only a holder of both secrets can say, as `role` (b"caller" or b"listener"), in answer to `nonce`."""
    text = role + nonce + listener.incarnation + caller.incarnation + struct.pack("<HQ", lane, page_nbytes)
    return hmac.digest(listener.secret + caller.secret, text, hashlib.sha256)


def drop_unsent_on_close(connection: socket.socket) -> None:
    """Of a caller's connection: what the kernel has not sent when it is closed never leaves."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def tune(connection: socket.socket) -> None:
    """Socket options of both ends. Buffer sizes are left to the kernel, which grows them to the link (4-6 MiB as shipped): a fixed size
    ends that and is capped at net.core.[rw]mem_max, and on loopback sizes from 64 KiB to 4 MiB gained or lost a third at random."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # an acknowledgement or a one-page write leaves at once
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_PEER_S * 1000))


class GuardedSocket:
    """A connection that its own threads use and close, and that any thread may shut down at any time. The lock keeps a shutdown
    from meeting a descriptor that was closed and given out again."""

    def __init__(self, connection: socket.socket) -> None:
        self.raw = connection
        self._lock = threading.Lock()

    def shut(self) -> None:
        """Wake whoever is blocked in it; what they do with it next fails."""
        with self._lock, suppress(OSError):  # not connected (any more), or closed: nobody to wake
            self.raw.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self.raw.close()


def receive_handshake(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """That many bytes, however they are cut. Raises TimeoutError at `deadline_s` (time.monotonic), EOFError at an early end."""
    received = bytearray()
    while len(received) < num_bytes:
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError(f"{len(received)} of {num_bytes} bytes of the handshake came in time")
        connection.settimeout(remaining_s)
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise EOFError(f"closed after {len(received)} of {num_bytes} bytes of the handshake")
        received += part
    return bytes(received)


def send_all(connection: socket.socket, buffers: Iterable[memoryview | bytes]) -> None:
    """Send at most IOV_MAX buffers whole. The socket blocks; the GIL is free meanwhile."""
    left: Sequence[memoryview | bytes] = list(buffers)
    while left:
        left = _after(left, connection.sendmsg(left))


def receive_all(connection: socket.socket, buffers: Sequence[memoryview | bytearray]) -> None:
    """Fill at most IOV_MAX buffers. Raises EOFError when the connection ends first.

    MSG_WAITALL: one system call, and one wait for the GIL, for as many bytes as the list holds."""
    left: Sequence[memoryview | bytearray] = buffers
    while left:
        num_bytes = connection.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
        if not num_bytes:
            raise EOFError("the peer closed the connection")
        left = _after(left, num_bytes)


def _after(buffers: Sequence[memoryview | bytes | bytearray], num_bytes: int) -> list[memoryview]:
    """What is left of `buffers` when their first `num_bytes` are done."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [memoryview(buffer)[num_bytes:], *(memoryview(later) for later in buffers[index + 1 :])]
        num_bytes -= len(buffer)
    return []
