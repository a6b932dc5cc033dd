"""Overload: who may go on, who waits, who is refused at once; and when those may come again.

    enter --> under way --> leave           the ordinary case: no task, no future
      │ └--> waiting --> under way           --max-concurrent-requests are under way; by waiting.py, when one of them leaves
      │         └--> 503 after --queue-timeout, 504 at the request's deadline, 429 when someone better needs its place
      └--> 429                               a rate or a key's limit, a full queue (--queue-size), a first token later than --ttft-slo

429 is for what is refused because of how much is asked, here or by this client: clients back off and come again (RFC 6585), and proxies that take
nodes with many 5xx out of service leave a router alone that sheds load as it should. 503 is for who was told to wait, in vain. Retry-After always
says when there will be room: when the rate allows the next request, when a request of this key should end, when the queue of now will have
been worked off, when the backlog will have shrunk to the objective. Estimates stay below MAX_RETRY_AFTER_S.

Whether the first token comes in time (ttft.py) is asked when a request comes, its wait in the queue included, and again when its turn comes.
Background requests (priority above 0) are refused earlier, so that they leave room for others: at priority 10 with half the objective. Under
overload a long prompt is refused where a short one still goes: it is the one that would come late.

What the nodes' load predicts is when the prompt would be computed; where the decode nodes' rows are what is short, it is when one becomes free: as
many requests as wait for one, times the time that a row is held, by the rows.

With --workers each process has its share of every limit (workers.py, keys.py). All happens in one thread, between two turns of the event loop.
"""

import asyncio
import math
import time
from collections.abc import Callable
from enum import Enum

from common.config import RouterConfig
from common.errors import Failure, RequestError, deadline_exceeded
from router.ask import Ask
from router.keys import PRIORITIES, Client
from router.nodes import NodeTable
from router.rate import Rate
from router.ttft import Mean, Sent, TtftModel
from router.waiting import WaitingRoom

MAX_RETRY_AFTER_S = 60.0  # of an estimate; openai-python takes a Retry-After of up to two minutes at its word
ROW_QUANTILE = 2.33  # sigma: rows become free at random, the n-th after n intervals and sqrt(n) of deviation; 99 of 100 have come by then
FIRST_SERVICE_S = 1.0  # how long a request is under way, before any has ended


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Ticket:
    """One request's. granted: None: go on; else await it: it raises RequestError when the wait is over without a turn."""

    __slots__ = ("_admission", "answering_since_s", "arrived_s", "ask", "client", "end_s", "granted", "priority", "sent", "since_s", "state", "timer")

    def __init__(self, admission: "Admission", client: Client, ask: Ask, priority: int, arrived_s: float, end_s: float) -> None:
        self._admission = admission
        self.client = client
        self.ask = ask
        self.priority = priority
        self.arrived_s = arrived_s
        self.end_s = end_s
        self.granted: asyncio.Future[None] | None = None
        # the admission's own
        self.state = State.RUNNING
        self.since_s = arrived_s  # under way since then
        self.answering_since_s: float | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.sent: Sent | None = None

    @property
    def waited_s(self) -> float:
        """In the queue, once it is under way."""
        return self.since_s - self.arrived_s

    def first_byte(self) -> None:
        """The first token is there: a stream's first byte, or the prompt is computed. What is predicted learns from when that is. Idempotent."""
        if self.sent is not None:
            self._admission.first_byte(self)

    def untimed(self) -> None:
        """Nobody will see when the first token is there: the answer comes in one piece, from a node that computes the prompt too. Idempotent."""
        self._admission.forget(self)

    def leave(self) -> None:
        """The request has ended, or its client has left. Idempotent."""
        if self.state is not State.ENDED:
            self._admission.left(self)


