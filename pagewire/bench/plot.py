"""Line plots as inline SVG."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 46
_COLORS = ("#1f6feb", "#d1570a", "#1a7f37", "#8250df", "#bf3989")
_MAX_POINTS = 400


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    """(x, y), x ascending."""
    marked: bool = False
    """Whether each point has a dot: for a few measured ones, not for a curve."""


def plot(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """An <svg> element; both axes begin at 0."""
    drawn = [line for line in lines if line.points]
    x_ticks = _ticks(max((line.points[-1][0] for line in drawn), default=1.0))
    y_ticks = _ticks(max((y for line in drawn for _, y in line.points), default=1.0))

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + across * x / x_ticks[-1], _HEIGHT - _BOTTOM - up * y / y_ticks[-1]

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        _text(_LEFT, 18, title, "start", bold=True),
        _text(_WIDTH - _RIGHT, _HEIGHT - 8, x_label, "end"),
        _text(_WIDTH - _RIGHT, 18, y_label, "end"),
    ]
    for tick in x_ticks:
        x, y = at(tick, 0)
        parts += [_rule(x, y, x, _TOP), _text(x, y + 16, f"{tick:g}", "middle")]
    for tick in y_ticks:
        x, y = at(0, tick)
        parts += [_rule(x, y, _WIDTH - _RIGHT, y), _text(x - 6, y + 4, f"{tick:g}", "end")]
    for index, line in enumerate(drawn):
        color = _COLORS[index % len(_COLORS)]
        points = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in _thin(line.points))
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{points}"/>')
        if line.marked:
            parts += [_dot(*at(x, y), color) for x, y in line.points]
        if len(drawn) > 1:
            y = _TOP + 16 + 16 * index
            parts.append(_text(_LEFT + 10, y, line.name, "start", color=color))
    return "".join([*parts, "</svg>"])


def distribution(values: Sequence[float], scale: float = 1.0) -> list[tuple[float, float]]:
    """The empirical distribution: (value * scale, percent of values that are not above it)."""
    ordered = sorted(values)
    count = len(ordered)
    return [(value * scale, 100 * (index + 1) / count) for index, value in enumerate(ordered)]


def _thin(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    if len(points) <= _MAX_POINTS:
        return points
    step = (len(points) - 1) / (_MAX_POINTS - 1)
    return [points[round(index * step)] for index in range(_MAX_POINTS)]


def _ticks(largest: float) -> list[float]:
    """From 0 past `largest` in round steps."""
    if largest <= 0:
        largest = 1.0
    rough = largest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [index * step for index in range(math.ceil(largest / step - 1e-9) + 1)]


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#8884"/>'


def _dot(x: float, y: float, color: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>'


def _text(
    x: float, y: float, text: str, anchor: str, *, bold: bool = False, color: str = "currentColor"
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" fill="{color}"'
        f"{weight}>{html.escape(text)}</text>"
    )
