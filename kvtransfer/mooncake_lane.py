"""The two ends of a Mooncake connection: the door that a peer's lane calls, and the lane.

    lane -> door   the handshake of tcp_wire.py: each proves to the other who it is
    door -> lane   SEGMENT: name of an engine made for this caller alone, base address of the region; no name: there could be none
    then nothing; pages travel between the two engines. The connection's end ends both engines

The lane's rules for broken connections are those of tcp_sender.py: it calls again, and a welcome proves that the old engine behind the
door has ended, so nothing sent before can land; then it sends once more what had no completion.
"""

import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from kvtransfer.backend import PageIds, PeerId, Region, Ticket, TransferError
from kvtransfer.mooncake_engine import Engine, EngineOptions
from kvtransfer.pages import PageMemory, merged_runs
from kvtransfer.tcp_receiver import Listener
from kvtransfer.tcp_sender import Lane, Message, Target
from kvtransfer.tcp_wire import SILENT_PEER_S, GuardedSocket, Identity, receive_all

log = logging.getLogger(__name__)

SEGMENT = struct.Struct("<HQ")  # length of the name that follows, base address
SEGMENT_TIMEOUT_S = 60.0  # the peer registers its pool first; with RDMA that pins it, gigabytes a second
MAX_IN_FLIGHT = 64  # descriptors; Mooncake's queue of a peer holds 1024 (MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER)
MAX_DESCRIPTOR_NBYTES = 4 << 20  # a page at least. Bounds what is in flight, and how far one descriptor may hold up the next
POLL_S = 50e-6  # one page of 360 KB takes Mooncake 200 us on loopback
ENGINE_GIVE_UP_S = SILENT_PEER_S  # without any completion


