"""The fused Triton kernels against TorchOps, whose rounding they share."""

import importlib.util
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import DEVICE, as_silent_as_devices

from common.errors import StartupError
from common.layers import triton_lang
from common.layers.ops import NormWeight
from common.layers.torch_ops import TorchOps
from common.layers.triton_ops import TritonOps

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
pytestmark = as_silent_as_devices
few_examples = settings(max_examples=15, deadline=None)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """bfloat16: the same but for a last place here and there, where the float32 before the rounding lay at a tie."""
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2**-7 if found.dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert (found != expected).float().mean() < 0.02 or found.dtype == torch.float32


def noise(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def norm_weight(seed: int, size: int, eps: float, dtype: torch.dtype) -> NormWeight:
    weight = NormWeight.empty(size, eps, dtype, DEVICE)
    weight.tensor.copy_(noise(seed, dtype, size))
    return weight


@few_examples
@given(st.integers(0, 99), DTYPES, st.integers(1, 3), st.integers(1, 1500), st.sampled_from([1e-6, 0.1]))
def test_norms_equal_torch(seed: int, dtype: torch.dtype, num_tokens: int, size: int, eps: float) -> None:
    x, residual, weight = noise(seed, dtype, num_tokens, size), noise(seed + 1, dtype, num_tokens, size), norm_weight(seed + 2, size, eps, dtype)
    kept, expected_residual = x.clone(), residual.clone()
    assert_near(TritonOps().rms_norm(x, weight), TorchOps().rms_norm(x, weight))
    found, expected = TritonOps().add_rms_norm(x, residual, weight), TorchOps().add_rms_norm(x, expected_residual, weight)
    assert_near(found, expected)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(x, kept)


@few_examples
@given(DTYPES, st.integers(1, 3), st.integers(1, 2500), st.sampled_from([1.0, 30.0, 1000.0]))
def test_silu_mul_equals_torch(dtype: torch.dtype, num_tokens: int, size: int, largest: float) -> None:
    gate_up = noise(size, dtype, num_tokens, 2 * size) * largest
    assert_near(TritonOps().silu_mul(gate_up), TorchOps().silu_mul(gate_up))


def test_tokens_may_lie_apart() -> None:
    x, weight = noise(0, torch.float32, 3, 80)[:, :50], norm_weight(1, 50, 1e-6, torch.float32)
    assert_near(TritonOps().rms_norm(x, weight), TorchOps().rms_norm(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible_in_its_row_alone(dtype: torch.dtype, bad: float) -> None:
    x, weight = torch.ones(2, 100, dtype=dtype, device=DEVICE), norm_weight(0, 100, 1e-6, dtype)
    x[1, 37] = bad
    for out in (TritonOps().rms_norm(x, weight), TritonOps().add_rms_norm(x, torch.ones_like(x), weight), TritonOps().silu_mul(x)):
        assert out[0].isfinite().all()
        assert not out[1].isfinite().all()


def test_where_triton_is_not_installed_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("triton_lang_without_triton", triton_lang.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(StartupError, match=r"not installed \(triton\): pip install triton"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
