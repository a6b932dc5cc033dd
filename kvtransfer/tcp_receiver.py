"""The listening half of the tcp backend: who may reach our pages, and where their bytes land.

One accept thread, one thread per connection. A connection first proves who it is (tcp_wire.py); only peers named by allow() get
in, each with one connection per lane. Then its thread reads requests and receives straight into the pool: page ids are checked
before the first byte is taken, neighbours are merged, nothing is copied in Python.

The fence. forget(peer) shuts the peer's connections down and joins their threads: when it returns, no byte of that peer can
land any more, however much the kernel still had buffered. A caller whose connection broke calls again on the same lane; the new
connection is welcomed only after the old one's thread has ended, so the caller knows that nothing it sent before can land later.

Anything that is not the protocol closes the connection with a warning; what strangers say is warned of rarely, and mutes nothing
that peers do. Unproven connections are few and short-lived: beyond MAX_HANDSHAKES the oldest is dropped.
"""

import errno
import hmac
import logging
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from common.errors import StartupError
from kvtransfer.backend import PeerId
from kvtransfer.link import RareWarning
from kvtransfer.pages import PageMemory, first_outside
from kvtransfer.tcp_wire import (
    CHALLENGE,
    FRAME,
    HELLO,
    MAGIC,
    MAX_LANES,
    MAX_PAGES_PER_MESSAGE,
    NONCE_NBYTES,
    PAGE_ID_NBYTES,
    VERSION,
    WELCOME,
    Frame,
    GuardedSocket,
    Identity,
    Kind,
    Verdict,
    WireError,
    check_magic,
    proof,
    receive_all,
    receive_handshake,
    send_all,
    tune,
)

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
MAX_HANDSHAKES = 64  # threads and sockets that strangers can hold
BACKLOG = 128
OUT_OF_FILES_PAUSE_S = 0.1  # accept() fails at once while the process has no descriptor left


@dataclass(frozen=True, slots=True)
class Guest:
    """A peer that may connect."""

    peer: PeerId
    identity: Identity


@dataclass(slots=True, eq=False)
class Connection:
    """An accepted connection and the thread that serves it."""

    socket: GuardedSocket
    address: str
    key: tuple[PeerId, int] | None = None  # peer and lane, once proven
    thread: threading.Thread | None = None

    def stop(self) -> None:
        """Returns when its thread has ended."""
        self.socket.shut()
        if self.thread is not None:
            self.thread.join()


