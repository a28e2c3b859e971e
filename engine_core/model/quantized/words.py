"""Codes in 32-bit words, least significant first."""

from __future__ import annotations

import torch


def unpack_columns(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[R, n] int32 -> [R, n * 32 / bits] uint8: a word holds neighbours of a row. bits is
    4 or 8."""
    # The bytes of a word are in order on all machines that torch runs on: little-endian.
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
