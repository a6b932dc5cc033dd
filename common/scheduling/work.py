"""What a node computes: extend batches and decode batches, one a turn, and how a request without a room is served.

Turn rule: prefill first, for time to first token, but after `max_decode_delay_steps` extend batches in a row the running
requests get a decode step, so that decode is delayed by a bounded number of chunks and never starves. A retracted request whose
KV was copied to host memory runs again without a forward of its own: it takes no turn.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.engine.batch import DecodeBatch
from common.engine.runner import Runner
from common.errors import Failure
from common.scheduling.extending import Extending, ExtendPlan
from common.scheduling.finish import accept_token
from common.scheduling.line import Line
from common.scheduling.outbox import Outbox
from common.scheduling.pages import RequestPages
from common.scheduling.request import Place, Request, non_finite_logits
from common.scheduling.running import Running

NON_FINITE = -1  # what the sampler returns for a row whose logits are not finite


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


class Work:
    def __init__(self, runner: Runner, pages: RequestPages, outbox: Outbox, limits: Limits) -> None:
        self._runner = runner
        self.pages = pages
        self._outbox = outbox
        self._limits = limits
        self.line = Line()
        self.extending = Extending(pages, self.line, limits.chunked_prefill_size)
        self.running = Running(pages, limits.max_running_requests, limits.context_length)
        self._extends_in_a_row = 0
        self.num_extend_steps = 0
        self.num_decode_steps = 0
        self.num_extended_tokens = 0

    # ---- a turn -----------------------------------------------------------------------------------------------------

    def plan(self, elsewhere: Collection[Request] = ()) -> Plan | None:
        """What to launch next. elsewhere: requests that hold pages outside this object and will come to run."""
        self._bring_back(elsewhere)
        decode_is_due = len(self.running) > 0 and self._extends_in_a_row >= self._limits.max_decode_delay_steps
        # extending comes again behind decode: the last running request may have been retracted
        return (None if decode_is_due else self._plan_extend(elsewhere)) or self._plan_decode() or self._plan_extend(elsewhere)

    def admit_head(self, max_matched_tokens: int, elsewhere: Collection[Request]) -> bool:
        """Give the head of the line its pages, if a row and pages are there, and take it out; as RequestPages.admit()."""
        head = self.line.head
        free_rows, reserve_pages = self.headroom(elsewhere)
        if head is None or free_rows <= 0 or not self.pages.admit(head, max_matched_tokens, reserve_pages):
            return False
        self.line.pop()
        return True

    def headroom(self, elsewhere: Collection[Request]) -> tuple[int, int]:
        """How many more requests may hold pages, and the pages left for those that run or come to run to grow."""
        free_rows = self._limits.max_running_requests - len(self.running) - len(self.extending) - len(elsewhere)
        return free_rows, self.running.growth_pages() + sum(map(self.pages.growth_pages, (*self.extending.requests, *elsewhere)))

    def _plan_extend(self, elsewhere: Collection[Request]) -> ExtendPlan | None:
        if not self.extending and self.line.head is None:
            return None
        plan = self.extending.plan(*self.headroom(elsewhere))
        self._extends_in_a_row += plan is not None
        return plan

    def _plan_decode(self) -> DecodePlan | None:
        self._extends_in_a_row = 0
        batch, retracted = self.running.plan()
        for request in retracted:
            self.line.add_again(request)
        return DecodePlan(list(self.running.requests), batch) if batch is not None else None

    def _bring_back(self, elsewhere: Collection[Request]) -> None:
        """Let requests run again whose KV is in host memory, as long as they are the head of the line and pages are there."""
        while (head := self.line.head) and head.host_copy is not None and self.admit_head(head.num_tokens - 1, elsewhere):
            if self.pages.restore(head):
                self.running.join(head)
            else:
                self.extending.go_on(head)

    def launch(self, plan: Plan) -> NDArray[np.int64]:
        """Run the model: KV written, one token drawn for each row that samples."""
        if isinstance(plan, ExtendPlan):
            self.num_extend_steps += 1
            self.num_extended_tokens += len(plan.batch.token_ids)
            started_s = time.perf_counter()
            tokens = self._runner.extend(plan.batch)
            self.pages.backup.extended(len(plan.batch.token_ids), time.perf_counter() - started_s)
            self.extending.computed(plan)
            return tokens
        self.num_decode_steps += 1
        tokens = self._runner.decode(plan.batch)
        self.running.computed()
        return tokens

    # ---- requests served here from prompt to end ---------------------------------------------------------------------

    def retire_decode(self, plan: DecodePlan, tokens: NDArray[np.int64]) -> None:
        """Hand out the step's tokens; requests that finish leave with their pages shared."""
        for request, token_id in zip(plan.requests, tokens.tolist(), strict=True):
            if token_id == NON_FINITE:
                self.running.remove(request)
                self.end(request, non_finite_logits(request.rid))
            elif accept_token(request, token_id, self._limits.eos_token_ids, self._limits.context_length):
                self.running.remove(request)
                self._outbox.tokens(request)
                self._give_back(request)
            else:
                self._outbox.tokens(request)
                self.running.advance(request)

    def retire_prompt(self, request: Request, token_id: int) -> None:
        """A prompt computed here for this node itself has its next token."""
        if token_id == NON_FINITE:
            self.end(request, non_finite_logits(request.rid))
            return
        finished = accept_token(request, token_id, self._limits.eos_token_ids, self._limits.context_length)
        self._outbox.tokens(request)
        if finished:
            self._give_back(request)
        else:
            self.pages.share(request)
            self.running.join(request)

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
        num_arriving = self.line.num_arriving()
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
        }
