"""The ZMQ ends of the control channel: a ROUTER on P, one DEALER a link on D.

A DEALER here makes one connection attempt and at most one connection, and never reconnects (RECONNECT_IVL -1): what was queued for
one process cannot reach the next one behind the same address. Its monitor says at once when the attempt failed or the connection
ended, which the kernel notices in milliseconds when the peer's process dies. The ROUTER cannot say whose connection ended; its
monitor says that one did, and a probe finds the route (ROUTER_MANDATORY makes a send to a route that is gone fail).

Nothing blocks; host names are looked up in threads beside (names.py).

Frames are bounded in size and queues in length; a peer that lets its queue fill counts as gone. Bytes that are no
ZMQ on these ports end their own connection and nothing else.

With a cluster key the connections are authenticated and encrypted (curve.py), and one between two nodes that do not both have the
same key, or both none, ends in its handshake. Both ends log that; which of them hears the reason, and which only that the other hung
up, is a matter of microseconds.
"""

import ipaddress
import itertools
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from common.cluster_key import ClusterKey
from common.errors import StartupError
from kvtransfer.curve import MAX_OVERHEAD_NBYTES, Caller, Gate
from kvtransfer.link import Address, RareWarning
from kvtransfer.names import Names
from kvtransfer.protocol import MAX_FRAME_NBYTES

ZmqContext = zmq.Context[zmq.Socket[bytes]]
ZmqSocket = zmq.Socket[bytes]

logger = logging.getLogger(__name__)

MAX_QUEUED_FRAMES = 10_000  # per connection: more than a node has rooms
MAX_FRAMES_A_STEP = 256  # then timers and commands get their turn, whoever floods us
LINGER_MS = 200  # a last Closed or Cancel still leaves; a dead peer does not hold up exit
HANDSHAKE_MS = 3000  # P gives a caller so long; D has its own timer for Hello, which includes the handshake

HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
ROUTER_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
DEALER_EVENTS = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
REASONS: dict[int, str] = {zmq.EVENT_CLOSED: "connection refused", zmq.EVENT_DISCONNECTED: "its connection ended"}
UNKNOWN = "an unknown address"
NO_KEY = "it does not have this cluster's key (--cluster-key-file)"
NO_HANDSHAKE = "control handshake refused: is the same --cluster-key-file given on both nodes, and is this a prefill node's bootstrap port?"

_monitor_numbers = itertools.count()  # names of inproc addresses, unique in the process


class Monitor:
    """Connection events of one socket, and why."""

    def __init__(self, context: ZmqContext, watched: ZmqSocket, events: int) -> None:
        address = f"inproc://kvtransfer-monitor-{next(_monitor_numbers)}"
        watched.monitor(address, events)
        self._watched = watched
        self.socket = context.socket(zmq.PAIR)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(address)

    def take(self) -> list[tuple[int, int]]:
        """(event, its value) in the order they happened."""
        events: list[tuple[int, int]] = []
        with suppress(zmq.Again):
            while True:
                message = recv_monitor_message(self.socket, zmq.NOBLOCK)
                events.append((message["event"], message["value"]))
        return events

    def close(self) -> None:
        """Before the watched socket is closed, whose end would otherwise wait for this one."""
        self._watched.disable_monitor()
        self.socket.close()


def _open(context: ZmqContext, kind: int) -> ZmqSocket:
    opened: ZmqSocket = context.socket(kind)
    opened.set(zmq.LINGER, LINGER_MS)
    opened.set(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES + MAX_OVERHEAD_NBYTES)
    opened.set(zmq.SNDHWM, MAX_QUEUED_FRAMES)
    opened.set(zmq.RCVHWM, MAX_QUEUED_FRAMES)
    return opened


