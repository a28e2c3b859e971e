"""Token embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def embedding(input_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """input_ids [T] int64, table [V, H] -> [T, H]."""
    return table[input_ids]
