"""A model's token table, which may be its output head too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from kernels.ops import LinearWeight, Ops


class Embedding(Protocol):
    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [T] int64 -> [T, H]."""
        ...


class TiedEmbedding(Embedding, Protocol):
    @property
    def table(self) -> LinearWeight:
        """[V, H], the output head."""
        ...


@dataclass(frozen=True, slots=True)
class FloatEmbedding:
    ops: Ops
    table: torch.Tensor  # [V, H]

    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [T] int64 -> [T, H]."""
        return self.ops.embedding(input_ids, self.table)


@dataclass(frozen=True, slots=True)
class PackedEmbedding:
    """Rows of the weight of a product, so that the head can be the same memory."""

    ops: Ops
    table: LinearWeight  # [V, H]
    dtype: torch.dtype

    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [T] int64 -> [T, H]."""
        return self.ops.packed_embedding(input_ids, self.table, self.dtype)
