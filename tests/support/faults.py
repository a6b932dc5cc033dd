"""Faults on purpose, drawn from a seed: between a session and its backend, and on the wire between two sessions.

    FaultyBackend   stands between a session and any TransferBackend
    FaultyWire      stands between a session and kvtransfer.wire's RouterWire or DealerWire

A write (any posted ticket) meets one of

    delay      posted to the backend delay_s later
    hold       posted at once, its completion is handed out delay_s later: a slow receiver
    partial    some of its pages land, then the ticket ends with an error
    error      all of its pages land, and the ticket ends with an error all the same
    refuse     post() raises TransferError; nothing lands
    corrupt    all of its pages land, one bit of them is then flipped, and the ticket ends well
    cut        the data connection breaks: this ticket (some pages landed) and every other one to that peer end with an error
    stuck      nothing happens until the test finishes it (`in_flight`, finish()) or its peer is disconnected

and a frame, when it is sent, one of

    drop, duplicate, corrupt (one bit flipped), delay (delay_s), reorder (leaves after the next one to that peer, or delay_s
    later)
    cut        D's wire: the connection ends, both sides notice. P's wire, which cannot end one: as partition
    partition  nothing passes any more on this connection, either way, and nobody is told

With `one_sided` the backends write as RDMA does, around the inner backend: into the peer's memory whether or not it still wants it,
with late landings. What an owner posted before it disconnected or died may land until either side's Fence has passed; a peer that
disconnects cannot keep the owner from posting. passed() lands what is left, at the last possible moment.

Each site (a backend or wire, by the name it was given) draws its own sequence, so that threads do not mix them: the n-th write of a
site meets the same fault in every run with that seed. What was drawn is in `decisions`; Faults(replay=decisions) meets it again. As
a context manager Faults prints both when the block fails.
"""

import math
import os
import random
import select
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvtransfer.backend import Completion, Fence, Op, PageIds, PeerId, PeerUnknown, Region, Ticket, TransferBackend, TransferError
from kvtransfer.pages import PageMemory, check_local, check_remote
from kvtransfer.tickets import Tickets
from kvtransfer.wire import DealerWire, RouterWire

BACKEND_FAULTS = ("delay", "hold", "partial", "error", "refuse", "corrupt", "cut", "stuck")
WIRE_FAULTS = ("drop", "duplicate", "corrupt", "delay", "reorder", "cut", "partition")
ENDS_WITH_ERROR = ("partial", "error", "cut")


class Decision(NamedTuple):
    """`kind` "": no fault. `fraction` in [0, 1): how much of it, or where."""

    kind: str = ""
    fraction: float = 0.0


NO_FAULT = Decision()


class Faults:
    """One experiment. `rates`: by site, the probability of each fault. `now`: a simulated clock, then nothing wakes a sleeper."""

    def __init__(
        self,
        seed: int = 0,
        rates: Mapping[str, Mapping[str, float]] | None = None,
        *,
        replay: Mapping[str, Iterable[tuple[str, float]]] | None = None,
        one_sided: bool = False,
        delay_s: float = 0.05,
        fence_delay_s: float = 0.0,
        now: Callable[[], float] | None = None,
    ) -> None:
        self.seed = seed
        self.rates = rates or {}
        self.one_sided = one_sided
        self.delay_s = delay_s
        self.fence_delay_s = fence_delay_s
        self.simulated = now is not None
        self.now = now or time.monotonic
        self.decisions: dict[str, list[Decision]] = defaultdict(list)
        self.lock = threading.RLock()
        self.backends: dict[bytes, FaultyBackend] = {}  # by description, the dead ones too
        self.late: list[Write] = []  # their tickets are over, their bytes may still land
        self._next: dict[str, deque[Decision]] = defaultdict(deque)  # before anything is drawn
        self._randoms: dict[str, random.Random] = {}
        for site, decisions in (replay or {}).items():
            self._next[site] = deque(Decision(*decision) for decision in decisions)

    def __enter__(self) -> "Faults":
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is not None:
            decisions = {site: [tuple(decision) for decision in drawn] for site, drawn in self.decisions.items()}
            print(f"faults: seed {self.seed}, decisions {decisions}")

    def script(self, site: str, *kinds: str | Decision) -> None:
        """The site's next decisions, in order; then it draws again."""
        with self.lock:
            self._next[site] += [kind if isinstance(kind, Decision) else Decision(kind, 0.5) for kind in kinds]

    def decide(self, site: str) -> Decision:
        with self.lock:
            scripted = self._next[site]
            decision = scripted.popleft() if scripted else self._draw(site)
            self.decisions[site].append(decision)
            return decision

    def _draw(self, site: str) -> Decision:
        rates = self.rates.get(site)
        if not rates:
            return NO_FAULT
        rng = self._randoms.setdefault(site, random.Random(f"{self.seed} {site}"))
        drawn, fraction = rng.random(), rng.random()
        for kind, rate in rates.items():
            if drawn < rate:
                return Decision(kind, fraction)
            drawn -= rate
        return NO_FAULT

    # ---- writes in flight -------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> list["Write"]:
        """Posted and not landed, oldest first for each backend."""
        with self.lock:
            return [write for backend in self.backends.values() for write in backend.waiting()] + self.late

    def finish(self, write: "Write", how: Decision = NO_FAULT) -> None:
        """Let a write that is stuck go on; once."""
        with self.lock:
            if write.num_landed is not None:
                return
            write.fault = how
            if self.one_sided:
                write.owner.move(write)
            else:
                write.due_s = -math.inf
                write.owner.wake()

    def finish_all(self) -> None:
        for write in self.in_flight:
            self.finish(write)

    def kill(self, backend: "FaultyBackend") -> None:
        """Its process ended as by kill -9: what it had posted may still land, what is posted to it lands nowhere."""
        with self.lock:
            backend.alive = False

    def settle(self, one: "FaultyBackend", other: "FaultyBackend | None") -> bool:
        """Land whatever is in flight between the two."""
        with self.lock:
            for write in self.in_flight:
                if other is not None and {write.owner, write.target} == {one, other}:
                    self.finish(write)
            return True


