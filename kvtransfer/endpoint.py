"""The transfer endpoint of a node: what the schedulers see of kvtransfer.

One thread per scheduler process owns the control sockets, the sessions (sender.py or receiver.py) and the backend; the scheduler's
calls are queued to it, its events are queued back. A thread, and not a call in the scheduler's loop, because a forward takes as
long as it takes: Closed, refusals and heartbeats must not wait for it, or a busy node would look dead to its peers. The scheduler's
process still owns the backend, through this thread.

    scheduler --commands--> thread: sockets -> sessions -> backend --events--> scheduler: poll()

The thread sleeps until a socket, a completion, a command or a timer is due. A defect in it is not survived: poll() raises it in the
scheduler, and the node goes down with its traceback. A command the tables forbid (a defect of the scheduler) fails its room alone.

Deadlines come as unix time and are turned into this process's monotonic clock here, once.
"""

import logging
import math
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import zmq

from common.cluster_key import ClusterKey
from common.errors import Failure, PdserveError
from kvtransfer.backend import PageIds, PeerId, TransferBackend
from kvtransfer.events import Delivered, Event, FirstToken, OfferJoined, PagesReturned, RoomFailed
from kvtransfer.failures import internal_error
from kvtransfer.figures import Stats
from kvtransfer.link import Address
from kvtransfer.machine import IllegalTransition
from kvtransfer.outgoing import Ready
from kvtransfer.protocol import MAX_ROOM
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.settings import TransferSettings
from kvtransfer.wire import DealerWire, RouterWire, ZmqContext, ZmqSocket

__all__ = [
    "DecodeEndpoint", "Delivered", "Event", "FirstToken", "OfferJoined", "PagesReturned", "PrefillEndpoint", "Ready", "RoomFailed",
    "TransferCrashed",
]  # fmt: skip

logger = logging.getLogger(__name__)

SHUTDOWN = Failure(503, "the node is shutting down", code="shutting_down", stage="transfer")
JOIN_TIMEOUT_S = 5.0
ZMQ_TICK_S = 1e-3  # it polls in whole milliseconds
ROUTE_GONE_S = 0.02  # P: ZMQ announces a connection's end a moment before its route is gone
LAST_FRAMES_S = 0.1  # D: and before its last frames are here; on a loaded machine its thread may be put aside between the two

Command = Callable[[float], None]  # takes the time


class TransferCrashed(PdserveError):
    """The transfer thread died of a defect, which is the cause of this error."""


