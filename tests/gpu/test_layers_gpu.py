"""Fused steps and the sampler on a CUDA device equal their plain forms."""

import numpy as np
import pytest
import torch
from no_waiting import no_waiting

from common.layers.ops import NormWeight
from common.layers.quantized_fp8 import Float8Weight, scaled
from common.layers.torch_ops import TorchOps
from common.layers.triton_ops import TritonOps
from common.sampling.params import SamplingMix, SamplingRows
from common.sampling.sample import NON_FINITE, sample

CUDA = torch.device("cuda", 0)
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 8e-3, "atol": 8e-3}}  # of bfloat16: one rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (7, 576), (33, 4096), (3, 14336)])
def test_fused_steps(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(num_tokens, size, device=CUDA).to(dtype) for _ in range(2))
    weight = NormWeight(torch.randn(size, device=CUDA).to(dtype), 1e-5, None)
    gate_up = torch.randn(num_tokens, 2 * size, device=CUDA).to(dtype)
    plain, fused, other_residual = TorchOps(), TritonOps(), residual.clone()
    torch.testing.assert_close(fused.rms_norm(x, weight), plain.rms_norm(x, weight), **TOLERANCES[dtype])
    normed = fused.add_rms_norm(x, residual, weight)
    torch.testing.assert_close(normed, plain.add_rms_norm(x, other_residual, weight), **TOLERANCES[dtype])
    assert torch.equal(residual, other_residual)
    torch.testing.assert_close(fused.silu_mul(gate_up), plain.silu_mul(gate_up), **TOLERANCES[dtype])


@pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="multiplies no float8")
@pytest.mark.parametrize(("num_tokens", "num_in", "num_out"), [(1, 64, 48), (7, 576, 1536), (64, 4096, 512)])
def test_float8_linears(num_tokens: int, num_in: int, num_out: int) -> None:
    """Products of the rounded numbers, exactly but for the result's rounding; the same from a captured graph."""
    torch.manual_seed(0)
    x, weight = torch.randn(num_tokens, num_in, device=CUDA).bfloat16(), torch.randn(num_out, num_in, device=CUDA).bfloat16()
    (p, x_scale), (q, weight_scale), form = scaled(x), scaled(weight), Float8Weight(weight, None, None)
    expected = (p.double() * x_scale.double()) @ (q.double() * weight_scale.double()).T
    torch.testing.assert_close(form(x).double(), expected, rtol=2**-6, atol=2**-6 * expected.abs().mean().item())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = form(x)
    x.mul_(2)
    graph.replay()
    assert torch.equal(captured, form(x))


def rows_of(num_rows: int, **values: float) -> tuple[SamplingRows, SamplingMix]:
    """On the host, every row alike but for its seed."""
    rows = SamplingRows.greedy(num_rows, torch.device("cpu"))
    for name, value in values.items():
        getattr(rows, name).fill_(value)
    rows.seed.copy_(torch.arange(num_rows))
    return rows, SamplingMix.of(rows.temperature.numpy(), rows.top_p.numpy(), rows.top_k.numpy(), rows.min_p.numpy())


def on_device(rows: SamplingRows) -> SamplingRows:
    return SamplingRows(*(tensor.to(CUDA) for tensor in (rows.temperature, rows.top_p, rows.top_k, rows.min_p, rows.seed)))


MIXES = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 50}, {"temperature": 1.3, "top_p": 0.9}, {"temperature": 1.0, "min_p": 0.05},
         {"temperature": 0.9, "top_k": 200, "top_p": 0.95, "min_p": 0.01}]  # fmt: skip


@pytest.mark.parametrize("values", MIXES, ids=str)
def test_tokens_are_those_of_the_cpu(values: dict[str, float]) -> None:
    """Greedy ones all; of drawn ones a few in a thousand may differ, where the last bit of an exponential decides."""
    num_rows = 512
    logits = torch.randn(num_rows, 32_000, generator=torch.Generator().manual_seed(0)) * 3
    rows, mix = rows_of(num_rows, **values)
    positions = torch.arange(num_rows) + 7
    here, there = sample(logits, rows, positions, mix), sample(logits.to(CUDA), on_device(rows), positions.to(CUDA), mix).cpu()
    num_unequal = int((here != there).sum())
    assert num_unequal <= (num_rows // 100 if values else 0)


def test_rows_without_a_token_leave_the_others_alone() -> None:
    logits = torch.randn(4, 1000)
    logits[1, 17], logits[2, 5] = torch.nan, torch.inf
    rows, mix = rows_of(4)
    found = sample(logits.to(CUDA), on_device(rows), torch.zeros(4, dtype=torch.int64, device=CUDA), mix)
    assert found.tolist() == [int(logits[0].argmax()), NON_FINITE, NON_FINITE, int(logits[3].argmax())]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("values", MIXES, ids=str)
def test_sampling_does_not_wait_for_the_device(values: dict[str, float]) -> None:
    logits, positions = torch.randn(16, 32_000, device=CUDA), torch.arange(16, device=CUDA)
    rows, mix = rows_of(16, **values)
    there = on_device(rows)
    sample(logits, there, positions, mix)
    with no_waiting():
        sample(logits, there, positions, mix)


def test_a_draw_follows_its_weights() -> None:
    """Chi-square of 4096 draws over 8 tokens, at a level that one run in ten thousand exceeds."""
    num_rows, weights = 4096, torch.tensor([0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.05, 0.02])
    rows, mix = rows_of(num_rows, temperature=1.0)
    logits = weights.log().to(CUDA).repeat(num_rows, 1)
    drawn = sample(logits, on_device(rows), torch.zeros(num_rows, dtype=torch.int64, device=CUDA), mix).cpu().numpy()
    expected = weights.numpy() * num_rows
    assert ((np.bincount(drawn, minlength=8) - expected) ** 2 / expected).sum() < 29.9  # 7 degrees of freedom, 1e-4