class RouterWire:
    """P's end (link.AcceptWire)."""

    def __init__(self, context: ZmqContext, host: str, port: int, key: ClusterKey | None = None) -> None:
        """Raises StartupError when host:port cannot be bound. Port 0: a free one. With a `key` only its holders are let in."""
        self._gate = None if key is None else Gate(context, key)
        self._socket = _open(context, zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if self._gate is not None:
            self._gate.secure(self._socket)
        self._monitor = Monitor(context, self._socket, ROUTER_EVENTS)
        self._callers: dict[int, str] = {}  # descriptor of each connection -> numeric address
        self._refused = ""  # why the handshake failed of the connection whose end is the next event: ZMQ's one I/O thread tells both in a row
        self._warn = RareWarning(logger)
        try:
            numeric = _numeric(host)
            self._socket.set(zmq.IPV6, ":" in numeric)
            self._socket.bind(f"tcp://{Address(numeric, port)}")
        except (OSError, zmq.ZMQError) as error:
            self.close()
            refused = f"control endpoint {Address(host, port)} cannot be bound: {error}"
            raise StartupError(f"{refused}; choose another --bootstrap-port or --host") from error
        self.port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    @property
    def sockets(self) -> list[ZmqSocket]:
        """To be polled for reading."""
        gate = [] if self._gate is None else [self._gate.socket]
        return [self._socket, self._monitor.socket, *gate]

    def send(self, route: bytes, frame: bytes) -> bool:
        try:
            self._socket.send_multipart([route, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def frames(self) -> Iterator[tuple[bytes, bytes, str | None]]:
        """(route, frame, numeric address of the peer) of each message that waits. Others' multipart messages are passed over."""
        with suppress(zmq.Again):
            for _ in range(MAX_FRAMES_A_STEP):
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                if len(parts) == 2:
                    yield parts[0].bytes, parts[1].bytes, _peer_address(parts[1])

    def tend(self, now_s: float) -> bool:
        """Decide on connections that are being made. True when one has ended that had been made."""
        for address in self._gate.answer() if self._gate is not None else ():
            self._warn_refused(now_s, address, NO_KEY)
        ended = False
        for event, value in self._monitor.take():
            if event == zmq.EVENT_ACCEPTED:
                self._callers[value] = _caller_behind(value, self.port)
            elif event != zmq.EVENT_DISCONNECTED:
                self._refused = self._reason(event, value)
            else:
                address = self._callers.pop(value, UNKNOWN)
                if self._refused:
                    self._warn_refused(now_s, address, self._refused)
                ended |= not self._refused
                self._refused = ""
        return ended

    def _warn_refused(self, now_s: float, address: str, reason: str) -> None:
        self._warn(now_s, f"control connection from {address} refused: {reason}")

    def _reason(self, event: int, value: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return "it did not finish the handshake, as a port probe, or a node that does not have the same --cluster-key-file"
        if self._gate is not None:
            return NO_KEY
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "it asks for a key, and this node has none (--cluster-key-file)"
        return "it does not speak this protocol"

    def close(self) -> None:
        self._monitor.close()
        self._socket.close()
        if self._gate is not None:
            self._gate.close()


class DealerWire:
    """D's end (link.DialWire)."""

    def __init__(self, context: ZmqContext, key: ClusterKey | None = None) -> None:
        """With a `key` only its holders are talked to."""
        self._context = context
        self._caller = None if key is None else Caller(key)
        self._next_link = 1
        self._links: dict[int, tuple[ZmqSocket, Monitor]] = {}
        self._names = Names()
        self._unresolved: dict[int, tuple[Address, list[bytes]]] = {}  # links whose name is being looked up, with the frames sent so far

    @property
    def sockets(self) -> list[ZmqSocket | int]:
        """To be polled for reading."""
        return [self._names.fd, *(polled for dealer, monitor in self._links.values() for polled in (dealer, monitor.socket))]

    def open(self, address: Address) -> int:
        link = self._next_link
        if _is_numeric(address.host):
            self._connect(link, address)
        else:
            self._names.look_up(link, address.host)
            self._unresolved[link] = address, []
        self._next_link += 1
        return link

    def _connect(self, link: int, address: Address) -> None:
        """Raises ValueError for an address that cannot be one."""
        dealer = _open(self._context, zmq.DEALER)
        dealer.set(zmq.RECONNECT_IVL, -1)
        dealer.set(zmq.IPV6, ":" in address.host)
        dealer.set(zmq.HANDSHAKE_IVL, 0)
        if self._caller is not None:
            self._caller.secure(dealer)
        monitor = Monitor(self._context, dealer, DEALER_EVENTS)
        try:
            dealer.connect(f"tcp://{address}")
        except (zmq.ZMQError, ValueError, UnicodeError) as error:
            monitor.close()
            dealer.close(linger=0)
            raise ValueError(f"not an address: {error}") from error
        self._links[link] = dealer, monitor

    def send(self, link: int, frame: bytes) -> bool:
        if link in self._unresolved:
            frames = self._unresolved[link][1]
            frames.append(frame)
            return len(frames) <= MAX_QUEUED_FRAMES
        if link not in self._links:
            return False
        try:
            self._links[link][0].send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """(link, frame) of each message that waits."""
        for link, (dealer, _) in list(self._links.items()):
            with suppress(zmq.Again):
                while not dealer.closed:
                    parts = dealer.recv_multipart(zmq.NOBLOCK)
                    if len(parts) == 1:
                        yield link, parts[0]

    def disconnected(self) -> list[tuple[int, str]]:
        """Links that are over, and why. Their last frames may still be on the way through ZMQ."""
        ended = self._resolve()
        for link, (_, monitor) in self._links.items():
            if events := monitor.take():
                ended.append((link, REASONS.get(events[0][0], NO_HANDSHAKE)))
        return ended

    def _resolve(self) -> list[tuple[int, str]]:
        """Connect the links whose names have been looked up; those that cannot be, and why."""
        failed = []
        for link, numeric, reason in self._names.answers():
            if link not in self._unresolved:
                continue  # closed meanwhile
            address, frames = self._unresolved[link]
            if not numeric:
                failed.append((link, reason))
                continue
            del self._unresolved[link]
            try:
                self._connect(link, Address(numeric, address.port))
            except ValueError as error:
                failed.append((link, str(error)))
                continue
            for frame in frames:
                self.send(link, frame)
        return failed

    def close(self, link: int) -> None:
        self._unresolved.pop(link, None)
        if link in self._links:
            dealer, monitor = self._links.pop(link)
            monitor.close()
            dealer.close()

    def close_all(self) -> None:
        for link in list(self._links):
            self.close(link)
        self._names.close()


def _numeric(host: str) -> str:
    """ZMQ binds numeric addresses only. Raises OSError for a name that does not resolve."""
    return str(socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)[0][4][0])


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _caller_behind(descriptor: int, port: int) -> str:
    """Who made this connection to our `port`: best effort, for the log, since ZMQ owns it and may have closed it by now."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.getsockname()[1] == port:
            return str(connection.getpeername()[0])
    return UNKNOWN


def _peer_address(frame: zmq.Frame) -> str | None:
    try:
        address = frame.get("Peer-Address")
    except zmq.ZMQError:
        return None
    return address if isinstance(address, str) else None
