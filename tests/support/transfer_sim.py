"""Prefill and decode nodes without sockets, threads or time: the sans-IO sessions over the memory backend and a simulated network.

SimNetwork keeps the frames of each connection, and lets a test deliver, drop, repeat, reorder or corrupt them one by one, end or freeze
processes, and move the clock. What sessions tell their schedulers is kept per process and checked against the contract of events as
it comes. With `faults` every process has a FaultyBackend over its memory backend.
Recording wires are for tests of one side alone: the test plays the peer.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from faults import Faults, FaultyBackend, flipped

from kvtransfer.backend import PageIds, PeerId, Region
from kvtransfer.events import Delivered, Event, FirstToken, OfferJoined, PagesReturned, RoomFailed
from kvtransfer.link import Address
from kvtransfer.memory import MemoryBackend, MemoryFabric
from kvtransfer.protocol import Compat, Message, decode_to_decode, decode_to_prefill, encode
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.settings import TransferSettings

PAGE_SIZE, PAGE_NBYTES, NUM_PAGES = 4, 16, 64
UNIX_OFFSET_S = 1e9  # simulated unix time runs so far ahead of the simulated monotonic clock
COMPAT = Compat("model-a", "float32", "float32", PAGE_SIZE, 2, 1, 8, PAGE_NBYTES, 128, 1 << 20)
SETTINGS = TransferSettings(compat=COMPAT, max_rooms=64)

_incarnations = itertools.count()


def settings(**changes: Any) -> TransferSettings:
    """SETTINGS with changes; names of Compat's fields change the compat."""
    compat = {name: changes.pop(name) for name in list(changes) if name in Compat.__struct_fields__}
    return replace(SETTINGS, compat=msgspec.structs.replace(COMPAT, **compat), **changes)


def pages(*ids: int) -> PageIds:
    return np.array(ids, dtype=np.int32)


def registered_backend(fabric: MemoryFabric, page_nbytes: int = PAGE_NBYTES) -> tuple[MemoryBackend, np.ndarray]:
    """With its pool: uint8[NUM_PAGES, page_nbytes]."""
    pool = np.zeros((NUM_PAGES, page_nbytes), np.uint8)
    backend = fabric.backend()
    weakref.finalize(backend, backend.tickets.close)  # its eventfd: tests make thousands and close few
    backend.register(Region(pool.ctypes.data, NUM_PAGES, page_nbytes, "cpu", pool))
    return backend, pool


def faulty(inner: MemoryBackend, pool: np.ndarray, faults: Faults, site: str) -> FaultyBackend:
    """Around a backend that has its region."""
    backend = FaultyBackend(inner, faults, site)
    weakref.finalize(backend, backend.tickets.close)
    backend.memory = inner.memory
    return backend


# ---- one side alone ----------------------------------------------------------------------------------------------------------


class RecordingAcceptWire:
    """P's wire; frames are decoded into `sent`, per route. Routes in `gone` fail."""

    def __init__(self) -> None:
        self.sent: dict[bytes, list[Any]] = {}
        self.gone: set[bytes] = set()

    def send(self, route: bytes, frame: bytes) -> bool:
        if route in self.gone:
            return False
        self.sent.setdefault(route, []).append(decode_to_decode(frame))
        return True

    def take(self, route: bytes) -> list[Any]:
        return self.sent.pop(route, [])


class RecordingDialWire:
    """D's wire; frames are decoded into `sent`, per link."""

    def __init__(self) -> None:
        self.opened: list[Address] = []  # link i + 1 leads to opened[i]
        self.sent: dict[int, list[Any]] = {}
        self.gone: set[int] = set()
        self.closed: set[int] = set()

    def open(self, address: Address) -> int:
        if not address.host:
            raise ValueError("not an address: it is empty")
        self.opened.append(address)
        return len(self.opened)

    def send(self, link: int, frame: bytes) -> bool:
        if link in self.gone | self.closed:
            return False
        self.sent.setdefault(link, []).append(decode_to_prefill(frame))
        return True

    def close(self, link: int) -> None:
        self.closed.add(link)

    def take(self, link: int) -> list[Any]:
        return self.sent.pop(link, [])


