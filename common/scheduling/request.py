"""The scheduler's record of one request: the documented mutable exception to frozen data.

Owner: exactly one of the queues named by `place` holds it; only the scheduler thread touches it. Its pages are freed when it
is over, no step under way names it, and no transfer may still read or write them.
"""

import hashlib
import time
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from common.errors import Failure
from common.messages import FinishReason, Generate, PrefillSite
from common.request import Bootstrap, SamplingParams, TextSpec
from common.sampling.penalties import LogitHistory


class Place(Enum):
    """Where a request is. ARRIVING and WAITING requests stand in the line for pages; ROOM means that a transfer has it."""

    NOWHERE = "nowhere"  # in no queue: new, on its way from one to the next, or computed here for a decode node
    ARRIVING = "arriving"  # waits in the line for pages to offer to its prefill node
    WAITING = "waiting"  # waits in the line for pages to run here
    EXTENDING = "extending"  # holds pages; some prompt tokens are computed
    RUNNING = "running"  # a row of the decode batch
    FINISHING = "finishing"  # its last token is being drawn; needs no row any more
    ROOM = "room"  # its pages or its next step belong to a transfer
    OVER = "over"  # the terminal output was sent


NO_ROW = -1


@dataclass(frozen=True, slots=True)
class HostCopy:
    """KV of a retracted request in host memory (host_backup.py): its pages from number `first_page` of its row on, a slot each."""

    first_page: int
    slots: list[int]


@dataclass(slots=True)
class Trace:
    """Phases of a traced request (spans.py): when those that have not ended began, in unix seconds."""

    traceparent: str
    begun_s: dict[str, float]
    num_transfer_pages: int = 0


@dataclass(slots=True, eq=False)
class Request:
    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams
    text: TextSpec
    deadline_s: float  # monotonic
    deadline_unix_s: float
    bootstrap: Bootstrap | None
    order: int  # of arrival; retraction takes the newest first
    max_new_tokens: int
    place: Place = Place.NOWHERE
    output_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)  # pages of tokens [0, len(pages) * page_size), in order
    num_computed_tokens: int = 0  # tokens whose KV is in `pages`, or will be when what was launched has run; not kept while RUNNING
    row: int = NO_ROW  # of the device's state, while it extends or runs
    last_step: int = 0  # number of the last launched step that names it; not kept while RUNNING
    host_copy: HostCopy | None = None  # only of a request in the line
    history: LogitHistory | None = None  # of a request whose logits are changed, once it samples
    num_cached_tokens: int | None = None  # prompt tokens found in a prefix cache where prefill ran; None: not admitted yet
    num_sent_tokens: int = 0  # outputs handed to the detokenizer
    prefill_site: PrefillSite = "local"
    finish_reason: FinishReason | None = None
    matched_stop: int | None = None
    trace: Trace | None = None  # of a request that is traced

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def over(self) -> bool:
        return self.place is Place.OVER

    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    def tokens_between(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and output together."""
        num_prompt = len(self.prompt_ids)
        if stop <= num_prompt:
            return self.prompt_ids[start:stop]
        return self.prompt_ids[start:] + self.output_ids[max(0, start - num_prompt) : stop - num_prompt]


def request_from(message: Generate, order: int, *, max_new_tokens: int | None = None) -> Request:
    """A Request for an incoming message; its unix deadline becomes a monotonic one here, once."""
    return Request(
        rid=message.rid,
        prompt_ids=message.prompt_ids,
        sampling=message.sampling,
        text=message.text,
        deadline_s=time.monotonic() + (message.deadline_s - time.time()),
        deadline_unix_s=message.deadline_s,
        bootstrap=message.bootstrap,
        order=order,
        max_new_tokens=message.sampling.max_new_tokens if max_new_tokens is None else max_new_tokens,
        trace=Trace(message.traceparent, {"queued": time.time()}) if message.traceparent else None,
    )


def prompt_digest(prompt_ids: list[int]) -> bytes:
    """16 bytes that tell two prompts apart; both nodes of a pair must have the same."""
    return hashlib.blake2b(np.asarray(prompt_ids, dtype=np.int32).tobytes(), digest_size=16).digest()


def non_finite_logits(rid: str) -> Failure:
    return Failure(500, f"the model produced logits that are not finite for request {rid}", code="non_finite_logits", stage="decode")
