"""The Triton kernels against the dense oracle, by the interpreter where there is no device; and what a captured graph relies on."""

import numpy as np
import pytest
import torch
from attention_batches import LAYER, Case, Step, cases
from hypothesis import given, settings
from triton_interpreter import DEVICE, as_silent_as_devices

from common.attention.backend import HeadGeometry, HostLens
from common.attention.triton import MAX_SPLITS, TritonAttention, extend_tiles
from common.errors import StartupError
from common.kvcache.layout import KVLayout, KVPool
from common.layers.rope import RopeTable

pytestmark = as_silent_as_devices
BF16 = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
CONTEXTS = ((0, 1), (128, 1), (600, 1), (255, 1), (63, 1))


def triton_on(step: Step, num_sms: int = 4) -> TritonAttention:
    return TritonAttention(step.geometry, step.pool, step.rope, max_rows=8, max_context=step.max_context, num_sms=num_sms)


@settings(max_examples=25, deadline=None)
@given(cases(max_rows=3, max_new=12))
def test_equals_the_oracle(case: Case) -> None:
    step = Step(case, DEVICE)
    step.check(triton_on(step))


@pytest.mark.parametrize(
    "case",
    [
        Case(CONTEXTS, group=3, is_decode=True, num_padding=1),
        Case(CONTEXTS, group=8, head_dim=128, page_size=64, window=150, soft_cap=30.0, is_decode=True, **BF16),
        Case(((0, 70), (300, 1), (17, 45)), group=3, page_size=16, **BF16),
        Case(((130, 40),), group=2, head_dim=256, page_size=1, window=33),
        Case(((30, 1), (0, 1)), group=20, head_dim=32, is_decode=True),
        Case(((30, 5),), group=20, head_dim=32),
    ],
    ids=["splits", "splits of a window", "blocks of queries", "window over blocks", "more heads than 16", "a block of one query"],
)
def test_what_one_program_does_not_take(case: Case) -> None:
    step = Step(case, DEVICE)
    step.check(triton_on(step, num_sms=16))


def test_the_number_of_splits_changes_nothing() -> None:
    outputs = []
    for num_sms in (1, 4, 16):
        step = Step(Case(CONTEXTS, group=3, is_decode=True), DEVICE)
        backend = triton_on(step, num_sms)
        outputs.append(step.run(backend))
    for out in outputs[1:]:
        torch.testing.assert_close(out, outputs[0], rtol=1e-5, atol=1e-5)


