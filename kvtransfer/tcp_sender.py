"""The calling half of the tcp backend: a lane is one connection to one peer, made when there is something to send.

A lane has two threads. The lane thread connects and sends the messages in their order; the reply thread receives the answers, in the
same order, READ pages straight into the pool. So a WRITE completes when the peer says that all its bytes are in its memory,
while later messages are already on their way.

When the connection breaks, messages without an answer are not simply failed: the peer may still hold bytes of them in its
kernel, and a page whose ticket failed may be reused at once. The lane therefore calls again, and only then knows:

    welcomed       the peer has ended the old connection; nothing of it can land now. The messages are sent once more, as a
                   broken connection is no fault of theirs; those that break MAX_ATTEMPTS connections fail
    refused        the peer has forgotten us, or another process sits behind its address: nothing can land. All fail
    nobody there   connection refused: the peer's process is gone, and its memory with it. All fail
    no answer      cut again, time-outs, no route: try again for FENCE_GIVE_UP_S, unless there is nothing to fence. Then all fail

stop() interrupts any of this, at any point: the socket is shut down, both threads are joined, the messages fail.
"""

import hmac
import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.backend import Op, PageIds, PeerId, Ticket, TransferError
from kvtransfer.pages import PageMemory
from kvtransfer.tcp_wire import (
    CHALLENGE,
    FRAME,
    HELLO,
    MAGIC,
    SILENT_PEER_S,
    VERSION,
    WELCOME,
    Frame,
    GuardedSocket,
    Identity,
    Kind,
    Verdict,
    WireError,
    check_magic,
    drop_unsent_on_close,
    proof,
    receive_all,
    receive_handshake,
    send_all,
    tune,
)

CONNECT_TIMEOUT_S = 5.0  # connect and handshake together
RETRY_PAUSE_S = 0.05
MAX_ATTEMPTS = 2
FENCE_GIVE_UP_S = SILENT_PEER_S  # by then the peer's kernel has ended the connection too, and what was buffered has long landed

ANSWERS: dict[Op, Kind] = {"WRITE": Kind.WRITTEN, "READ": Kind.PAGES}


@dataclass(slots=True, eq=False)
class Message:
    """One ticket's part: at most MAX_PAGES_PER_MESSAGE pages."""

    op: Op
    ticket: Ticket
    local_pages: PageIds
    remote_pages: PageIds
    attempts: int = 0
    sequence: int = 0  # on the connection that carries it


class Refused(Exception):
    """The peer, or whoever is behind its address now, answered and will not have us."""


NOTHING_CAN_LAND = (ConnectionRefusedError, WireError, Refused)  # failed calls after which the old connection is surely over


@dataclass(frozen=True, slots=True)
class Target:
    """Whom a lane calls, as whom."""

    peer: PeerId
    host: str  # a numeric address: resolving a name could not be interrupted
    port: int
    listener: Identity
    caller: Identity


