"""A scheduler without processes: messages in as objects, outputs gathered by request, the model faked (fake_runner.py)."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from fake_runner import VOCAB_SIZE, FakeRunner, expected_tokens

from common.errors import Failure
from common.kvcache.cache import KVCache
from common.kvcache.host_pages import HostPages
from common.messages import Abort, Drain, Generate, NodeStatus, SpanOut, SpanOuts, TokenOuts, ToScheduler
from common.request import Bootstrap, SamplingParams, TextSpec
from common.scheduling.host_backup import HostBackup
from common.scheduling.outbox import Outbox
from common.scheduling.pages import RequestPages
from common.scheduling.work import Limits, Work
from decode_node.scheduler import DecodeScheduler
from prefill_node.scheduler import PrefillScheduler


class ListIntake:
    def __init__(self) -> None:
        self.pending: list[ToScheduler] = []

    def messages(self) -> Iterator[ToScheduler]:
        while self.pending:
            yield self.pending.pop(0)

    def wait(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, 0.0005))


class NoTransfer:
    """The endpoint of a node that is only asked for requests without a room."""

    def poll(self) -> list[Any]:
        return []

    def peers(self) -> list[dict[str, str]]:
        return []

    def stats(self) -> dict[str, float]:
        return {}


@dataclass
class Answer:
    """What a client got."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    matched_stop: int | None = None
    failure: Failure | None = None
    num_terminals: int = 0
    num_cached_tokens: int = 0
    prefill_site: str = ""

    @property
    def over(self) -> bool:
        return self.num_terminals > 0


BUSY = ("running_requests", "extending_requests", "waiting_requests", "arriving_requests", "open_requests", "swapped_requests", "swap_bytes")

_rids = itertools.count()


class Node:
    """One scheduler of either role with its fake model."""

    def __init__(
        self, role: str = "decode", *, num_pages: int = 64, page_size: int = 4, chunk: int = 16, max_running: int = 8, context_length: int = 256,
        max_decode_delay_steps: int = 2, eos: tuple[int, ...] = (), prefix_cache: bool = True, endpoint: Any = None, runner: FakeRunner | None = None,
        preemption: Literal["auto", "recompute", "swap"] = "auto", num_swap_slots: int = 1000, late: int | None = 1, overlap: bool = True,
    ) -> None:  # fmt: skip
        """late: of FakeRunner: launched steps run later, as on a GPU. None: at once, as on CPU."""
        self.runner = runner or FakeRunner(num_pages, page_size, late=late, max_rows=max_running)
        self.cache = KVCache(num_pages, page_size, prefix_cache)
        self.answers: dict[str, Answer] = {}
        self.statuses: list[NodeStatus | SpanOuts] = []
        self.intake = ListIntake()
        self.endpoint = endpoint or NoTransfer()
        memory = HostPages(pool_of(self.runner), 0 if preemption == "recompute" else num_swap_slots)
        self.backup = HostBackup(memory, extend_prior_tokens_per_s=1e4, always_swap=preemption == "swap")
        self.pages = RequestPages(self.cache, self.backup)
        limits = Limits(frozenset(eos), context_length, max_running, max_decode_delay_steps, chunk, VOCAB_SIZE, overlap)
        self.outbox = Outbox(self._gather, self.statuses.append)
        self.work = Work(self.runner, self.pages, self.outbox, limits)
        kind: Any = DecodeScheduler if role == "decode" else PrefillScheduler
        self.scheduler = kind(self.work, self.intake, self.outbox, self.endpoint, limits)

    def submit(
        self, prompt_ids: list[int], num_tokens: int, *, bootstrap: Bootstrap | None = None, timeout_s: float = 60.0, rid: str = "",
        traceparent: str = "", **sampling: Any,
    ) -> str:  # fmt: skip
        rid = rid or f"r{next(_rids)}"
        self.answers[rid] = Answer()
        params = SamplingParams(**{"max_new_tokens": num_tokens, "temperature": 0.0, **sampling})
        self.intake.pending.append(Generate(rid, prompt_ids, params, TextSpec(), time.time() + timeout_s, bootstrap, traceparent))
        return rid

    def spans(self) -> list[SpanOut]:
        """What was said of traced requests, in order."""
        return [span for message in self.statuses if isinstance(message, SpanOuts) for span in message.spans]

    def abort(self, rid: str, cause: Any = "client_left") -> None:
        self.intake.pending.append(Abort(rid, cause))

    def drain(self, timeout_s: float) -> None:
        self.intake.pending.append(Drain(time.time() + timeout_s))

    def run_until_answered(self, *rids: str, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if all(self.answers[rid].over for rid in rids) and not self.intake.pending:
                return
            if not self.scheduler.step():
                self.intake.wait(0.0005)
        raise AssertionError(f"not answered: {[rid for rid in rids if not self.answers[rid].over]}; {self.scheduler.stats()}")

    def assert_right(self, rid: str, prompt_ids: list[int], num_tokens: int, seed: int | None = None) -> None:
        answer = self.answers[rid]
        assert answer.failure is None, answer.failure
        assert answer.token_ids == expected_tokens(prompt_ids, num_tokens, seed)
        assert answer.finish_reason == "length"
        assert answer.num_terminals == 1

    def assert_idle(self) -> None:
        """Nothing is held once every request is answered (R1)."""
        counts = self.cache.counts()
        assert (counts.held, counts.quarantined) == (0, 0), (counts, self.scheduler.stats())
        assert counts.free + counts.cached == counts.total
        stats = self.scheduler.stats()
        assert not any(stats[key] for key in BUSY), stats
        assert len(self.backup._free_slots) == len(set(self.backup._free_slots)) == self.backup._memory.num_slots

    def num_retracted(self, way: str = "") -> int:
        """Retractions: those by "swap", those by "recompute", or all."""
        return sum(int(value) for key, value in self.scheduler.stats().items() if key.startswith("retracted_requests_total") and way in key)

    def _gather(self, message: TokenOuts) -> None:
        for out in message.each():
            answer = self.answers[out.rid]
            assert not answer.over, f"{out.rid} was answered already"
            assert (out.text is not None) == (not answer.token_ids), "the text spec comes with the first output, and only with it"
            answer.token_ids += out.token_ids
            answer.finish_reason, answer.matched_stop, answer.failure = out.finish_reason, out.matched_stop, out.failure
            answer.num_terminals += out.finish_reason is not None or out.failure is not None
            answer.num_cached_tokens, answer.prefill_site = out.num_cached_tokens, out.prefill_site


def pool_of(runner: Any) -> torch.Tensor:
    return torch.from_numpy(runner.pool) if isinstance(runner, FakeRunner) else runner.kv.tensor


def random_prompt(rng: np.random.Generator, num_tokens: int) -> list[int]:
    return rng.integers(10, 900, num_tokens).tolist()