# ---- processes ---------------------------------------------------------------------------------------------------------------


class EventLog:
    """A scheduler's events, by room; a room's order is checked as it grows."""

    def __init__(self) -> None:
        self.by_room: dict[int, list[Event]] = {}
        self.aborted: set[int] = set()
        self._next: dict[int, int] = {}

    def open(self, room: int) -> None:
        assert room not in self.by_room
        self.by_room[room] = []

    def add(self, event: Event) -> None:
        events = self.by_room[event.room]
        assert not events or not isinstance(events[-1], Delivered | PagesReturned), f"{event} after {events}"
        failed = any(isinstance(earlier, RoomFailed) for earlier in events)
        match event:
            case RoomFailed():
                assert not failed, f"{event} after {events}"
            case PagesReturned():
                assert failed or event.room in self.aborted, f"{event} out of nothing, after {events}"
            case Delivered() | OfferJoined() | FirstToken():
                assert not failed, f"{event} after {events}"
        events.append(event)

    def is_over(self, room: int) -> bool:
        events = self.by_room[room]
        return bool(events) and isinstance(events[-1], Delivered | PagesReturned)

    def open_rooms(self) -> list[int]:
        return [room for room in self.by_room if not self.is_over(room)]


class SimProcess:
    def __init__(self, network: "SimNetwork", name: str) -> None:
        self.network = network
        self.incarnation = PeerId(f"{name}-{next(_incarnations)}")
        self.memory, self.pool = registered_backend(network.fabric)
        self.backend = self.memory if network.faults is None else faulty(self.memory, self.pool, network.faults, self.incarnation)
        self.region = Region(self.pool.ctypes.data, *self.pool.shape, "cpu", self.pool)
        self.log = EventLog()
        self.alive = True
        self.frozen_at_s: float | None = None
        self.in_hand: tuple[int, bytes] | None = None  # connection and frame, read when the process was frozen

    @property
    def now_s(self) -> float:
        """The time that this process read last: a frozen one has not looked since."""
        return self.network.now_s if self.frozen_at_s is None else self.frozen_at_s

    def settle(self, session: Sender | Receiver) -> None:
        session.poll_backend(self.now_s)
        session.tick(self.now_s)
        for event in session.events:
            self.log.add(event)
            self.on_event(event)
        session.events.clear()

    def on_event(self, event: Event) -> None:
        """For tests that keep books of pages."""


class SimPrefill(SimProcess):
    def __init__(self, network: "SimNetwork", address: Address, fixed: TransferSettings = SETTINGS) -> None:
        super().__init__(network, "p")
        self.address = address
        fixed = replace(fixed, region=self.region)
        self.session = Sender(fixed, self.incarnation, self, self.backend, lambda unix_s: unix_s - UNIX_OFFSET_S, lambda: network.now_s)

    def send(self, route: bytes, frame: bytes) -> bool:
        connection = self.network.connections.get(int(route))
        if connection is None or connection.prefill is not self or (connection.over_for_prefill and not connection.silent):
            return False
        if not connection.silent:
            connection.to_decode.append(frame)
        return True

    def receive(self, number: int, frame: bytes, now_s: float) -> None:
        self.session.on_frame(b"%d" % number, frame, "127.0.0.1", now_s)

    def step(self) -> None:
        self.settle(self.session)


class SimDecode(SimProcess):
    def __init__(self, network: "SimNetwork", fixed: TransferSettings = SETTINGS) -> None:
        super().__init__(network, "d")
        self.session = Receiver(replace(fixed, region=self.region), self.incarnation, self, self.backend, lambda: network.now_s)

    def open(self, address: Address) -> int:
        return self.network.connect(self, address)

    def send(self, link: int, frame: bytes) -> bool:
        connection = self.network.connections.get(link)
        if connection is None or not connection.decode_open or connection.cut:
            return False
        if not connection.silent:
            connection.to_prefill.append(frame)
        return True

    def receive(self, number: int, frame: bytes, now_s: float) -> None:
        self.session.on_frame(number, frame, now_s)

    def close(self, link: int) -> None:
        self.network.connections[link].decode_open = False

    def step(self) -> None:
        self.settle(self.session)


