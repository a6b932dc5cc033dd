"""The prefill node's scheduler: what P runs next, and when a page leaves for D.

A request with a room lives like this here:
    expect(room) -> OfferJoined -> waiting for pages -> extend batches, pages shipped as each chunk completes them
    -> token 1 sampled: FirstToken, finish(room) -> Delivered: answered, pages released (the radix tree keeps them)
Failure, abort or deadline give the room up; its pages stay until PagesReturned, because writes may still read them (R2).
A request without a room is served here from prompt to end, as on a decode node.
"""

import logging

import numpy as np
from numpy.typing import NDArray

from common.engine.batch import NON_FINITE
from common.engine.launched import Ready
from common.errors import Failure
from common.kvcache.events import KVEvents
from common.messages import Abort, AbortCause, Drain, Generate
from common.scheduling.extending import Chunk, ExtendPlan
from common.scheduling.finish import accept_token
from common.scheduling.intake import Intake
from common.scheduling.outbox import Outbox
from common.scheduling.pages import page_array
from common.scheduling.request import Place, Request, non_finite_logits, prompt_digest
from common.scheduling.spans import TRANSFER
from common.scheduling.table import RequestTable
from common.scheduling.work import DecodePlan, Limits, Plan, Work
from common.tracing import TRANSFER_BYTES, TRANSFER_PAGES
from kvtransfer.endpoint import Delivered, Event, OfferJoined, PagesReturned, PrefillEndpoint, RoomFailed

logger = logging.getLogger(__name__)

CANCELLED = Failure(499, "the prefill request was cancelled", code="cancelled", stage="prefill")


