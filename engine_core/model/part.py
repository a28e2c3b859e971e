"""The part of a tensor that one rank of several holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Part:
    """rows, in their order, of all columns or of some neighbours.

    A vector (a bias, the norm of a row of heads) has rows only.
    """

    rows: tuple[range, ...]
    columns: range | None = None

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.rows))

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Of a tensor of shape whole."""
        columns = whole[1:] if self.columns is None else (len(self.columns),)
        return (self.num_rows, *columns)
