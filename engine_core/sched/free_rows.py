"""The runner's rows that nobody has, and what it has yet to be told of its rows."""

from __future__ import annotations

from typing import NamedTuple


class RowNews(NamedTuple):
    freed: tuple[int, ...]
    """Whose sequences the runner can forget."""
    chosen: tuple[tuple[int, int], ...]
    """Row and the last token of its beam, which is another one than was drawn there."""


NO_NEWS = RowNews((), ())


class FreeRows:
    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._freed: list[int] = []
        self._chosen: dict[int, int] = {}

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, row: int, *, told: bool) -> None:
        """told: whether the runner knows of its sequence."""
        self._free.append(row)
        if told:
            self._freed.append(row)
        self._chosen.pop(row, None)

    def choose(self, row: int, token_id: int) -> None:
        self._chosen[row] = token_id

    def tell(self) -> RowNews:
        """For a plan that is launched: what is told is not told again."""
        news = RowNews(tuple(self._freed), tuple(self._chosen.items()))
        self._freed.clear()
        self._chosen.clear()
        return news

    def check(self, taken: list[int]) -> None:
        """Raises AssertionError if these are not all rows but the free ones."""
        assert sorted(taken + self._free) == list(range(self._num_rows)), taken
