"""Where K and V lie in the pool: page-major, contiguous, heads outermost within a page."""

import numpy as np
import pytest
import torch

from common.kvcache.layout import KVLayout, KVPool

CPU = torch.device("cpu")


@pytest.fixture
def pool() -> KVPool:
    return KVPool(KVLayout(num_kv_heads=3, num_layers=4, page_size=8, head_dim=16, dtype=torch.bfloat16), 6, CPU)


def test_a_page_is_one_block_and_a_head_range_one_block_in_it(pool: KVPool) -> None:
    assert pool.page_nbytes == 3 * 4 * 2 * 8 * 16 * 2
    assert pool.nbytes == 6 * pool.page_nbytes
    assert pool.tensor[2].data_ptr() == pool.base_address + 2 * pool.page_nbytes
    assert pool.tensor[2, 1].data_ptr() == pool.base_address + 2 * pool.page_nbytes + pool.page_nbytes // 3
    assert pool.tensor.is_contiguous()


def test_views_and_array_are_the_pools_own_memory(pool: KVPool) -> None:
    pool.keys(3)[2, 1, 5] = 1.0
    pool.values(3)[2, 1, 5] = 2.0
    assert pool.tensor[2, 1, 3, 0, 5].tolist() == [1.0] * 16
    assert pool.tensor[2, 1, 3, 1, 5].tolist() == [2.0] * 16
    assert pool.array is not None
    assert pool.array.dtype == np.uint16
    assert set(pool.array[2, 1, 3, 1, 5].tolist()) == {0x4000}
    assert pool.array.ctypes.data == pool.base_address


def test_a_pool_starts_zeroed(pool: KVPool) -> None:
    assert not pool.tensor.any()


def test_pages_within_a_budget() -> None:
    layout = KVLayout(3, 30, 16, 64, torch.bfloat16)  # the embedded model: 22.5 KiB a token
    assert layout.page_nbytes == 16 * 22.5 * 1024
    assert layout.num_pages_within(10 * layout.page_nbytes + 5) == 10
    assert layout.num_pages_within(-1) == 0