class PrefillScheduler:
    def __init__(
        self, work: Work, intake: Intake, outbox: Outbox, endpoint: PrefillEndpoint, limits: Limits, events: KVEvents | None = None
    ) -> None:
        self._work = work
        self._pages = work.pages
        self._intake = intake
        self._outbox = outbox
        self._endpoint = endpoint
        self._limits = limits
        self._events = events
        self._table = RequestTable()
        self._rooms: dict[int, Request] = {}  # until the endpoint is done with the room, answered or not

    def run(self) -> None:
        """Until drained."""
        while not self._table.drained:
            if not self.step() and not self._table.drained:
                self._intake.wait(min(self._outbox.heartbeat_due_in_s(), self._table.next_timer_in_s()))

    def step(self) -> bool:
        """Receive, plan, launch, retire, pump. False: there was nothing to do. With overlap, what is retired is the step launched before."""
        self._receive()
        plan = self._work.plan()
        if isinstance(plan, ExtendPlan):
            self._ship_cached(plan.admitted)
            self._ship_full_pages(plan, self._work.launch(plan).ready)
        elif isinstance(plan, DecodePlan):
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
        request = self._table.open(message, max_new_tokens=None if message.bootstrap is None else 1)
        # a roomed request takes no page here for its output: D does
        num_tokens = len(request.prompt_ids) + (request.max_new_tokens if request.bootstrap is None else 0)
        if refusal := self._pages.refusal(num_tokens):
            self._outbox.failure(request, refusal)
            if request.bootstrap is not None:
                self._endpoint.abort(request.bootstrap.room, refusal)  # answers D's offer
        elif request.bootstrap is None:
            self._work.extending.add(request)
        else:
            room = request.bootstrap.room
            digest = prompt_digest(request.prompt_ids)
            if refusal := self._endpoint.expect(room, len(request.prompt_ids), digest, request.deadline_unix_s, request.rid):
                self._outbox.failure(request, refusal)
            else:
                request.place = Place.ROOM
                self._rooms[room] = request

    def _on_event(self, event: Event) -> None:
        request = self._rooms.get(event.room)
        if request is None:
            logger.error("transfer event for a room this scheduler does not have: %s", event)
            return
        match event:
            case OfferJoined(_, decode_prefix_pages):
                if not request.over:
                    self._work.extending.add(request)
                if request.trace is not None:
                    request.trace.num_transfer_pages = self._pages.num_pages_for(len(request.prompt_ids)) - decode_prefix_pages
            case RoomFailed(_, failure):
                self._answer_failure(request, failure)
            case Delivered(room):
                self._end_transfer_span(request)
                self._outbox.tokens(request)
                self._leave_room(room, request)
            case PagesReturned(room):
                self._leave_room(room, request)

    # ---- ship -------------------------------------------------------------------------------------------------------

    def _ship_cached(self, admitted: list[Request]) -> None:
        """Pages found in the radix tree leave before the first forward; a step under way may be writing the last of them yet."""
        for request in admitted:
            self._ship(request, 0, request.num_computed_tokens // self._pages.page_size, self._work.pipeline.ready())

    def _ship_full_pages(self, plan: ExtendPlan, ready: Ready | None) -> None:
        """A page leaves when it is full, once the step that fills it has run; those of a last chunk go behind token 1, for which the
        client waits."""
        for chunk in plan.chunks:
            if not chunk.last:
                self._ship(chunk.request, chunk.start // self._pages.page_size, chunk.stop // self._pages.page_size, ready)

    def _ship(self, request: Request, first_page: int, stop_page: int, ready: Ready | None = None) -> None:
        if request.bootstrap is not None and stop_page > first_page:
            self._outbox.spans.begin(request, TRANSFER)
            self._endpoint.send_pages(request.bootstrap.room, first_page, page_array(request.pages[first_page:stop_page]), ready)

    # ---- retire -----------------------------------------------------------------------------------------------------

    def _retire(self, plan: Plan, tokens: NDArray[np.int64]) -> None:
        if isinstance(plan, DecodePlan):
            self._work.retire_decode(plan, tokens)
            return
        sampled = iter(tokens.tolist())
        for chunk in plan.chunks:
            if chunk.last:
                self._retire_prompt(chunk, next(sampled))

    def _retire_prompt(self, chunk: Chunk, token_id: int) -> None:
        request = chunk.request
        if request.bootstrap is None or request.over:
            self._work.retire(request, token_id, share=True)
        elif token_id == NON_FINITE:
            self._fail(request, non_finite_logits(request.rid))
        else:
            room = request.bootstrap.room
            self._outbox.spans.computed(request)
            self._pages.share(request)
            accept_token(request, token_id, self._limits.eos_token_ids, self._limits.context_length)
            self._endpoint.send_first_token(room, token_id, request.num_cached_tokens or 0)
            self._ship(request, chunk.start // self._pages.page_size, self._pages.num_pages_for(chunk.stop))
            self._endpoint.finish(room)

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _abort(self, request: Request, cause: AbortCause) -> None:
        """The text process has ended it: no output follows."""
        self._outbox.spans.aborted(request, cause)
        if request.bootstrap is None:
            self._work.drop(request, share=cause == "stop_string")
        else:
            self._work.forget(request)
            self._endpoint.abort(request.bootstrap.room, CANCELLED)
        request.place = Place.OVER

    def _fail(self, request: Request, failure: Failure) -> None:
        """This node ends it: the client is told, and D."""
        if request.bootstrap is None:
            self._work.forget(request)
            self._work.end(request, failure)
        else:
            self._endpoint.abort(request.bootstrap.room, failure)
            self._answer_failure(request, failure)

    def _answer_failure(self, request: Request, failure: Failure) -> None:
        """A roomed request ends; its pages stay until the endpoint returns them."""
        self._work.forget(request)
        self._outbox.failure(request, failure)

    def _leave_room(self, room: int, request: Request) -> None:
        del self._rooms[room]
        self._pages.release(request)

    def _end_transfer_span(self, request: Request) -> None:
        if request.trace is not None:
            num_pages = request.trace.num_transfer_pages
            self._outbox.spans.end(request, TRANSFER, {TRANSFER_PAGES: num_pages, TRANSFER_BYTES: num_pages * self._endpoint.page_nbytes})

    # ---- figures ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        return {**self._work.stats(), "open_requests": len(self._table), "rooms": len(self._rooms), **self._endpoint.stats()}
