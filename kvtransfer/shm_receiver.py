"""The listening half of the shm backend: who gets our pool's memfd, and how its writes are ended.

One thread answers an abstract unix socket whose name is random; the kernel removes it with the process. A caller proves who it is
as in the tcp backend (tcp_wire.py has the handshake; here each step is one packet), and gets with the welcome two descriptors: the
pool's and its gate's (shm_gate.py). The connection carries nothing afterwards; its end tells the caller that this process, or the
caller's place in it, is gone.

forget(peer) shuts the peer's gate. Its Fence has passed at once unless the peer is copying at that moment.
"""

import contextlib
import hmac
import logging
import secrets
import select
import socket
import threading
import time
from dataclasses import dataclass, field

from common.errors import StartupError
from kvtransfer.backend import NO_FENCE, Fence, PeerId, Region
from kvtransfer.link import RareWarning
from kvtransfer.shm_gate import Gate
from kvtransfer.tcp_wire import CHALLENGE, HELLO, MAGIC, NONCE_NBYTES, VERSION, WELCOME, Identity, Verdict, WireError, check_magic, proof

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 64  # sockets that strangers can hold
BACKLOG = 128
OUT_OF_FILES_PAUSE_S = 0.1  # accept() fails at once while the process has no descriptor left


@dataclass(frozen=True, slots=True)
class Guest:
    """A peer that may map the pool."""

    peer: PeerId
    identity: Identity
    gate: Gate = field(default_factory=Gate)


@dataclass(slots=True, eq=False)
class Connection:
    socket: socket.socket
    nonce: bytes
    peer: PeerId | None = None  # once proven


class Listener:
    def __init__(self, region: Region, own: Identity) -> None:
        """Raises StartupError when no socket can be opened."""
        self._region = region
        self._own = own
        self.address = f"pdserve-kv-{secrets.token_hex(16)}"
        self._lock = threading.Lock()  # guards all below; nothing under it blocks
        self._guests: dict[PeerId, Guest] = {}
        self._connections: dict[int, Connection] = {}  # by descriptor, oldest first
        self._closing = threading.Event()
        self._warn_of_strangers = RareWarning(log)
        self._warn_of_ours = RareWarning(log)  # of peers, and of what this process lacks
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            self._socket.bind("\0" + self.address)
            self._socket.listen(BACKLOG)
        except OSError as error:
            raise StartupError(f"cannot listen for KV pages on a unix socket: {error}; choose another --transfer-backend") from error
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name="kv-share", daemon=True)
        self._thread.start()

    # ---- for the backend ------------------------------------------------------------------------------------------------

    def allow(self, peer: PeerId, identity: Identity) -> None:
        """Raises OSError when no gate can be made."""
        with self._lock:
            if peer not in self._guests:
                self._guests[peer] = Guest(peer, identity)

    def forget(self, peer: PeerId) -> Fence:
        """Let `peer` in no more, and end what it writes."""
        with self._lock:
            guest = self._guests.pop(peer, None)
            for connection in [connection for connection in self._connections.values() if connection.peer == peer]:
                self._drop(connection)
        if guest is None or guest.gate.shut():
            return NO_FENCE
        return Fence(0.0, guest.gate.shut)

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError):  # wakes the thread
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for peer in list(self._guests):
            self.forget(peer)
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._socket.close()
        self._epoll.close()

    # ---- the thread -----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing.is_set():
            for fd, _ in self._epoll.poll():
                if fd == self._socket.fileno():
                    self._accept()
                    continue
                with self._lock:
                    if connection := self._connections.get(fd):
                        self._advance(connection)

    def _accept(self) -> None:
        try:
            raw, _ = self._socket.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError) and not self._closing.is_set():
                self._warn_of_ours(time.monotonic(), f"cannot take a transfer connection: {error}")
                self._closing.wait(OUT_OF_FILES_PAUSE_S)
            return
        raw.setblocking(False)
        connection = Connection(raw, secrets.token_bytes(NONCE_NBYTES))
        with self._lock:
            unproven = [other for other in self._connections.values() if other.peer is None]
            if len(unproven) >= MAX_HANDSHAKES:
                self._drop(unproven[0])
            self._connections[raw.fileno()] = connection
            self._epoll.register(raw, select.EPOLLIN)
            try:
                raw.send(CHALLENGE.pack(MAGIC, VERSION, connection.nonce))
            except OSError as error:
                self._end(connection, error)

    def _advance(self, connection: Connection) -> None:
        """Something came on the connection: the Hello, its end, or what does not belong there."""
        try:
            packet = connection.socket.recv(HELLO.size + 1)
            if not packet:
                self._drop(connection)
            elif connection.peer is not None:
                raise WireError(f"peer {connection.peer} sent {len(packet)} bytes after its Hello")
            else:
                self._welcome(connection, packet)
        except BlockingIOError:  # the event was for a connection that had this descriptor before
            return
        except (OSError, WireError) as error:
            self._end(connection, error)

    def _welcome(self, connection: Connection, packet: bytes) -> None:
        """Raises WireError unless the caller is a guest and proves it."""
        if len(packet) != HELLO.size:
            raise WireError(f"a Hello of {len(packet)} bytes; it has {HELLO.size}")
        magic, version, lane, page_nbytes, incarnation, answer = HELLO.unpack(packet)
        check_magic(magic, version)
        guest = next((guest for guest in self._guests.values() if guest.identity.incarnation == incarnation), None)
        if guest is None:
            connection.socket.send(WELCOME.pack(MAGIC, VERSION, Verdict.REFUSED, b""))
            raise WireError("the caller is not a peer that was accepted")
        expected = proof(b"caller", self._own, guest.identity, connection.nonce, lane, page_nbytes)
        if not hmac.compare_digest(answer, expected) or page_nbytes != self._region.page_nbytes:
            connection.socket.send(WELCOME.pack(MAGIC, VERSION, Verdict.REFUSED, b""))
            raise WireError(f"peer {guest.peer} brought a wrong secret")
        connection.peer = guest.peer
        ours = proof(b"listener", self._own, guest.identity, connection.nonce, lane, page_nbytes)
        packet = WELCOME.pack(MAGIC, VERSION, Verdict.WELCOME, ours)
        socket.send_fds(connection.socket, [packet], [self._region.shared_fd, guest.gate.fd])

    def _end(self, connection: Connection, error: Exception) -> None:
        if isinstance(error, WireError):
            warn = self._warn_of_strangers if connection.peer is None else self._warn_of_ours
            warn(time.monotonic(), f"closed a transfer connection: {error}")
        else:
            log.debug("transfer connection ended: %s", error)
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._connections.pop(connection.socket.fileno(), None)
        connection.socket.close()  # leaves the epoll set too
