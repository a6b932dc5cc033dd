"""What two nodes of the `nixl` backend say to each other, and one of them as the other sees it.

NIXL lets whoever has the keys of a region write to it, and has no way to take them back. So the description in Hello has no keys:
it says how to reach the agent, and a secret. The keys travel in a message between the agents, to a peer that was accepted:

    ASK n           connect() was called, or the connection has been made anew; grants up to n are not taken any more: one that is on its way
                    still, from before a disconnect(), would be revoked a moment later
    GRANT n, keys   accept() was called: the peer may write. n is new for every grant
    REVOKE n        disconnect() was called: stop what is queued under grant n, and say OVER
    OVER n          nothing is outstanding under grants up to n, and nothing more will be posted: their fence has passed

Each message carries a proof that its sender knows both secrets, so only the two that met in Hello can speak to each other. A peer that does
not answer a REVOKE (dead, cut off, stopped) has its fence pass by time, see host_process.py.

A GRANT follows every accept(), so one ASK for each connection is enough; as messages may be lost with a connection, it is repeated while pages
wait. One Peer is one process at the other end: a grant may run in either direction. Requests that fail or are cut off are awaited all the same
before their connection is dropped. UCX is at its weakest where it connects to the same process again (ai-dynamo/nixl issue 1983,
ModelTC/LightLLM issue 1470), so that is done for a broken connection only, after a pause, and never towards a process that is seen to be gone.
"""

import hashlib
import hmac
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from kvtransfer.backend import Op, PageIds, PeerId, Ticket, TransferError
from kvtransfer.description import Description
from kvtransfer.host_process import HostProcess, is_gone
from kvtransfer.nixl_library import NixlAgent, Request

logger = logging.getLogger(__name__)

MAX_PARTS_IN_FLIGHT = 4  # of one peer; bounds what may still land after it was cut off
RECONNECT_MIN_S, RECONNECT_MAX_S = 1.0, 8.0  # pause before a broken connection is made anew; doubles. Each refused one costs UCX 1.23 a descriptor
ASK_AGAIN_S = 1.0  # while the queue waits: a message may be lost with its connection
GRANT_TIMEOUT_S = 3.0  # that the queue waits for; a peer that has not answered by then is as good as unreachable
ERROR_HOLD_S = 0.5  # from a failed request to its ticket: what UCX had given to a socket or a card has landed, or is lost with the connection
REMEMBER_S = 10.0  # a Peer after its end: what comes late of the former meeting is known as such, and what failed then has landed (FENCE_DELAY_S)
GIVE_UP_S = 30.0  # for requests that a lost peer keeps unfinished: longer than any transport of UCX tries (RC: 8 x 1 s, TCP: keepalive)

MAC_NBYTES = 32


class NixlDescription(Description, frozen=True, kw_only=True, tag="nixl"):
    agent: str
    contact: bytes
    secret: bytes
    base: int
    device: str
    process: HostProcess


class Message(msgspec.Struct, frozen=True, array_like=True):
    kind: Literal["ASK", "GRANT", "REVOKE", "OVER"]
    grant: int = 0
    keys: bytes = b""


_decoder = msgspec.msgpack.Decoder(Message)


@dataclass(slots=True, eq=False)
class Part:
    """One ticket's share that fits into one request."""

    op: Op
    ticket: Ticket
    local_pages: PageIds
    remote_pages: PageIds


@dataclass(slots=True, eq=False)
class Posted:
    """A request under way, or one that has failed, whose error is held back until `due_s`. `ticket`: None once disconnect() has completed it."""

    ticket: Ticket | None
    request: Request | None
    error: TransferError | None = None
    due_s: float = 0.0


@dataclass(slots=True, eq=False)
class Grant:
    """Ours to a peer. `over`: the peer has said so."""

    number: int
    over: bool = False


