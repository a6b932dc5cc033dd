"""Is this node live, is it ready? (R9: neither depends on peers, queues or load.)

    live    the process answers, and once loaded, the scheduler's loop has sent a heartbeat within HEARTBEAT_TIMEOUT_S
    ready   loaded, live, and not shutting down

    LOADING --loaded--> READY --drain--> DRAINING
       └────────────── drain ──────────────┘        any --fail--> FAILED (a child died; the node ends)
"""

import time
from collections.abc import Callable, Mapping
from enum import Enum

from common.errors import Failure
from common.messages import NodeStatus

HEARTBEAT_TIMEOUT_S = 30.0  # a heartbeat is due every second; the longest single step of a slow CPU stays below this


class Phase(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class NodeHealth:
    """Written by the node's parent process and the TokenizerManager, read by the HTTP surface."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heartbeat_s = 0.0
        self.phase = Phase.LOADING
        self.facts: Mapping[str, object] = {}  # what the scheduler said when it was ready
        self.status = NodeStatus({})
        self.failure: Failure | None = None

    def loaded(self, facts: Mapping[str, object]) -> None:
        self.facts = facts
        self._heartbeat_s = self._clock()
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def drain(self) -> None:
        if self.phase is not Phase.FAILED:
            self.phase = Phase.DRAINING

    def fail(self, failure: Failure) -> None:
        self.phase = Phase.FAILED
        self.failure = failure

    def heartbeat(self, status: NodeStatus) -> None:
        self.status = status
        self._heartbeat_s = self._clock()

    @property
    def live(self) -> bool:
        return self.phase is Phase.LOADING or (self.phase is not Phase.FAILED and self._clock() - self._heartbeat_s < HEARTBEAT_TIMEOUT_S)

    @property
    def ready(self) -> bool:
        return self.phase is Phase.READY and self.live

    def refusal(self) -> Failure | None:
        """Why a new request cannot be taken now; None when it can."""
        if self.phase is Phase.READY:
            return None
        if self.phase is Phase.LOADING:
            return Failure(503, "the model is still loading; try again when /ready answers 200", code="not_ready", stage="intake", retry_after_s=1.0)
        if self.phase is Phase.DRAINING:
            return Failure(503, "this node is shutting down", code="shutting_down", stage="intake", retry_after_s=1.0)
        return self.failure
