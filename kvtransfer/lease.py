"""Until when P may post writes to a D.

A backend with one-sided writes cannot be revoked by D: once D has dropped P, nothing but P itself keeps P from writing into pages that
D gives to others. A P that was stopped for a while, or cut off, does not know that it was dropped. So P writes on a lease:

    P's Heartbeat carries P's clock (sent_s). D's Heartbeat carries the newest sent_s that D heard (echo_s). D drops P for silence not
    before peer_timeout_s have passed since it heard that message, and it heard it after it was sent: until echo_s + peer_timeout_s, on
    P's own clock, P is not dropped. Only the echoed time counts, never the time at which an echo is read: the echoes that wait in the
    socket of a P that stood still are old, and renew nothing. HelloAck is the first message that is echoed; before, P posts nothing.

    When D drops P sooner, because the connection ended, it waits for the end of the lease before the backend's fence begins to count
    (link_dial.py). The fence covers what was posted before, and the difference of two clocks' rates (1e-4 of peer_timeout_s).

P looks at its clock immediately before each post. A P that is stopped in the microseconds between that look and the post is not
caught by the lease; Fence.passed() of the backends says what they know of a stopped process on the same host (host_process.py).
"""

import math


class Lease:
    def __init__(self, peer_timeout_s: float) -> None:
        """peer_timeout_s: D's."""
        self._peer_timeout_s = peer_timeout_s
        self._newest_sent_s = -math.inf
        self._ends_s = -math.inf

    def sent(self, sent_s: float) -> None:
        """A message with this sent_s leaves."""
        self._newest_sent_s = max(self._newest_sent_s, sent_s)

    def echoed(self, echo_s: float) -> None:
        """D has heard the message of echo_s. An echo of what was never sent is none."""
        if echo_s <= self._newest_sent_s:
            self._ends_s = max(self._ends_s, echo_s + self._peer_timeout_s)

    def holds(self, now_s: float) -> bool:
        return now_s < self._ends_s
