"""Adapters as the C++ multiplies them: each matrix packed by itself, with its own rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kernels.lora import row_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from kernels.cpu.linear import CpuLinear
    from kernels.lora import LoraBatch, LoraPart
    from kernels.ops import LinearWeight


class _Packed(NamedTuple):
    a: CpuLinear
    b: CpuLinear
    span: tuple[int, int]
    """Rows of the fused product."""


class PackedSlots:
    """A slot's matrices take memory only while it is filled. Their products sum in one order,
    like all of the C++, so that a token's result does not depend on the tokens beside it."""

    def __init__(
        self, prepare: Callable[[torch.Tensor], CpuLinear], num_slots: int, rows: Sequence[int]
    ) -> None:
        self._prepare = prepare
        self._spans = row_spans(rows)
        self._slots: list[list[_Packed]] = [[] for _ in range(num_slots)]

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def fill(self, slot: int, parts: Sequence[LoraPart | None]) -> None:
        self._slots[slot] = [
            _Packed(self._prepare(part.a), self._prepare(part.b), span)
            for part, span in zip(parts, self._spans, strict=True)
            if part is not None
        ]

    def clear(self, slot: int) -> None:
        self._slots[slot] = []

    def add(
        self,
        linear: Callable[[torch.Tensor, LinearWeight], torch.Tensor],
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
    ) -> None:
        """As Ops.add_lora."""
        for slot, start, stop in batch.groups:
            is_whole = stop - start == y.shape[0]
            tokens = batch.tokens[start:stop]
            rows = x if is_whole else x.index_select(0, tokens)
            for a, b, (first, last) in self._slots[slot]:
                delta = linear(linear(rows, a), b)
                if is_whole:
                    y[:, first:last] += delta
                else:
                    y[:, first:last].index_add_(0, tokens, delta)
