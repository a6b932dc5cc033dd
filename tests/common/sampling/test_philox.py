"""The generator is the published one, and the kernel's is the same."""

import numba
import numpy as np
import pytest
import torch
from triton_interpreter import DEVICE

from common.sampling.numba import _uniform
from common.sampling.philox import philox, uniform
from common.sampling.triton import uniform_by_triton

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # kat_vectors of Random123 (D. E. Shaw Research), philox4x32 with 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_published_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1))) == words


def numbers_of(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds and positions: any int64, half of the positions as they are."""
    rng = np.random.default_rng(0)
    seeds, positions = (torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, num_rows)) for _ in range(2))
    positions[: num_rows // 2] %= 1 << 20
    return seeds, positions


def test_the_cpu_kernel_computes_the_same_numbers() -> None:
    seeds, positions = numbers_of(200)

    @numba.njit
    def kernel(seeds: np.ndarray, positions: np.ndarray) -> list[float]:
        return [_uniform(np.uint64(seeds[i]), np.uint64(positions[i])) for i in range(len(seeds))]

    numbers = uniform(seeds, positions)
    assert kernel(seeds.numpy(), positions.numpy()) == numbers.tolist()
    assert numbers.min() >= 0
    assert numbers.max() < 1


@pytest.mark.parametrize("num_rows", [1, 200])
def test_the_gpu_kernel_computes_the_same_numbers(num_rows: int) -> None:
    seeds, positions = (tensor.to(DEVICE) for tensor in numbers_of(num_rows))
    assert uniform_by_triton(seeds, positions).tolist() == uniform(seeds, positions).tolist()


def test_numbers_are_spread_evenly_along_positions_and_along_seeds() -> None:
    """Chi-squared over 64 bins and 64000 numbers; 120 is beyond the 1e-5 tail of 63 degrees of freedom."""
    counting, fixed = torch.arange(64000), torch.full((64000,), 12345)
    for seed, position in ((fixed, counting), (counting, fixed), (fixed, counting << 32)):
        counts = torch.bincount((uniform(seed, position) * 64).long(), minlength=64)
        assert ((counts - 1000) ** 2 / 1000).sum() < 120
