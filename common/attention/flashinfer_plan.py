"""A paged batch in the form FlashInfer reads it: all rows' pages in one list.

    kv_indptr       int32 [B + 1]  where each row's pages begin in the list, then its length
    indices         int32 [N]      pages of the batch's first row in order, then those of the second, ...
    last_page_len   int32 [B]      tokens on each row's last page, 1 to page_size
    query_indptr    int32 [B + 1]  first new token of each row, then their number

The host knows lengths, the device knows page ids. So the first, third and fourth are made on the host, where FlashInfer's scheduler wants
them, and the list is gathered on the device: no page table is copied, and nobody waits for the other.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PagedLens:
    kv_indptr: NDArray[np.int32]  # [B + 1]
    last_page_len: NDArray[np.int32]  # [B]

    @classmethod
    def of(cls, context_lens: NDArray[np.int32], page_size: int) -> "PagedLens":
        """context_lens [B], each at least 1: a row without a token has no last page."""
        full_pages, last_offset = np.divmod(context_lens - 1, page_size)
        return cls(indptr(full_pages + 1), (last_offset + 1).astype(np.int32))

    @property
    def num_indices(self) -> int:
        return int(self.kv_indptr[-1])


def indptr(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """counts [B] -> [B + 1]: where each begins, then their sum."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def page_indices(page_table: torch.Tensor, rows: torch.Tensor, kv_indptr: torch.Tensor, num_indices: int) -> torch.Tensor:
    """page_table int32 [R, max_pages], rows int32 [B], kv_indptr int32 [B + 1], all on one device -> indices int32 [num_indices].

    num_indices is kv_indptr's last entry, which the host knows: asking the device for it would wait for all work queued there.
    """
    place = torch.arange(num_indices, dtype=torch.int32, device=page_table.device)
    row = torch.searchsorted(kv_indptr[1:], place, right=True)
    return page_table[rows[row], place - kv_indptr[row]]
