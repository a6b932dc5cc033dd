"""The CUDA attention backends, compiled, against the dense oracle: batches of every kind, in a captured graph, without waiting."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from attention_batches import Case, Step
from no_waiting import no_waiting

from common.attention.backend import AttentionBackend
from common.attention.triton import TritonAttention

CUDA = torch.device("cuda", 0)
DECODE = ((0, 1), (15, 1), (16, 1), (700, 1), (5000, 1))  # the last are split
EXTEND = ((0, 200), (100, 1), (16, 130), (1000, 64), (0, 1))
BF16 = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
SHARED = (  # what both serve
    Case((), kv_heads=8, group=4, head_dim=128, **BF16),
    Case((), kv_heads=2, group=8, head_dim=128, window=100, **BF16),
    Case((), kv_heads=3, group=3, head_dim=64, soft_cap=30.0, is_normed=True, **BF16),
    Case((), kv_heads=4, group=1, head_dim=64, page_size=1, **BF16),
    Case((), kv_heads=2, group=2, head_dim=256, page_size=64, window=33, soft_cap=2.0, **BF16),
)
TRITON_ONLY = (
    Case((), kv_heads=2, group=4, head_dim=80, **BF16),
    Case((), kv_heads=1, group=7, head_dim=96, window=20, is_normed=True, **BF16),
    Case((), kv_heads=2, group=3, head_dim=64),
    Case((), kv_heads=2, group=2, head_dim=128, page_size=64, window=40, soft_cap=2.0),
    Case((), kv_heads=1, group=2, head_dim=256, is_normed=True),
    Case((), kv_heads=2, group=4, head_dim=128, dtype=torch.bfloat16, kv_dtype=torch.float32),
    Case((), kv_heads=2, group=4, head_dim=64, dtype=torch.float32, kv_dtype=torch.bfloat16),
)


def triton_on(step: Step) -> AttentionBackend:
    return TritonAttention(step.geometry, step.pool, step.rope, max_rows=len(step.batch.rows), max_context=step.max_context)


def flashinfer_on(step: Step) -> AttentionBackend:
    pytest.importorskip("flashinfer")
    from common.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(step.geometry, step.pool, step.rope, max_rows=len(step.batch.rows), max_context=step.max_context)


Make = Callable[[Step], AttentionBackend]
SERVED = [*((triton_on, case) for case in (*SHARED, *TRITON_ONLY)), *((flashinfer_on, case) for case in SHARED)]
BACKENDS = [triton_on, flashinfer_on]


def named(value: Make | Case) -> str:
    if not isinstance(value, Case):
        return value.__name__
    dtypes = "" if value.dtype == value.kv_dtype else f"-{value.dtype}-on-{value.kv_dtype}"
    marks = [f"window{value.window}"] * bool(value.window) + [f"cap{value.soft_cap}"] * bool(value.soft_cap) + ["normed"] * value.is_normed
    return "-".join([f"{value.kv_heads}x{value.group}x{value.head_dim}", f"page{value.page_size}", str(value.dtype).split(".")[1] + dtypes, *marks])


compiles = pytest.mark.timeout(900)  # FlashInfer's kernels, by nvcc, when they are met for the first time


@compiles
@pytest.mark.parametrize(("make", "case"), SERVED, ids=named)
def test_extend_equals_the_oracle(make: Make, case: Case) -> None:
    step = Step(replace(case, rows=EXTEND), CUDA)
    step.check(make(step))


@compiles
@pytest.mark.parametrize(("make", "case"), SERVED, ids=named)
def test_decode_equals_the_oracle(make: Make, case: Case) -> None:
    step = Step(replace(case, rows=DECODE, is_decode=True, num_padding=3), CUDA)
    step.check(make(step))


@compiles
@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("num_rows", [3, 64])
def test_a_captured_step_works_by_what_its_buffers_hold(make: Make, num_rows: int) -> None:
    """Captured on one token a row, as the engine does it, then replayed with other lengths, longer and shorter ones."""
    longest = ((0, 1), (5000, 1), *((97 * row, 1) for row in range(1, num_rows - 1)))
    step = Step(Case(longest, kv_heads=2, group=4, head_dim=128, is_decode=True, num_padding=1, **BF16), CUDA)
    backend, static, qkv = make(step), step.batch, step.qkv.to(CUDA)
    with torch.inference_mode():
        place(static, like(step, ((0, 1),) * num_rows))
        backend.plan(static, like(step, ((0, 1),) * num_rows).lens)
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            backend.forward(qkv, step.spec)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            out = backend.forward(qkv, step.spec)
        for rows in (longest, tuple((cached // 3, 1) for cached, _ in longest), longest):
            wanted = like(step, rows)
            expected, *_ = wanted.expected()
            place(static, wanted)
            backend.plan(static, wanted.lens)
            graph.replay()
            found = out.cpu().view(len(qkv), step.geometry.num_heads, -1)[:num_rows]
            torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


def like(step: Step, rows: tuple[tuple[int, int], ...]) -> Step:
    """The step with other lengths, none longer, on the same pool and pages."""
    other = copy.copy(step)
    other.case = replace(step.case, rows=rows)
    other.context_lens = [cached + new for cached, new in rows] + [1] * step.case.num_padding
    other.batch, other.lens = other._make_batch()
    return other


def place(static: object, step: Step) -> None:
    """Into the buffers that a graph was, or will be, captured with."""
    for name in ("context_lens", "positions", "slots"):
        getattr(static, name).copy_(getattr(step.batch, name))


@compiles
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("is_decode", [False, True])
@pytest.mark.parametrize("make", BACKENDS)
def test_a_step_does_not_wait_for_the_device(make: Make, is_decode: bool) -> None:
    step = Step(replace(SHARED[0], rows=DECODE if is_decode else EXTEND, is_decode=is_decode), CUDA)
    backend, qkv = make(step), step.qkv.to(CUDA)
    for _ in range(2):  # compiles, allocates
        backend.plan(step.batch, step.lens)
        backend.forward(qkv, step.spec)
    with no_waiting():
        backend.plan(step.batch, step.lens)
        backend.forward(qkv, step.spec)
