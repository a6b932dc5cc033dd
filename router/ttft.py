"""When will the first token of a request come? What the nodes' load says, corrected by how first tokens came of late.

The prediction by load knows how much prompt is to be computed where, and how many rows the decode nodes have, but not what else holds requests
up: pages, a rate that is no constant, another router. So what was predicted and what came are compared for each request, as

    measured = predicted + slope * (requests that waited for their first token before it) + residual

slope      of what is not predicted, most grows with the line: where decode nodes have no pages left, each request in the line waits for one
           more to end. Least squares over the last WINDOW requests; long lines count most, and RIDGE keeps short ones from saying much
deviation  mean of |residual| / scale, where scale is the prediction, at least a quarter of the objective, so that what was learnt from small
           loads holds for large ones. MARGIN of them are added to what is expected
stall      the time that the line's first has been overdue, while nothing that was sent after it had its first token: what never comes teaches
           nothing else

Simulated (bench/overload_sim.py): prefill-bound, decode-bound, quadratic and misjudged nodes at 1.5 and 3 times what they can do keep the
objective for 99 of 100 admitted requests, once WINDOW of them have been seen; in the first seconds after a jump of the load, where rows are
what is short, for nine of ten.

Learning must not lock itself out: after a pause of one objective without an admitted request, one is let through on the bare prediction. And
where that alone forbids everything (a first prompt that waited for kernels to be compiled, a node that was slow once, make rates that nobody would
ever measure again) one is let through after DOUBT_S in which nothing was sent and no first token was awaited.
"""

import math
from dataclasses import dataclass

WINDOW = 64.0  # requests; 32 follow a change faster, and let 2 of 100 come late where rows are short
RIDGE = 16.0**2  # as one request that waited behind 16 and came as predicted
MARGIN = 4.0  # of a normal law the 99th percentile is 2.33 sigma, 2.9 mean deviations; residuals are skewed, 3 let 2 of 100 come late
SCALE_SHARE = 0.25
WORST = 1.25  # of a residual, by the scale: MARGIN of it are more than the objective, so more would only be remembered for longer
DOUBT_S = 1.0
TRUST = 4.0  # requests that came as predicted, before any has come: one prompt that waits for its kernels to be compiled shuts nobody out


class Mean:
    """Of all values at first, of about the last WINDOW later on. weight: of the first guess, in values."""

    __slots__ = ("_num", "value")

    def __init__(self, first_guess: float = 0.0, weight: float = 0.0) -> None:
        self.value = first_guess
        self._num = weight

    def add(self, value: float) -> None:
        self._num = min(self._num + 1.0, WINDOW)
        self.value += (value - self.value) / self._num


@dataclass(eq=False, slots=True)
class Sent:
    """A request whose first token is awaited."""

    sent_s: float
    predicted_s: float
    num_before: int  # that waited for theirs
    due_s: float


class TtftModel:
    def __init__(self, slo_s: float) -> None:
        self._slo_s = slo_s
        self._line: dict[Sent, None] = {}  # nothing sent later has its first token
        self.num_awaited = 0
        self._products = self._squares = 0.0
        self._deviation = Mean(weight=TRUST)
        self._last_sent_s = -math.inf

    @property
    def slope_s(self) -> float:
        return self._products / (self._squares + RIDGE)

    @property
    def deviation(self) -> float:
        return self._deviation.value

    def keeps(self, predicted_s: float, limit_s: float, now_s: float) -> bool:
        """Whether a request that is sent now has its first token within limit_s."""
        if predicted_s > limit_s:
            return False
        return now_s - self._last_sent_s > self._slo_s or self.bound_s(predicted_s, now_s) <= limit_s

    def doubts(self, now_s: float) -> bool:
        """What the nodes were measured to do may not be so any more, and this request would tell."""
        return not self.num_awaited and math.inf > now_s - self._last_sent_s > DOUBT_S

    def bound_s(self, predicted_s: float, now_s: float) -> float:
        return self._expected_s(predicted_s, self.num_awaited) + MARGIN * self._deviation.value * self._scale_s(predicted_s) + self._stall_s(now_s)

    def sent(self, predicted_s: float, now_s: float) -> Sent:
        due_s = now_s + self.bound_s(predicted_s, now_s)
        sent = Sent(now_s, predicted_s, self.num_awaited, due_s)
        self._line[sent] = None
        self.num_awaited += 1
        self._last_sent_s = now_s
        return sent

    def first_byte(self, sent: Sent, now_s: float) -> None:
        self.num_awaited -= 1
        if sent in self._line:
            for overtaken in list(self._line):
                del self._line[overtaken]
                if overtaken is sent:
                    break
        self._learn(sent, now_s - sent.sent_s)

    def forget(self, sent: Sent) -> None:
        """Its first token will not be seen."""
        self.num_awaited -= 1
        self._line.pop(sent, None)

    def _learn(self, sent: Sent, measured_s: float) -> None:
        residual_s = measured_s - self._expected_s(sent.predicted_s, sent.num_before)
        self._deviation.add(min(WORST, abs(residual_s) / self._scale_s(sent.predicted_s)))
        keep = 1.0 - 1.0 / WINDOW
        self._products = keep * self._products + sent.num_before * (measured_s - sent.predicted_s)
        self._squares = keep * self._squares + sent.num_before**2

    def _expected_s(self, predicted_s: float, num_before: int) -> float:
        return max(0.0, predicted_s + self.slope_s * num_before)

    def _scale_s(self, predicted_s: float) -> float:
        return max(predicted_s, SCALE_SHARE * self._slo_s)

    def _stall_s(self, now_s: float) -> float:
        first = next(iter(self._line), None)
        return 0.0 if first is None else max(0.0, now_s - first.due_s)
