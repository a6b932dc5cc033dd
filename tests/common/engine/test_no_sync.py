"""Nothing in a launch waits for the device: on one whose tensors have no values (tests/support/dataless_device.py), so that whoever needs one fails.

What runs on a GPU besides has its test there (tests/gpu): graphs, FlashInfer, and the copy of the drawn tokens, which is taken out here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from dataless_device import DEVICE, Waits, no_waiting_without_device
from paged_driver import PagedDriver, Row, greedy, sampling
from tiny_models import EOS_ID, VOCAB_SIZE, cached_checkpoint
from triton.runtime import interpreter

from common.config import AttentionName
from common.engine import runner as runner_module
from common.engine.batch import LogitChange, SamplingBatch
from common.engine.runner import ModelRunner
from common.layers.triton_lang import INTERPRETED
from common.request import SamplingParams
from common.sampling.penalties import LogitHistory

MAX_ROWS = 10  # with buckets of 8 and 10 rows, and none of 9
REFUSALS = (Waits, NotImplementedError, RuntimeError)


# ---- that it finds what waits ---------------------------------------------------------------------------------------------


def tensor(*values: int) -> torch.Tensor:
    return torch.empty(len(values), dtype=torch.int64, device=DEVICE)


def pinned(*values: int) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


WAITING: dict[str, Callable[[], object]] = {
    "item": lambda: tensor(1).item(),
    "int": lambda: int(tensor(1)),
    "if": lambda: 1 if tensor(1) > 0 else 2,
    "tolist": lambda: tensor(1, 2).tolist(),
    "cpu": lambda: tensor(1, 2).cpu(),
    "numpy": lambda: tensor(1, 2).cpu().numpy(),
    "copy to the host": lambda: torch.empty(2, dtype=torch.int64).copy_(tensor(1, 2)),
    "nonzero": lambda: tensor(1, 2).nonzero(),
    "where": lambda: torch.where(tensor(1, 2) > 1),
    "mask": lambda: tensor(1, 2)[tensor(1, 2) > 1],
    "masked_select": lambda: tensor(1, 2).masked_select(tensor(1, 2) > 1),
    "assignment by a mask": lambda: tensor(1, 2).__setitem__(tensor(1, 2) > 1, tensor(1, 2)),
    "a tensor as a number of a row": lambda: torch.empty(3, 3, device=DEVICE)[tensor(1)[0], :2],
    "a host tensor as an index": lambda: tensor(1, 2)[torch.tensor([1, 0])],
    "unique": lambda: tensor(1, 2).unique(),
    "equal": lambda: torch.equal(tensor(1, 2), tensor(1, 2)),
    "repeat_interleave": lambda: tensor(1, 2).repeat_interleave(tensor(1, 2)),
    "a copy from pageable memory": lambda: torch.tensor([1, 2]).to(DEVICE, non_blocking=True),
    "a blocking copy": lambda: pinned(1, 2).to(DEVICE),
    "a blocking copy in place": lambda: tensor(1, 2).copy_(pinned(1, 2)),
    "a tensor of host values": lambda: torch.tensor([1, 2], device=DEVICE),
}
INNOCENT: dict[str, Callable[[], object]] = {
    "an asynchronous copy": lambda: pinned(1, 2).to(DEVICE, non_blocking=True),
    "one in place": lambda: tensor(1, 2).copy_(pinned(1, 2), non_blocking=True),
    "arithmetic": lambda: (tensor(1, 2) * 3 + 1).clamp(min=0).cumsum(0),
    "device indices": lambda: tensor(1, 2)[tensor(1, 0)],
    "assignment by device indices": lambda: tensor(1, 2).__setitem__(tensor(1, 0), tensor(1, 2)),
    "one number by a mask": lambda: tensor(1, 2).__setitem__(tensor(1, 2) > 1, 5),
    "a filled mask": lambda: tensor(1, 2).masked_fill(tensor(1, 2) > 1, 0),
    "a choice": lambda: torch.where(tensor(1, 2) > 1, tensor(1, 2), -1),
    "a tensor full of one number": lambda: torch.full((2,), 5, device=DEVICE),
    "work on the host": lambda: torch.tensor([1, 2]).unique().tolist(),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_refused(name: str) -> None:
    with no_waiting_without_device(), pytest.raises(REFUSALS):
        WAITING[name]()


@pytest.mark.parametrize("name", INNOCENT)
def test_what_does_not_wait_is_let_through(name: str) -> None:
    with no_waiting_without_device():
        INNOCENT[name]()


# ---- launches -------------------------------------------------------------------------------------------------------------


class NoKernel:
    """In place of the interpreter's launch of a Triton kernel."""

    def __init__(self, *args: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "GridExecutor", NoKernel)
    monkeypatch.setattr(runner_module, "to_host", lambda drawn: drawn)


