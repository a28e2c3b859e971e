"""Cosines and sines of rotary position embeddings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine_core.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32: radians per position of each rotated pair.

    linear: all divided by factor (position interpolation, arXiv:2306.15595).
    llama3: wavelengths above original / low_freq_factor divided by factor, below
    original / high_freq_factor kept, between them blended (Llama 3.1 model code).
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.int64).float()
    frequencies = 1.0 / (rope.theta ** (pairs / head_dim))
    if rope.rope_type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.rope_type == "llama3":
        frequencies = _llama3(frequencies, rope)
    else:
        assert rope.rope_type == "default", rope
    if rope.freq_divisors:
        frequencies = frequencies / torch.tensor(rope.freq_divisors)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def cos_sin_table(rope: RopeConfig, head_dim: int, max_positions: int) -> torch.Tensor:
    """[max_positions, head_dim] float32: cosines, then sines."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
