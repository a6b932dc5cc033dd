"""Random numbers without state: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in tensor arithmetic.

It hashes a counter under a key. The key is a request's seed and the counter a position in it, so a number can be computed anywhere, at
any time, in any order. torch has no unsigned 64-bit arithmetic on every device: a 32-bit word is an int64 of value [0, 2^32) here. The product of
two words wraps, which leaves its 64 bits right; masks take off the sign that a shift extends.
"""

import torch

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # int64, each in [0, 2^32)
NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round
WORD = 0xFFFFFFFF
DOUBLE_BITS = 53  # of a float64's significand


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four random words for each counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> 32 & WORD) ^ c1 ^ k0, second & WORD, (first >> 32 & WORD) ^ c3 ^ k1, first & WORD
        k0, k1 = k0 + WEYL[0] & WORD, k1 + WEYL[1] & WORD
    return c0, c1, c2, c3


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """seed, position: int64 [S] -> float64 [S] in [0, 1)."""
    zero = torch.zeros_like(position)
    high, low, _, _ = philox((position & WORD, position >> 32 & WORD, zero, zero), (seed & WORD, seed >> 32 & WORD))
    bits = high << (DOUBLE_BITS - 32) | low >> (64 - DOUBLE_BITS)
    return bits.double() * 2.0**-DOUBLE_BITS