@cache
def dataless_runner(attention_backend: AttentionName) -> ModelRunner:
    device: Any = "meta"
    return ModelRunner(
        cached_checkpoint("qwen3_sliding"), device=device, attention_backend=attention_backend, num_pages=64, max_running_requests=MAX_ROWS
    )


def rows_of(lengths: Sequence[int]) -> list[Row]:
    return [Row(list(range(length))) for length in lengths]


MIXES = {
    "greedy": greedy,
    "sampled": lambda n: sampling(n, temperature=0.7, seed=3),
    "top_p": lambda n: sampling(n, temperature=0.7, top_p=0.9),
    "top_k and min_p": lambda n: sampling(n, temperature=0.7, top_k=20, min_p=0.1),
    "all": lambda n: sampling(n, temperature=0.7, top_p=0.9, top_k=20, min_p=0.1),
}
PENALTIES = SamplingParams(
    max_new_tokens=9, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2, logit_bias=((7, 3.0),), min_tokens=4
)  # fmt: skip


def changes(num_rows: int) -> list[LogitChange]:
    return [LogitChange(row, LogitHistory(PENALTIES, [1, 2, 3], [EOS_ID], VOCAB_SIZE), [], 0) for row in range(0, num_rows, 2)]


@pytest.mark.parametrize(
    ("attention_backend", "mix", "penalties"),
    [*(("triton", mix, False) for mix in MIXES), ("triton", "greedy", True), ("torch", "greedy", False), ("torch", "all", True)],
)
def test_a_launch_waits_for_nothing(attention_backend: AttentionName, mix: str, penalties: bool) -> None:
    """Prompts of one token, in one chunk and in two; then decode steps in a bucket, padded where that is quick enough, and of other rows."""
    if attention_backend == "triton" and not INTERPRETED:
        pytest.skip("kernels are compiled here; tests/gpu has the test for these")
    driver = PagedDriver(dataless_runner(attention_backend))
    rows = rows_of([1, 16, 40] if attention_backend == "torch" else [1, 16, 40, *range(2, 8)])
    launch(driver, driver.extend_batch([(row, min(len(row.token_ids), 35)) for row in rows]), mix, penalties)
    launch(driver, driver.extend_batch([(rows[2], 5)]), mix, penalties)
    for part in (rows, rows, rows[1:]):
        for row in part:
            row.token_ids.append(7)
        launch(driver, driver.decode_batch(part), mix, penalties)


def launch(driver: PagedDriver, batch: Any, mix: str, penalties: bool) -> None:
    num_sampled = len(getattr(batch, "sample_rows", batch.rows))
    asked: SamplingBatch = MIXES[mix](num_sampled)
    told = replace(batch.updates, sampling=MIXES[mix](len(batch.updates.new_rows)))
    with no_waiting_without_device():
        drawn: Any = driver.runner.launch(replace(batch, updates=told, sampling=asked, changes=changes(num_sampled) if penalties else ()))
    assert (drawn.device, drawn.dtype, len(drawn)) == (DEVICE, torch.int64, num_sampled)
