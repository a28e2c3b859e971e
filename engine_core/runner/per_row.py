"""State that only some rows have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_S = TypeVar("_S")


class PerRow(Generic[_S]):
    """The rows that asked for one thing, each with its state."""

    bans = True

    def __init__(self) -> None:
        self._states: dict[int, _S] = {}

    def forget(self, row: int) -> None:
        self._states.pop(row, None)

    def holds(self, row: int) -> bool:
        return row in self._states

    def _present(self, rows: Sequence[int]) -> list[tuple[int, int, _S]]:
        """(place in the batch, row, state) of those in the batch."""
        states = self._states
        return [(at, row, states[row]) for at, row in enumerate(rows) if row in states]


def flat_index(logits: torch.Tensor, ids: Sequence[tuple[int, np.ndarray]]) -> torch.Tensor:
    """[K] int64 into logits.view(-1), from (place in the batch, ids there)."""
    width = logits.shape[1]
    index = np.concatenate([at * width + there for at, there in ids])
    return torch.from_numpy(index).to(logits.device)
