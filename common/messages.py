"""Messages between the processes of one node: one typed union per receiver, msgspec msgpack, never pickle.

    TokenizerManager --ToScheduler--> Scheduler --ToDetokenizer--> Detokenizer --ToTokenizer--> TokenizerManager
                                         └────────────ToTokenizer (NodeStatus, SpanOuts)──────────────┘

Exactly one terminal output exists per Generate (R5): a TokenOut whose `finish_reason` or `failure` is set. After the
TokenizerManager aborts a request itself (client left, stop string found) it ignores what still arrives for that rid.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from common.errors import Failure
from common.request import Bootstrap, SamplingParams, TextSpec

FinishReason = Literal["stop", "length"]
AbortCause = Literal["client_left", "stop_string", "deadline", "shutdown"]
PrefillSite = Literal["local", "remote"]


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Serve this request. `deadline_s`: unix time; the scheduler ends the request with 504 when it passes."""

    rid: str
    prompt_ids: list[int]  # at least one; validated against vocabulary and context length
    sampling: SamplingParams
    text: TextSpec
    deadline_s: float
    bootstrap: Bootstrap | None = None
    traceparent: str = ""  # of the span that its phases belong to; empty: nobody traces it


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop working on `rid`; unknown ids are ignored. No output follows for it."""

    rid: str
    cause: AbortCause


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish running requests until `deadline_s` (unix time), fail the rest with 503, then exit 0."""

    deadline_s: float


ToScheduler = Generate | Abort | Drain


class TokenOut(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """New tokens of one request. The first one of a request carries `text`."""

    rid: str
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    matched_stop: int | None = None  # the stop token id, when finish_reason is "stop"
    failure: Failure | None = None
    text: TextSpec | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens not computed for this request, on the node where prefill ran
    prefill_site: PrefillSite = "local"


class NextTokens(msgspec.Struct, frozen=True, tag=True):
    """One more token of each of these requests, which begin and end elsewhere: most of a decode step, as columns."""

    rids: list[str]
    token_ids: list[int]


class TokenOuts(msgspec.Struct, frozen=True, tag=True):
    """All outputs of one scheduler step, in order."""

    outs: list[TokenOut | NextTokens]

    def each(self) -> Iterator[TokenOut]:
        """One by one."""
        for out in self.outs:
            if isinstance(out, TokenOut):
                yield out
            else:
                for rid, token_id in zip(out.rids, out.token_ids, strict=True):
                    yield TokenOut(rid, [token_id])


class DropStream(msgspec.Struct, frozen=True, tag=True):
    """`rid` was aborted: forget its decoding state."""

    rid: str


ToDetokenizer = TokenOuts | DropStream


class TextOut(msgspec.Struct, frozen=True, omit_defaults=True):
    """New printable text of one request; terminal when `finish_reason` or `failure` is set."""

    rid: str
    text: str = ""
    num_new_tokens: int = 0  # tokens this increment stands for
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    failure: Failure | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prefill_site: PrefillSite = "local"


class TextOuts(msgspec.Struct, frozen=True, tag=True):
    """All text increments made from one scheduler step."""

    outs: list[TextOut]


class NodeStatus(msgspec.Struct, frozen=True, tag=True):
    """The scheduler's heartbeat, at least once a second from its loop; `stats` become Prometheus gauges and counters.

    Keys ending in `_total` are counters, the rest gauges; each becomes `pdserve_<key>`.
    """

    stats: dict[str, float]
    peers: list[dict[str, str]] = []  # transfer peers: {"endpoint", "state", "reason"}


class SpanOut(msgspec.Struct, frozen=True, omit_defaults=True):
    """A phase of a traced request, which has ended. Times: unix seconds."""

    traceparent: str
    name: str
    start_s: float
    end_s: float
    attributes: dict[str, int | str | list[str]] = {}
    error: str = ""  # why it failed


class SpanOuts(msgspec.Struct, frozen=True, tag=True):
    """All phases that ended in one scheduler step."""

    spans: list[SpanOut]


ToTokenizer = TextOuts | NodeStatus | SpanOuts
