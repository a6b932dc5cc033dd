"""Decode in buckets: a batch padded to a fixed size computes what it would alone, and padding touches page 0 only."""

import numpy as np
import pytest
import torch
from paged_driver import PagedDriver, Row
from tiny_models import cached_checkpoint, greedy_oracle

from common.engine.batch import KEEP, RowUpdates, SamplingBatch
from common.engine.buckets import bucket_sizes
from common.engine.rows import DeviceRows
from common.engine.runner import ModelRunner

PAGE = 16


@pytest.mark.parametrize("max_rows", [1, 2, 7, 8, 9, 10, 33, 64, 100, 256, 1000])
def test_bucket_sizes_waste_less_than_a_quarter(max_rows: int) -> None:
    sizes = bucket_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    for n in range(1, max_rows + 1):
        size = next(size for size in sizes if size >= n)
        assert size == n or size - n < 0.25 * n
    assert len(sizes) <= 8 + 4 * max(0, int(np.log2(max_rows / 8)) + 1)


def prompts(count: int) -> list[list[int]]:
    return [np.random.default_rng(n).integers(0, 256, 5 + 3 * n).tolist() for n in range(count)]


def test_a_padded_batch_computes_what_its_rows_would_alone() -> None:
    """9 rows run as 10, then 7 as 7, then 5 as 5: rows leave and the rest goes on in another bucket."""
    model_dir = cached_checkpoint("qwen3")
    driver = PagedDriver(ModelRunner(model_dir, page_size=PAGE, num_pages=64, max_running_requests=12))
    assert driver.runner._buckets.size_for(9) == 10
    rows = [Row(prompt) for prompt in prompts(9)]
    outputs = [[token] for token in driver.extend([(row, len(row.token_ids)) for row in rows]).tolist()]
    for num_rows in (9, 9, 7, 7, 5):
        for row, output in zip(rows[:num_rows], outputs, strict=False):
            row.token_ids.append(output[-1])
        for output, token in zip(outputs, driver.decode(rows[:num_rows]).tolist(), strict=False):
            output.append(token)
    for prompt, output in zip(prompts(9), outputs, strict=True):
        assert output == greedy_oracle(model_dir, prompt, len(output))


def test_padding_writes_to_page_0_only_and_changes_no_row() -> None:
    driver = PagedDriver(ModelRunner(cached_checkpoint("llama"), page_size=PAGE, num_pages=32, max_running_requests=12))
    runner = driver.runner
    rows = [Row(prompt) for prompt in prompts(9)]
    for row, token in zip(rows, driver.extend([(row, len(row.token_ids)) for row in rows]).tolist(), strict=True):
        row.token_ids.append(token)
    pool, state = runner.kv.tensor.clone(), runner.rows
    driver.decode(rows)
    written = {(page, offset) for page, _, _, _, offset in (runner.kv.tensor != pool).any(-1).nonzero().tolist()}
    expected = {(row.pages[(row.num_computed - 1) // PAGE], (row.num_computed - 1) % PAGE) for row in rows}
    assert expected < written
    assert {page for page, _ in written - expected} == {0}
    numbers = [row.number for row in rows]
    assert state.context_lens[numbers].tolist() == [row.num_computed + 1 for row in rows], "the device counts"
    others = sorted(set(range(state.padding_row + 1)) - set(numbers))
    assert state.context_lens[others].tolist() == [1] * len(others), "padding stays at one token"


def test_a_token_that_the_host_does_not_know_goes_on_on_the_device() -> None:
    """As in the overlapped loop: extend, then four decode steps of which none is told a token."""
    model_dir = cached_checkpoint("llama")
    driver = PagedDriver(ModelRunner(model_dir, page_size=PAGE, num_pages=8, max_running_requests=4))
    prompt = prompts(4)[3]
    row = Row(list(prompt))
    drawn = driver.extend([(row, len(prompt))]).tolist()
    for step in range(4):
        row.token_ids.append(-12345)  # must not be looked at
        batch = driver.decode_batch([row])
        joined = batch.updates if step == 0 else None
        updates = RowUpdates(
            batch.updates.page_rows, batch.updates.page_columns, batch.updates.page_ids, batch.updates.new_rows, batch.updates.sampling,
            batch.updates.joined_rows[: 1 if joined else 0], np.full(1 if joined else 0, KEEP, np.int64),
            batch.updates.joined_context_lens[: 1 if joined else 0],
        )  # fmt: skip
        drawn += driver.runner.launch(type(batch)(updates, batch.rows, batch.context_lens, batch.sampling)).tokens().tolist()
    assert drawn == greedy_oracle(model_dir, prompt, 5)


@pytest.mark.parametrize("context_length", [7, 256])
def test_warm_up_leaves_every_row_as_it_was(context_length: int) -> None:
    """It decodes padding rows alone, up to the largest bucket, in a context shorter than their number in all."""
    runner = ModelRunner(cached_checkpoint("llama"), page_size=PAGE, num_pages=4, max_running_requests=64, context_length=context_length)
    runner.warmup()
    assert runner.rows.context_lens.tolist() == [1] * 65
    assert not runner.kv.tensor[1:].any()
    assert not runner.rows.page_table.any()


def test_updates_touch_the_rows_they_name() -> None:
    rows = DeviceRows(4, 3, torch.device("cpu"))
    rows.token_ids[:4] = torch.arange(4) + 50
    sampling = SamplingBatch(*(np.array([value], dtype) for value, dtype in ((0.5, "f4"), (0.9, "f4"), (7, "i4"), (0.1, "f4"), (1 << 40, "i8"))))
    ints = [np.array(values, np.int32) for values in ([1, 1], [0, 2], [9, 8], [1], [1, 3], [6, 4])]
    rows.apply(RowUpdates(*ints[:4], sampling, ints[4], np.array([77, KEEP], np.int64), ints[5]))
    assert rows.page_table.tolist() == [[0, 0, 0], [9, 0, 8], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert rows.token_ids.tolist() == [50, 77, 52, 53, 0]
    assert rows.context_lens.tolist() == [1, 6, 1, 4, 1]
    assert rows.sampling.temperature.tolist() == [0.0, 0.5, 0.0, 0.0, 0.0]
    assert rows.sampling.seed[1] == 1 << 40
    rows.drawn(torch.tensor([0, 1]), torch.tensor([-1, 5]))
    assert rows.token_ids[:2].tolist() == [0, 5], "a row without a token may run once more"
