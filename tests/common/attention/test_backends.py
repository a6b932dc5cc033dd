"""The numba backend against the torch backend: same KV written, same output, for every shape that models have."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from paged_driver import greedy

from common.attention.backend import AttentionBackend, AttentionSpec, Batch, HeadGeometry, TokenPlaces
from common.attention.numba import LONG_BLOCK, NumbaAttention
from common.attention.torch import TorchAttention
from common.engine.batch import DecodeBatch, ExtendBatch
from common.kvcache.layout import KVLayout, KVPool
from common.layers.ops import NormWeight
from common.layers.rope import RopeTable

CPU = torch.device("cpu")
NUM_LAYERS, LAYER, NUM_PAGES = 3, 1, 160
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 0.02, "atol": 0.02}}


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    page_size: int = 16
    window: int | None = None
    norm: bool = False


CASES = [
    Case(9, 3, 64),
    Case(9, 3, 64, torch.bfloat16),
    Case(4, 4, 32, window=20),
    Case(8, 1, 128, torch.bfloat16, window=33, norm=True),
    Case(2, 1, 16, page_size=1, norm=True),
    Case(6, 2, 80, page_size=64, window=1),
    Case(4, 2, 48, page_size=8, window=200),
]


class Pair:
    """Both backends, each on its own pool of equal content."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.geometry = HeadGeometry(case.heads, case.kv_heads, case.head_dim)
        layout = KVLayout(case.kv_heads, NUM_LAYERS, case.page_size, case.head_dim, case.dtype)
        num_pages = NUM_PAGES * 16 // case.page_size
        self.pools = [KVPool(layout, num_pages, CPU) for _ in range(2)]
        torch.manual_seed(0)
        content = torch.randn(self.pools[0].tensor.shape).to(case.dtype)
        for pool in self.pools:
            pool.tensor.copy_(content)
        angles = torch.outer(torch.arange(2048.0), 1.0 / 1e4 ** (torch.arange(0, case.head_dim, 2) / case.head_dim))
        rope = RopeTable(angles.cos(), angles.sin())
        oracle, tested = self.pools
        self.backends: list[AttentionBackend] = [TorchAttention(self.geometry, oracle, rope), NumbaAttention(self.geometry, tested, rope)]
        norms = [NormWeight.empty(case.head_dim, 1e-6, case.dtype, CPU) if case.norm else None for _ in range(2)]
        for norm in norms:
            if norm is not None:
                norm.tensor.normal_(1.0, 0.3)
        self.spec = AttentionSpec(LAYER, case.window, norms[0], norms[1])
        self._pages = iter(np.random.default_rng(0).permutation(np.arange(1, num_pages)).tolist())

    def table(self, context_lens: list[int]) -> np.ndarray:
        counts = [-(-n // self.case.page_size) for n in context_lens]
        table = np.zeros((len(counts), max(counts) + 2), np.int32)
        for row, count in enumerate(counts):
            table[row, :count] = [next(self._pages) for _ in range(count)]
        return table

    def check(self, batch: Batch) -> None:
        qkv = torch.randn(len(batch.token_ids), self.geometry.qkv_size).to(self.case.dtype)
        outputs = []
        for backend in self.backends:
            backend.plan(batch)
            outputs.append(backend.forward(qkv.clone(), self.spec))
        tolerance = TOLERANCES[self.case.dtype]
        torch.testing.assert_close(outputs[1], outputs[0], **tolerance)
        torch.testing.assert_close(self.pools[1].tensor, self.pools[0].tensor, **tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_extend_equals_torch(case: Case) -> None:
    """Without and with cached prefix, shorter and longer than a block of queries of either length, in one batch."""
    extend_lens, cached = [1, LONG_BLOCK + 3, 17, 40, LONG_BLOCK, 70], [0, 0, 5, 100, 64, 1100]
    context_lens = [new + old for new, old in zip(extend_lens, cached, strict=True)]
    pair = Pair(case)
    ids = np.zeros(sum(extend_lens), np.int64)
    lens = np.array(extend_lens, np.int32)
    pair.check(ExtendBatch(ids, lens, np.array(context_lens, np.int32), pair.table(context_lens), np.arange(6, dtype=np.int32), greedy(6)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_equals_torch(case: Case) -> None:
    context_lens = [1, 15, 16, 17, 200, 131]
    pair = Pair(case)
    pair.check(DecodeBatch(np.zeros(6, np.int64), np.array(context_lens, np.int32), pair.table(context_lens), greedy(6)))


def test_token_places_of_a_ragged_extend_batch() -> None:
    table = np.array([[7, 3, 0], [9, 0, 0]], np.int32)
    batch = ExtendBatch(np.zeros(5, np.int64), np.array([3, 2], np.int32), np.array([6, 2], np.int32), table, np.zeros(0, np.int32), greedy(0))
    places = TokenPlaces.of(batch, 4)
    assert places.positions.tolist() == [3, 4, 5, 0, 1]
    assert places.slots.tolist() == [7 * 4 + 3, 3 * 4, 3 * 4 + 1, 9 * 4, 9 * 4 + 1]


def test_forward_writes_no_other_slot_and_no_other_layer() -> None:
    pair = Pair(CASES[0])
    before = pair.pools[1].tensor.clone()
    batch = DecodeBatch(np.zeros(2, np.int64), np.array([5, 18], np.int32), pair.table([5, 18]), greedy(2))
    pair.check(batch)
    changed = (pair.pools[1].tensor != before).any(-1).nonzero()  # page, kv_head, layer, k/v, offset
    assert set(changed[:, 2].tolist()) == {LAYER}
    assert {(page, offset) for page, _, _, _, offset in changed.tolist()} == {(int(batch.page_table[0, 0]), 4), (int(batch.page_table[1, 1]), 1)}
