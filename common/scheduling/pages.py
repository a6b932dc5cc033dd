"""How requests hold pages: the only callers of the KV cache on the scheduler's side.

`Request.pages` holds one hold of each page listed. Nothing else in scheduling knows about matching, growing or inserting.

Admission looks ahead: whoever gets pages leaves enough for all that hold some, itself included, to take their next
GROWTH_HORIZON_TOKENS tokens, or as many as may still come if that is fewer. So no admission makes a retraction necessary at once,
and a request that was retracted advances before the next retraction. More than the horizon is not reserved: answers end early.
A request that ends while a launched step still names it keeps its pages until that step has run: the device may write them yet, and
writes of a peer, into a page offered anew, would not wait for it.
(A prompt that was computed twice at the same time may pin its twin in the radix tree, and so use up some of the reserve. That
retraction comes early, which costs time; the bound in line.py does not rest on the reserve.)
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.errors import Failure
from common.kvcache.cache import KVCache, OutOfPages
from common.scheduling.host_backup import HostBackup
from common.scheduling.request import Request

GROWTH_HORIZON_TOKENS = 128  # as many decode steps without a retraction after each admission


def page_array(pages: Sequence[int]) -> NDArray[np.int32]:
    return np.asarray(pages, dtype=np.int32)


class RequestPages:
    def __init__(self, cache: KVCache, backup: HostBackup) -> None:
        self.cache = cache
        self.backup = backup
        self.page_size = cache.page_size
        self._refused: tuple[Request, int] | None = None  # who got no pages last, and how many there were
        self.num_launched = 0  # steps
        self._num_landed = 0
        self._giving_up: deque[Request] = deque()  # over, but a launched step names them; by step

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def refusal(self, num_tokens: int) -> Failure | None:
        """Why a request of that many tokens can never be served, even with nothing else in the pool; None if it can."""
        limit = self.cache.counts().total * self.page_size
        if num_tokens <= limit:
            return None
        sentence = f"{num_tokens} tokens (prompt and output) never fit this node's KV pool of {limit}; ask for fewer or raise --max-total-tokens"
        return Failure(400, sentence, code="context_length_exceeded", stage="intake")

    def admit(self, request: Request, max_matched_tokens: int, reserve_pages: int) -> bool:
        """Give the request pages for all its tokens, the cached prefix of at most `max_matched_tokens` shared. False, and nothing
        changed, unless that leaves `reserve_pages` and its own room to grow available."""
        assert not request.pages, f"{request.rid} holds pages already"
        num_spare = self.cache.available() - reserve_pages
        if self._refused is not None and self._refused[0] is request and num_spare <= self._refused[1]:
            return False  # nothing has changed for the better: its prompt need not be looked up again
        matched = self.cache.match(request.tokens_between(0, max_matched_tokens))
        if self._pages_soon(request) - len(matched) + reserve_pages > self.cache.available():
            self.cache.release(matched)
            self._refused = (request, num_spare)
            return False
        num_new = self.num_pages_for(request.num_tokens) - len(matched)
        request.pages = [*matched.tolist(), *self.cache.alloc(num_new).tolist()]
        request.num_computed_tokens = len(matched) * self.page_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed_tokens, len(request.prompt_ids))
        return True

    def growth_pages(self, request: Request) -> int:
        """Pages that a request which holds some may soon need beside them."""
        return 0 if request.over else max(0, self._pages_soon(request) - len(request.pages))

    def _pages_soon(self, request: Request) -> int:
        """All pages the request may have within the horizon. The last token drawn is never written."""
        ahead = min(request.max_new_tokens - len(request.output_ids), GROWTH_HORIZON_TOKENS) - 1
        return self.num_pages_for(request.num_tokens + max(0, ahead))

    def grow(self, request: Request) -> bool:
        """One more page. False when there is none."""
        try:
            request.pages.append(int(self.cache.alloc(1)[0]))
        except OutOfPages:
            return False
        return True

    def share(self, request: Request) -> None:
        """Let later requests reuse the full pages whose KV is computed."""
        self._refused = None  # who waits may find more of its prompt now
        num_checked = request.num_tokens - self.in_flight(request)  # what a step under way writes nobody has looked at
        num_full = min(request.num_computed_tokens, num_checked) // self.page_size
        if num_full:
            self.cache.insert(request.tokens_between(0, num_full * self.page_size), page_array(request.pages[:num_full]))

    def retract(self, request: Request) -> None:
        """Take a running request's pages for others. Its KV goes to host memory; or, where that costs more, to the radix tree, which
        keeps it as long as it can, and what it lost by then runs again."""
        assert not self.in_flight(request), f"{request.rid} is retracted while a step names it"
        num_shared = self.cache.num_shared(page_array(request.pages))
        private_pages = request.pages[num_shared : self.num_pages_for(request.num_computed_tokens)]
        if self.backup.pays(len(private_pages), request.num_tokens - num_shared * self.page_size):
            self.backup.save(request, num_shared, private_pages)
        else:
            self.share(request)
        self._give_up(request)

    def restore(self, request: Request) -> bool:
        """Bring the host copy of a request that was just admitted back: it can run. False: its tokens must run again from where the
        radix tree ends."""
        if not self.backup.load(request, request.num_computed_tokens // self.page_size):
            return False
        request.num_computed_tokens = request.num_tokens - 1
        return True

    def release(self, request: Request) -> None:
        """Give up every page of the request, and its host copy; what a launched step may touch, when that has run."""
        self.backup.drop(request)
        if self.in_flight(request):
            self._giving_up.append(request)
        else:
            self._give_up(request)

    def in_flight(self, request: Request) -> bool:
        """Does a step that has not landed name the request, which is in no batch any more?"""
        return request.last_step > self._num_landed

    def launched(self) -> int:
        """One more step is under way. Returns its number."""
        self.num_launched += 1
        return self.num_launched

    def landed(self) -> None:
        """The oldest step under way has run."""
        self._num_landed += 1
        while self._giving_up and not self.in_flight(self._giving_up[0]):
            self._give_up(self._giving_up.popleft())

    def _give_up(self, request: Request) -> None:
        if request.pages:
            self.cache.release(page_array(request.pages))
            request.pages = []
        request.num_computed_tokens = 0

    def take(self, request: Request) -> NDArray[np.int32]:
        """The request's pages and holds, which become the caller's."""
        assert not self.in_flight(request), f"{request.rid} gives its pages to a peer while a step names it"
        pages = page_array(request.pages)
        request.pages = []
        request.num_computed_tokens = 0
        return pages
