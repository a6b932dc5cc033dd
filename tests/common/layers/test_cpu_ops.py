"""The fused kernels against float32 torch, over drawn shapes; rounding and NaN bit by bit."""

import numba.core.caching
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from common.layers import cpu_ops
from common.layers.arrays import EMPTY, as_array
from common.layers.vectors import exp2, kernel, narrow, njit, tanh

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
HALF_STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # largest relative error of a result: of rounding it, and in float32 of sums
few_examples = settings(max_examples=40, deadline=None)  # the first call compiles


@njit
def narrow_all(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(x)):
        out[i] = narrow(x[i], out[i])


@njit
def exp2_all(x: np.ndarray) -> None:
    for i in range(len(x)):
        x[i] = exp2(x[i])


@njit
def tanh_all(x: np.ndarray) -> None:
    for i in range(len(x)):
        x[i] = tanh(x[i])


def noise(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-6) -> None:
    """expected: float32, what exact arithmetic on the stored inputs gives."""
    torch.testing.assert_close(found.float(), expected, rtol=HALF_STEP[found.dtype], atol=atol)


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()).float()


@few_examples
@given(st.data(), DTYPES, st.integers(1, 5), st.integers(1, 700))
def test_norms(data: st.DataObject, dtype: torch.dtype, num_rows: int, size: int) -> None:
    generator, eps = torch.Generator().manual_seed(data.draw(st.integers(0, 99))), data.draw(st.sampled_from([1e-6, 1e-5, 0.1]))
    x, residual, weight = (noise(generator, dtype, *shape) for shape in ((num_rows, size), (num_rows, size), (size,)))
    out, added, kept = torch.empty_like(x), x + residual, x.clone()
    cpu_ops.rms_norm(as_array(x), as_array(weight), eps, as_array(out))
    assert_near(out, exact_norm(x, weight, eps))
    cpu_ops.add_rms_norm(as_array(x), as_array(residual), as_array(weight), eps, as_array(out))
    assert torch.equal(residual, added)  # rounded as torch rounds
    assert torch.equal(x, kept)
    assert_near(out, exact_norm(added, weight, eps))


@few_examples
@given(DTYPES, st.integers(1, 4), st.integers(1, 300), st.sampled_from([1.0, 30.0, 1000.0]))
def test_silu_mul(dtype: torch.dtype, num_rows: int, size: int, largest: float) -> None:
    generator = torch.Generator().manual_seed(size)
    gate_up, out = noise(generator, dtype, num_rows, 2 * size) * largest, torch.empty(num_rows, size, dtype=dtype)
    cpu_ops.silu_mul(as_array(gate_up), as_array(out))
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(out, (F.silu(gate) * up).float())