class Admission:
    """predicted_ttft_s: from a request's placing on, by the nodes' load; None: nothing is known. num_rows: of all decode nodes; None: not known.
    clock: of the event loop. loop: the running one if not given."""

    def __init__(self, config: RouterConfig, predicted_ttft_s: Callable[[Ask], float | None], clock: Callable[[], float] = time.monotonic, *,
                 num_rows: Callable[[], int | None] = lambda: None, loop: asyncio.AbstractEventLoop | None = None) -> None:  # fmt: skip
        self._most = config.max_concurrent_requests
        self._queue_size = config.queue_size
        self._queue_timeout_s = config.queue_timeout_s
        self._rate = Rate(config.rate_limit) if config.rate_limit > 0 else None
        self._slo_s = config.ttft_slo_s or math.inf
        self._ttft = None if config.ttft_slo_s is None else TtftModel(config.ttft_slo_s)
        self._predicted_ttft_s = predicted_ttft_s
        self._num_rows = num_rows
        self._clock = clock
        self._loop = loop
        self._waiting: WaitingRoom[Ticket] = WaitingRoom()
        self._service_s = Mean(FIRST_SERVICE_S)  # how long requests are under way, on average
        self._hold_s = Mean()  # how long from their first byte to their end
        self.num_running = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enter(self, client: Client, ask: Ask, priority: int | None, end_s: float) -> Ticket:
        """priority: what the request asks for, any number; None: nothing. end_s: its deadline, by the clock. Raises RequestError, and nothing
        has changed; else leave() is owed."""
        now_s = self._clock()
        self._check_limits(client, now_s)
        ticket = Ticket(self, client, ask, _priority(client, priority), now_s, end_s)
        if self.num_running < self._most:  # so nobody waits
            self._run(ticket, now_s)
        else:
            self._wait(ticket, now_s)
        client.num_open += 1
        for rate in (client.rate, self._rate):
            if rate is not None:
                rate.take(now_s)
        return ticket

    def first_byte(self, ticket: Ticket) -> None:
        """From the ticket."""
        assert self._ttft is not None
        assert ticket.sent is not None
        ticket.answering_since_s = self._clock()
        self._ttft.first_byte(ticket.sent, ticket.answering_since_s)
        ticket.sent = None

    def left(self, ticket: Ticket) -> None:
        """From the ticket, once."""
        if ticket.state is State.WAITING:
            self._waiting.remove(ticket)
            self._end_wait(ticket)
            return
        now_s = self._clock()
        ticket.state = State.ENDED
        ticket.client.num_open -= 1
        self.num_running -= 1
        self._service_s.add(now_s - ticket.since_s)
        if ticket.answering_since_s is not None:
            self._hold_s.add(now_s - ticket.answering_since_s)
        self.forget(ticket)
        self._grant(now_s)

    def forget(self, ticket: Ticket) -> None:
        """From the ticket: its first token is not waited for."""
        if self._ttft is not None and ticket.sent is not None:
            self._ttft.forget(ticket.sent)
            ticket.sent = None

    # ---- on arrival ---------------------------------------------------------------------------------------------------

    def _check_limits(self, client: Client, now_s: float) -> None:
        if client.max_open is not None and client.num_open >= client.max_open:
            text = f"{client.num_open} requests of key {client.name} are open, its limit; wait for one to end"
            raise _refused(text, "key_limit", self._service_s.value / client.num_open)
        if client.rate is not None and (wait_s := client.rate.wait_s(now_s)) > 0:
            raise _refused(f"key {client.name} asks more often than its limit allows", "key_rate_limit", wait_s, math.inf)
        if self._rate is not None and (wait_s := self._rate.wait_s(now_s)) > 0:
            raise _refused("more requests come than this router takes in a second (--rate-limit-requests-per-second)", "rate_limit", wait_s, math.inf)

    def _run(self, ticket: Ticket, now_s: float) -> None:
        """Raises RequestError when its first token would come too late."""
        if self._ttft is not None:
            predicted_s = self._check_first_token(ticket, self._ttft, now_s, 0.0)
            ticket.sent = self._ttft.sent(predicted_s, now_s)
        ticket.state = State.RUNNING
        ticket.since_s = now_s
        self.num_running += 1

    def _wait(self, ticket: Ticket, now_s: float) -> None:
        """Raises RequestError when there is no place, or no use in waiting."""
        if self._ttft is not None:
            self._check_first_token(ticket, self._ttft, now_s, self._turns_s(1 + self._waiting.num_ahead(ticket.client, ticket.priority)))
        if len(self._waiting) >= self._queue_size:
            displaced = self._waiting.displaced_by(ticket)
            if displaced is None:
                raise self._queue_full("this one has no place")
            self._waiting.remove(displaced)
            self._end_wait(displaced, self._queue_full("this one made way for another"))
        loop = self._loop or asyncio.get_running_loop()
        ticket.granted = loop.create_future()
        ticket.timer = loop.call_later(max(0.0, min(self._queue_timeout_s, ticket.end_s - now_s)), self._waited_in_vain, ticket)
        ticket.state = State.WAITING
        self._waiting.add(ticket)

    def _check_first_token(self, ticket: Ticket, ttft: TtftModel, now_s: float, wait_s: float) -> float:
        """wait_s: in the queue, from now. Returns what the nodes' load predicts. Raises RequestError when it would come too late."""
        row_wait_s = self._row_wait_s()
        predicted_s = max(self._predicted_ttft_s(ticket.ask) or 0.0, row_wait_s)  # nothing known: all is learnt
        slo_s = self._slo_s * (1.0 - max(0, ticket.priority) / (2 * PRIORITIES[-1]))
        limit_s = min(slo_s - (now_s - ticket.arrived_s), ticket.end_s - now_s) - wait_s
        doubtful = predicted_s > slo_s and row_wait_s <= limit_s and ttft.doubts(now_s)
        if not doubtful and not ttft.keeps(predicted_s, limit_s, now_s):
            late_s = max(predicted_s, ttft.bound_s(predicted_s, now_s)) - limit_s
            text = f"the first token would come {late_s:.2f} s later than {slo_s:g} s, the objective (--ttft-slo); try again when there is less load"
            raise _refused(text, "ttft_slo", late_s)
        return predicted_s

    def _row_wait_s(self) -> float:
        """Until a decode node has a row for one more request, where rows are what there is too little of."""
        num_rows = self._num_rows()
        if num_rows is None or self.num_running < num_rows:
            return 0.0
        excess = self.num_running + 1 - num_rows
        return (excess + ROW_QUANTILE * math.sqrt(excess)) * self._hold_s.value / max(1, num_rows)

    # ---- the queue ----------------------------------------------------------------------------------------------------

    def _grant(self, now_s: float) -> None:
        while self._waiting and self.num_running < self._most:
            ticket = self._waiting.take_next(now_s)
            try:
                if now_s >= ticket.end_s:
                    raise RequestError(deadline_exceeded("queue"))
                self._run(ticket, now_s)
            except RequestError as error:
                self._end_wait(ticket, error)
            else:
                self._answer(ticket, None)

    def _waited_in_vain(self, ticket: Ticket) -> None:
        self._waiting.remove(ticket)
        waited_s = self._clock() - ticket.arrived_s
        if ticket.end_s - ticket.arrived_s <= self._queue_timeout_s:
            self._end_wait(ticket, RequestError(deadline_exceeded("queue")))
            return
        text = f"no turn came within {waited_s:.1f} s (--queue-timeout); {self._most} requests are under way and {len(self._waiting)} more wait"
        self._end_wait(ticket, RequestError(Failure(503, text, code="queue_timeout", stage="queue", retry_after_s=self._retry_after_s())))

    def _end_wait(self, ticket: Ticket, error: RequestError | None = None) -> None:
        """It is out of the room; error None: nobody listens any more."""
        ticket.state = State.ENDED
        ticket.client.num_open -= 1
        self._answer(ticket, error)

    @staticmethod
    def _answer(ticket: Ticket, error: RequestError | None) -> None:
        assert ticket.granted is not None
        assert ticket.timer is not None
        ticket.timer.cancel()
        if ticket.granted.done():  # cancelled by who awaited it
            return
        if error is not None:
            ticket.granted.set_exception(error)
            ticket.granted.exception()  # seen: its client may have left by now
        elif ticket.state is State.RUNNING:
            ticket.granted.set_result(None)
        else:
            ticket.granted.cancel()

    def _queue_full(self, what: str) -> RequestError:
        text = f"{self._most} requests are under way and {self._queue_size} more wait, the limits (--max-concurrent-requests, --queue-size); {what}"
        return _refused(text, "queue_full", self._retry_after_s())

    def _retry_after_s(self) -> float:
        """Until those that wait now have had their turns."""
        return min(MAX_RETRY_AFTER_S, self._turns_s(1 + len(self._waiting)))

    def _turns_s(self, number: int) -> float:
        """By Little's law: in the time that one request is under way, all that are have ended."""
        return number * self._service_s.value / self._most


def num_decode_rows(nodes: NodeTable) -> int | None:
    """Rows that the usable decode nodes have for this process's requests; None when one of them does not say."""
    total = 0
    for node in nodes.decode:
        if node.usable and not node.draining:
            if node.info.max_running_requests is None:
                return None
            total += max(0, node.info.max_running_requests - node.decode_load.num_others)
    return total


def _priority(client: Client, asked: int | None) -> int:
    """No better than the client may, no worse than there is."""
    return min(PRIORITIES[-1], max(client.best_priority, client.default_priority if asked is None else asked))


def _refused(message: str, code: str, retry_after_s: float, most_s: float = MAX_RETRY_AFTER_S) -> RequestError:
    return RequestError(Failure(429, message, code=code, stage="queue", retry_after_s=min(retry_after_s, most_s)))
