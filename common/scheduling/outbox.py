"""What leaves the scheduler: the outputs of a step, one message a step; its heartbeat with figures; phases of traced requests.

This is the one place that sends terminal outputs, so that a request is answered exactly once (R5).
"""

import time
from collections.abc import Callable

from common.errors import Failure
from common.messages import NextTokens, NodeStatus, SpanOuts, TokenOut, TokenOuts
from common.scheduling.request import Place, Request
from common.scheduling.spans import DECODE, Spans

HEARTBEAT_S = 1.0  # liveness allows 30 of these


class Outbox:
    def __init__(self, send_outputs: Callable[[TokenOuts], None], send_status: Callable[[NodeStatus | SpanOuts], None]) -> None:
        self.spans = Spans()
        self._send_outputs = send_outputs
        self._send_status = send_status
        self._outs: list[TokenOut | NextTokens] = []
        self._ended: list[Request] = []
        self._next_heartbeat_s = 0.0
        self.num_finished = 0
        self.num_failed = 0
        self.num_output_tokens = 0

    def tokens(self, request: Request) -> None:
        """Hand on the outputs that were not sent yet; the terminal one when the request is finished."""
        if request.over:
            return
        new_ids = request.output_ids[request.num_sent_tokens :]
        first = request.num_sent_tokens == 0
        self._outs.append(
            TokenOut(
                rid=request.rid,
                token_ids=new_ids,
                finish_reason=request.finish_reason,
                matched_stop=request.matched_stop,
                text=request.text if first else None,
                num_prompt_tokens=len(request.prompt_ids),
                num_cached_tokens=request.num_cached_tokens or 0,
                prefill_site=request.prefill_site,
            )
        )
        request.num_sent_tokens += len(new_ids)
        self.num_output_tokens += len(new_ids)
        self.spans.computed(request)
        if request.finish_reason is not None:
            self.num_finished += 1
            self._end(request)
        elif first:
            self.spans.begin(request, DECODE)

    def next_tokens(self, requests: list[Request], token_ids: list[int]) -> None:
        """Hand on one more token of each request. None of them is its first output, or its last."""
        if requests:
            self._outs.append(NextTokens([request.rid for request in requests], token_ids))
            self.num_output_tokens += len(token_ids)
            for request in requests:
                request.num_sent_tokens += 1

    def failure(self, request: Request, failure: Failure) -> None:
        """End a request without (the rest of) its answer. The first end counts; a later one is muted (R6)."""
        if request.over:
            return
        first = request.num_sent_tokens == 0
        self._outs.append(TokenOut(rid=request.rid, failure=failure, text=request.text if first else None, num_prompt_tokens=len(request.prompt_ids)))
        self.num_failed += 1
        self._end(request, failure.message)

    def flush(self) -> list[Request]:
        """Send what gathered. Returns the requests it answered for good."""
        if self._outs:
            self._send_outputs(TokenOuts(self._outs))
            self._outs = []
        if self.spans.ended:
            self._send_status(SpanOuts(self.spans.take()))
        ended, self._ended = self._ended, []
        return ended

    def heartbeat(self, stats: Callable[[], dict[str, float]], peers: Callable[[], list[dict[str, str]]]) -> None:
        """Send NodeStatus if one is due."""
        now_s = time.monotonic()
        if now_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = now_s + HEARTBEAT_S
            self._send_status(NodeStatus(stats(), peers()))

    def heartbeat_due_in_s(self) -> float:
        return max(0.0, self._next_heartbeat_s - time.monotonic())

    def _end(self, request: Request, error: str = "") -> None:
        self.spans.answered(request, error)
        request.place = Place.OVER
        self._ended.append(request)
