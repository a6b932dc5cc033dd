"""What becomes of the KV of a request that is retracted: a copy in host memory, or nothing, and its tokens run again?

Swapping copies the request's private pages out and later back in, without a forward. Private are the pages from the first one on
that nobody else holds; the ones before it stay with their other holders, and are found again in the radix tree when the request
returns. A copy keeps no hold of them: a request that waits for pages would otherwise keep some from the request before it. When
they are gone after all, the copy is of no use and the tokens run again. Pages that only the tree holds besides are copied: under
memory pressure the tree gives them up first.

    swapping costs      2 * private bytes / copy rate
    recomputing costs   tokens without the shared prefix / extend rate

Both rates are measured here, as work goes by. A rate is the quotient of two sums that fade with every measurement and with every
decision, on top of a prior that weighs as much as PRIOR_WEIGHT_S of measurement: a way that is not taken any more drifts back to its
prior and gets its chance again. (After vLLM's preemption modes; there the choice is static: Kwon et al., SOSP'23, 4.5.)

Slots are counted as pages are (R1): free + those of copies == all. A copy ends with its request's return, or its end.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from common.scheduling.request import HostCopy, Request

COPY_PRIOR_BYTES_PER_S = 10e9  # below what one core copies and what PCIe 4.0 x16 moves, pinned
PRIOR_WEIGHT_S = 0.01
KEPT = 0.9  # of the sums, at each measurement and decision


class Rate:
    """Something per second, as it was lately."""

    def __init__(self, prior_per_s: float) -> None:
        self._prior_per_s = prior_per_s
        self._amount = 0.0
        self._seconds = 0.0

    @property
    def per_s(self) -> float:
        return (self._amount + self._prior_per_s * PRIOR_WEIGHT_S) / (self._seconds + PRIOR_WEIGHT_S)

    def measured(self, amount: float, seconds: float) -> None:
        self.fade()
        self._amount += amount
        self._seconds += seconds

    def fade(self) -> None:
        self._amount *= KEPT
        self._seconds *= KEPT


class HostMemory(Protocol):
    """common/kvcache/host_pages.py, where the bytes are."""

    num_slots: int
    page_nbytes: int

    def save(self, pages: Sequence[int], slots: Sequence[int]) -> None: ...
    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None: ...


class HostBackup:
    def __init__(
        self, memory: HostMemory, *, extend_prior_tokens_per_s: float, always_swap: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """memory: without slots everything is recomputed. always_swap: while there are slots, whatever it costs."""
        self._memory = memory
        self._always_swap = always_swap
        self._clock = clock
        self._free_slots = list(range(memory.num_slots - 1, -1, -1))
        self._extend_rate = Rate(extend_prior_tokens_per_s)
        self._copy_rate = Rate(COPY_PRIOR_BYTES_PER_S)
        self.num_copies = 0
        self.num_prefix_lost = 0  # copies that were of no use
        self.save_seconds = 0.0
        self.load_seconds = 0.0

    @property
    def nbytes_used(self) -> int:
        return (self._memory.num_slots - len(self._free_slots)) * self._memory.page_nbytes

    def extended(self, num_tokens: int, seconds: float) -> None:
        """An extend batch was computed."""
        self._extend_rate.measured(num_tokens, seconds)

    def pays(self, num_pages: int, num_tokens: int) -> bool:
        """Shall the KV of a request that loses its pages be copied? num_pages: private ones with KV. num_tokens: to run again otherwise."""
        if not 0 < num_pages <= len(self._free_slots):
            return False
        copy_s = 2 * num_pages * self._memory.page_nbytes / self._copy_rate.per_s
        extend_s = num_tokens / self._extend_rate.per_s
        self._copy_rate.fade()
        self._extend_rate.fade()
        return self._always_swap or copy_s < extend_s

    def save(self, request: Request, first_page: int, private_pages: Sequence[int]) -> None:
        """Copy the request's private pages, of which the first is page `first_page` of its row; there are slots for them."""
        assert request.host_copy is None, f"{request.rid} has a host copy already"
        slots = [self._free_slots.pop() for _ in private_pages]
        started_s = self._clock()
        self._memory.save(private_pages, slots)
        self.save_seconds += self._copied(slots, started_s)
        request.host_copy = HostCopy(first_page, slots)
        self.num_copies += 1

    def load(self, request: Request, num_matched_pages: int) -> bool:
        """Bring the copy back into the request's new row, of which the first pages were found in the radix tree; the copy ends. False:
        too few were, and the tokens are to be run again."""
        copy = request.host_copy
        assert copy is not None, f"{request.rid} has no host copy"
        complete = num_matched_pages >= copy.first_page
        if complete:
            slots = copy.slots[num_matched_pages - copy.first_page :]
            pages = request.pages[num_matched_pages : num_matched_pages + len(slots)]
            started_s = self._clock()
            self._memory.load(slots, pages)
            self.load_seconds += self._copied(slots, started_s)
        else:
            self.num_prefix_lost += 1
        self.drop(request)
        return complete

    def drop(self, request: Request) -> None:
        """The copy, if there is one, is not needed any more."""
        if request.host_copy is not None:
            self._free_slots += request.host_copy.slots
            self.num_copies -= 1
            request.host_copy = None

    def stats(self) -> dict[str, float]:
        return {
            "swapped_requests": self.num_copies,
            "swap_bytes": self.nbytes_used,
            "swap_out_seconds_total": self.save_seconds,
            "swap_in_seconds_total": self.load_seconds,
            "swap_prefix_lost_total": self.num_prefix_lost,
        }

    def _copied(self, slots: Sequence[int], started_s: float) -> float:
        seconds = self._clock() - started_s
        self._copy_rate.measured(len(slots) * self._memory.page_nbytes, seconds)
        return seconds