def exact_turn(x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, D]; cos, sin: [T, 1, D / 2]."""
    wide = x.float() if len(weight) == 0 else exact_norm(x, weight, eps)
    low, high = wide.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@few_examples
@given(st.data(), DTYPES, st.integers(1, 6), st.sampled_from([2, 16, 64, 80, 96, 128]), st.sampled_from([1, 16, 64]))
def test_rope_scatter(data: st.DataObject, dtype: torch.dtype, num_tokens: int, head_dim: int, page_size: int) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    kv_heads, group, normed = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 3, 4, 8])), data.draw(st.booleans())
    heads, num_pages, num_layers, layer, eps = kv_heads * group, -(-12 // page_size), 2, 1, 1e-6
    qkv, q_out = noise(generator, dtype, num_tokens, (heads + 2 * kv_heads) * head_dim), torch.empty(num_tokens, heads, head_dim, dtype=dtype)
    pool = noise(generator, dtype, num_pages, kv_heads, num_layers, 2, page_size, head_dim)
    angles = torch.rand(50, head_dim // 2, generator=generator) * 6
    positions, slots = torch.randint(50, (num_tokens,), generator=generator), torch.randperm(12, generator=generator)[:num_tokens]
    weights = [noise(generator, dtype, head_dim) if normed else torch.empty(0, dtype=dtype) for _ in range(2)]
    q, k, v = torch.split(qkv.view(num_tokens, -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
    cos, sin = angles.cos(), angles.sin()
    expected_q, expected_k = (
        exact_turn(x, weight, eps, cos[positions, None], sin[positions, None]) for x, weight in zip((q, k), weights, strict=True)
    )
    expected_pool = pool.clone()
    cpu_ops.rope_scatter(
        as_array(qkv), cos.numpy(), sin.numpy(), positions.numpy(), slots.numpy(), as_array(pool), layer,
        *(as_array(weight) if normed else EMPTY[dtype] for weight in weights), eps, as_array(q_out), kv_heads,
    )  # fmt: skip
    assert_near(q_out, expected_q, atol=1e-5)
    pages, offsets = slots // page_size, slots % page_size
    assert_near(pool[pages, :, layer, 0, offsets], expected_k, atol=1e-5)
    expected_pool[pages, :, layer, 0, offsets] = pool[pages, :, layer, 0, offsets]
    expected_pool[pages, :, layer, 1, offsets] = v
    assert torch.equal(pool, expected_pool)  # V as it is, and nothing else touched


def test_bfloat16_is_rounded_as_torch_rounds_and_nan_stays_nan() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000  # every bfloat16, and half a step
    edges = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0, 1 << 31, 1], np.uint32)
    x = np.concatenate([bits, ties, edges]).view(np.float32)
    found = np.empty(len(x), np.uint16)
    narrow_all(x, found)
    expected = torch.from_numpy(x).to(torch.bfloat16)
    rounded = torch.from_numpy(found).view(torch.bfloat16)
    assert torch.equal(rounded.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(rounded[numbers].view(torch.uint16), expected[numbers].view(torch.uint16))


def test_exp2_is_exact_to_float32_and_ends_at_the_normal_numbers() -> None:
    x = np.linspace(-126, 126, 100_001, dtype=np.float32)
    found = x.copy()
    exp2_all(found)
    np.testing.assert_allclose(found, np.exp2(x.astype(np.float64)), rtol=4e-7)
    ends = np.array([-np.inf, -1e9, 1e9, np.inf, np.nan], np.float32)
    exp2_all(ends)
    np.testing.assert_allclose(ends[:4], np.array([2.0**-126, 2.0**-126, 2.0**126, 2.0**126]), rtol=4e-7)
    assert np.isnan(ends[4])


def test_tanh_is_within_a_few_units_in_the_last_place() -> None:
    magnitudes = np.concatenate([np.geomspace(1e-30, 1e-3, 10_001), np.linspace(1e-3, 12, 100_001), [0.0, 100.0, np.inf]]).astype(np.float32)
    for x in (magnitudes, -magnitudes):
        found, exact = x.copy(), np.tanh(x.astype(np.float64))
        tanh_all(found)
        assert np.all(np.abs(found - exact) <= 4 * np.spacing(np.abs(exact).astype(np.float32)))
    missing = np.array([np.nan], np.float32)
    tanh_all(missing)
    assert np.isnan(missing[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible_in_its_row_alone(dtype: torch.dtype, bad: float) -> None:
    x, weight = torch.ones(2, 100, dtype=dtype), torch.ones(100, dtype=dtype)
    x[1, 37] = bad
    normed, added, gated = torch.empty_like(x), torch.empty_like(x), torch.empty(2, 50, dtype=dtype)
    cpu_ops.rms_norm(as_array(x), as_array(weight), 1e-6, as_array(normed))
    cpu_ops.add_rms_norm(as_array(x), as_array(torch.ones_like(x)), as_array(weight), 1e-6, as_array(added))
    cpu_ops.silu_mul(as_array(x), as_array(gated))
    for out in (normed, added, gated):
        assert out[0].isfinite().all()
        assert not out[1].isfinite().all()


def test_a_kernel_works_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])

    def fill(out: np.ndarray) -> None:
        out[:] = 3

    out = np.zeros(2)
    kernel(fill)(out)
    assert out.tolist() == [3, 3]
