"""Weights in blocks: what comes from a GGUF file goes back to its blocks; the CPU kernels compute what the blocks say, for any shape."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from float8 import multiplies_float8
from gguf import GGMLQuantizationType as GGUFType
from gguf.quants import dequantize, quantize

from common.layers import quantized_cpu
from common.layers.arrays import as_array
from common.layers.linear import Linear
from common.layers.quantized import BLOCK, Blocks, quantised
from common.layers.quantized_cpu import PANEL, BlockQuantizer, BlockWeight, multiply_kernel, packed
from common.layers.quantized_fp8 import FLOAT8, LARGEST, Float8Quantizer, Float8Weight, scaled

CPU = torch.device("cpu")
SHAPES = [(PANEL, BLOCK), (17, 2 * BLOCK), (260, 3 * BLOCK)]  # outputs that fill their panels, and that do not
ROWS = (1, 3, quantized_cpu.ROW_TILE, 2 * quantized_cpu.ROW_TILE + 1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def weight_of(shape: tuple[int, int]) -> torch.Tensor:
    """Outputs of very different size, one of them zero, some values alone far from the others."""
    weight = torch.randn(shape) * torch.logspace(-4, 1, shape[0])[:, None]
    weight[shape[0] // 2] = 0
    weight[:, ::29] *= 8
    return weight


# ---- blocks -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "stored"), [(8, GGUFType.Q8_0), (4, GGUFType.Q4_1), (4, GGUFType.Q4_0)])
def test_weights_of_a_gguf_file_come_back_as_they_were(bits: int, stored: GGUFType) -> None:
    exact = torch.from_numpy(dequantize(quantize(weight_of((64, 4 * BLOCK)).numpy(), stored), stored))
    assert torch.equal(quantised(exact, bits).dequantised(), exact)


@pytest.mark.parametrize(("stored", "most_error"), [(GGUFType.Q4_1, 1e-4), (GGUFType.Q4_0, 4e-4)])
def test_four_bits_made_of_bfloat16_come_back_through_bfloat16(stored: GGUFType, most_error: float) -> None:
    exact = torch.from_numpy(dequantize(quantize(torch.randn(64, 4 * BLOCK).bfloat16().float().numpy(), stored), stored))
    rounded = exact.bfloat16()
    assert (rounded.float() - exact).norm() > 1e-3 * exact.norm()
    assert (quantised(rounded, 4).dequantised() - exact).norm() < most_error * exact.norm()


@pytest.mark.parametrize(("bits", "steps"), [(8, 127.0), (4, 15.0)])
def test_values_are_within_a_step_of_their_own(bits: int, steps: float) -> None:
    """Half a step by the grid; a scale below 6e-5 is a coarser float16, and the grid around zero may cut the far end of the other side."""
    weight = weight_of((64, 4 * BLOCK))
    blocks = weight.reshape(64, 4, BLOCK)
    span = blocks.abs().amax(2) if bits == 8 else blocks.amax(2) - blocks.amin(2)
    step = torch.maximum(span / steps, torch.tensor(6e-8))  # the least float16 above zero
    error = (quantised(weight, bits).dequantised() - weight).reshape(64, 4, BLOCK).abs().amax(2)
    assert bool((error <= step * 1.1).all())
    assert float((error / step).median()) < 0.52


def test_the_better_grid_of_four_bits_is_taken() -> None:
    around_zero = torch.cat((torch.arange(-8, 7).float(), torch.zeros(17)))[None]  # -8..6: steps of one from zero, 14/15 from the least
    assert torch.equal(quantised(around_zero, 4).dequantised(), around_zero)
    offset = torch.cat((torch.arange(16).float() + 100, torch.full((16,), 107.0)))[None]
    assert torch.equal(quantised(offset, 4).dequantised(), offset)


# ---- the CPU kernels -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_computes_what_the_blocks_say(bits: int, shape: tuple[int, int]) -> None:
    weight, bias = weight_of(shape), torch.randn(shape[0]).bfloat16()
    meant = quantised(weight, bits).dequantised()
    form = BlockWeight(weight, bias, bits, None, 1)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1]).bfloat16()
        expected = x.double() @ meant.double().T + bias.double()
        magnitude = x.double().abs() @ meant.double().abs().T + bias.double().abs()
        y = form(x).double()
        assert bool(((y - expected).abs() <= 2**-8 * expected.abs() + 2**-18 * magnitude).all())  # one rounding to bfloat16, float32 sums


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_the_others(bits: int) -> None:
    form = BlockWeight(weight_of((33, 3 * BLOCK)), None, bits, None, 1)
    x = torch.randn(ROWS[-1], 3 * BLOCK).bfloat16()
    together = form(x)
    assert all(torch.equal(form(x[row : row + 1])[0], together[row]) for row in range(len(x)))
    x[5] = float("nan")
    spoiled = form(x)
    assert bool(spoiled[5].isnan().all())
    assert torch.equal(spoiled[6:], together[6:])


@pytest.mark.parametrize("bits", [4, 8])
def test_the_form_for_other_processors_agrees(bits: int) -> None:
    """As on a machine without AVX512-BF16: float32 products of the same numbers."""
    blocks = quantised(weight_of((17, 2 * BLOCK)), bits)
    q, scales = packed(blocks)
    x, y = torch.randn(3, 2 * BLOCK).bfloat16(), torch.empty(3, 17, dtype=torch.bfloat16)
    multiply_kernel(bits, native=False)(as_array(x), q, scales, np.empty(0, np.uint16), as_array(y), 0, 2)
    torch.testing.assert_close(y.float(), x.float() @ blocks.dequantised().T, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_the_weight_itself_in_bfloat16(bits: int) -> None:
    weight = weight_of((40, 2 * BLOCK))
    ids = torch.tensor([39, 0, 17, 17])
    assert torch.equal(BlockWeight(weight, None, bits, None, 1).rows(ids), quantised(weight, bits).dequantised().bfloat16()[ids])


def test_quantised_in_parts_is_quantised_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of((5 * PANEL + 3, BLOCK))
    whole = BlockWeight(weight, None, 4, None, 1)
    monkeypatch.setattr(quantized_cpu, "QUANTISED_AT_ONCE", 2 * PANEL * BLOCK)
    parts = BlockWeight(weight, None, 4, None, 1)
    ids = torch.arange(len(weight))
    assert torch.equal(parts.rows(ids), whole.rows(ids))


def test_threads_share_the_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_cpu, "WORK_A_THREAD", 1)
    weight, x = weight_of((7 * PANEL, BLOCK)), torch.randn(2, BLOCK).bfloat16()
    with ThreadPoolExecutor(2) as pool:
        assert torch.equal(BlockWeight(weight, None, 8, pool, 3)(x), BlockWeight(weight, None, 8, None, 1)(x))


# ---- in a Linear ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "bits_a_weight"), [(4, 5.0), (8, 8.5)])
def test_no_plain_weight_is_left(bits: int, bits_a_weight: float) -> None:
    linear = Linear(4 * BLOCK, 4 * PANEL, True, torch.bfloat16, CPU, BlockQuantizer(bits, 1))
    linear.weight.copy_(weight_of((4 * PANEL, 4 * BLOCK)))
    assert linear.bias is not None
    linear.bias.zero_()
    before = linear.embed(torch.arange(4 * PANEL)).float()
    linear.pack(keep_plain=True)
    assert linear.nbytes == 4 * PANEL * 4 * BLOCK * bits_a_weight / 8 + linear.bias.nbytes
    assert linear.weight.numel() == 0
    after = linear.embed(torch.arange(4 * PANEL)).float()
    assert (after - before).norm() < before.norm() * (0.02 if bits == 8 else 0.2)


def test_inputs_that_fill_no_block_stay_in_bfloat16() -> None:
    linear = Linear(BLOCK + 8, PANEL, False, torch.bfloat16, CPU, BlockQuantizer(8, 1))
    weight = torch.randn(PANEL, BLOCK + 8).bfloat16()
    linear.weight.copy_(weight)
    linear.pack()
    assert torch.equal(linear(torch.eye(BLOCK + 8).bfloat16()), weight.T)


# ---- float8 ---------------------------------------------------------------------------------------------


def test_float8_scales_bring_the_largest_to_the_end_of_its_range() -> None:
    x = weight_of((20, 48))
    p, scale = scaled(x)
    assert (p.dtype, scale.shape) == (FLOAT8, (20, 1))
    full = p.float().abs().amax(1)
    assert bool((full[x.abs().amax(1) > 0] == LARGEST).all())
    assert bool(((p.float() * scale - x).abs() <= x.abs() * 2**-4 + scale * 2**-10).all())  # three bits of fraction; below 2^-6, steps of 2^-9
    assert bool(p.float()[10].eq(0).all())  # the row of zeros


@multiplies_float8
def test_float8_product_scales_by_token_and_by_output() -> None:
    weight, bias, x = weight_of((32, 48)).bfloat16(), torch.randn(32).bfloat16(), torch.randn(5, 48).bfloat16() * torch.logspace(-3, 3, 5)[:, None]
    x = x.bfloat16()
    (p, x_scale), (q, w_scale) = scaled(x), scaled(weight)
    expected = (p.double() * x_scale.double()) @ (q.double() * w_scale.double()).T
    y = Float8Weight(weight, bias, None)(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected + bias.double(), rtol=2**-6, atol=1e-6)


@multiplies_float8
def test_float8_takes_the_scales_of_the_checkpoint() -> None:
    stored = torch.randn(32, 48).to(FLOAT8)
    scale = torch.rand(32) + 0.1  # not what the largest numbers would ask for
    weight = (stored.float() * scale[:, None]).bfloat16()
    y = Float8Weight(weight, None, scale)(torch.eye(48).bfloat16())
    assert torch.equal(y.T, (stored.float() * scale[:, None]).bfloat16())


@multiplies_float8
def test_float8_keeps_a_broken_row_to_itself() -> None:
    form, x = Float8Weight(torch.randn(16, 32).bfloat16(), None, None), torch.randn(4, 32).bfloat16()
    whole = form(x)
    x[1, 3], x[2, 4] = float("nan"), float("inf")
    y = form(x)
    assert bool(y[1].isnan().all())
    assert not bool(y[2].isfinite().any())
    assert torch.equal(y[::3], whole[::3])


def test_float8_leaves_what_its_kernel_cannot_take() -> None:
    assert Float8Quantizer().quantise(torch.randn(16, 40).bfloat16(), None, None) is None
    assert isinstance(Float8Quantizer().quantise(torch.randn(16, 48).bfloat16(), None, None), Float8Weight)


def test_blocks_without_low_have_none() -> None:
    assert isinstance(quantised(torch.randn(16, 32), 8), Blocks)
    assert quantised(torch.randn(16, 32), 8).low is None
