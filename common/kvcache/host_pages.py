"""Pages copied to host memory and back. One allocation of fixed size, made at start: under memory pressure is no time to ask for more.

For a pool on CUDA the memory is pinned, so that a copy is one DMA a page at the bus's speed. On the host it is taken when first
written; huge pages made that first copy slower and later ones no faster. A call returns when the bytes are
there: the pages it read may be written by a peer, and the slots it read be reused, right after it.
"""

from collections.abc import Sequence

import torch


class HostPages:
    """Slots of host memory, each as large as a page of the pool."""

    def __init__(self, pool: torch.Tensor, num_slots: int) -> None:
        """pool: [num_pages, ...], its first dimension the page. Raises RuntimeError: there is no such memory."""
        self._pool = pool
        self._is_cuda = pool.device.type == "cuda"
        self._host = torch.empty((num_slots, *pool.shape[1:]), dtype=pool.dtype, pin_memory=self._is_cuda and num_slots > 0)
        self.num_slots = num_slots
        self.page_nbytes = pool[0].nbytes

    def save(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy pages[i] to slots[i]."""
        for page, slot in zip(pages, slots, strict=True):
            self._host[slot].copy_(self._pool[page], non_blocking=True)
        self._finish()

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy slots[i] to pages[i]."""
        for slot, page in zip(slots, pages, strict=True):
            self._pool[page].copy_(self._host[slot], non_blocking=True)
        self._finish()

    def _finish(self) -> None:
        if self._is_cuda:
            torch.cuda.current_stream(self._pool.device).synchronize()
