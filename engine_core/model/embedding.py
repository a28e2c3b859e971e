"""A model's token table, which may be its output head too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kernels.ops import LinearWeight, Ops


@dataclass(frozen=True, slots=True)
class FloatEmbedding:
    name: str
    """Of the tensor in the checkpoint."""
    ops: Ops
    table: torch.Tensor  # [V, H]

    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [T] int64 -> [T, H]."""
        return self.ops.embedding(input_ids, self.table)

    def head(self) -> LinearWeight:
        return self.ops.prepare_linear(self.table)


@dataclass(frozen=True, slots=True)
class QuantizedEmbedding:
    """Rows are made floats as they are looked up; the head is the same memory."""

    name: str
    ops: Ops
    table: LinearWeight  # [V, H]
    dtype: torch.dtype

    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [T] int64 -> [T, H]."""
        return self.ops.quantized_embedding(input_ids, self.table, self.dtype)

    def head(self) -> LinearWeight:
        return self.table


Embedding = FloatEmbedding | QuantizedEmbedding
