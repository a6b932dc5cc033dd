"""What an episode of load says: percentiles, limits, goodput. Pure functions of times.

A limit is a multiple of what a lone request meets, as in Mooncake (Qin et al., FAST '25). The strain of a request is the factor by which
all its limits would have to grow for it to meet them: 1 is just met. The strain of an episode is the 90th percentile of its requests'
strains, for streams and prompts apart, and the worse of the two: neither can be paid for with the other. So an episode meets its
limits, 90 % of its requests do, exactly when its strain is at most 1. Goodput is the highest offered rate with a strain of at most 1
(DistServe: Zhong et al., OSDI '24).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from serve_client import Outcome
from serve_report import percentile

ATTAINED_SHARE = 0.9
# Multiples of what is met alone, fixed before anything was measured; goodput is reported under tighter and wider limits, too.
TTFT_FACTOR, TPOT_FACTOR, ITL_P99_FACTOR = 5.0, 2.0, 3.0


@dataclass(frozen=True, slots=True)
class Limits:
    """In seconds. ttft_s: of a prompt. tpot_s: mean time for each later token of a stream or a prompt. itl_p99_s: of one stream's gaps; a prompt
    with 16 output tokens has no 99th percentile."""

    ttft_s: float
    tpot_s: float
    itl_p99_s: float

    @classmethod
    def multiples_of(cls, lone_ttft_s: float, lone_tpot_s: float) -> "Limits":
        return cls(TTFT_FACTOR * lone_ttft_s, TPOT_FACTOR * lone_tpot_s, ITL_P99_FACTOR * lone_tpot_s)


@dataclass(frozen=True, slots=True)
class Episode:
    """Streams that were running while prompts arrived for `window_s` from `started_s` on. Times are absolute, on one clock."""

    streams: list[Outcome]
    prompts: list[Outcome]
    started_s: float
    window_s: float
    client_cpu_s: float  # of the load generator, in the window

    def stream_gaps_s(self) -> list[list[float]]:
        """Of each stream, the gaps between its tokens of which some part lies in the window."""
        start_s, end_s = self.started_s, self.started_s + self.window_s
        return [
            [after - before for before, after in pairwise(stream.text_times_s) if after > start_s and before < end_s] for stream in self.streams
        ]

    def strains(self, limits: Limits) -> tuple[list[float], list[float]]:
        """Of its prompts, and of its streams; infinite for streams none of which got a token."""
        of_streams = [stream_strain(gaps_s, limits) for gaps_s in self.stream_gaps_s() if gaps_s]
        starved = [math.inf] if self.streams and not of_streams else []
        return [prompt_strain(prompt, limits) for prompt in self.prompts], of_streams + starved


def share_of(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed (nearest rank; infinity may be among them). nan for no values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * share - 1e-9) - 1)]


def prompt_strain(prompt: Outcome, limits: Limits) -> float:
    """Infinity for one that was not served."""
    if prompt.failure is not None:
        return math.inf
    return max(prompt.ttft_s / limits.ttft_s, (prompt.tpot_s or 0.0) / limits.tpot_s)


def stream_strain(gaps_s: Sequence[float], limits: Limits) -> float:
    return max(fmean(gaps_s) / limits.tpot_s, percentile(gaps_s, 99) / limits.itl_p99_s)


def strain(episodes: Iterable[Episode], limits: Limits) -> float:
    """Of episodes of one rate together. nan when nothing was asked."""
    kinds = zip(*(episode.strains(limits) for episode in episodes), strict=True)
    pooled = [[one for strains in kind for one in strains] for kind in kinds]
    return max((share_of(strains, ATTAINED_SHARE) for strains in pooled if strains), default=math.nan)


def attained(episodes: Iterable[Episode], limits: Limits) -> float:
    """Share of the requests, prompts and streams alike, that met every limit."""
    strains = [one for episode in episodes for kind in episode.strains(limits) for one in kind]
    return sum(one <= 1 for one in strains) / len(strains) if strains else math.nan


def goodput(points: Sequence[tuple[float, float]], scale: float = 1.0) -> float:
    """Highest rate before the strain first exceeds `scale`, between two measured rates by a straight line; 0 when the lowest rate exceeds
    it already; the highest measured rate when none does, which then is a lower bound. points: (rate, strain), any order."""
    best = 0.0
    below: tuple[float, float] | None = None
    for rate, at_rate in sorted(points):
        if not at_rate <= scale:  # nan too: nothing was served
            if below is not None and math.isfinite(at_rate):
                best = below[0] + (rate - below[0]) * (scale - below[1]) / (at_rate - below[1])
            return best
        best, below = rate, (rate, at_rate)
    return best


def figures(episodes: Sequence[Episode]) -> dict[str, float]:
    """Of episodes of one kind together. Times in ms; a prompt that was not served has none and is counted in `failed`."""
    gaps_s = [gap_s for episode in episodes for stream in episode.stream_gaps_s() for gap_s in stream]
    prompts = [prompt for episode in episodes for prompt in episode.prompts]
    served = [prompt for prompt in prompts if prompt.failure is None]
    ttfts_s, tpots_s = [prompt.ttft_s for prompt in served], [prompt.tpot_s for prompt in served if prompt.tpot_s is not None]
    prompt_gaps_s = [gap_s for prompt in served for gap_s in prompt.itls_s]
    window_s = sum(episode.window_s for episode in episodes)
    return {
        "itl_ms_p50": percentile(gaps_s, 50) * 1e3,
        "itl_ms_p99": percentile(gaps_s, 99) * 1e3,
        "stream_tokens_per_s": len(gaps_s) / window_s,
        "ttft_ms_p50": percentile(ttfts_s, 50) * 1e3,
        "ttft_ms_p90": percentile(ttfts_s, 90) * 1e3,
        "tpot_ms_p50": percentile(tpots_s, 50) * 1e3,
        "prompt_itl_ms_p99": percentile(prompt_gaps_s, 99) * 1e3,
        "e2e_ms_p50": percentile([prompt.e2e_s for prompt in served], 50) * 1e3,
        "prompts": len(prompts),
        "failed": len(prompts) - len(served),
        "gaps": len(gaps_s),
        "prompt_gaps": len(prompt_gaps_s),
        "client_cpu": sum(episode.client_cpu_s for episode in episodes) / window_s,
    }
