"""Adapters as the C++ multiplies them: two packed matrices for each product, of its own rank.

A product's matrices share one call: their A are stacked, and B has a block of rows and columns
for each, with zeros beside it. A call costs more than the zeros do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kernels.lora import row_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.cpu.linear import CpuLinear
    from kernels.lora import LoraBatch, LoraPart
    from kernels.ops import LinearWeight


class _Packed(NamedTuple):
    a: CpuLinear  # [sum of ranks, in]
    b: CpuLinear  # [last - first, sum of ranks]
    first: int
    last: int
    """Rows of the product that it is of."""


class PackedSlots:
    """A slot's matrices take memory only while it is filled. Their products sum in one order,
    like all of the C++, so that a token's result does not depend on the tokens beside it."""

    def __init__(
        self, prepare: Callable[[torch.Tensor], CpuLinear], num_slots: int, rows: Sequence[int]
    ) -> None:
        self._prepare = prepare
        self._spans = row_spans(rows)
        self._slots: list[_Packed | None] = [None] * num_slots

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def fill(self, slot: int, parts: Sequence[LoraPart | None]) -> None:
        pairs = zip(parts, self._spans, strict=True)
        present = [(part, *span) for part, span in pairs if part is not None]
        if not present:
            self.clear(slot)
            return
        first, last = present[0][1], present[-1][2]
        a = torch.cat([part.a for part, _, _ in present])
        b = a.new_zeros(last - first, a.shape[0])
        column = 0
        for part, begin, end in present:
            rank = part.a.shape[0]
            b[begin - first : end - first, column : column + rank] = part.b
            column += rank
        self._slots[slot] = _Packed(self._prepare(a), self._prepare(b), first, last)

    def clear(self, slot: int) -> None:
        self._slots[slot] = None

    def add(
        self,
        linear: Callable[[torch.Tensor, LinearWeight], torch.Tensor],
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
    ) -> None:
        """As Ops.add_lora."""
        for slot, start, stop, first in batch.groups:
            packed = self._slots[slot]
            if packed is None:
                continue
            columns = slice(packed.first, packed.last)
            if first is not None:
                rows = slice(first, first + stop - start)
                y[rows, columns] += linear(linear(x[rows], packed.a), packed.b)
            else:
                tokens = batch.tokens[start:stop]
                delta = linear(linear(x.index_select(0, tokens), packed.a), packed.b)
                y[:, columns].index_add_(0, tokens, delta)
