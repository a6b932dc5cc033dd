"""How much work this router has given to a node and not seen the end of, and how fast the node computes prompts.

PrefillLoad: prompts that were sent and are not computed yet, as tokens that the node has to compute (what its cache holds costs nothing), and
what they cost. A prompt of n such tokens is taken to occupy a node for `prompt_s + n * token_s`: each has a launch and a round trip
besides its tokens, and without the first term a node that serves cached prompts would look slow. Both come from a least-squares line
through (tokens, seconds) of late prompts. Seconds are those in which the node had nothing of ours but this prompt to end: from the end of the
one before it, or its own beginning, to its end. For a node that computes one after another that is its service time; for one that
computes them side by side the sum is still right.

An estimate is mixed with the fleet's (the mean of the nodes beside it): a node never measured is taken for an average one, a first
prompt that compiled its kernels counts little, and evidence fades with time, so that a node that was slow once is tried again.
Differences of a few percent are noise, and are dropped: equal machines stay equal, and take turns.

Work for a node also delays whoever comes while it is done, the more the busier the fleet is: at utilisation u one second of it costs all
together 1 / (1 - u) seconds, as in a queue. The price of computing what another node's cache holds is `new_token_s` a token, token_s times that
(at most MAX_PRICE); on an idle fleet they are the same. Replaying Mooncake's traces a price of 3 to 5 gives shorter times to the first token than
1 at any load, mean and p99 (bench/routing.py), because caches hold more when they hold less twice.

DecodeLoad: requests from their placing to the end of the stream, and the tokens of KV that they will need, on top of what the node said
of itself at its last probe. That includes the requests of other routers: what the probe counts beyond our own. A node that reports nothing is
judged by our own requests alone, and is taken to have room.
"""

import math
from collections.abc import Sequence

PRIOR_PROMPTS = 2.0  # the fleet's mean counts as much as so many prompts of the node's own
MEMORY_PROMPTS = 32.0  # about the last so many decide
EVIDENCE_HALF_LIFE_S = 60.0
LEAST_WEIGHT = 1e-3  # of a prompt; less is no evidence
NOISE = 0.1  # relative difference from the fleet's mean below which a node is as fast as the fleet
LEAST_SPREAD = 0.25  # of prompt lengths, deviation over mean, for a line through them to have a slope
LEAST_SLOPE = 0.1  # of the mean time a token: tokens never cost nothing
LEAST_TOKEN_S = 1e-9
MAX_PRICE = 5.0
UTILISATION_HALF_LIFE_S = 30.0
UNMEASURED_TOKEN_S = 1.0  # any: then only tokens compare
DEFAULT_ROWS = 64  # rows of a decode batch where the node does not say; pdserve's --max-running-requests