def test_splits_fill_the_device_and_bound_a_long_row() -> None:
    def splits(num_rows: int, max_context: int) -> int:
        pool = KVPool(KVLayout(8, 1, 16, 64, torch.float32), 2, DEVICE)
        rope = RopeTable(torch.ones(1, 32, device=DEVICE), torch.ones(1, 32, device=DEVICE))
        return TritonAttention(HeadGeometry(8, 8, 64), pool, rope, max_rows=1, max_context=max_context, num_sms=132).num_splits(num_rows)

    assert [splits(rows, 32768) for rows in (1, 2, 8, 33, 256)] == [33, 17, 5, 2, 2]
    assert splits(1, 200) == 2  # not more than there is work for
    assert splits(256, 131072) == 8
    assert splits(1, 1 << 24) == MAX_SPLITS


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Where batches of both sizes are split alike: here, not at all."""
    together = Step(Case(((5, 1), (40, 1), (200, 1)), kv_heads=2, group=3, is_decode=True, num_padding=1), DEVICE)
    out = together.run(triton_on(together, num_sms=1))
    alone = Step(Case(((200, 1),), kv_heads=2, group=3, is_decode=True), DEVICE)
    alone.pool, alone.rope, alone.qkv = together.pool, together.rope, together.qkv[2:3]
    alone.batch = type(alone.batch)(
        together.batch.page_table, *(tensor[2:3] for tensor in (together.batch.rows, together.batch.context_lens)),
        alone.batch.query_starts, together.batch.positions[2:3], together.batch.slots[2:3], is_decode=True,
    )  # fmt: skip
    assert torch.equal(alone.run(triton_on(alone, num_sms=1))[0], out[2])


@pytest.mark.parametrize("is_decode", [True, False])
def test_a_nan_shows_in_its_row_alone_and_what_is_not_visible_is_not_read(is_decode: bool) -> None:
    step = Step(Case(((200, 1), (150, 1)), window=40, is_decode=is_decode), DEVICE)
    kept = step.pool.tensor.clone()
    expected = step.run(triton_on(step))
    own = torch.from_numpy(step.page_table)[step.table_rows[0]].long().to(DEVICE)
    step.pool.tensor[own[: (200 - 40) // 16]] = torch.nan  # pages that end before the window
    step.pool.tensor[own[200 // 16], :, LAYER, :, 200 % 16 + 1 :] = torch.nan  # slots after the row's last
    assert torch.equal(step.run(triton_on(step)), expected)
    step.pool.tensor.copy_(kept)
    step.pool.tensor[own[190 // 16], :, LAYER, 1, 190 % 16, 5] = torch.nan
    out = step.run(triton_on(step))
    assert out[0, :, 5].isnan().all()
    assert torch.equal(out[1], expected[1])


def test_padding_rows_write_to_page_0_alone() -> None:
    step = Step(Case((), kv_heads=2, group=2, is_decode=True, num_padding=3), DEVICE)
    before = step.pool.tensor.clone()
    step.run(triton_on(step))
    changed = (step.pool.tensor != before).any(-1).nonzero()  # page, kv_head, layer, k/v, offset
    assert {(page, layer, offset) for page, _, layer, _, offset in changed.tolist()} == {(0, LAYER, 0)}


def test_a_decode_batch_follows_its_tensors_without_a_new_plan() -> None:
    """As a captured graph is replayed: forward() takes nothing from plan() that belongs to one step."""
    step, later = (Step(Case(rows, group=2, is_decode=True, seed=3), DEVICE) for rows in (((40, 1), (7, 1)), ((90, 1), (300, 1))))
    step.rope, step.pool = later.rope, later.pool
    backend = TritonAttention(step.geometry, later.pool, later.rope, max_rows=2, max_context=301, num_sms=4)
    width = later.batch.page_table.shape[1]
    static = type(step.batch)(
        torch.zeros(later.batch.page_table.shape[0], width, dtype=torch.int32, device=DEVICE), *(tensor.clone() for tensor in
        (step.batch.rows, step.batch.context_lens, step.batch.query_starts, step.batch.positions, step.batch.slots)), is_decode=True,
    )  # fmt: skip
    backend.plan(static, step.lens)
    for field in ("page_table", "rows", "context_lens", "query_starts", "positions", "slots"):
        getattr(static, field).copy_(getattr(later.batch, field))
    expected = later.expected()[0]
    out = backend.forward(later.qkv.to(DEVICE), later.spec)
    torch.testing.assert_close(out.cpu().view(expected.shape).double(), expected, rtol=2e-5, atol=2e-5)


def test_tiles_cover_every_token_once_longest_first() -> None:
    lens = HostLens(np.array([5, 1, 9], np.int32), np.array([5, 100, 9], np.int32))
    assert extend_tiles(lens, 4).tolist() == [[1, 0], [2, 2], [0, 1], [2, 1], [0, 0], [2, 0]]


def test_a_head_that_fits_no_tile_is_refused() -> None:
    pool = KVPool(KVLayout(1, 1, 16, 320, torch.float32), 2, DEVICE)
    with pytest.raises(StartupError, match=r"head_dim of up to 256, this model's is 320"):
        TritonAttention(HeadGeometry(1, 1, 320), pool, RopeTable(torch.ones(1, 160), torch.ones(1, 160)), max_rows=1, max_context=1)