class Door(Listener):
    """Lets accepted peers in, each to an engine of its own, which lives as long as the peer's connection."""

    def __init__(self, host: str, port: int, region: Region, own: Identity, options: EngineOptions, advertise_host: str | None) -> None:
        """`advertise_host`: numeric, or None for the address that the caller called."""
        self._region = region
        self._options = options
        self._advertise_host = advertise_host
        super().__init__(host, port, cast(PageMemory, region), own)  # of which the handshake needs the page size

    def dismiss(self, peer: PeerId) -> Callable[[], bool]:
        """Let `peer` in no more, and end its engine. Returns at once; the result tells whether the engine has ended."""
        with self._lock:
            self._guests = {incarnation: guest for incarnation, guest in self._guests.items() if guest.peer != peer}
            connections = [connection for (owner, _), connection in self._proven.items() if owner == peer]
        for connection in connections:
            connection.socket.shut()
        threads = [connection.thread for connection in connections if connection.thread is not None]
        return lambda: not any(thread.is_alive() for thread in threads)

    def _answer(self, raw: socket.socket) -> None:
        host = self._advertise_host or own_host(raw)
        try:
            engine = Engine(self._options, host, self._region)
        except TransferError as error:
            log.error("no engine for the peer at %s: %s", raw.getpeername()[0], error)
            raw.sendall(SEGMENT.pack(0, 0))
            return
        try:
            name = engine.segment.encode()
            raw.sendall(SEGMENT.pack(len(name), self._region.base) + name)
            raw.recv(1)  # nothing comes but the end
        finally:
            engine.close()


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One contiguous copy. Addresses of both sides, length in bytes; `last` of its message."""

    message: Message
    local: int
    remote: int
    nbytes: int
    last: bool


class MooncakeLane(Lane):
    """Carries messages by an engine of its own, which lives as long as the connection to the peer's door."""

    def __init__(self, target: Target, region: Region, options: EngineOptions, part_done: Callable[[Ticket, TransferError | None], None]) -> None:
        super().__init__(target, 0, cast(PageMemory, region), part_done)  # of which the handshake needs the page size
        self._region = region
        self._options = options
        self._engine: Engine | None = None

    def dismiss(self) -> Callable[[], bool]:
        """Fail all messages and end. Returns at once; the result tells whether the engine has ended: until then a READ may still land."""
        self.interrupt()
        self._fail_all(TransferError(f"disconnected from {self._target.peer}"))
        return self._ended

    def _ended(self) -> bool:
        """After dismiss(). Asking hurries the thread on: its engine may be waiting for the peer's, which strangers keep busy."""
        if self._thread is None or not self._thread.is_alive():
            return True
        engine = self._engine
        if engine is not None:
            engine.interrupt()
        return False

    # ---- lane thread ----------------------------------------------------------------------------------------------------

    def _carry(self, connection: GuardedSocket) -> None:
        self._error = None
        watch = threading.Thread(target=self._watch, args=(connection,), name=f"kv-door-{self._target.port}", daemon=True)
        engine = self._engine = None
        try:
            segment, remote_base = self._receive_segment(connection.raw)
            watch.start()
            engine = self._engine = Engine(self._options, own_host(connection.raw), self._region)
            self._pump(engine, segment, self._descriptors(remote_base))
        except Exception as error:  # whatever it is, it becomes the tickets' error
            self._broke(connection, error)
            if engine is None:
                self._count_attempt()
        connection.shut()
        if engine is not None:
            engine.close()
        if watch.ident is not None:
            watch.join()
        self._drop(connection)
        with self._changed:
            if self._unanswered:
                self._broken_since_s = time.monotonic()
            self._waiting.extendleft(reversed(self._unanswered))
            self._unanswered.clear()

    def _count_attempt(self) -> None:
        """For messages that wait: this connection would have carried them, and never came so far."""
        with self._changed:
            for message in self._waiting:
                message.attempts += 1

    @staticmethod
    def _receive_segment(raw: socket.socket) -> tuple[str, int]:
        raw.settimeout(SEGMENT_TIMEOUT_S)
        head = bytearray(SEGMENT.size)
        receive_all(raw, [head])
        length, base = SEGMENT.unpack(head)
        if not length:
            raise TransferError("it cannot make a Mooncake engine; its log says why")
        name = bytearray(length)
        receive_all(raw, [name])
        raw.settimeout(None)
        return name.decode(), base

    def _watch(self, connection: GuardedSocket) -> None:
        """The door's end is the peer's end, or its dismissal of us."""
        try:
            connection.raw.recv(1)
            raise EOFError("the peer closed the connection")
        except (OSError, EOFError) as error:
            self._broke(connection, error)

    def _pump(self, engine: Engine, segment: str, descriptors: Iterator[Descriptor | None]) -> None:
        """Keep MAX_IN_FLIGHT descriptors moving until the connection breaks or the lane stops. They are looked at in their order: a lane
        of Mooncake's finishes them in it, and a message is over when its last one and all before have landed."""
        flight: deque[tuple[int, Descriptor]] = deque()
        landed_s = time.monotonic()
        while self._error is None and not self._stopping:
            while len(flight) < MAX_IN_FLIGHT and (descriptor := next(descriptors)) is not None:
                batch = engine.submit(descriptor.message.op, segment, descriptor.local, descriptor.remote, descriptor.nbytes)
                flight.append((batch, descriptor))
            if not flight:
                self._wait_for_work()
                landed_s = time.monotonic()
            elif self._retire(engine, flight):
                landed_s = time.monotonic()
            elif time.monotonic() - landed_s > ENGINE_GIVE_UP_S:
                raise TransferError(f"no byte moved for {ENGINE_GIVE_UP_S:.0f} s")
            else:
                time.sleep(POLL_S)

    def _retire(self, engine: Engine, flight: deque[tuple[int, Descriptor]]) -> bool:
        """Whether anything has landed."""
        before = len(flight)
        while flight and engine.landed(flight[0][0]):
            _, descriptor = flight.popleft()
            if descriptor.last:
                self._complete(descriptor.message)
        return len(flight) < before

    def _complete(self, message: Message) -> None:
        with self._changed:
            if not self._unanswered or self._unanswered[0] is not message:
                return  # dismissed meanwhile
            self._unanswered.popleft()
        self._part_done(message.ticket, None)

    def _wait_for_work(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._error or self._stopping)

    def _descriptors(self, remote_base: int) -> Iterator[Descriptor | None]:
        """Of the messages in their order; None when none waits."""
        while True:
            with self._changed:
                message = self._waiting.popleft() if self._waiting and not self._stopping else None
                if message is not None:
                    message.attempts += 1
                    self._unanswered.append(message)
            if message is None:
                yield None
                continue
            yield from self._cut(message, remote_base)

    def _cut(self, message: Message, remote_base: int) -> Iterator[Descriptor]:
        page_nbytes = self._region.page_nbytes
        pieces = cut_runs(message.local_pages, message.remote_pages, max(1, MAX_DESCRIPTOR_NBYTES // page_nbytes))
        for number, (local, remote, num_pages) in enumerate(pieces, 1):
            yield Descriptor(
                message,
                self._region.base + local * page_nbytes,
                remote_base + remote * page_nbytes,
                num_pages * page_nbytes,
                last=number == len(pieces),
            )


def own_host(connection: socket.socket) -> str:
    """The numeric address of this host that the peer sees; an IPv4 one as such on a socket that listens to both families."""
    host: str = connection.getsockname()[0]
    return host.removeprefix("::ffff:")


def cut_runs(local_pages: PageIds, remote_pages: PageIds, max_pages: int) -> list[tuple[int, int, int]]:
    """merged_runs() of at most max_pages each: (first local page, first remote page, number of pages)."""
    return [
        (local + start, remote + start, min(max_pages, num_pages - start))
        for local, remote, num_pages in zip(*(side.tolist() for side in merged_runs(local_pages, remote_pages)), strict=True)
        for start in range(0, num_pages, max_pages)
    ]
