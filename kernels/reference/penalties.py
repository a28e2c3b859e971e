"""Repetition, frequency and presence penalties on the logits of known ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.ops import PenaltyBatch, TokenLists

_LARGEST = torch.finfo(torch.float32).max


def apply_penalties(logits: torch.Tensor, batch: PenaltyBatch) -> None:
    """logits [S, V] float32, dense. See Ops.apply_penalties. One gather and one scatter."""
    lists = batch.known
    owners, places = owners_and_places(lists, logits.shape[1])
    flat = logits.view(-1)
    # Several times faster than indexing with places.
    seen = flat.index_select(0, places)
    penalized = penalize(
        seen,
        batch.repetition.index_select(0, owners),
        batch.frequency.index_select(0, owners),
        batch.presence.index_select(0, owners),
        batch.counts,
    )
    flat.scatter_(0, places, penalized)


def owners_and_places(lists: TokenLists, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[K] int64 each: the list that an id is in, and its place in logits [S, V] as one row."""
    num_lists, num_ids = len(lists.rows), len(lists.ids)
    numbers = torch.arange(num_lists, device=lists.ids.device)
    owners = numbers.repeat_interleave(lists.starts.diff(), output_size=num_ids)
    return owners, lists.rows.index_select(0, owners) * vocab_size + lists.ids


def penalize(
    logits: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """All [K] float32; the formula of Ops.apply_penalties."""
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalized = penalized.clamp(-_LARGEST, _LARGEST)
    penalized = penalized - frequency * counts - presence * (counts > 0)
    return torch.where(logits.isinf(), logits, penalized.clamp(-_LARGEST, _LARGEST))
