"""Where the engines are, asked again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Endpoints:
    """`asks` has one question for each engine; its answer is None while the engine's actor is
    away, which may be about to come back where it was. The first answers must all be there."""

    def __init__(self, asks: Sequence[Callable[[], str | None]], first: Sequence[str]) -> None:
        self._asks = asks
        self.current = list(first)

    def refresh(self) -> bool:
        """Asks all; True where an engine is elsewhere now."""
        answers = [ask() for ask in self._asks]
        found = [answer or old for answer, old in zip(answers, self.current, strict=True)]
        moved = found != self.current
        self.current = found
        return moved