class Lane:
    def __init__(self, target: Target, number: int, memory: PageMemory, part_done: Callable[[Ticket, TransferError | None], None]) -> None:
        self._target = target
        self._number = number
        self._memory = memory
        self._part_done = part_done
        self._changed = threading.Condition()  # guards all below
        self._waiting: deque[Message] = deque()
        self._unanswered: deque[Message] = deque()  # sent on the present connection, or being sent
        self._connection: GuardedSocket | None = None
        self._error: Exception | None = None  # what broke the present or the last connection
        self._broken_since_s: float | None = None  # a connection broke with messages unanswered, and nothing proves yet that it is over
        self._stopping = False
        self._thread: threading.Thread | None = None

    # ---- for the backend ------------------------------------------------------------------------------------------------

    @property
    def num_messages(self) -> int:
        """Not answered yet."""
        with self._changed:
            return len(self._waiting) + len(self._unanswered)

    def submit(self, message: Message) -> None:
        with self._changed:
            self._waiting.append(message)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"kv-send-{self._target.port}", daemon=True)
            self._thread.start()

    def interrupt(self) -> None:
        """First half of stop(), for stopping several lanes at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            if self._connection is not None:
                self._connection.shut()

    def stop(self) -> None:
        """When this returns, no thread of the lane is left and every message has ended."""
        self.interrupt()
        if self._thread is not None:
            self._thread.join()
        self._fail_all(TransferError(f"disconnected from {self._target.peer}"))

    # ---- lane thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_for_messages():
            try:
                connection = self._call()
            except Exception as error:  # whatever it is, it becomes the tickets' error: nobody waits for a thread that died
                self._after_failed_call(error)
            else:
                self._fail_exhausted()
                self._carry(connection)

    def _wait_for_messages(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            return not self._stopping

    def _call(self) -> GuardedSocket:
        """A new connection, welcomed by the peer. What it raises says why there is none."""
        family = socket.AF_INET6 if ":" in self._target.host else socket.AF_INET
        connection = GuardedSocket(socket.socket(family, socket.SOCK_STREAM))
        with self._changed:
            self._connection = connection
            if self._stopping:
                connection.shut()
        try:
            self._shake_hands(connection.raw, time.monotonic() + CONNECT_TIMEOUT_S)
        except BaseException:
            self._drop(connection)
            raise
        return connection

    def _shake_hands(self, raw: socket.socket, deadline_s: float) -> None:
        target = self._target
        raw.settimeout(CONNECT_TIMEOUT_S)
        raw.connect((target.host, target.port))
        if raw.getsockname() == raw.getpeername():  # nobody listens, and the kernel chose that very port for us
            raise ConnectionRefusedError("connected to itself")
        tune(raw)
        drop_unsent_on_close(raw)
        magic, version, nonce = CHALLENGE.unpack(receive_handshake(raw, CHALLENGE.size, deadline_s))
        check_magic(magic, version)
        lane, page_nbytes = self._number, self._memory.page_nbytes
        ours = proof(b"caller", target.listener, target.caller, nonce, lane, page_nbytes)
        raw.sendall(HELLO.pack(MAGIC, VERSION, lane, page_nbytes, target.caller.incarnation, ours))
        magic, version, verdict, theirs = WELCOME.unpack(receive_handshake(raw, WELCOME.size, deadline_s))
        check_magic(magic, version)
        if verdict != Verdict.WELCOME:
            raise Refused("it refused us: it has not accepted this node, or is another process behind the same address")
        if not hmac.compare_digest(theirs, proof(b"listener", target.listener, target.caller, nonce, lane, page_nbytes)):
            raise WireError("it does not know its own secret: another process behind the same address")
        raw.settimeout(None)

    def _after_failed_call(self, error: Exception) -> None:
        if self._stopping:
            return  # stop() interrupted the call, and fails the messages itself
        broken_since_s = self._broken_since_s
        if broken_since_s is None or isinstance(error, NOTHING_CAN_LAND) or time.monotonic() - broken_since_s > FENCE_GIVE_UP_S:
            cause = error if broken_since_s is None else self._error
            self._broken_since_s = None
            self._fail_all(self._transfer_error(cause))
        else:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, RETRY_PAUSE_S)

    def _fail_exhausted(self) -> None:
        """A new connection was welcomed, so the old one is over: fail the messages that have had all their attempts."""
        self._broken_since_s = None
        with self._changed:
            exhausted = [message for message in self._waiting if message.attempts >= MAX_ATTEMPTS]
            self._waiting = deque(message for message in self._waiting if message.attempts < MAX_ATTEMPTS)
        for message in exhausted:
            self._part_done(message.ticket, self._transfer_error(self._error))

    def _carry(self, connection: GuardedSocket) -> None:
        """Send messages until the connection breaks or the lane stops; what is unanswered then waits again, in front."""
        self._error = None
        replies = threading.Thread(target=self._receive_replies, args=(connection,), name=f"kv-reply-{self._target.port}", daemon=True)
        replies.start()
        try:
            for sequence in itertools.count():
                message = self._next_message(sequence)
                if message is None:
                    break
                self._send(connection.raw, message)
        except Exception as error:
            self._broke(connection, error)
        connection.shut()
        replies.join()
        self._drop(connection)
        with self._changed:
            if self._unanswered:
                self._broken_since_s = time.monotonic()
            self._waiting.extendleft(reversed(self._unanswered))
            self._unanswered.clear()

    def _next_message(self, sequence: int) -> Message | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._error or self._stopping)
            if self._error or self._stopping:
                return None
            message = self._waiting.popleft()
            message.attempts += 1
            message.sequence = sequence
            self._unanswered.append(message)
            return message

    def _send(self, raw: socket.socket, message: Message) -> None:
        frame = Frame(Kind[message.op], len(message.remote_pages), message.sequence)
        head: list[bytes | memoryview] = [frame.encode(), message.remote_pages.tobytes()]
        if message.op == "READ":
            send_all(raw, head)
            return
        for buffers in self._memory.iovecs(message.local_pages):
            send_all(raw, [*head, *buffers])
            head = []

    # ---- reply thread ---------------------------------------------------------------------------------------------------

    def _receive_replies(self, connection: GuardedSocket) -> None:
        raw = connection.raw
        header = bytearray(FRAME.size)
        try:
            while True:
                receive_all(raw, [header])
                message = self._answered(Frame.decode(header))
                if message.op == "READ":
                    for buffers in self._memory.iovecs(message.local_pages):
                        receive_all(raw, buffers)
                with self._changed:
                    self._unanswered.popleft()
                self._part_done(message.ticket, None)
        except Exception as error:
            self._broke(connection, error)

    def _answered(self, reply: Frame) -> Message:
        """The message that `reply` must belong to: the oldest one."""
        with self._changed:
            if self._unanswered:
                message = self._unanswered[0]
                if reply == Frame(ANSWERS[message.op], len(message.remote_pages), message.sequence):
                    return message
        raise WireError(f"{reply} answers nothing that was asked")

    # ---- both -----------------------------------------------------------------------------------------------------------

    def _broke(self, connection: GuardedSocket, error: Exception) -> None:
        """Note the first cause and wake the other thread. The kernel tells the cause once, to one of the two; the other hears
        "broken pipe", perhaps first, and that is never a cause."""
        with self._changed:
            if self._error is None or isinstance(self._error, BrokenPipeError):
                self._error = error
            self._changed.notify_all()
        connection.shut()

    def _drop(self, connection: GuardedSocket) -> None:
        with self._changed:
            self._connection = None
        connection.close()

    def _fail_all(self, error: TransferError) -> None:
        with self._changed:
            messages = [*self._unanswered, *self._waiting]
            self._unanswered.clear()
            self._waiting.clear()
        for message in messages:
            self._part_done(message.ticket, error)

    def _transfer_error(self, cause: Exception | None) -> TransferError:
        target = self._target
        return TransferError(f"peer {target.peer} at {target.host}:{target.port}: {cause}")
