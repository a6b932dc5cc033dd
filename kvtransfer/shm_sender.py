"""The copying half of the shm backend: a peer's pool, mapped, and the threads that copy between it and ours.

The first part to be copied makes a worker call the peer (shm_receiver.py) and map its pool; all lanes share that. Copies are pieces of
at most PIECE_NBYTES (shm_copy.py), each under the peer's gate (shm_gate.py).

A part fails when the peer refuses us, has shut its gate, or has closed the connection, as the kernel does when its process ends.
All that was posted fails with it and the mapping is given up; what is posted later calls again. So what was posted before is never
written into what a later accept() lets in.
"""

import ctypes
import hmac
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from common import memfd
from kvtransfer.backend import Op, PageIds, PeerId, Region, Ticket, TransferError
from kvtransfer.shm_copy import Run, copy_runs, pieces
from kvtransfer.shm_gate import GatePass
from kvtransfer.tcp_wire import CHALLENGE, HELLO, MAGIC, VERSION, WELCOME, GuardedSocket, Identity, Verdict, WireError, check_magic, proof

CONNECT_TIMEOUT_S = 5.0  # each step of the handshake


@dataclass(frozen=True, slots=True)
class Part:
    """Of one ticket."""

    op: Op
    ticket: Ticket
    local_pages: PageIds
    remote_pages: PageIds


@dataclass(frozen=True, slots=True)
class Target:
    """Whose pool, as whom."""

    peer: PeerId
    address: str  # of its abstract socket
    num_pages: int
    page_nbytes: int
    listener: Identity
    caller: Identity


class Mapping:
    """The peer's pool in our address space until nobody refers to it."""

    def __init__(self, connection: GuardedSocket, pool: memfd.Buffer, passes: list[GatePass]) -> None:
        self.connection = connection
        self.address = ctypes.addressof(pool)
        self.passes = passes  # of each lane
        self._pool = pool

    def peer_lives(self) -> bool:
        """It keeps the connection open, on which nothing ever comes."""
        try:
            self.connection.raw.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