# ---- the network -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Connection:
    """`prefill` None: nobody listened there."""

    decode: SimDecode
    prefill: SimPrefill | None
    decode_open: bool = True
    told_decode: bool = False
    cut: bool = False  # the connection broke, both processes live
    silent: bool = False  # nothing passes any more, and P is not told, nor D unless the connection is cut too
    to_prefill: deque[bytes] = field(default_factory=deque)
    to_decode: deque[bytes] = field(default_factory=deque)

    @property
    def over_for_prefill(self) -> bool:
        return self.cut or (not self.decode_open and not self.to_prefill)

    @property
    def over_for_decode(self) -> bool:
        return (self.cut or self.prefill is None or not self.prefill.alive) and not self.to_decode


class SimNetwork:
    def __init__(self, fence_delay_s: float = 0.0, faults: Faults | None = None) -> None:
        self.now_s = 1000.0
        self.faults = faults
        self.fabric = MemoryFabric(fence_delay_s=fence_delay_s)
        self.listening: dict[Address, SimPrefill] = {}
        self.decodes: list[SimDecode] = []
        self.connections: dict[int, Connection] = {}  # by link, which is also the route
        self._next_connection = 1

    @property
    def unix_s(self) -> float:
        return self.now_s + UNIX_OFFSET_S

    def processes(self) -> list[SimPrefill | SimDecode]:
        """The living ones."""
        return [process for process in (*self.listening.values(), *self.decodes) if process.alive]

    def running(self) -> list[SimPrefill | SimDecode]:
        """Those that take steps."""
        return [process for process in self.processes() if process.frozen_at_s is None]

    def prefill(self, port: int, fixed: TransferSettings = SETTINGS) -> SimPrefill:
        """A new process behind the port, whoever was there before."""
        address = Address("p", port)
        self.listening[address] = SimPrefill(self, address, fixed)
        return self.listening[address]

    def decode(self, fixed: TransferSettings = SETTINGS) -> SimDecode:
        self.decodes.append(SimDecode(self, fixed))
        return self.decodes[-1]

    def connect(self, decode: SimDecode, address: Address) -> int:
        prefill = self.listening.get(address)
        number = self._next_connection
        self._next_connection += 1
        self.connections[number] = Connection(decode, prefill if prefill is not None and prefill.alive else None)
        return number

    def kill(self, process: SimPrefill | SimDecode) -> None:
        process.alive = False
        self.fabric.kill(process.memory)
        if self.faults is not None:
            self.faults.kill(process.backend)
        for connection in self.connections.values():
            if process is connection.decode:
                connection.decode_open = False

    def freeze(self, process: SimPrefill | SimDecode, in_hand: bool) -> None:
        """As SIGSTOP: it takes no step, its frames wait, what its backend writes by itself goes on. `in_hand`: it has just read one
        of its frames, and the clock."""
        waiting = [queue for queue in self.queues() if self._receiver(*queue) is process and self.queue(*queue)]
        if in_hand and waiting:
            process.in_hand = waiting[0][0], self.queue(*waiting[0]).popleft()
        process.frozen_at_s = self.now_s

    def thaw(self, process: SimPrefill | SimDecode, num_frames: int, commands: Callable[[], None] = lambda: None) -> None:
        """It goes on in the middle of a step: handles the frame in hand, obeys its scheduler's `commands` (or did before the frame; all
        the same), reads other frames with the clock as it is, does the rest of the step with the time at which the step began. Then
        comes another step."""
        if process.in_hand is not None:
            process.receive(*process.in_hand, process.now_s)
            process.in_hand = None
        commands()
        for queue in [queue for queue in self.queues(thawing=process) if self._receiver(*queue) is process]:
            for _ in range(min(num_frames, len(self.queue(*queue)))):
                process.receive(queue[0], self.queue(*queue).popleft(), self.now_s)
        process.step()
        process.frozen_at_s = None
        process.step()

    def open_connections(self) -> list[int]:
        return [number for number, connection in self.connections.items() if connection.decode_open and not connection.cut]

    def cut(self, number: int) -> None:
        """The connection breaks; D is told as by a frame, P finds out when it sends, if the connection is not silent."""
        self.connections[number].cut = True
        self.connections[number].to_prefill.clear()

    def silence(self, number: int) -> None:
        """Nothing passes on the connection any more, and nobody is told."""
        connection = self.connections[number]
        connection.silent = True
        connection.to_prefill.clear()
        connection.to_decode.clear()

    # ---- frames, one at a time -------------------------------------------------------------------------------------------

    def queues(self, thawing: "SimPrefill | SimDecode | None" = None) -> list[tuple[int, bool]]:
        """(connection, towards P?) wherever a frame waits or an end is to be noticed by a process that runs."""
        waiting = []
        for number, connection in self.connections.items():
            if connection.to_prefill and (connection.prefill is None or connection.prefill.frozen_at_s is None or connection.prefill is thawing):
                waiting.append((number, True))
            noticed = connection.to_decode or (connection.over_for_decode and not connection.told_decode)
            if connection.decode_open and noticed and (connection.decode.frozen_at_s is None or connection.decode is thawing):
                waiting.append((number, False))
        return waiting

    def deliver(self, number: int, towards_prefill: bool) -> None:
        connection = self.connections[number]
        if towards_prefill:
            frame = connection.to_prefill.popleft()
            if connection.prefill is not None and connection.prefill.alive:
                connection.prefill.receive(number, frame, self.now_s)
                connection.prefill.step()
        elif connection.to_decode:
            connection.decode.receive(number, connection.to_decode.popleft(), self.now_s)
            connection.decode.step()
        else:
            connection.told_decode = True
            connection.decode.session.on_disconnected(number, "its connection ended", self.now_s)
            connection.decode.step()

    def drop(self, number: int, towards_prefill: bool) -> None:
        queue = self.queue(number, towards_prefill)
        if queue:
            queue.popleft()

    def repeat(self, number: int, towards_prefill: bool) -> None:
        """The frame at the head comes once more, behind those that wait."""
        queue = self.queue(number, towards_prefill)
        if queue:
            queue.append(queue[0])

    def overtake(self, number: int, towards_prefill: bool) -> None:
        """The newest frame comes before all that wait."""
        queue = self.queue(number, towards_prefill)
        queue.rotate(1)

    def corrupt(self, number: int, towards_prefill: bool, fraction: float = 0.5) -> None:
        """A bit of the frame at the head is flipped."""
        queue = self.queue(number, towards_prefill)
        if queue:
            queue[0] = flipped(queue[0], fraction)

    def pump(self) -> None:
        """Deliver until nothing waits."""
        while waiting := self.queues():
            for number, towards_prefill in waiting:
                if (number, towards_prefill) in self.queues():
                    self.deliver(number, towards_prefill)

    def advance(self, seconds: float) -> None:
        """Writes cut off by a disconnect land now: the fence has not passed yet. Then time moves."""
        self.fabric.land_late()
        self.now_s += seconds
        for process in self.running():
            process.step()

    def _receiver(self, number: int, towards_prefill: bool) -> SimPrefill | SimDecode | None:
        connection = self.connections[number]
        return connection.prefill if towards_prefill else connection.decode

    def queue(self, number: int, towards_prefill: bool) -> deque[bytes]:
        connection = self.connections[number]
        return connection.to_prefill if towards_prefill else connection.to_decode


def frame(message: Message) -> bytes:
    return encode(message)