class Wake:
    """An eventfd: readable from set() until clear(). Who clears it looks at what it announces afterwards, so a set() that finds it set
    already need not write: a write costs 100 us where it hands the core over."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_set = False

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        self._is_set = False  # after the read: a set() in between finds it set, and is looked at now

    def close(self) -> None:
        os.close(self.fd)


class Endpoint(ABC):
    """What both roles share: the thread, its two queues, and the rooms the scheduler has open.

    All methods are for the scheduler's thread and return at once; none raises for a room that ended meanwhile. peers() and stats()
    read the sessions' figures as they happen to be.
    """

    def __init__(self, settings: TransferSettings, backend: TransferBackend, session: Sender | Receiver, context: ZmqContext) -> None:
        self._settings = settings
        self._backend = backend
        self._session = session
        self._context = context
        self._commands: deque[tuple[int, Command]] = deque()  # producer: the scheduler; consumer: the thread
        self._events: deque[Event] = deque()  # producer: the thread; consumer: the scheduler
        self._command_wake = Wake()
        self._event_wake = Wake()
        self._rooms: set[int] = set()  # from expect() or offer() until poll() hands the terminal event out
        self._rooms_lock = threading.Lock()
        self._stopping = False
        self._closed = False
        self._defect: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    @property
    def incarnation(self) -> PeerId:
        return self._session.incarnation

    @property
    def page_nbytes(self) -> int:
        return self._settings.compat.page_nbytes

    @property
    def wake_fd(self) -> int:
        """Readable while poll() has something to return."""
        return self._event_wake.fd

    def poll(self) -> list[Event]:
        """Events since the last call. Raises TransferCrashed when the thread died."""
        if not self._closed:
            self._event_wake.clear()
        if self._defect is not None:
            raise TransferCrashed(f"the transfer thread died: {self._defect}") from self._defect
        events = [self._events.popleft() for _ in range(len(self._events))]
        with self._rooms_lock:
            self._rooms.difference_update(event.room for event in events if isinstance(event, Delivered | PagesReturned))
        return events

    def peers(self) -> list[dict[str, str]]:
        """{"endpoint", "state", "reason"} of each peer known."""
        return self._session.links.snapshot()

    def stats(self) -> Stats:
        """Rooms and peers by state, totals, times waited, writes (figures.py)."""
        return self._session.stats()

    def close(self) -> None:
        """End every room, tell the peers what can be told, stop the thread, release sockets and backend. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stopping = True
        self._command_wake.set()
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            raise TransferCrashed(f"the transfer thread did not stop within {JOIN_TIMEOUT_S:g} s")
        self._command_wake.close()
        self._event_wake.close()

    # ---- for the roles ------------------------------------------------------------------------------------------------------

    def _enter(self, room: int) -> Failure | None:
        """Take the room, or say why not."""
        if not 0 <= room <= MAX_ROOM:
            return Failure(400, f"bootstrap_room {room} is not in [0, 2**63)", param="bootstrap_room", stage="transfer")
        with self._rooms_lock:
            if room in self._rooms:
                return Failure(400, f"bootstrap_room {room} is taken; draw a new one", code="duplicate_room", stage="transfer")
            if len(self._rooms) >= self._settings.max_rooms:
                full = f"{len(self._rooms)} transfers are open already"
                return Failure(503, full, code="overloaded", stage="transfer", retry_after_s=1.0)
            self._rooms.add(room)
        return None

    def _call(self, room: int, command: Command) -> None:
        self._commands.append((room, command))
        self._command_wake.set()

    @abstractmethod
    def _receive(self, now_s: float) -> None:
        """Give the session what its wire has."""

    @abstractmethod
    def _sockets(self) -> Sequence[ZmqSocket | int]: ...

    @abstractmethod
    def _close_wire(self) -> None: ...

    def _next_due_s(self) -> float:
        return self._session.next_due_s()

    # ---- the thread -----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wait()
                self._step()
            self._shut_down()
        except BaseException as defect:
            logger.exception("transfer thread died")
            self._defect = defect
            self._event_wake.set()
        finally:
            self._backend.close()
            self._close_wire()
            self._context.term()  # waits for what lingers

    def _wait(self) -> None:
        timeout_s = self._next_due_s() - time.monotonic()
        poller = zmq.Poller()
        for polled in (*self._sockets(), self._command_wake.fd, self._backend.completion_fd()):
            poller.register(polled, zmq.POLLIN)
        if 0.0 < timeout_s < ZMQ_TICK_S:
            if not poller.poll(0):
                time.sleep(timeout_s)
        else:
            poller.poll(None if math.isinf(timeout_s) else max(math.ceil(timeout_s * 1e3), 0))

    def _step(self) -> None:
        """Inputs first, time last: a peer is not silent whose messages waited here. But a frame's time is taken when it is here: it must
        not lie before that of its departure, nor seem to, should this process be stopped in between (lease.py)."""
        self._command_wake.clear()
        now_s = time.monotonic()
        for _ in range(len(self._commands)):
            self._obey(*self._commands.popleft(), now_s)
        self._receive(now_s)
        self._session.poll_backend(now_s)
        self._session.tick(now_s)
        self._publish()

    def _obey(self, room: int, command: Command, now_s: float) -> None:
        try:
            command(now_s)
        except (IllegalTransition, ValueError) as error:
            logger.exception("room %d: the scheduler did what may not be done", room)
            self._session.fail(room, internal_error(error), now_s)

    def _publish(self) -> None:
        if self._session.events:
            self._events.extend(self._session.events)
            self._session.events.clear()
            self._event_wake.set()

    def _shut_down(self) -> None:
        now_s = time.monotonic()
        self._session.close(SHUTDOWN, now_s)
        self._backend.close()
        self._session.poll_backend(now_s)
        self._publish()


