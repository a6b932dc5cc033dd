"""Paged decode attention against float64 softmax over gathered keys, over drawn shapes."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.attention.numba_decode import paged_decode_attention
from common.layers.arrays import as_array
from common.layers.vectors import TILE

NUM_LAYERS, LAYER = 2, 1
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 2e-6}, torch.bfloat16: {"rtol": 2**-8, "atol": 1e-5}}


@dataclass(frozen=True)
class Shape:
    group: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype


SHAPES = st.builds(
    Shape,
    st.sampled_from([1, 2, 3, 4, 5, 8]),
    st.integers(1, 3),
    st.sampled_from([20, 64, 80, 96, 128]),  # 20: not whole vectors
    st.sampled_from([1, 16, 64]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
CONTEXTS = st.lists(st.one_of(st.integers(0, 300), st.sampled_from([1, TILE - 1, TILE, TILE + 1, 2 * TILE])), min_size=1, max_size=4)


class Rows:
    """Requests of given context lengths on shuffled pages; unused table entries point at page 0, which is full of NaN."""

    def __init__(self, shape: Shape, context_lens: list[int], seed: int = 0, q_scale: float = 1.0) -> None:
        self.shape = shape
        counts = [-(-n // shape.page_size) for n in context_lens]
        generator = torch.Generator().manual_seed(seed)
        pages = iter((torch.randperm(sum(counts), generator=generator) + 1).tolist())
        self.page_table = np.zeros((len(counts), max(counts) + 1), np.int32)
        for row, count in enumerate(counts):
            self.page_table[row, :count] = [next(pages) for _ in range(count)]
        pool_shape = (sum(counts) + 1, shape.kv_heads, NUM_LAYERS, 2, shape.page_size, shape.head_dim)
        self.pool = torch.randn(pool_shape, generator=generator).to(shape.dtype)
        self.pool[0] = torch.nan
        self.context_lens = np.array(context_lens, np.int32)
        self.q = (torch.randn(len(counts), shape.group * shape.kv_heads, shape.head_dim, generator=generator) * q_scale).to(shape.dtype)

    def slot(self, row: int, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self.shape.page_size)
        return int(self.page_table[row, page]), offset

    def run(self, window: int = 0) -> torch.Tensor:
        out = torch.full_like(self.q, torch.nan)
        scale, rows = self.shape.head_dim**-0.5, np.arange(len(out), dtype=np.int32)
        paged_decode_attention(
            as_array(self.q), as_array(self.pool), LAYER, self.page_table, rows, rows, self.context_lens, window, scale, 0.0, as_array(out)
        )
        return out

    def expected(self, window: int = 0) -> torch.Tensor:
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        for row, context in enumerate(self.context_lens.tolist()):
            if context == 0:
                continue
            kv = self.pool[self.page_table[row], :, LAYER].double()  # [pages, KV, 2, page_size, D]
            k, v = kv.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, max(0, context - window) if window else 0 : context]
            k, v = (x.repeat_interleave(self.shape.group, dim=0) for x in (k, v))
            weights = torch.softmax(torch.einsum("hd,htd->ht", self.q[row].double(), k) * self.shape.head_dim**-0.5, dim=-1)
            out[row] = torch.einsum("ht,htd->hd", weights, v)
        return out.float()


def assert_equal(rows: Rows, window: int = 0) -> None:
    found = rows.run(window)
    torch.testing.assert_close(found.float(), rows.expected(window), **TOLERANCES[found.dtype])


@settings(max_examples=120, deadline=None)  # the first call compiles
@given(SHAPES, CONTEXTS, st.integers(0, 99), st.one_of(st.just(0), st.integers(1, 150)))
def test_equals_softmax_over_what_each_row_sees(shape: Shape, context_lens: list[int], seed: int, window: int) -> None:
    assert_equal(Rows(shape, context_lens, seed), window)


@settings(max_examples=20, deadline=None)
@given(SHAPES, st.integers(1, 200), st.integers(0, 99))
def test_large_scores_do_not_overflow(shape: Shape, context: int, seed: int) -> None:
    """Scores of a few hundred, rising and falling over the tiles: one key takes nearly all the weight."""
    found = Rows(shape, [context], seed, q_scale=100.0)
    expected = found.expected()
    torch.testing.assert_close(found.run().float(), expected, rtol=0.01, atol=0.01)


def test_a_row_without_context_gets_zeros() -> None:
    out = Rows(Shape(3, 2, 64, 16, torch.bfloat16), [0, 5, 0]).run()
    assert out[[0, 2]].eq(0).all()
    assert out[1].ne(0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", [0, 1], ids=["k", "v"])
@pytest.mark.parametrize("position", [0, 70, 199])
def test_a_nan_shows_in_its_row_alone(dtype: torch.dtype, part: int, position: int) -> None:
    rows = Rows(Shape(3, 1, 64, 16, dtype), [200, 200])
    page, offset = rows.slot(1, position)
    rows.pool[page, 0, LAYER, part, offset, 5] = torch.nan
    out = rows.run()
    assert out[0].isfinite().all()
    assert out[1].isnan().any(dim=-1).all()  # in every head


def test_what_lies_before_the_window_is_not_read() -> None:
    rows = Rows(Shape(4, 1, 64, 16, torch.bfloat16), [130])
    expected = rows.run(window=40)
    for position in range(130 - 40):
        page, offset = rows.slot(0, position)
        rows.pool[page, :, LAYER, :, offset] = torch.nan
    assert torch.equal(rows.run(window=40), expected)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    shape = Shape(3, 3, 64, 16, torch.bfloat16)
    together = Rows(shape, [100, 7, 64, 300])
    out = together.run()
    for row in range(4):
        alone = Rows(shape, [1])
        alone.pool, alone.q = together.pool, together.q[row : row + 1]
        alone.page_table, alone.context_lens = together.page_table[row : row + 1].copy(), together.context_lens[row : row + 1].copy()
        assert torch.equal(alone.run()[0], out[row])