class Listener:
    def __init__(self, host: str, port: int, memory: PageMemory, own: Identity) -> None:
        """Bind and start accepting. Raises StartupError when the address cannot be bound."""
        self._memory = memory
        self._own = own
        self._lock = threading.Lock()
        self._guests: dict[bytes, Guest] = {}  # by incarnation
        self._proven: dict[tuple[PeerId, int], Connection] = {}
        self._unproven: dict[Connection, None] = {}  # oldest first
        self._ended: list[Connection] = []  # their threads are at their last instruction; joined with the next connection, or on close
        self._closing = threading.Event()
        self._warn_lock = threading.Lock()
        self._warn_of_strangers = RareWarning(log)
        self._warn_of_ours = RareWarning(log)  # of peers, and of what this process lacks
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise StartupError(f"cannot listen for KV pages on {host}:{port}: {error}; choose another --host") from error
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept_all, name="kv-accept", daemon=True)
        self._thread.start()

    # ---- for the backend ------------------------------------------------------------------------------------------------

    def allow(self, peer: PeerId, identity: Identity) -> None:
        with self._lock:
            self._guests[identity.incarnation] = Guest(peer, identity)

    def forget(self, peer: PeerId) -> None:
        """Let `peer` in no more. When this returns no thread of its connections is left: the fence."""
        with self._lock:
            self._guests = {incarnation: guest for incarnation, guest in self._guests.items() if guest.peer != peer}
            connections = [connection for (owner, _), connection in self._proven.items() if owner == peer]
        for connection in connections:
            connection.stop()

    def close(self) -> None:
        self._closing.set()
        with suppress(OSError):  # ENOTCONN: a listening socket is woken all the same
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        with self._lock:
            self._guests.clear()
            connections = [*self._unproven, *self._proven.values(), *self._ended]
        for connection in connections:
            connection.stop()

    # ---- accept thread --------------------------------------------------------------------------------------------------

    def _accept_all(self) -> None:
        while not self._closing.is_set():
            try:
                raw, address = self._socket.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._warn(self._warn_of_ours, f"cannot take a transfer connection: {error}")
                    self._closing.wait(OUT_OF_FILES_PAUSE_S)
                continue  # one caller gave up early, or close() woke us
            self._start(Connection(GuardedSocket(raw), f"{address[0]}:{address[1]}"))

    def _start(self, connection: Connection) -> None:
        connection.thread = threading.Thread(target=self._serve, args=(connection,), name="kv-receive", daemon=True)
        with self._lock:
            ended, self._ended = self._ended, []
        for other in ended:
            other.stop()
        with self._lock:
            if len(self._unproven) >= MAX_HANDSHAKES:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.socket.shut()
                self._ended.append(oldest)
            try:
                connection.thread.start()
            except RuntimeError as error:  # the process may have no more threads
                self._warn(self._warn_of_ours, f"cannot serve a transfer connection from {connection.address}: {error}")
                connection.socket.close()
            else:
                self._unproven[connection] = None

    def _warn(self, warning: RareWarning, message: str) -> None:
        with self._warn_lock:
            warning(time.monotonic(), message)

    # ---- a connection's thread ------------------------------------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        try:
            self._welcome(connection)
            self._answer(connection.socket.raw)
        except WireError as error:
            warning = self._warn_of_strangers if connection.key is None else self._warn_of_ours
            self._warn(warning, f"closed a transfer connection from {connection.address}: {error}")
        except (OSError, EOFError) as error:
            log.debug("transfer connection from %s ended: %s", connection.address, error)
        finally:
            connection.socket.close()
            with self._lock:
                self._unproven.pop(connection, None)
                if connection.key is not None and self._proven.get(connection.key) is connection:
                    del self._proven[connection.key]
                self._ended.append(connection)

    def _welcome(self, connection: Connection) -> None:
        """The handshake. Raises WireError unless the caller is a guest and proves it."""
        raw = connection.socket.raw
        tune(raw)
        nonce = secrets.token_bytes(NONCE_NBYTES)
        raw.sendall(CHALLENGE.pack(MAGIC, VERSION, nonce))
        hello = receive_handshake(raw, HELLO.size, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        magic, version, lane, page_nbytes, incarnation, answer = HELLO.unpack(hello)
        check_magic(magic, version)
        try:
            guest = self._check_guest(incarnation, answer, nonce, lane, page_nbytes)
            self._take_lane(connection, guest, lane)
        except WireError:
            raw.sendall(WELCOME.pack(MAGIC, VERSION, Verdict.REFUSED, b""))
            raise
        raw.settimeout(None)
        raw.sendall(WELCOME.pack(MAGIC, VERSION, Verdict.WELCOME, proof(b"listener", self._own, guest.identity, nonce, lane, page_nbytes)))

    def _check_guest(self, incarnation: bytes, answer: bytes, nonce: bytes, lane: int, page_nbytes: int) -> Guest:
        with self._lock:
            guest = self._guests.get(incarnation)
        if guest is None:
            raise WireError("the caller is not a peer that was accepted")
        if not hmac.compare_digest(answer, proof(b"caller", self._own, guest.identity, nonce, lane, page_nbytes)):
            raise WireError(f"peer {guest.peer} brought a wrong secret")
        if lane >= MAX_LANES:
            raise WireError(f"peer {guest.peer} asks for lane {lane}; a peer has at most {MAX_LANES}")
        if page_nbytes != self._memory.page_nbytes:
            raise WireError(f"peer {guest.peer} has pages of {page_nbytes} bytes, we of {self._memory.page_nbytes}")
        return guest

    def _take_lane(self, connection: Connection, guest: Guest, lane: int) -> None:
        """Take the lane over; returns when the connection that had it before has ended."""
        key = (guest.peer, lane)
        with self._lock:
            if self._guests.get(guest.identity.incarnation) != guest or self._closing.is_set():
                raise WireError(f"peer {guest.peer} was forgotten during its handshake")
            self._unproven.pop(connection, None)
            before = self._proven.get(key)
            self._proven[key] = connection
            connection.key = key
        if before is not None:
            before.stop()

    def _answer(self, raw: socket.socket) -> None:
        """Serve requests until the connection ends."""
        header = bytearray(FRAME.size)
        page_ids = memoryview(bytearray(MAX_PAGES_PER_MESSAGE * PAGE_ID_NBYTES))
        while True:
            receive_all(raw, [header])
            request = Frame.decode(header)
            receive_all(raw, [page_ids[: request.num_pages * PAGE_ID_NBYTES]])
            pages = np.frombuffer(page_ids, dtype=np.int32, count=request.num_pages)
            outside = first_outside(pages, self._memory.num_pages)
            if outside is not None:
                raise WireError(f"{request.kind.name} of page {outside}; this region has {self._memory.num_pages}")
            if request.kind is Kind.WRITE:
                for buffers in self._memory.iovecs(pages):
                    receive_all(raw, buffers)
                raw.sendall(Frame(Kind.WRITTEN, request.num_pages, request.sequence).encode())
            elif request.kind is Kind.READ:
                head: list[bytes | memoryview] = [Frame(Kind.PAGES, request.num_pages, request.sequence).encode()]
                for buffers in self._memory.iovecs(pages):
                    send_all(raw, [*head, *buffers])
                    head = []
            else:
                raise WireError(f"{request.kind.name} is an answer, not a request")