@dataclass(eq=False, slots=True)
class Write:
    """A posted ticket, of either op."""

    owner: "FaultyBackend"
    target: "FaultyBackend | None"  # None: of another process
    ticket: Ticket
    op: Op
    peer: PeerId
    local_pages: PageIds
    remote_pages: PageIds
    fault: Decision
    due_s: float = math.inf  # when to post it, or to hand its completion out
    num_landed: int | None = None  # pages given to the inner backend, or copied; None: not yet
    over: bool = False  # the ticket is


class FaultyBackend:
    """`site`: the name under which its faults are drawn. Its peers' backends share the Faults if their memory is to be reached
    (corrupt, one_sided)."""

    def __init__(self, inner: TransferBackend, faults: Faults, site: str) -> None:
        self.name = inner.name
        self.site = site
        self.alive = True
        self.memory: PageMemory | None = None
        self.tickets = Tickets()
        self._inner = inner
        self._faults = faults
        self._peers: dict[PeerId, bytes] = {}  # connected or accepted: description
        self._connected: set[PeerId] = set()
        self._writes: dict[Ticket, Write] = {}  # whose tickets are not over
        self._by_inner: dict[Ticket, Write] = {}
        self._timers: set[threading.Timer] = set()
        self._wake_fd = -1
        self._epoll: select.epoll | None = None

    def register(self, region: Region) -> None:
        self._inner.register(region)
        self.memory = PageMemory(region)

    def describe(self) -> bytes:
        description = self._inner.describe()
        self._faults.backends[description] = self
        return description

    def connect(self, peer: PeerId, description: bytes, observed_host: str | None = None) -> None:
        self._inner.connect(peer, description, observed_host)
        self._peers[peer] = description
        self._connected.add(peer)

    def accept(self, peer: PeerId, description: bytes) -> None:
        self._inner.accept(peer, description)
        self._peers[peer] = description

    def post(self, op: Op, peer: PeerId, local_pages: PageIds, remote_pages: PageIds) -> Ticket:
        with self._faults.lock:
            if peer not in self._connected:
                raise PeerUnknown(f"peer {peer} is not connected")
            assert self.memory is not None
            check_local(local_pages, remote_pages, self.memory.num_pages)
            fault = self._faults.decide(self.site)
            if fault.kind == "refuse":
                raise TransferError("injected: the post was refused")
            target = self._faults.backends.get(self._peers[peer])
            ticket = self.tickets.open(1)
            write = Write(self, target, ticket, op, peer, local_pages.copy(), remote_pages.copy(), fault)
            self._writes[ticket] = write
            if fault.kind == "delay":
                self._later(write)
            elif fault.kind == "cut":
                self._cut(peer)
            elif fault.kind != "stuck":
                self.move(write)
            return ticket

    def poll(self) -> list[Completion]:
        with self._faults.lock:
            now_s = self._faults.now()
            if self._wake_fd >= 0:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            for write in [write for write in self._writes.values() if write.due_s <= now_s]:
                write.due_s = math.inf
                if write.num_landed is None:
                    self.move(write)
                else:
                    self._end(write, None)
            for completion in self._inner.poll():
                self._landed(self._by_inner.pop(completion.ticket), completion.error)
            return self.tickets.drain()

    def completion_fd(self) -> int:
        if self._epoll is None:
            self._epoll = select.epoll()
            self._wake_fd = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            for fd in (self._wake_fd, self.tickets.fileno(), self._inner.completion_fd()):
                self._epoll.register(fd, select.EPOLLIN)
        return self._epoll.fileno()

    def disconnect(self, peer: PeerId) -> Fence:
        with self._faults.lock:
            description = self._peers.pop(peer, None)
            self._connected.discard(peer)
            self._disconnect_writes(peer)
            fence = self._inner.disconnect(peer)
            if description is None or not self._faults.one_sided:
                return fence
            other = self._faults.backends.get(description)
            passed: list[bool] = []  # asked again, it must not hurry what a new link writes
            return Fence(self._faults.fence_delay_s, lambda: bool(passed) or passed.append(self._faults.settle(self, other)) is None)

    def close(self) -> None:
        with self._faults.lock:
            for peer in list(self._peers):
                self.disconnect(peer)
            for timer in self._timers:
                timer.cancel()
            self._inner.close()
            for completion in self._inner.poll():  # tickets left still come out of poll()
                self._landed(self._by_inner.pop(completion.ticket), completion.error)
            self.tickets.close()
            if self._epoll is not None and not self._epoll.closed:
                self._epoll.close()
                os.close(self._wake_fd)
                self._wake_fd = -1

    # ---- a write's way, under the lock ------------------------------------------------------------------------------------

    def waiting(self) -> list[Write]:
        return [write for write in self._writes.values() if write.num_landed is None]

    def wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def move(self, write: Write) -> None:
        """Its pages, or as many as its fault lets through, are on their way."""
        num_pages = len(write.local_pages)
        if write.fault.kind in ("partial", "cut"):
            num_pages = int(num_pages * write.fault.fraction)
        write.num_landed = num_pages
        if self._faults.one_sided:
            self._landed(write, self._copy(write, num_pages))
            return
        if write.over:
            return
        try:
            inner = self._inner.post(write.op, write.peer, write.local_pages[:num_pages], write.remote_pages[:num_pages])
        except TransferError as error:
            self._end(write, error)
        else:
            self._by_inner[inner] = write

    def _copy(self, write: Write, num_pages: int) -> TransferError | None:
        """As a one-sided write: straight between the two memories, whoever may have lost interest."""
        target = write.target
        if target is None or target.memory is None or not target.alive:
            return TransferError("injected: the peer's process is gone")
        if error := check_remote(write.remote_pages, target.memory.num_pages):
            return error
        assert self.memory is not None
        mine, theirs = self.memory.rows(), target.memory.rows()
        local, remote = write.local_pages[:num_pages], write.remote_pages[:num_pages]
        if write.op == "WRITE":
            theirs[remote] = mine[local]
        else:
            mine[local] = theirs[remote]
        return None

    def _landed(self, write: Write, error: TransferError | None) -> None:
        if error is None and write.fault.kind == "corrupt":
            self._flip_a_bit(write)
        elif error is None and write.fault.kind in ENDS_WITH_ERROR:
            error = TransferError(f"injected: {write.fault.kind}, after {write.num_landed} of {len(write.local_pages)} pages")
        if write.fault.kind == "hold" and error is None and not write.over:
            self._later(write)
        else:
            self._end(write, error)

    def _flip_a_bit(self, write: Write) -> None:
        into, pages = (write.target, write.remote_pages) if write.op == "WRITE" else (self, write.local_pages)
        assert into is not None, "corrupt: the memory written to belongs to another process"
        assert into.memory is not None
        if len(pages):
            bit = int(write.fault.fraction * len(pages) * into.memory.page_nbytes * 8)
            page, bit_of_page = divmod(bit, into.memory.page_nbytes * 8)
            into.memory.rows()[pages[page], bit_of_page // 8] ^= np.uint8(1 << bit_of_page % 8)

    def _cut(self, peer: PeerId) -> None:
        for write in [write for write in self._writes.values() if write.peer == peer]:
            if write.num_landed is None:
                write.fault = Decision("cut", write.fault.fraction)
                self.move(write)
            elif math.isinf(write.due_s):  # with the inner backend
                write.fault = Decision("cut")
            else:
                self._end(write, TransferError("injected: cut, before the completion"))

    def _disconnect_writes(self, peer: PeerId) -> None:
        """Their tickets are over; with one_sided their bytes may still land."""
        for write in [write for write in self._writes.values() if write.peer == peer]:
            if write.num_landed is None or not math.isinf(write.due_s):
                self._end(write, TransferError("disconnected"))
                if self._faults.one_sided and write.num_landed is None and write.op == "WRITE":
                    self._faults.late.append(write)
            else:
                write.fault = NO_FAULT  # the inner backend ends it now

    def _end(self, write: Write, error: TransferError | None) -> None:
        if write in self._faults.late:
            self._faults.late.remove(write)
        if not write.over:
            write.over = True
            del self._writes[write.ticket]
            self.tickets.part_done(write.ticket, error)

    def _later(self, write: Write) -> None:
        pause_s = self._faults.delay_s * (0.1 + write.fault.fraction)
        write.due_s = self._faults.now() + pause_s
        if not self._faults.simulated:
            timer = threading.Timer(pause_s, self._timer_due)
            timer.daemon = True
            self._timers.add(timer)
            timer.start()

    def _timer_due(self) -> None:
        with self._faults.lock:
            self._timers.discard(threading.current_thread())  # type: ignore[arg-type]
            self.wake()


# ---- the wire ------------------------------------------------------------------------------------------------------------------


class FaultyWire:
    """Frames that leave through it meet the site's faults. What is late leaves when the endpoint's thread next wakes, at the latest
    for its next heartbeat."""

    def __init__(self, inner: Any, faults: Faults, site: str) -> None:
        self._inner = inner
        self._faults = faults
        self._site = site
        self._delayed: list[tuple[float, Any, bytes]] = []
        self._swapped: dict[Any, tuple[float, bytes]] = {}  # leaves after the next one, or when its time has come
        self._silent: set[Any] = set()
        self._cut: set[Any] = set()
        self._to_tell: list[tuple[Any, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, to: Any, frame: bytes) -> bool:
        if to in self._cut:
            return False
        if to in self._silent:
            return True
        fault = self._faults.decide(self._site)
        match fault.kind:
            case "drop":
                return True
            case "duplicate":
                return bool(self._inner.send(to, frame) and self._inner.send(to, frame))
            case "corrupt":
                return bool(self._inner.send(to, flipped(frame, fault.fraction)))
            case "delay":
                self._delayed.append((self._faults.now() + self._faults.delay_s * fault.fraction, to, frame))
                return True
            case "reorder":
                self._flush(to)
                self._swapped[to] = self._faults.now() + self._faults.delay_s, frame
                return True
            case "cut" | "partition":
                self._end(to, fault.kind)
                return True
        sent = bool(self._inner.send(to, frame))
        self._flush(to)
        return sent

    def frames(self) -> Iterator[Any]:
        now_s = self._faults.now()
        due, self._delayed = [late for late in self._delayed if late[0] <= now_s], [late for late in self._delayed if late[0] > now_s]
        for _, to, frame in due:
            self._send_late(to, frame)
        for to in [to for to, (due_s, _) in self._swapped.items() if due_s <= now_s]:
            self._flush(to)
        for received in self._inner.frames():
            if received[0] not in self._silent | self._cut:
                yield received

    def disconnected(self) -> list[tuple[Any, str]]:
        told, self._to_tell = self._to_tell, []
        return [*told, *self._inner.disconnected()]

    def close(self, *link: Any) -> None:
        if not link or link[0] not in self._cut:
            self._inner.close(*link)

    def _end(self, to: Any, kind: str) -> None:
        self._swapped.pop(to, None)
        if kind == "cut" and isinstance(self._inner, DealerWire):
            self._inner.close(to)
            self._cut.add(to)
            self._to_tell.append((to, "injected: cut"))
        else:
            self._silent.add(to)

    def _flush(self, to: Any) -> None:
        if to in self._swapped:
            self._send_late(to, self._swapped.pop(to)[1])

    def _send_late(self, to: Any, frame: bytes) -> None:
        if to not in self._silent | self._cut:
            self._inner.send(to, frame)


def flipped(frame: bytes, fraction: float) -> bytes:
    """One bit of it, at `fraction` of its length."""
    bit = int(fraction * len(frame) * 8)
    return frame[: bit // 8] + bytes([frame[bit // 8] ^ (1 << bit % 8)]) + frame[bit // 8 + 1 :]


def on_every_wire(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoints made from now on have faulty wires: sites "P wire" and "D wire"."""

    def faulty(kind: type, site: str) -> Callable[..., FaultyWire]:
        return lambda *arguments, **named: FaultyWire(kind(*arguments, **named), faults, site)

    monkeypatch.setattr("kvtransfer.endpoint.RouterWire", faulty(RouterWire, "P wire"))
    monkeypatch.setattr("kvtransfer.endpoint.DealerWire", faulty(DealerWire, "D wire"))
