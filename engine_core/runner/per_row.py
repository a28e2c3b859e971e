"""State that only some rows have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from kernels.ops import TokenLists

if TYPE_CHECKING:
    from collections.abc import Sequence

_S = TypeVar("_S")


class PerRow(Generic[_S]):
    """The rows that asked for one thing, each with its state."""

    bans = True
    reads_ids = True

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


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """The values on the device, without waiting for it.

    A copy from memory that is not pinned would wait for all that is queued. torch keeps
    pinned blocks and hands them out again once the copy is done, so this allocates only
    until there are enough.
    """
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def flat_index(logits: torch.Tensor, ids: Sequence[tuple[int, np.ndarray]]) -> torch.Tensor:
    """[K] int64 into logits.view(-1), from (place in the batch, ids there)."""
    width = logits.shape[1]
    index = np.concatenate([at * width + there for at, there in ids])
    return upload(index, logits.device)


def token_lists(lists: Sequence[tuple[int, np.ndarray]], device: torch.device) -> TokenLists:
    """From (place in the batch, ids there [..] int64), in one copy."""
    sizes = [len(ids) for _, ids in lists]
    rows = np.array([at for at, _ in lists], np.int64)
    starts = np.cumsum([0, *sizes], dtype=np.int64)
    together = upload(np.concatenate([rows, starts, *[ids for _, ids in lists]]), device)
    parts = torch.split(together, [len(rows), len(starts), int(starts[-1])])
    return TokenLists(parts[0], parts[1], parts[2], longest=max(sizes, default=0))