class Peer:
    def __init__(self, agent: NixlAgent, secret: bytes, theirs: NixlDescription, part_done: Callable[[Ticket, TransferError | None], None]) -> None:
        self.description = theirs
        self.connected_as: PeerId | None = None
        self.given: Grant | None = None  # what the peer may do to us
        self.has_told = False  # the peer about `given`
        self.rests_until_s = 0.0  # its last step has failed
        self._agent = agent
        self._key = hashlib.sha256(b"".join(sorted((secret, theirs.secret)))).digest()
        self._part_done = part_done
        self._loaded = False  # the agent has a connection
        self._keys = b""  # that the connection has
        self._taken = 0  # number of the grant under which we write; 0: none
        self._revoked = 0  # the highest number that was taken back or parted with: messages of two connections may overtake each other
        self._queue: deque[Part] = deque()
        self._in_flight: list[Posted] = []
        self._ending_since_s: float | None = None  # nothing more is posted under the present grant
        self._is_broken = False  # the connection
        self._clean = True  # no request has ever failed: then, and only then, is our word that nothing can land any more good
        self._ended_s = -math.inf  # disconnect(), or a request that failed
        self._is_gone = False  # its process: seen once, true for ever
        self._asked_s: float | None = None  # on this connection
        self._reconnect_at_s = 0.0  # not before
        self._pause_s = RECONNECT_MIN_S
        self._queued_since_s: float | None = None  # the queue waits for a grant
        self._shut_out = False  # revoked, and not granted anew since
        self._cause = ""  # why there may be no grant; not the error itself, whose traceback holds whoever called

    @property
    def is_wanted(self) -> bool:
        return self.connected_as is not None or self.given is not None

    @property
    def outstanding(self) -> list[Posted]:
        """A copy."""
        return list(self._in_flight)

    def awaits(self, posted: Posted) -> bool:
        return posted in self._in_flight

    def may_be_forgotten(self, now_s: float) -> bool:
        """A Peer made later for the same process knows nothing of this one's failures and revoked grants."""
        return not self.is_wanted and not self.is_moving and now_s - self._ended_s >= REMEMBER_S

    @property
    def is_moving(self) -> bool:
        """A step will find something to do before long."""
        return bool(self._in_flight or (self._taken and self._queue) or self._ending_since_s is not None)

    @property
    def is_waiting(self) -> bool:
        """For a message."""
        if self._is_gone:
            return False
        return bool(self._queue) or (self.connected_as is not None and not self._taken) or (self.given is not None and not self.has_told)

    # ---- for the backend ------------------------------------------------------------------------------------------------

    def submit(self, part: Part) -> None:
        """From any thread."""
        self._queue.append(part)

    def meet(self, now_s: float) -> None:
        """connect() or accept(): it is there, so no long pause before it is called again."""
        self._pause_s = RECONNECT_MIN_S
        self._reconnect_at_s = min(self._reconnect_at_s, now_s + RECONNECT_MIN_S)

    def part_with(self, now_s: float) -> None:
        """disconnect(): our tickets complete, the peer's grant is taken back."""
        error = TransferError(f"disconnected from {self.connected_as}")
        self._fail_queue(error)
        for posted in self._in_flight:
            if posted.ticket is not None:
                self._part_done(posted.ticket, posted.error or error)
                posted.ticket = None
        if self.given is not None and not self.given.over:
            self._say(Message("REVOKE", self.given.number), now_s)
        self.connected_as = self.given = None
        self._revoked = max(self._revoked, self._taken)
        self._shut_out, self._asked_s, self._queued_since_s, self._cause = False, None, None, ""
        self._ended_s = now_s
        self._end(now_s)
        self.step(now_s)

    def step(self, now_s: float) -> bool:
        """Whether something was posted or has ended."""
        moved = self._check(now_s)
        if self._ending_since_s is not None and (not self._in_flight or now_s - self._ending_since_s >= GIVE_UP_S):
            self._settle(now_s)
        if self._ending_since_s is not None:
            return moved
        if self.given is not None and not self.has_told and self._may_speak(now_s):
            self.has_told = self._say(Message("GRANT", self.given.number, self._agent.memory_keys()), now_s)
        if self._taken:
            return self._post(now_s) or moved
        if self.connected_as is not None:
            self._await_grant(now_s)
        return moved

    def abandon(self) -> None:
        """Nothing is awaited any more."""
        for posted in list(self._in_flight):
            posted.error = posted.error or TransferError(f"peer {self.connected_as}: a request did not end within {GIVE_UP_S:g} s")
            self._finish(posted)

    # ---- messages -------------------------------------------------------------------------------------------------------

    def hear(self, raw: bytes, now_s: float) -> Message | None:
        """The message, acted upon as far as it concerns what we do to the peer; None: it is not the peer's."""
        message = self._verified(raw)
        if message is None:
            return None
        match message.kind:
            case "GRANT" if self.connected_as is not None and not self._taken and self._ending_since_s is None and message.grant > self._revoked:
                self._take(message)
            case "REVOKE":
                self._revoked = max(self._revoked, message.grant)
                if 0 < self._taken <= message.grant:
                    self._shut_out = True
                    self._end(now_s)
                elif self._clean:
                    self._say(Message("OVER", message.grant), now_s)
        return message

    def _take(self, message: Message) -> None:
        try:
            self._connect()
            if message.keys != self._keys:
                self._agent.load(message.keys)
                self._keys = message.keys
        except TransferError as error:
            self._cause = str(error)
        else:
            self._taken, self._queued_since_s, self._shut_out, self._cause = message.grant, None, False, ""
            self._pause_s = RECONNECT_MIN_S

    def _verified(self, raw: bytes) -> Message | None:
        mac, body = raw[:MAC_NBYTES], raw[MAC_NBYTES:]
        if not hmac.compare_digest(mac, self._mac(self.description.agent, body)):
            return None
        try:
            return _decoder.decode(body)
        except msgspec.DecodeError:
            return None

    def _say(self, message: Message, now_s: float) -> bool:
        """False: the peer cannot be reached now. Only an ASK and a GRANT are worth a new connection."""
        if not self._loaded and message.kind in ("REVOKE", "OVER"):
            return False
        body = msgspec.msgpack.encode(message)
        try:
            self._connect()
            self._agent.notify(self.description.agent, self._mac(self._agent.name, body) + body)
        except TransferError as error:
            self._cause = str(error)
            self._broke(now_s)
            return False
        return True

    def _connect(self) -> None:
        if not self._loaded:
            self._agent.load(self.description.contact)
            self._loaded = True

    def _may_speak(self, now_s: float) -> bool:
        return self._loaded or (now_s >= self._reconnect_at_s and not self._has_gone())

    def _has_gone(self) -> bool:
        self._is_gone = self._is_gone or is_gone(self.description.process)
        return self._is_gone

    def _mac(self, sender: str, body: bytes) -> bytes:
        return hmac.digest(self._key, sender.encode() + b"\0" + body, "sha256")

    # ---- what we do to the peer -----------------------------------------------------------------------------------------

    def _await_grant(self, now_s: float) -> None:
        is_first = self._asked_s is None and not self._shut_out
        is_due = is_first or (self._queue and (self._asked_s is None or now_s - self._asked_s >= ASK_AGAIN_S))
        if is_due and self._may_speak(now_s) and self._say(Message("ASK", self._revoked), now_s):
            self._asked_s = now_s
        if not self._queue:
            self._queued_since_s = None
            return
        if self._queued_since_s is None:
            self._queued_since_s = now_s
        if self._shut_out:
            self._fail_queue(TransferError(f"peer {self.connected_as} has disconnected this node"))
        elif self._has_gone():
            self._fail_queue(TransferError(f"peer {self.connected_as}: its process has ended"))
        elif now_s - self._queued_since_s >= GRANT_TIMEOUT_S:
            self._queued_since_s = None
            cause = f" ({self._cause})" if self._cause else ""
            self._fail_queue(TransferError(f"peer {self.connected_as} does not answer, or has not accepted this node{cause}"))

    def _post(self, now_s: float) -> bool:
        theirs = self.description
        posted_one = False
        while self._queue and len(self._in_flight) < MAX_PARTS_IN_FLIGHT and self._ending_since_s is None:
            part = self._queue.popleft()
            posted = Posted(part.ticket, None)
            posted_one = True
            try:
                posted.request = self._agent.post(part.op, theirs.agent, part.local_pages, part.remote_pages, theirs.base, theirs.device)
            except TransferError as error:
                self._failed(posted, error, now_s)
            self._in_flight.append(posted)
        return posted_one

    def _check(self, now_s: float) -> bool:
        ended_one = False
        for posted in list(self._in_flight):
            try:
                ended = now_s >= posted.due_s if posted.request is None else self._agent.is_done(posted.request)
            except TransferError as error:
                self._failed(posted, error, now_s)
                continue
            if ended:
                ended_one = True
                self._finish(posted)
        return ended_one

    def _finish(self, posted: Posted) -> None:
        self._in_flight.remove(posted)
        self._release(posted)
        if posted.ticket is not None:
            self._part_done(posted.ticket, posted.error)

    def _failed(self, posted: Posted, cause: TransferError, now_s: float) -> None:
        self._release(posted)
        posted.error = TransferError(f"peer {self.connected_as}: {cause}")
        posted.due_s = now_s + ERROR_HOLD_S
        self._clean, self._ended_s = False, now_s
        self._broke(now_s)

    def _release(self, posted: Posted) -> None:
        request, posted.request = posted.request, None
        if request is None:
            return
        try:
            self._agent.release(request)
        except TransferError as error:  # it stays with the library; its ticket and its peer go on
            logger.warning("a request to agent %s cannot be released: %s", self.description.agent, error)

    def _fail_queue(self, error: TransferError) -> None:
        while self._queue:
            self._part_done(self._queue.popleft().ticket, error)

    def _end(self, now_s: float) -> None:
        if self._ending_since_s is None:
            self._ending_since_s = now_s

    def _broke(self, now_s: float) -> None:
        self._is_broken = True
        self._reconnect_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, RECONNECT_MAX_S)
        self._end(now_s)

    def _settle(self, now_s: float) -> None:
        """Nothing is outstanding under our grant, or nothing is awaited any more."""
        if self._in_flight:
            self._clean, self._ended_s = False, now_s
            self.abandon()
            self._is_broken = True
        if self._taken:
            self._revoked = max(self._revoked, self._taken)  # what was said to be over is not taken again
            if self._clean:
                self._say(Message("OVER", self._revoked), now_s)
        self._taken, self._ending_since_s, self._asked_s = 0, None, None
        if self._loaded and (self._is_broken or not self.is_wanted):
            self._loaded, self._is_broken, self._keys = False, False, b""
            try:
                self._agent.forget(self.description.agent)
            except TransferError as error:
                logger.warning("agent %s cannot be forgotten: %s", self.description.agent, error)
