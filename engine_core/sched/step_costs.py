"""What a step takes, by its tokens."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MEASURED_SIZES = (1, 2, 4, 5, 8, 9, 12, 16)
"""Of steps, in tokens: dense where kernels take few rows at a time."""


class StepCosts:
    """Straight lines between what was measured."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """seconds: of a step that draws from each of its tokens, by their number; 1 is among
        them, and another.

        Noise only ever adds to a measurement, and no step costs more than a larger one. So
        each counts for no more than the least of the larger ones.
        """
        self._sizes = sorted(seconds)
        assert self._sizes[0] == 1, self._sizes
        assert len(self._sizes) > 1, self._sizes
        self._seconds: list[float] = []
        least = float("inf")
        for size in reversed(self._sizes):
            least = min(least, seconds[size])
            self._seconds.append(least)
        self._seconds.reverse()
        last, halfway = self._sizes[-1], self._sizes[-1] // 2 or 1
        self._slope = (self._seconds[-1] - self._between(halfway)) / max(1, last - halfway)
        self._table = [self._between(max(1, size)) for size in range(last + 1)]

    def seconds(self, num_tokens: int) -> float:
        """Of a step of at least one token. Beyond the largest size measured, as if it went
        on as it did in the second half."""
        if num_tokens < len(self._table):
            return self._table[num_tokens]
        return self._table[-1] + self._slope * (num_tokens - len(self._table) + 1)

    def most_decodes(self, gain: float) -> int:
        """The largest number of decodes that one draft token each makes faster, if three in
        four are right: their tokens a second must grow by the factor `gain`."""
        most = 0
        for num in range(1, len(self._table)):
            if 1.75 * self.seconds(num) > gain * self.seconds(2 * num):
                most = num
        return most

    def _between(self, num_tokens: int) -> float:
        index = bisect_left(self._sizes, num_tokens)
        if self._sizes[index] == num_tokens:
            return self._seconds[index]
        low, high = self._sizes[index - 1], self._sizes[index]
        share = (num_tokens - low) / (high - low)
        return self._seconds[index - 1] * (1 - share) + self._seconds[index] * share
