"""What a section has found, as it crosses from its process to the one that sums up."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

ENGINE = "engine, tokens a second"
BATCHING = "transformers' continuous batching, tokens a second"
COMPILED = "transformers' static cache and torch.compile, tokens a second"
"""Of the table's lines that are compared across sections."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table."""

    what: str
    value: float
    unit: str
    ratio: float | None = None
    """Against what `what` names; None where nothing is compared."""
    goal: float | None = None
    """Of ratio. Missing it is told, and fails nothing."""
    at_most: bool = False
    """Whether the goal is an upper bound."""

    @property
    def verdict(self) -> str:
        if self.goal is None or self.ratio is None:
            return ""
        is_met = self.ratio <= self.goal if self.at_most else self.ratio >= self.goal
        return "met" if is_met else "missed"


@dataclass(slots=True)
class Outcome:
    lines: list[Line] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Results that are wrong, one sentence each."""
    notes: list[str] = field(default_factory=list)
    """What could not be compared, and why."""

    def add(self, what: str, value: float, unit: str, **compared: Any) -> None:
        """compared: Line's other fields."""
        self.lines.append(Line(what, value, unit, **compared))

    def value(self, what: str) -> float | None:
        """Of the line with that name."""
        return next((line.value for line in self.lines if line.what == what), None)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Outcome:
        raw = json.loads(path.read_text())
        return cls([Line(**line) for line in raw["lines"]], raw["failures"], raw["notes"])
