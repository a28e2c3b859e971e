"""What is added to the logits of single ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.reference.penalties import owners_and_places

if TYPE_CHECKING:
    import torch

    from kernels.ops import TokenLists


def add_logit_bias(logits: torch.Tensor, ids: TokenLists, values: torch.Tensor) -> None:
    """logits [S, V] float32, dense. See Ops.add_logit_bias."""
    _, places = owners_and_places(ids, logits.shape[1])
    logits.view(-1)[places] += values
