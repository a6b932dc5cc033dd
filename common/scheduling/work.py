"""What a node computes: extend batches and decode batches, one a turn, and how a request without a room is served.

Turn rule: prefill first, for time to first token, but after `max_decode_delay_steps` extend batches in a row the running
requests get a decode step, so that decode is delayed by a bounded number of chunks and never starves. A retracted request whose
KV was copied to host memory runs again without a forward of its own: it takes no turn.

A step is planned while the one before it may still be under way (pipeline.py). Then its lengths are known, its tokens are not. A plan
that needs them is not made: plan() says None, and is asked again when the step has landed. That is so for a retraction, and for a
decode batch with a row whose next draw depends on what was drawn before (penalties).
"""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.engine.batch import NON_FINITE, DecodeBatch
from common.engine.launched import Launched, Runner
from common.errors import Failure
from common.scheduling.extending import Extending, ExtendPlan
from common.scheduling.finish import accept_token, accept_tokens
from common.scheduling.line import Line
from common.scheduling.logit_changes import LogitChangesOf
from common.scheduling.outbox import Outbox
from common.scheduling.pages import RequestPages
from common.scheduling.pipeline import Landed, Pipeline
from common.scheduling.request import Place, Request, non_finite_logits
from common.scheduling.rows import Rows
from common.scheduling.running import Running
from common.scheduling.spans import PREFILL, RECOMPUTE


@dataclass(frozen=True, slots=True)
class DecodePlan:
    requests: list[Request]  # row by row
    batch: DecodeBatch


