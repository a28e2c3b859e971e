"""Philox4x32-10, the counter-based random numbers of every backend.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011. Torch has no unsigned 32-bit arithmetic, so words travel as int64.
"""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """counter [..., 4] and key [..., 2], int64 words in [0, 2^32) -> [..., 4] words."""
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(_ROUNDS):
        # The products wrap modulo 2^64, which leaves both halves' bits right.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, low0 = (product0 >> 32) & _WORD, product0 & _WORD
        high1, low1 = (product1 >> 32) & _WORD, product1 & _WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def uniform(seed: torch.Tensor, position: torch.Tensor, sample_index: torch.Tensor) -> torch.Tensor:
    """One number per row: seed [S] int64 (bits of the uint64), position [S] int64,
    sample_index [S] int32 -> u [S] float64 in [0, 1), a multiple of 2^-53.

    key = (seed's low word, its high word); counter = (position's low word,
    sample_index, 0, 0). With output words w0 and w1,
    u = ((w0 << 21) | (w1 >> 11)) * 2^-53.
    """
    key = torch.stack((seed & _WORD, (seed >> 32) & _WORD), dim=-1)
    zero = torch.zeros_like(position)
    counter = torch.stack((position & _WORD, sample_index.long() & _WORD, zero, zero), dim=-1)
    w0, w1, _, _ = philox4x32(counter, key).unbind(-1)
    return ((w0 << 21) | (w1 >> 11)).double() * 2.0**-53
