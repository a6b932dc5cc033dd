"""When did the phases of a traced request begin and end? common/tracing.py has their names and order.

A phase that has ended is one message to the HTTP process, which makes a span of it; the scheduler knows nothing of OpenTelemetry. What
has begun is kept with the request, and a request that nobody traces has nothing to keep it in, so it costs one look.
"""

import time
from dataclasses import dataclass, field

from common.messages import AbortCause, SpanOut
from common.scheduling.request import Request
from common.tracing import CACHED_TOKENS, FINISH_REASONS, INPUT_TOKENS, OUTPUT_TOKENS

QUEUED, PREFILL, RECOMPUTE, TRANSFER, WAITING_FOR_KV, DECODE = "queued", "prefill", "recompute", "transfer", "waiting for KV", "decode"

Attributes = dict[str, int | str | list[str]]


@dataclass(slots=True)
class Spans:
    ended: list[SpanOut] = field(default_factory=list)

    def begin(self, request: Request, phase: str) -> None:
        """Does nothing when it has begun already."""
        if request.trace is not None:
            request.trace.begun_s.setdefault(phase, time.time())

    def end(self, request: Request, phase: str, attributes: Attributes | None = None, error: str = "") -> None:
        """Does nothing when it has not begun."""
        if request.trace is not None and (begun_s := request.trace.begun_s.pop(phase, None)) is not None:
            self.ended.append(SpanOut(request.trace.traceparent, phase, begun_s, time.time(), attributes or {}, error))

    def admitted(self, request: Request, next_phase: str) -> None:
        """It has its pages."""
        if request.trace is not None:
            self.end(request, QUEUED)
            self.begin(request, next_phase)

    def computed(self, request: Request) -> None:
        """Its prompt's KV is there, and one token more is known."""
        if request.trace is not None:
            self.end(request, PREFILL, {INPUT_TOKENS: len(request.prompt_ids), CACHED_TOKENS: request.num_cached_tokens or 0})
            self.end(request, RECOMPUTE)

    def answered(self, request: Request, error: str = "") -> None:
        """Its last token is known, or it failed. A transfer may be under way yet when it did not fail."""
        if request.trace is None:
            return
        attributes: Attributes = {OUTPUT_TOKENS: len(request.output_ids)}
        if request.finish_reason is not None:
            attributes[FINISH_REASONS] = [request.finish_reason]
        self.end(request, DECODE, attributes, error)
        if error:
            self._end_all(request, error)

    def aborted(self, request: Request, cause: AbortCause) -> None:
        """The text process has ended it, and with it what is under way."""
        if request.trace is not None:
            error = "" if cause == "stop_string" else cause
            self.answered(request, error)
            self._end_all(request, error)

    def _end_all(self, request: Request, error: str) -> None:
        assert request.trace is not None
        for phase in tuple(request.trace.begun_s):
            self.end(request, phase, error=error)

    def take(self) -> list[SpanOut]:
        ended, self.ended = self.ended, []
        return ended
