"""Stop strings in a text that arrives in pieces.

The rule does not depend on how the text is cut into pieces: generation ends at
the first character that completes a stop string, and of the stop strings that end
there the one that starts first (the longest) is the match.

Each stop string is followed by its Knuth-Morris-Pratt automaton (Knuth, Morris,
Pratt 1977), whose state is the length of the longest suffix of the text that is a
prefix of the stop string: just what has to be held back. So a character costs O(1)
amortised for each stop string, whatever the strings are.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Matched(NamedTuple):
    text: str
    """What may be emitted now."""
    stop_index: int | None
    """Index of the stop string that matched; the text has ended. None: go on."""


class StopMatcher:
    """Follows one output. Call feed for each new piece, then flush at its end."""

    __slots__ = ("_active", "_by_first", "_failures", "_held", "_include", "_next_first", "_stops")

    def __init__(self, stops: Sequence[str], *, include_stop_str: bool = False) -> None:
        """`stops` are non-empty; raises ValueError otherwise."""
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._failures = [_failure_table(stop) for stop in stops]
        self._by_first: dict[str, list[int]] = {}
        for index, stop in enumerate(stops):
            self._by_first.setdefault(stop[0], []).append(index)
        self._next_first = re.compile("|".join(map(re.escape, self._by_first))).search
        self._include = include_stop_str
        self._active: dict[int, int] = {}
        """Index of a stop string -> its automaton's state, where that is not 0."""
        self._held = ""

    def feed(self, piece: str, *, may_end: bool = True) -> Matched:
        """Takes the next piece of text; not to be called again after a match.

        A stop string that ends in a piece that may not end the text is no match.
        """
        if not self._active and self._next_first(piece) is None:
            return Matched(piece, None)
        position = len(self._held)
        text = self._held + piece
        while position < len(text):
            if not self._active:
                first = self._next_first(text, position)
                if first is None:
                    break
                position = first.start()
            index = self._advance(text[position])
            position += 1
            if index is not None and not may_end:
                self._pass_over()
            elif index is not None:
                keep = position if self._include else position - len(self._stops[index])
                self._held = ""
                return Matched(text[:keep], index)
        # A stop string that stays in the output needs no holding back.
        hold = 0 if self._include else max(self._active.values(), default=0)
        self._held = text[len(text) - hold :]
        return Matched(text[: len(text) - hold], None)

    def _pass_over(self) -> None:
        """Goes on from stop strings that have ended here as if they had not."""
        for index, state in list(self._active.items()):
            if state == len(self._stops[index]):
                self._active[index] = self._failures[index][state - 1]
                if not self._active[index]:
                    del self._active[index]

    def flush(self) -> str:
        """The text held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int | None:
        """Moves every automaton; returns the longest stop string that ends here."""
        former, self._active = self._active, {}
        for index in self._by_first.get(character, ()):
            if index not in former:
                self._active[index] = 1
        for index, state in former.items():
            stop, failures = self._stops[index], self._failures[index]
            while state and stop[state] != character:
                state = failures[state - 1]
            if state or stop[0] == character:
                self._active[index] = state + 1
        ended = [index for index, state in self._active.items() if state == len(self._stops[index])]
        return max(ended, key=lambda index: (len(self._stops[index]), -index), default=None)


def cut_at_stop(text: str, stops: Sequence[str], *, include_stop_str: bool = False) -> Matched:
    """The same rule on a whole text: what is left of it, and which stop string matched."""
    ends = [
        (found + len(stop), found, index)
        for index, stop in enumerate(stops)
        if (found := text.find(stop)) >= 0
    ]
    if not ends:
        return Matched(text, None)
    end, start, index = min(ends)
    return Matched(text[: end if include_stop_str else start], index)


@lru_cache(maxsize=256)
def _failure_table(stop: str) -> tuple[int, ...]:
    """Entry i: length of the longest proper prefix of stop[:i + 1] that is its suffix."""
    table = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[position] != stop[length]:
            length = table[length - 1]
        if stop[position] == stop[length]:
            length += 1
        table[position] = length
    return tuple(table)