class PrefillEndpoint(Endpoint):
    """P's side."""

    def __init__(self, settings: TransferSettings, backend: TransferBackend, host: str, port: int, key: ClusterKey | None = None) -> None:
        """`backend` has its region. `host`, `port`: the control endpoint, 0 is a free port. Raises StartupError if it cannot be bound.
        With a `key` only decode nodes that have it are heard."""
        context: ZmqContext = zmq.Context()
        try:
            self._wire = RouterWire(context, host, port, key)
        except BaseException:
            context.destroy(linger=0)
            raise
        self.port = self._wire.port
        self._sender = Sender(settings, new_incarnation(), self._wire, backend, to_monotonic_s, time.monotonic)
        self._probe_at_s = math.inf
        super().__init__(settings, backend, self._sender, context)
        self._thread.start()

    def expect(self, room: int, num_prompt_tokens: int, prompt_digest: bytes, deadline_s: float, rid: str = "") -> Failure | None:
        """P's scheduler holds the request of `room`. Joined with D's offer (before or after): OfferJoined. Returns a
        Failure (and takes nothing) for a duplicate room or a full table. `deadline_s`: unix time. `rid`: for the log."""
        if refusal := self._enter(room):
            return refusal
        self._call(room, partial(self._sender.expect, room, num_prompt_tokens, prompt_digest, to_monotonic_s(deadline_s), rid=rid))
        return None

    def send_pages(self, room: int, first_page: int, local_pages: PageIds, ready: Ready | None = None) -> None:
        """Prompt pages [first_page, first_page + n) of the room are complete in `local_pages`, once `ready` has passed: write them to
        D's pages. They are gathered to post_tokens' worth; finish() sends the rest. Pages below the offer's decode_prefix_pages are
        skipped."""
        self._call(room, partial(self._sender.send_pages, room, first_page, np.array(local_pages, np.int32), ready=ready))

    def send_first_token(self, room: int, token_id: int, num_cached_tokens: int) -> None:
        """Token 1, to be streamed by D at once."""
        self._call(room, partial(self._sender.send_first_token, room, token_id, num_cached_tokens))

    def finish(self, room: int) -> None:
        """All pages and token 1 were handed over: Closed(DELIVERED) goes out when the writes have completed; then Delivered."""
        self._call(room, partial(self._sender.finish, room))

    def abort(self, room: int, failure: Failure) -> None:
        """Give the room up: Closed with `failure` goes out when no write is outstanding; then PagesReturned (no RoomFailed).
        For a room that was never expected (refused at intake): its offer, here or to come, is answered with `failure`; no event."""
        self._call(room, partial(self._sender.abort, room, failure))

    def _receive(self, now_s: float) -> None:
        for route, frame, observed_host in self._wire.frames():
            self._sender.on_frame(route, frame, observed_host, time.monotonic())
        if self._wire.tend(now_s):
            self._probe_at_s = now_s + ROUTE_GONE_S
        if self._probe_at_s <= now_s:
            self._probe_at_s = math.inf
            self._sender.links.probe(now_s)

    def _next_due_s(self) -> float:
        return min(self._probe_at_s, super()._next_due_s())

    def _sockets(self) -> Sequence[ZmqSocket | int]:
        return self._wire.sockets

    def _close_wire(self) -> None:
        self._wire.close()


class DecodeEndpoint(Endpoint):
    """D's side."""

    def __init__(self, settings: TransferSettings, backend: TransferBackend, key: ClusterKey | None = None) -> None:
        """`backend` has its region. With a `key` only prefill nodes that have it are talked to."""
        context: ZmqContext = zmq.Context()
        self._wire = DealerWire(context, key)
        self._receiver = Receiver(settings, new_incarnation(), self._wire, backend, time.monotonic)
        self._ended: list[tuple[float, int, str]] = []  # when to act on it, link, reason
        super().__init__(settings, backend, self._receiver, context)
        self._thread.start()

    def offer(
        self,
        room: int,
        host: str,
        port: int,
        num_prompt_tokens: int,
        prompt_digest: bytes,
        decode_prefix_pages: int,
        dst_pages: PageIds,
        deadline_s: float,
        rid: str = "",
    ) -> Failure | None:
        """Offer `dst_pages` (prompt pages from decode_prefix_pages on, in order) to the prefill node at host:port, connecting
        to it if need be. Returns a Failure (and takes nothing) for a duplicate room or a full table. `deadline_s`: unix time. `rid`: for
        the log."""
        if refusal := self._enter(room):
            return refusal
        pages = np.array(dst_pages, np.int32)
        offer = partial(self._receiver.offer, room, Address(host, port), num_prompt_tokens, prompt_digest, decode_prefix_pages, pages)
        self._call(room, partial(offer, to_monotonic_s(deadline_s), deadline_s, rid=rid))
        return None

    def withdraw(self, room: int, host: str, port: int, failure: Failure) -> None:
        """No offer will come for `room`: its request ended here before it had one. The prefill node at host:port is told, if it can
        be reached, so that its half ends at once with `failure`. No event."""
        if 0 <= room <= MAX_ROOM:
            self._call(room, partial(self._receiver.withdraw, room, Address(host, port), failure))

    def abort(self, room: int, failure: Failure) -> None:
        """D gives the room up: P is told; PagesReturned follows once P has closed it or is fenced (no RoomFailed)."""
        self._call(room, partial(self._receiver.abort, room, failure))

    def _receive(self, now_s: float) -> None:
        self._ended += [(now_s + LAST_FRAMES_S, link, reason) for link, reason in self._wire.disconnected()]
        for link, frame in self._wire.frames():
            self._receiver.on_frame(link, frame, time.monotonic())
        while self._ended and self._ended[0][0] <= now_s:
            _, link, reason = self._ended.pop(0)
            self._receiver.on_disconnected(link, reason, now_s)

    def _next_due_s(self) -> float:
        return min(self._ended[0][0] if self._ended else math.inf, super()._next_due_s())

    def _sockets(self) -> Sequence[ZmqSocket | int]:
        return self._wire.sockets

    def _close_wire(self) -> None:
        self._wire.close_all()


def new_incarnation() -> PeerId:
    """A name no other process, and no other start of this one, has."""
    return PeerId(secrets.token_hex(16))


def to_monotonic_s(unix_s: float) -> float:
    return unix_s - time.time() + time.monotonic()
