"""Where a token's K and V lie in the pool. The only file that knows.

    [page, kv_head, layer, 2 (K, V), page_size, head_dim]      contiguous, page-major

A page of all layers is one block (one transfer descriptor), and a range of heads within a page is contiguous too. Attention reads
per-layer strided views. Page 0 belongs to nobody: padding in page tables points at it. The memory is one allocation whose address
never changes, because the transfer layer writes into it from other threads.
"""

import mmap
from dataclasses import dataclass

import torch

from common.layers.arrays import Array, as_array

PADDING_PAGE = 0
ITEM_NBYTES = {torch.float32: 4, torch.bfloat16: 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one page. Two nodes can exchange pages if and only if their layouts are equal."""

    num_kv_heads: int
    num_layers: int
    page_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_kv_heads, self.num_layers, 2, self.page_size, self.head_dim)

    @property
    def page_nbytes(self) -> int:
        return self.num_kv_heads * self.num_layers * 2 * self.page_size * self.head_dim * ITEM_NBYTES[self.dtype]

    def num_pages_within(self, nbytes: int) -> int:
        """Pages, the padding page included, that a budget holds."""
        return max(0, nbytes // self.page_nbytes)


class KVPool:
    """The memory of all pages, zeroed (masked reads of never written slots must not meet a NaN)."""

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device) -> None:
        """num_pages: the padding page included."""
        assert num_pages >= 2, f"a pool of {num_pages} pages has none to give"
        self.layout = layout
        self.num_pages = num_pages
        self.tensor = _allocate(layout, num_pages, device)  # [num_pages, *page_shape]
        self.array: Array | None = as_array(self.tensor) if device.type == "cpu" else None

    @property
    def base_address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def page_nbytes(self) -> int:
        return self.layout.page_nbytes

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.layout.page_nbytes

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    def keys(self, layer: int) -> torch.Tensor:
        """View [page, kv_head, page_size, head_dim]."""
        return self.tensor[:, :, layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """View [page, kv_head, page_size, head_dim]."""
        return self.tensor[:, :, layer, 1]


def _allocate(layout: KVLayout, num_pages: int, device: torch.device) -> torch.Tensor:
    shape = (num_pages, *layout.page_shape)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=layout.dtype, device=device)
    # Zero pages, backed when first written. Private: huge pages of shared mappings are off on most machines.
    memory = mmap.mmap(-1, num_pages * layout.page_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # a decode step touches each page once a layer: with 4 KiB pages each touch misses the TLB
    return torch.frombuffer(memory, dtype=layout.dtype).view(shape)