Plan = ExtendPlan | DecodePlan


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a generation, and how many requests may hold pages at once."""

    eos_token_ids: frozenset[int]
    context_length: int
    max_running_requests: int
    max_decode_delay_steps: int
    chunked_prefill_size: int
    vocab_size: int
    overlap: bool  # plan a step while the one before it is under way


class Work:
    def __init__(self, runner: Runner, pages: RequestPages, outbox: Outbox, limits: Limits) -> None:
        self._runner = runner
        self.pages = pages
        self._outbox = outbox
        self._limits = limits
        self._may_end = limits.eos_token_ids | {NON_FINITE}
        self.pipeline: Pipeline[Plan] = Pipeline(1 if limits.overlap else 0)
        self.line = Line()
        self._rows = Rows(limits.max_running_requests)
        changes = LogitChangesOf(limits.eos_token_ids, limits.vocab_size)
        self.extending = Extending(pages, self.line, self._rows, changes, limits.chunked_prefill_size)
        self.running = Running(pages, self._rows, changes, limits.context_length)
        self._extends_in_a_row = 0
        self.num_extend_steps = 0
        self.num_decode_steps = 0
        self.num_extended_tokens = 0
        self.num_dropped_tokens = 0  # drawn for requests that had ended

    # ---- a turn -----------------------------------------------------------------------------------------------------

    def plan(self, elsewhere: Collection[Request] = ()) -> Plan | None:
        """What to launch next. None: nothing, or nothing before the oldest step under way has landed.
        elsewhere: requests that hold pages outside this object and will come to run."""
        self._bring_back(elsewhere)
        decode_is_due = len(self.running) > 0 and self._extends_in_a_row >= self._limits.max_decode_delay_steps
        if not decode_is_due and (plan := self._plan_extend(elsewhere)):
            return plan
        if self.running and not self._can_decode():
            return None
        # extending comes again behind decode: the last running request may have been retracted
        return self._plan_decode() or self._plan_extend(elsewhere)

    def admit_head(self, max_matched_tokens: int, elsewhere: Collection[Request]) -> bool:
        """Give the head of the line its pages, if a row and pages are there, and take it out; as RequestPages.admit()."""
        head = self.line.head
        if head is None or self.free_rows(elsewhere) <= 0 or not self.pages.admit(head, max_matched_tokens, self._reserve_pages(elsewhere)):
            return False
        self.line.pop()
        return True

    def free_rows(self, elsewhere: Collection[Request]) -> int:
        """How many more requests may hold pages."""
        return self._limits.max_running_requests - len(self.running) - len(self.extending) - len(elsewhere)

    def _reserve_pages(self, elsewhere: Collection[Request]) -> int:
        """The pages left for those that run or come to run to grow."""
        return self.running.growth_pages() + sum(map(self.pages.growth_pages, (*self.extending.requests, *elsewhere)))

    def _plan_extend(self, elsewhere: Collection[Request]) -> ExtendPlan | None:
        if not self.extending and self.line.head is None:
            return None
        plan = self.extending.plan(self.free_rows(elsewhere), lambda: self._reserve_pages(elsewhere))
        self._extends_in_a_row += plan is not None
        return plan

    def _can_decode(self) -> bool:
        """Is what the running rows need there: pages, if need be from others, and the history of those that look at it? False: not before
        the steps under way have landed."""
        if self.running.need_history and self.pipeline:
            return False
        while not self.running.grow():
            if self.pipeline:
                return False
            self.line.add_again(self.running.retract_newest())
        return True

    def _plan_decode(self) -> DecodePlan | None:
        self._extends_in_a_row = 0
        if not self.running:
            return None
        return DecodePlan(list(self.running.requests), self.running.next_batch())

    def _bring_back(self, elsewhere: Collection[Request]) -> None:
        """Let requests run again whose KV is in host memory, as long as they are the head of the line and pages are there."""
        while (head := self.line.head) and head.host_copy is not None and self.admit_head(head.num_tokens - 1, elsewhere):
            if self.pages.restore(head):
                self.running.join(head)
            else:
                self.extending.go_on(head)

    def launch(self, plan: Plan) -> Launched:
        """Have the model run: KV written, one token drawn for each row that samples. What is known of the outcome is written down."""
        if isinstance(plan, ExtendPlan):
            for request in plan.admitted:
                self._outbox.spans.admitted(request, RECOMPUTE if request.output_ids else PREFILL)
        launched_s = time.perf_counter()
        launched = self._runner.launch(plan.batch)
        self.pipeline.add(plan, launched, launched_s)
        step = self.pages.launched()
        if isinstance(plan, ExtendPlan):
            self.num_extend_steps += 1
            self.num_extended_tokens += len(plan.batch.token_ids)
            for request in self.extending.launched(plan, step):
                self.running.join(request, being_drawn=1)
        else:
            self.num_decode_steps += 1
            self.running.launched()
        return launched

    def landed(self, *, wait: bool) -> Iterator[Landed[Plan]]:
        """Steps that have run; the requests they name are to be given their tokens. wait: for one at least, if any is under way."""
        for landed in self.pipeline.landed(wait=wait):
            self.pages.landed()
            if isinstance(landed.plan, ExtendPlan):
                self.pages.backup.extended(len(landed.plan.batch.token_ids), landed.seconds)
            yield landed

    # ---- requests served here from prompt to end ---------------------------------------------------------------------

    def retire_decode(self, plan: DecodePlan, tokens: NDArray[np.int64]) -> None:
        """Hand out the step's tokens; requests that finish leave with their pages shared."""
        going_on, token_ids, others = accept_tokens(plan.requests, tokens.tolist(), self._may_end)
        self._outbox.next_tokens(going_on, token_ids)
        for request, token_id in others:
            self.retire(request, token_id)

    def retire(self, request: Request, token_id: int, *, share: bool = False) -> None:
        """The request has its next token. share: and it has KV that others may use from now on."""
        if request.place is not Place.RUNNING and request.place is not Place.FINISHING:
            self.num_dropped_tokens += 1  # it ended after the step was launched
        elif token_id == NON_FINITE:
            self.forget(request)
            self.end(request, non_finite_logits(request.rid))
        elif accept_token(request, token_id, self._limits.eos_token_ids, self._limits.context_length):
            self.forget(request)
            self._outbox.tokens(request)
            self._give_back(request)
        else:
            self._outbox.tokens(request)
            if share:
                self.pages.share(request)

    def drop(self, request: Request, *, share: bool) -> None:
        """Take the request out of whatever queue has it and give up its pages. share: its KV is sound and worth keeping."""
        self.forget(request)
        if share:
            self._give_back(request)
        else:
            self.pages.release(request)

    def forget(self, request: Request) -> None:
        """Take the request out of whatever queue has it; it keeps its pages."""
        if request.place is Place.RUNNING:
            self.running.remove(request)
        elif request.place is Place.EXTENDING:
            self.extending.remove(request)
        elif request.place in (Place.ARRIVING, Place.WAITING):
            self.line.remove(request)
        if request.place is not Place.OVER:
            request.place = Place.NOWHERE

    def end(self, request: Request, failure: Failure) -> None:
        """Answer with a failure; the KV may be wrong and is not shared."""
        self._outbox.failure(request, failure)
        self.pages.release(request)

    def _give_back(self, request: Request) -> None:
        self.pages.share(request)
        self.pages.release(request)

    # ---- figures ------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        counts = self.pages.cache.counts()
        num_arriving = self.line.num_arriving
        return {
            "running_requests": len(self.running),
            "extending_requests": len(self.extending),
            "waiting_requests": len(self.line) - num_arriving,
            "arriving_requests": num_arriving,
            "pages_free": counts.free,
            "pages_cached": counts.cached,
            "pages_held": counts.held,
            "pages_quarantined": counts.quarantined,
            "pages": counts.total,
            "extend_steps_total": self.num_extend_steps,
            "decode_steps_total": self.num_decode_steps,
            "extended_tokens_total": self.num_extended_tokens,
            'retracted_requests_total{way="swap"}': self.running.num_retracted_swap,
            'retracted_requests_total{way="recompute"}': self.running.num_retracted_recompute,
            **self.pages.backup.stats(),
            "requests_finished_total": self._outbox.num_finished,
            "requests_failed_total": self._outbox.num_failed,
            "output_tokens_total": self._outbox.num_output_tokens,
            "dropped_tokens_total": self.num_dropped_tokens,
            "steps_in_flight": len(self.pipeline),
        }