class Peer:
    """A connected peer, and the lanes to it."""

    def __init__(self, target: Target, num_lanes: int, region: Region, part_done: Callable[[Ticket, TransferError | None], None]) -> None:
        self.target = target
        self._num_lanes = num_lanes
        self._region = region
        self._part_done = part_done
        self._changed = threading.Condition()  # guards the six below
        self._waiting: deque[Part] = deque()
        self._calling: GuardedSocket | None = None
        self._mapping: Mapping | None = None
        self._generation = 0  # grows whenever all is given up
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._one_calls = threading.Lock()

    # ---- for the backend ------------------------------------------------------------------------------------------------

    def submit(self, parts: list[Part]) -> None:
        with self._changed:
            self._waiting.extend(parts)
            self._changed.notify(len(parts))
            num_wanted = min(self._num_lanes, len(self._waiting))
        while len(self._threads) < num_wanted:
            thread = threading.Thread(target=self._run, args=(len(self._threads),), name="kv-copy", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process may have no more
                if not self._threads:
                    self._give_up(self._generation, self._error(str(error)))
                return
            self._threads.append(thread)

    def interrupt(self) -> None:
        """First half of stop(), for stopping several peers at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            if self._calling is not None:
                self._calling.shut()

    def stop(self) -> None:
        """When this returns, no thread is left, every part has ended and the peer's pool is unmapped."""
        self.interrupt()
        for thread in self._threads:
            thread.join()
        self._give_up(self._generation, self._error("disconnected"))

    # ---- the lanes' threads ---------------------------------------------------------------------------------------------

    def _run(self, lane: int) -> None:
        while taken := self._next_part():
            part, generation = taken
            self._part_done(part.ticket, self._carry(lane, part, generation))

    def _next_part(self) -> tuple[Part, int] | None:
        """With its generation."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            return None if self._stopping else (self._waiting.popleft(), self._generation)

    def _carry(self, lane: int, part: Part, generation: int) -> TransferError | None:
        try:
            mapping = self._mapped(generation)
        except Exception as error:  # whatever it is, it becomes the tickets' error: nobody waits for a thread that died
            failed = self._error("disconnected" if self._stopping else str(error))
            self._give_up(generation, failed)
            return failed
        for piece in pieces(part.local_pages, part.remote_pages, self.target.page_nbytes):
            reason = self._copy_piece(lane, part.op, piece, mapping)
            if reason:
                failed = self._error(reason)
                self._give_up(generation, failed)
                return failed
        return None

    def _copy_piece(self, lane: int, op: Op, piece: list[Run], mapping: Mapping) -> str:
        """Why it may not have been copied; "" when it was."""
        if self._stopping:
            return "disconnected"
        gate = mapping.passes[lane]
        if not gate.enter():
            return "it has disconnected this node"
        try:
            ours, theirs = self._region.base, mapping.address
            if op == "WRITE":
                copy_runs([(theirs + remote, ours + local, nbytes) for local, remote, nbytes in piece])
            else:
                copy_runs([(ours + local, theirs + remote, nbytes) for local, remote, nbytes in piece])
        finally:
            gate.leave()
        return "" if mapping.peer_lives() else "its process is gone, or it has disconnected this node"

    def _give_up(self, generation: int, error: TransferError) -> None:
        """The mapping is closed and everything that waits fails, unless another lane has seen to it."""
        with self._changed:
            if generation != self._generation:
                return
            self._generation += 1
            waiting = list(self._waiting)
            self._waiting.clear()
            if self._mapping is not None:
                self._mapping.connection.close()
                self._mapping = None
        for part in waiting:
            self._part_done(part.ticket, error)

    def _error(self, cause: str) -> TransferError:
        return TransferError(f"peer {self.target.peer} on this host: {cause}")

    # ---- the call -------------------------------------------------------------------------------------------------------

    def _mapped(self, generation: int) -> Mapping:
        """What it raises says why the pool is not mapped."""
        with self._one_calls:
            if generation != self._generation:
                raise WireError("it has disconnected this node")
            if self._mapping is None:
                mapping = self._call()
                with self._changed:
                    self._mapping = mapping
            return self._mapping

    def _call(self) -> Mapping:
        connection = GuardedSocket(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        with self._changed:
            self._calling = connection
            if self._stopping:
                connection.shut()
        try:
            return self._map(connection, self._shake_hands(connection.raw))
        except BaseException:
            connection.close()
            raise
        finally:
            with self._changed:
                self._calling = None

    def _shake_hands(self, raw: socket.socket) -> list[int]:
        """Descriptors of the peer's pool and of our gate there."""
        target = self.target
        raw.settimeout(CONNECT_TIMEOUT_S)
        raw.connect("\0" + target.address)
        magic, version, nonce = CHALLENGE.unpack(_packet(raw.recv(CHALLENGE.size)))
        check_magic(magic, version)
        ours = proof(b"caller", target.listener, target.caller, nonce, 0, target.page_nbytes)
        raw.sendall(HELLO.pack(MAGIC, VERSION, 0, target.page_nbytes, target.caller.incarnation, ours))
        packet, fds, _, _ = socket.recv_fds(raw, WELCOME.size, 2, socket.MSG_CMSG_CLOEXEC)
        try:
            magic, version, verdict, theirs = WELCOME.unpack(_packet(packet))
            check_magic(magic, version)
            if verdict != Verdict.WELCOME:
                raise WireError("it refused us: it has not accepted this node")
            if not hmac.compare_digest(theirs, proof(b"listener", target.listener, target.caller, nonce, 0, target.page_nbytes)):
                raise WireError("it does not know its own secret: another process behind its name")
            if len(fds) != 2:
                raise WireError("its descriptors did not arrive: this process may have too many open files")
        except BaseException:
            _close(fds)
            raise
        return fds

    def _map(self, connection: GuardedSocket, fds: list[int]) -> Mapping:
        try:
            pool_fd, gate_fd = fds
            nbytes = self.target.num_pages * self.target.page_nbytes
            if os.fstat(pool_fd).st_size < nbytes:
                raise WireError(f"its pool has {os.fstat(pool_fd).st_size} bytes, not the {nbytes} it describes")
            connection.raw.setblocking(False)
            return Mapping(connection, memfd.mapped(pool_fd, nbytes), [GatePass(gate_fd) for _ in range(self._num_lanes)])
        finally:
            _close(fds)


def _packet(packet: bytes) -> bytes:
    if not packet:
        raise EOFError("it closed the connection during the handshake")
    return packet


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
