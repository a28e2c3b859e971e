"""What a step takes by what is in it, learnt from the steps that run anyway."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.sched.plan import SeqStep

_MEMORY = 32
"""Steps of a kind after which one counts for a third of what it did."""
_MIN_SEEN = 4
"""Steps of each kind before anything is told: the first are slow."""
_MOST_OFF = 2.0
"""A step counts as at most so many times, and at least such a part of, what was expected: a
process that was off the CPU for a moment says nothing of the step."""
_RECENT = 0.9
"""What a step counts for the machine's speed after one more."""
_SWEEPS = 8


class StepLoad(NamedTuple):
    """What a step's time depends on."""

    num_decodes: int
    num_context_tokens: int = 0
    """Tokens whose KV the decodes read."""
    num_prefill_tokens: int = 0
    num_pairs: float = 0.0
    """(query, key) pairs that the attention of prompt tokens looks at."""

    @classmethod
    def of(cls, seqs: Sequence[SeqStep]) -> StepLoad:
        """Of a plan without draft tokens."""
        num_decodes = num_context = num_prefill = 0
        num_pairs = 0.0
        for seq in seqs:
            num_new = seq.num_new_tokens
            if num_new == 1 and seq.samples:
                num_decodes += 1
                num_context += seq.num_computed_tokens
            else:
                num_prefill += num_new
                num_pairs += num_new * (seq.num_computed_tokens + num_new / 2)
        return cls(num_decodes, num_context, num_prefill, num_pairs)


class StepTimes:
    """A constant, and something for each token that is computed, for each decode besides, for
    each token of their contexts and each pair: these five parts add up to a step's seconds.
    So a decode costs at least what a prompt token does, also where one decode is all that was
    seen and the constant could stand for it.

    Least squares of relative errors, no part below zero, by coordinate descent from the last
    solution: what the latest steps say nothing of stays as it was. Steps with prompts are few
    among those without, so each kind is forgotten by its own. How fast the machine is at all
    is told by a few steps of any kind, and changes all parts by one factor.
    """

    def __init__(self) -> None:
        self._without, self._with = _Kind(), _Kind()
        self._parts = [0.0] * _NUM_PARTS
        self._times, self._weight = 0.0, 0.0
        """Of the last steps: the sum of how many times as long as expected they took."""

    @property
    def is_known(self) -> bool:
        return min(self._without.num_read, self._with.num_read) >= _MIN_SEEN

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step took more than 0 seconds. Costs next to nothing: learn() does the work."""
        kind = self._with if load.num_prefill_tokens else self._without
        kind.unread.append((load, seconds))

    def learn(self) -> None:
        """Takes in what was observed since the last time."""
        if self._without.unread or self._with.unread:
            self._read(self._without)
            self._read(self._with)
            if self._weight:
                self._follow_speed()
            self._solve()

    def seconds(self, load: StepLoad) -> float:
        """Of a step, as far as was learnt."""
        return _dot(self._parts, _values(load))

    def num_prefill_tokens(self, seconds: float, depth: int) -> float:
        """How many tokens of a prompt, of which `depth` are computed, add so much to a step;
        infinite if they cost nothing."""
        _, per_token, _, _, per_pair = self._parts
        # per_pair * n^2 / 2 + first * n = seconds, solved in a form that loses no digits.
        first = per_token + per_pair * depth
        slope = first + (first * first + 2 * per_pair * seconds) ** 0.5
        return 2 * seconds / slope if slope else float("inf")

    def _read(self, kind: _Kind) -> None:
        while kind.unread:
            load, seconds = kind.unread.popleft()
            expected = self.seconds(load) if self.is_known else 0.0
            if expected:
                times = min(max(seconds / expected, 1 / _MOST_OFF), _MOST_OFF)
                kind.add(_values(load), expected, times)
                self._times = _RECENT * self._times + times
                self._weight = _RECENT * self._weight + 1
            else:
                kind.add(_values(load), seconds, 1.0)

    def _follow_speed(self) -> None:
        """As if earlier steps had run as fast as the last ones."""
        factor = self._times / self._weight
        self._parts = [part * factor for part in self._parts]
        self._without.scale(factor)
        self._with.scale(factor)
        self._times = self._weight

    def _solve(self) -> None:
        products, sums = _total(self._without, self._with)
        parts = self._parts
        for _ in range(_SWEEPS):
            for at, row in enumerate(products):
                if row[at]:
                    parts[at] = max(0.0, parts[at] + (sums[at] - _dot(row, parts)) / row[at])


_NUM_PARTS = 5


def _values(load: StepLoad) -> tuple[float, ...]:
    """What the parts are multiplied with."""
    num_decodes, num_context, num_prefill, num_pairs = load
    return (1, num_decodes + num_prefill, num_decodes, num_context, num_pairs)


class _Kind:
    """The normal equations of steps of one kind, each divided by what was expected of it."""

    def __init__(self) -> None:
        self.products = [[0.0] * _NUM_PARTS for _ in range(_NUM_PARTS)]
        self.sums = [0.0] * _NUM_PARTS
        self.unread: deque[tuple[StepLoad, float]] = deque(maxlen=_MEMORY)
        self.num_read = 0

    def add(self, values: Sequence[float], expected: float, times: float) -> None:
        """A step took so many times what was expected."""
        self.num_read += 1
        scaled = [value / expected for value in values]
        keep = 1 - 1 / _MEMORY
        for row, x in zip(self.products, scaled, strict=True):
            row[:] = [keep * old + x * y for old, y in zip(row, scaled, strict=True)]
        self.sums = [keep * old + x * times for old, x in zip(self.sums, scaled, strict=True)]

    def scale(self, factor: float) -> None:
        """As if all had taken so many times as long as they did."""
        self.products = [[x / (factor * factor) for x in row] for row in self.products]
        self.sums = [x / factor for x in self.sums]


def _total(one: _Kind, other: _Kind) -> tuple[list[list[float]], list[float]]:
    products = [
        [x + y for x, y in zip(mine, others, strict=True)]
        for mine, others in zip(one.products, other.products, strict=True)
    ]
    return products, [x + y for x, y in zip(one.sums, other.sums, strict=True)]


def _dot(x: Sequence[float], y: Sequence[float]) -> float:
    # Five products in a row are four times as fast as a loop over them.
    return x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3] + x[4] * y[4]
