"""FlashInfer's lists of pages equal what a plain loop makes of the page table."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.attention.flashinfer_plan import PagedLens, indptr, page_indices

STALE = 999_999  # beyond a row's context the table holds what an earlier request left there


@st.composite
def paged_batches(draw: st.DrawFn) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """(page_size, page_table [R, max_pages], rows [B], context_lens [B]); the last rows of the batch may be padding."""
    page_size = draw(st.sampled_from([1, 2, 8, 16, 64]))
    max_pages, num_rows = draw(st.integers(1, 9)), draw(st.integers(1, 8))
    lens = np.array(draw(st.lists(st.integers(1, max_pages * page_size), min_size=num_rows, max_size=num_rows)), np.int32)
    table = np.random.default_rng(draw(st.integers(0, 99))).integers(1, 10_000, (num_rows + 1, max_pages)).astype(np.int32)
    for row, num_tokens in enumerate(lens):
        table[row, -(-int(num_tokens) // page_size) :] = STALE
    table[-1] = STALE
    table[-1, 0] = 0  # the padding row: page 0, one token
    rows = draw(st.permutations(range(num_rows)))[: draw(st.integers(1, num_rows))]
    num_padding = draw(st.integers(0, 5))
    batch_rows = np.array([*rows, *[num_rows] * num_padding], np.int32)
    return page_size, table, batch_rows, np.concatenate((lens[rows], np.ones(num_padding, np.int32)))


@settings(deadline=None)
@given(paged_batches())
def test_lists_equal_those_of_a_loop(batch: tuple[int, np.ndarray, np.ndarray, np.ndarray]) -> None:
    page_size, table, rows, context_lens = batch
    starts, pages, last = [0], [], []
    for row, num_tokens in zip(rows.tolist(), context_lens.tolist(), strict=True):
        num_pages = (num_tokens + page_size - 1) // page_size
        pages += table[row, :num_pages].tolist()
        starts.append(len(pages))
        last.append(num_tokens - (num_pages - 1) * page_size)
    lens = PagedLens.of(context_lens, page_size)
    assert (lens.kv_indptr.tolist(), lens.last_page_len.tolist(), lens.num_indices) == (starts, last, len(pages))
    assert lens.kv_indptr.dtype == lens.last_page_len.dtype == np.int32
    found = page_indices(torch.from_numpy(table), torch.from_numpy(rows), torch.from_numpy(lens.kv_indptr), lens.num_indices)
    assert found.dtype == torch.int32
    assert found.tolist() == pages
    assert STALE not in pages


@pytest.mark.parametrize(("counts", "expected"), [([], [0]), ([3], [0, 3]), ([2, 0, 5], [0, 2, 2, 7])])
def test_indptr(counts: list[int], expected: list[int]) -> None:
    starts = indptr(np.array(counts, np.int32))
    assert (starts.tolist(), starts.dtype) == (expected, np.int32)
