"""Cosines and sines of rotary position embeddings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine_core.model.config import RopeConfig


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_positions: int | None = None
) -> torch.Tensor:
    """[rotary_dim / 2] float32: radians per position of each rotated pair.

    linear: all divided by factor (position interpolation, arXiv:2306.15595).
    dynamic: as without scaling, which is what it means up to the model's own context;
    beyond it they would depend on a length that the cached keys do not know yet.
    llama3: wavelengths above original / low_freq_factor divided by factor, below
    original / high_freq_factor kept, between them blended (Llama 3.1 model code).
    yarn: likewise by how often a pair turns within the original context, beta_slow times
    or less and beta_fast times or more (arXiv:2309.00071).
    longrope: divided one by one, by long_factors where max_positions (the longest sequence
    that is served) is above the original context, else by short_factors (arXiv:2402.13753).
    proportional: the frequencies of the whole head, but 0 for pairs past rotary_dim / 2.
    """
    rotary_dim = rope.rotary_dim or head_dim
    base_dim = head_dim if rope.rope_type == "proportional" else rotary_dim
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float()
    periods = rope.theta ** (pairs / base_dim)
    frequencies = 1.0 / periods
    if rope.rope_type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.rope_type == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope.rope_type == "yarn":
        frequencies = _yarn(periods, rope, rotary_dim)
    elif rope.rope_type == "longrope":
        frequencies = 1.0 / (torch.tensor(_longrope_factors(rope, max_positions)) * periods)
    elif rope.rope_type == "proportional":
        unturned = torch.zeros((head_dim - rotary_dim) // 2)
        frequencies = torch.cat((frequencies / rope.factor, unturned))
    else:
        assert rope.rope_type in ("default", "dynamic"), rope
    if rope.freq_divisors:
        frequencies = frequencies / torch.tensor(rope.freq_divisors)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn(periods: torch.Tensor, rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    def dim_of(num_turns: float) -> float:
        """Which element turns so often within the original context."""
        positions_per_radian = rope.original_max_positions / (num_turns * 2 * math.pi)
        return rotary_dim * math.log(positions_per_radian) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    span = high - low if high != low else 0.001
    slowed = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    kept = 1 - slowed
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _longrope_factors(rope: RopeConfig, max_positions: int | None) -> tuple[float, ...]:
    assert max_positions is not None, "longrope depends on the longest sequence"
    is_long = max_positions > rope.original_max_positions
    return rope.long_factors if is_long else rope.short_factors


def cos_sin_table(rope: RopeConfig, head_dim: int, max_positions: int) -> torch.Tensor:
    """[max_positions, rotary_dim] float32: cosines, then sines."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim, max_positions))
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
