"""The decode node's scheduler: what D admits, runs, retracts and frees.

A request with a room lives like this here:
    arriving: waits for a row and pages, then offer(room, pages) -> FirstToken: streamed at once -> Delivered: joins the decode batch
If the transfer fails before token 1 was streamed, the client gets the failure (the router may try another pair); after it, the
prompt is computed here and the answer goes on. Either way the offered pages are quarantined until PagesReturned: P may still
write them (R2). A request that ends here before its offer is withdrawn, so that its other half on P ends too. A request without a
room is served here from prompt to end: a decode node alone is a complete server.
"""

import logging

import numpy as np
from numpy.typing import NDArray

from common.errors import Failure
from common.kvcache.events import KVEvents
from common.messages import Abort, AbortCause, Drain, Generate
from common.scheduling.finish import accept_token
from common.scheduling.intake import Intake
from common.scheduling.outbox import Outbox
from common.scheduling.pages import page_array
from common.scheduling.request import Place, Request, prompt_digest
from common.scheduling.spans import WAITING_FOR_KV
from common.scheduling.table import RequestTable
from common.scheduling.work import DecodePlan, Limits, Plan, Work
from kvtransfer.endpoint import DecodeEndpoint, Delivered, Event, FirstToken, PagesReturned, RoomFailed

logger = logging.getLogger(__name__)

CANCELLED = Failure(499, "the decode request was cancelled", code="cancelled", stage="decode")