class PrefillLoad:
    """Of one node. Read num_queued, queued_tokens, prompt_s, token_s, new_token_s, measured; the rest is this module's."""

    __slots__ = ("_busy_s", "_compared_s", "_fleet_prompt_s", "_fleet_token_s", "_since_s", "_sum_n", "_sum_nn", "_sum_nt", "_sum_t", "_utilisation",
                 "_weighed_s", "_weight", "measured", "new_token_s", "num_queued", "prompt_s", "queued_tokens", "token_s")

    def __init__(self) -> None:
        self.num_queued = 0
        self.queued_tokens = 0
        self.prompt_s = 0.0
        self.token_s = self.new_token_s = UNMEASURED_TOKEN_S
        self.measured = False  # this node, or one beside it: prompt_s and token_s are seconds
        self._since_s = 0.0  # the end of the last prompt, or when the first of the present ones came
        self._weight = self._sum_n = self._sum_t = self._sum_nn = self._sum_nt = 0.0
        self._weighed_s = 0.0
        self._busy_s = 0.0  # since the last comparison, of prompts that have ended
        self._compared_s = math.nan
        self._utilisation = 0.0  # of the fleet
        self._fleet_prompt_s, self._fleet_token_s = 0.0, math.nan

    def done_s(self, num_tokens: int) -> float:
        """Until what was sent there, and then one more prompt with so many tokens to compute, would be computed."""
        return (self.num_queued + 1) * self.prompt_s + (self.queued_tokens + num_tokens) * self.token_s

    @property
    def tokens_per_s(self) -> float | None:
        """None: nothing is known."""
        return 1 / self.token_s if self.measured else None

    def begin(self, num_tokens: int, now_s: float) -> None:
        """num_tokens: to be computed there."""
        if not self.num_queued:
            self._since_s = now_s
        self.num_queued += 1
        self.queued_tokens += num_tokens

    def end(self, num_tokens: int, now_s: float, *, computed: bool) -> bool:
        """computed: it was, all of it. True when this was the first prompt from which anything was learnt: fleet() is due."""
        self.num_queued -= 1
        self.queued_tokens -= num_tokens
        if not computed:  # the time goes to the prompt that ends next: the node may have worked on this one
            return False
        spent_s, self._since_s = now_s - self._since_s, now_s
        self._busy_s += spent_s
        self._learn(num_tokens, max(spent_s, 0.0), now_s)
        if not self.measured:
            return True
        self._mix()
        return False

    def _learn(self, n: int, t: float, now_s: float) -> None:
        keep = 1 - 1 / MEMORY_PROMPTS
        self._fade(now_s)
        self._weight = self._weight * keep + 1
        self._sum_n = self._sum_n * keep + n
        self._sum_t = self._sum_t * keep + t
        self._sum_nn = self._sum_nn * keep + n * n
        self._sum_nt = self._sum_nt * keep + n * t

    def _fade(self, now_s: float) -> None:
        if self._weight:
            keep = 0.5 ** ((now_s - self._weighed_s) / EVIDENCE_HALF_LIFE_S)
            if self._weight * keep < LEAST_WEIGHT:
                keep = 0.0
            self._weight *= keep
            self._sum_n *= keep
            self._sum_t *= keep
            self._sum_nn *= keep
            self._sum_nt *= keep
        self._weighed_s = now_s

    def _line(self) -> tuple[float, float]:
        """prompt_s and token_s of this node's own prompts; there must have been one."""
        mean_token_s = max(self._sum_t / max(self._sum_n, 1.0), LEAST_TOKEN_S)
        spread = self._weight * self._sum_nn - self._sum_n**2
        if spread <= (LEAST_SPREAD * self._sum_n) ** 2:
            return 0.0, mean_token_s
        slope = (self._weight * self._sum_nt - self._sum_n * self._sum_t) / spread
        slope = min(max(slope, LEAST_SLOPE * mean_token_s), mean_token_s)
        return max((self._sum_t - slope * self._sum_n) / self._weight, 0.0), slope  # rounding may take what is 0 below it

    def _mix(self) -> None:
        share = self._weight / (self._weight + PRIOR_PROMPTS)
        prompt_s, token_s = self._line() if self._weight else (0.0, 0.0)
        self.prompt_s = _mixed(prompt_s, self._fleet_prompt_s, share)
        self.token_s = _mixed(token_s, self._fleet_token_s, share)
        self.new_token_s = self.token_s * min(1 / max(1 - self._utilisation, 1 / MAX_PRICE), MAX_PRICE)

    @staticmethod
    def fleet(loads: Sequence["PrefillLoad"], now_s: float) -> None:
        """Compare nodes that stand beside each other: to be called when one of them is new, when end() says so, and every second or so."""
        total = prompt_s = token_s = 0.0
        for load in loads:
            load._fade(now_s)
            if load._weight:
                share = load._weight / (load._weight + PRIOR_PROMPTS)
                own_prompt_s, own_token_s = load._line()
                total += share
                prompt_s += share * own_prompt_s
                token_s += share * own_token_s
        if not total:  # no evidence is left, or there never was any
            for load in loads:
                if load.measured:
                    total += 1.0
                    prompt_s += load.prompt_s
                    token_s += load.token_s
        utilisation = PrefillLoad._compare_utilisation(loads, now_s)
        for load in loads if total else ():
            load.measured = True
            load._utilisation = utilisation
            load._fleet_prompt_s, load._fleet_token_s = prompt_s / total, token_s / total
            load._mix()

    @staticmethod
    def _compare_utilisation(loads: Sequence["PrefillLoad"], now_s: float) -> float:
        """Share of the fleet's time in which it had prompts to compute, of late."""
        before = busy_s = passed_s = 0.0
        for load in loads:
            before += load._utilisation
            if not math.isnan(load._compared_s):
                busy_s += load._busy_s
                passed_s += now_s - load._compared_s
            load._busy_s, load._compared_s = 0.0, now_s
        if not passed_s:
            return before / max(len(loads), 1)
        keep: float = 0.5 ** (passed_s / len(loads) / UTILISATION_HALF_LIFE_S)
        return keep * before / len(loads) + (1 - keep) * busy_s / passed_s


def _mixed(own: float, fleet: float, share: float) -> float:
    value = share * own + (1 - share) * fleet
    return fleet if abs(value - fleet) <= NOISE * fleet else value


class DecodeLoad:
    """Of one node. Read num_requests, num_others, room_tokens, fullness."""

    __slots__ = ("_given_tokens", "_pool_tokens", "_probe", "_probed_room_tokens", "_rows", "fullness", "num_others", "num_requests", "room_tokens")

    def __init__(self) -> None:
        self.num_requests = 0  # of this router
        self.num_others = 0  # of other routers, at the last probe
        self.room_tokens = math.inf  # what further requests can have
        self.fullness = 0.0  # share of the rows that are wanted, plus share of the pool that is taken; 2: no more of either
        self._rows = DEFAULT_ROWS
        self._pool_tokens = 0  # 0: not known
        self._probed_room_tokens = 0
        self._given_tokens = 0  # to requests placed since the probe
        self._probe = 0  # number of the last one

    def probed(self, running: int | None, waiting: int | None, rows: int | None, room_tokens: int | None, pool_tokens: int | None) -> None:
        """What the node has just said of itself; None for what it did not."""
        self._probe += 1
        self.num_others = max((running or 0) + (waiting or 0) - self.num_requests, 0)
        self._rows = rows or DEFAULT_ROWS
        known = room_tokens is not None and pool_tokens
        self._pool_tokens, self._probed_room_tokens = (pool_tokens or 0, room_tokens or 0) if known else (0, 0)
        self._given_tokens = 0
        self._weigh()

    def has_room(self, num_tokens: int) -> bool:
        """For one more request with that much KV: neither row nor pages need be waited for."""
        return self.num_requests + self.num_others < self._rows and num_tokens <= self.room_tokens

    def begin(self, num_tokens: int) -> int:
        """num_tokens: KV that the request will need. Returns what end() wants to know."""
        self.num_requests += 1
        self._given_tokens += num_tokens
        self._weigh()
        return self._probe

    def end(self, num_tokens: int, probe: int) -> None:
        """What was placed before the last probe is in its figures, and stays there until the next."""
        self.num_requests -= 1
        if probe == self._probe:
            self._given_tokens -= num_tokens
        self._weigh()

    def _weigh(self) -> None:
        self.fullness = (self.num_requests + self.num_others) / self._rows
        if self._pool_tokens:
            self.room_tokens = self._probed_room_tokens - self._given_tokens
            self.fullness += 1 - self.room_tokens / self._pool_tokens
        else:
            self.room_tokens = math.inf
