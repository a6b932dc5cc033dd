"""Pages that went to host memory come back as they were."""

import pytest
import torch

from common.kvcache.host_pages import HostPages
from common.kvcache.layout import KVLayout, KVPool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_come_back_elsewhere_bit_by_bit(dtype: torch.dtype) -> None:
    pool = KVPool(KVLayout(2, 3, 4, 8, dtype), 10, torch.device("cpu"))
    words = torch.iinfo(torch.int16).max
    pool.tensor.view(torch.int16).random_(-words, words)
    before = pool.tensor.view(torch.int16).clone()
    host = HostPages(pool.tensor, 5)
    assert host.page_nbytes == pool.page_nbytes
    host.save([7, 2, 9], [4, 0, 3])
    pool.tensor[[7, 2, 9]] = 0
    host.load([3, 4], [1, 2])
    after = pool.tensor.view(torch.int16)
    assert torch.equal(after[[1, 2]], before[[9, 7]])
    assert not after[[7, 9]].any()
    assert torch.equal(after[[3, 4, 5, 6, 8]], before[[3, 4, 5, 6, 8]])


def test_no_slots_are_no_memory() -> None:
    host = HostPages(torch.zeros(4, 8), 0)
    host.save([], [])
    host.load([], [])
    assert host.num_slots == 0
