"""Low-rank adapters of a model's products (LoRA, arXiv:2106.09685), several in one batch.

A product's adapter is y += B A x, its scale multiplied into B. The adapters that may be in
one batch have numbers, their slots, and each product holds the matrices of all slots.
Tokens are grouped by slot, as in Punica (arXiv:2310.18547) and S-LoRA (arXiv:2311.03285).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NO_SLOT = -1
"""Of a token without an adapter."""
TILE_TOKENS = 16
"""Of one slot, that a program of a kernel takes at most."""


class LoraPart(NamedTuple):
    """The adapter of one of the matrices that a product is fused of; r is its rank."""

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [out of the part, r], with the scale in it


class LoraGroup(NamedTuple):
    """Entries [start, stop) of LoraBatch.tokens."""

    slot: int
    start: int
    stop: int
    first: int | None
    """The first of its tokens, where they stand side by side in the batch."""


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Which tokens of a flat batch have an adapter, and whose: M of them, at least one."""

    tokens: torch.Tensor  # [M] int64, ascending within a slot
    groups: tuple[LoraGroup, ...]
    """One for each slot that is there, the slots ascending."""
    tiles: torch.Tensor  # [N, 3] int32: groups cut to at most TILE_TOKENS

    @classmethod
    def of(
        cls, token_slots: np.ndarray, upload: Callable[[np.ndarray], torch.Tensor]
    ) -> LoraBatch | None:
        """token_slots [T]: the slot of each token, or NO_SLOT; None where nobody has one.
        upload: to the device, with the dtype kept."""
        order = np.argsort(token_slots, kind="stable").astype(np.int64)
        tokens = order[np.searchsorted(token_slots[order], 0) :]
        if not len(tokens):
            return None
        slots, starts = np.unique(token_slots[tokens], return_index=True)
        bounds = pairwise([*starts.tolist(), len(tokens)])
        groups = tuple(
            LoraGroup(slot, start, stop, _first(tokens[start:stop]))
            for slot, (start, stop) in zip(slots.tolist(), bounds, strict=True)
        )
        tiles = [
            (slot, at, min(at + TILE_TOKENS, stop))
            for slot, start, stop, _ in groups
            for at in range(start, stop, TILE_TOKENS)
        ]
        return cls(upload(tokens), groups, upload(np.array(tiles, np.int32)))


def _first(tokens: np.ndarray) -> int | None:
    first = int(tokens[0])
    return first if int(tokens[-1]) - first == len(tokens) - 1 else None


class LoraSlots(Protocol):
    """The adapters of one product, by slot, as their backend keeps them."""

    @property
    def num_slots(self) -> int: ...

    def fill(self, slot: int, parts: Sequence[LoraPart | None]) -> None:
        """One of each matrix that the product is fused of, None where it has no adapter; in
        the dtype and on the device of the slots. Forgets what the slot held."""
        ...

    def clear(self, slot: int) -> None: ...


class StackedSlots:
    """All slots as two tensors, ranks filled up to the greatest with zeros.

    K matrices are fused in the product, one below the other:

        a [S, K * R, in]      rows [k * R, (k + 1) * R) are of matrix k
        b [S, out, R]         rows spans[k] are of matrix k
    """

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        in_features: int,
        rows: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """rows: of each matrix, in order."""
        a_size = (num_slots, len(rows) * max_rank, in_features)
        b_size = (num_slots, sum(rows), max_rank)
        self.a = torch.zeros(a_size, dtype=dtype, device=device)
        self.b = torch.zeros(b_size, dtype=dtype, device=device)
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.spans = row_spans(rows)

    def fill(self, slot: int, parts: Sequence[LoraPart | None]) -> None:
        self.clear(slot)
        for index, (part, span) in enumerate(zip(parts, self.spans, strict=True)):
            if part is not None:
                rank, first = part.a.shape[0], index * self.max_rank
                self.a[slot, first : first + rank] = part.a
                self.b[slot, slice(*span), :rank] = part.b

    def clear(self, slot: int) -> None:
        self.a[slot].zero_()
        self.b[slot].zero_()


def row_spans(rows: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """[first, last) of each matrix's rows in the fused product."""
    return tuple(pairwise(accumulate(rows, initial=0)))


class StackedLora:
    """The two methods for a backend that has no faster way, in float32 inside."""

    def lora_slots(
        self,
        num_slots: int,
        max_rank: int,
        in_features: int,
        rows: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> LoraSlots:
        return StackedSlots(num_slots, max_rank, in_features, rows, dtype, device)

    def add_lora(
        self, y: torch.Tensor, x: torch.Tensor, slots: LoraSlots, batch: LoraBatch
    ) -> None:
        assert isinstance(slots, StackedSlots), type(slots)
        add_stacked_lora(y, x, slots, batch, torch.float32)


def add_stacked_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    slots: StackedSlots,
    batch: LoraBatch,
    compute: torch.dtype,
) -> None:
    """As Ops.add_lora, which it defines."""
    rank = slots.max_rank
    for slot, start, stop, _ in batch.groups:
        tokens = batch.tokens[start:stop]
        inner = x[tokens].to(compute) @ slots.a[slot].to(compute).T
        for index, (first, last) in enumerate(slots.spans):
            part = inner[:, index * rank : (index + 1) * rank]
            delta = part @ slots.b[slot, first:last].to(compute).T
            y[tokens, first:last] = (y[tokens, first:last].to(compute) + delta).to(y.dtype)