class DecodeScheduler:
    def __init__(
        self, work: Work, intake: Intake, outbox: Outbox, endpoint: DecodeEndpoint, limits: Limits, events: KVEvents | None = None
    ) -> None:
        self._work = work
        self._pages = work.pages
        self._intake = intake
        self._outbox = outbox
        self._endpoint = endpoint
        self._limits = limits
        self._events = events
        self._table = RequestTable()
        self._rooms: dict[int, Request] = {}  # offered, not delivered
        self._quarantine: dict[int, NDArray[np.int32]] = {}  # room -> pages its writer may still write
        self._num_recomputed = 0

    def run(self) -> None:
        """Until drained."""
        while not self._table.drained:
            if not self.step() and not self._table.drained:
                self._intake.wait(min(self._outbox.heartbeat_due_in_s(), self._table.next_timer_in_s()))

    def step(self) -> bool:
        """Receive, plan, launch, retire, pump. False: there was nothing to do. With overlap, what is retired is the step launched before."""
        self._receive()
        self._offer_admitted()
        plan = self._work.plan(self._rooms.values())
        if plan is not None:
            self._work.launch(plan)
        worked = plan is not None
        for step in self._work.landed(wait=plan is None):
            self._retire(step.plan, step.tokens)
            worked = True
        self._table.forget(self._outbox.flush())
        self._outbox.heartbeat(self.stats, self._endpoint.peers)
        return (self._events is not None and self._events.publish()) or worked

    # ---- receive ----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for message in self._intake.messages():
            match message:
                case Generate():
                    self._open(message)
                case Abort(rid, cause):
                    if request := self._table.take(rid):
                        self._abort(request, cause)
                case Drain(deadline_s):
                    self._table.drain(deadline_s)
        for event in self._endpoint.poll():
            self._on_event(event)
        for request, failure in self._table.expired():
            self._fail(request, failure)

    def _open(self, message: Generate) -> None:
        request = self._table.open(message)
        if refusal := self._pages.refusal(len(request.prompt_ids) + request.max_new_tokens):
            self._outbox.failure(request, refusal)
            self._withdraw(request, refusal)
        elif request.bootstrap is None:
            self._work.extending.add(request)
        else:
            self._work.line.add(request, Place.ARRIVING)

    def _offer_admitted(self) -> None:
        """Reserve pages for arriving requests at the head of the line and offer them to their prefill nodes. No pages: they wait.
        That is the back-pressure."""
        while (head := self._work.line.head) and head.place is Place.ARRIVING:
            if not self._work.admit_head(len(head.prompt_ids), self._rooms.values()):
                return
            self._offer(head)

    def _offer(self, request: Request) -> None:
        assert request.bootstrap is not None
        to = request.bootstrap
        num_prefix_pages = request.num_computed_tokens // self._pages.page_size
        refusal = self._endpoint.offer(
            to.room, to.host, to.port, len(request.prompt_ids), prompt_digest(request.prompt_ids),
            num_prefix_pages, page_array(request.pages[num_prefix_pages:]), request.deadline_unix_s,
            request.rid,
        )  # fmt: skip
        if refusal:
            self._outbox.failure(request, refusal)
            self._pages.release(request)
            self._withdraw(request, refusal)
        else:
            request.place = Place.ROOM
            self._rooms[to.room] = request
            self._outbox.spans.admitted(request, WAITING_FOR_KV)

    def _on_event(self, event: Event) -> None:
        match event:
            case FirstToken(room, token_id, num_cached_tokens):
                if (request := self._rooms.get(room)) and not request.over:
                    self._stream_first(request, token_id, num_cached_tokens)
            case Delivered(room) if room in self._rooms:
                self._start(self._rooms.pop(room))
            case RoomFailed(room, failure):
                if request := self._rooms.get(room):
                    self._lose_room(request, failure)
            case Delivered(room) | PagesReturned(room):  # delivered: it crossed our abort, the pages are ours again all the same
                self._pages.cache.release_quarantined(self._quarantine.pop(room))

    def _stream_first(self, request: Request, token_id: int, num_cached_tokens: int) -> None:
        request.prefill_site = "remote"
        request.num_cached_tokens = num_cached_tokens
        accept_token(request, token_id, self._limits.eos_token_ids, self._limits.context_length)
        self._outbox.tokens(request)

    def _start(self, request: Request) -> None:
        """Every prompt page is here. Token 1 may have ended the request, and so may its client."""
        self._outbox.spans.end(request, WAITING_FOR_KV)
        request.num_computed_tokens = len(request.prompt_ids)
        self._pages.share(request)
        if request.over:
            self._pages.release(request)
        else:
            self._work.running.join(request)

    # ---- retire -----------------------------------------------------------------------------------------------------

    def _retire(self, plan: Plan, tokens: NDArray[np.int64]) -> None:
        if isinstance(plan, DecodePlan):
            self._work.retire_decode(plan, tokens)
            return
        sampled = iter(tokens.tolist())
        for chunk in plan.chunks:
            if chunk.last:
                self._work.retire(chunk.request, next(sampled), share=True)

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _lose_room(self, request: Request, failure: Failure) -> None:
        self._quarantine_pages(request)
        self._outbox.spans.end(request, WAITING_FOR_KV, error=failure.message)
        if request.over:
            return
        if request.output_ids:
            logger.warning("request %s: %s; its prompt is computed here", request.rid, failure.message)
            self._num_recomputed += 1
            request.prefill_site = "local"
            self._work.line.add_again(request)
        else:
            self._outbox.failure(request, failure)

    def _abort(self, request: Request, cause: AbortCause) -> None:
        """The text process has ended it: no output follows."""
        self._outbox.spans.aborted(request, cause)
        if not self._leave(request, CANCELLED):
            self._work.drop(request, share=cause == "stop_string")
        request.place = Place.OVER

    def _fail(self, request: Request, failure: Failure) -> None:
        """This node ends it: the client is told, and P."""
        if self._leave(request, failure):
            self._outbox.failure(request, failure)
        else:
            self._work.forget(request)
            self._work.end(request, failure)

    def _leave(self, request: Request, failure: Failure) -> bool:
        """End a request that is arriving or in its room. False: it is in neither."""
        if request.place is Place.ARRIVING:
            self._work.line.remove(request)
            self._withdraw(request, failure)
            return True
        if request.bootstrap is not None and self._rooms.get(request.bootstrap.room) is request:
            self._endpoint.abort(request.bootstrap.room, failure)
            self._quarantine_pages(request)
            return True
        return False

    def _withdraw(self, request: Request, failure: Failure) -> None:
        """The request ended before it was offered: P need not wait for an offer. Unless it was a duplicate: the room is another's."""
        to = request.bootstrap
        if to is not None and not (to.room in self._rooms or to.room in self._quarantine or self._work.line.has_room(to.room)):
            self._endpoint.withdraw(to.room, to.host, to.port, failure)

    def _quarantine_pages(self, request: Request) -> None:
        """The room is over, but its pages may still be written: keep them from reuse until PagesReturned."""
        assert request.bootstrap is not None
        room = request.bootstrap.room
        del self._rooms[room]
        num_prefix_pages = request.num_computed_tokens // self._pages.page_size
        pages = self._pages.take(request)
        self._pages.cache.release(pages[:num_prefix_pages])
        self._pages.cache.quarantine(pages[num_prefix_pages:])
        self._quarantine[room] = pages[num_prefix_pages:]

    # ---- figures ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        return {
            **self._work.stats(),
            "open_requests": len(self._table),
            "rooms": len(self._rooms),
            "rooms_quarantined": len(self._quarantine),
            "recomputed_requests_total": self._num_recomputed,
            **self._endpoint.stats(),
        }
