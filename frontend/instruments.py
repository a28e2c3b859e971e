"""Counters, gauges and histograms of one event loop, and the pages that show them.

prometheus_client's own take a lock for each observation and make every line anew for each
scrape. These belong to one thread; a family keeps its lines until one of its values
changes, and a line its name and labels for good. The formats are those of
https://prometheus.io/docs/instrumenting/exposition_formats/, 0.0.4, and of
https://prometheus.io/docs/specs/om/open_metrics_spec/, 1.0.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

S = TypeVar("S", bound="Series")


class Exemplar(NamedTuple):
    """An observation that a trace tells more of."""

    trace_id: str
    value: float
    at: float
    """Unix seconds."""


class Series:
    """One combination of label values. `changed` is to be called with each new value."""

    __slots__ = ("changed",)

    def __init__(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    def lines(self, *, openmetrics: bool) -> Iterable[str]:
        raise NotImplementedError


class Value(Series):
    """A counter's or a gauge's."""

    __slots__ = ("_prefix", "value")

    def __init__(self, changed: Callable[[], None], name: str, labels: str) -> None:
        super().__init__(changed)
        self._prefix = f"{name}{{{labels}}} " if labels else f"{name} "
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount
        self.changed()

    def set(self, value: float) -> None:
        if value != self.value:
            self.value = value
            self.changed()

    def lines(self, *, openmetrics: bool) -> Iterable[str]:
        yield f"{self._prefix}{_number(self.value)}\n"


class Distribution(Series):
    """A histogram's."""

    __slots__ = ("_bounds", "_count_prefix", "_counts", "_exemplars", "_prefixes", "_sum", "_tail")

    def __init__(
        self,
        changed: Callable[[], None],
        name: str,
        labels: Sequence[tuple[str, str]],
        bounds: tuple[float, ...],
    ) -> None:
        super().__init__(changed)
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: dict[int, Exemplar] = {}
        """The last one, by bucket."""
        self._sum = 0.0
        self._prefixes = [
            f"{name}_bucket{{{_labels([*labels, ('le', _number(bound))])}}} "
            for bound in (*bounds, math.inf)
        ]
        alone = f"{{{_labels(labels)}}}" if labels else ""
        self._count_prefix = f"{name}_count{alone} "
        self._tail = f"{name}_sum{alone} "

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper ends of the buckets, but for the last one, which has none."""
        return self._bounds

    @property
    def counts(self) -> tuple[int, ...]:
        """Observations in each bucket alone, one more than there are bounds."""
        return tuple(self._counts)

    def observe(self, value: float, times: int = 1, trace_id: str | None = None) -> None:
        at = bisect_left(self._bounds, value)
        self._counts[at] += times
        self._sum += value * times
        if trace_id is not None:
            self._exemplars[at] = Exemplar(trace_id, value, time.time())
        self.changed()

    def lines(self, *, openmetrics: bool) -> Iterable[str]:
        total = 0
        for at, (prefix, count) in enumerate(zip(self._prefixes, self._counts, strict=True)):
            total += count
            exemplar = self._exemplars.get(at) if openmetrics else None
            shown = "" if exemplar is None else _exemplar(exemplar)
            yield f"{prefix}{_number(total)}{shown}\n"
        yield f"{self._count_prefix}{_number(total)}\n"
        yield f"{self._tail}{_number(self._sum)}\n"


class Family(Generic[S]):
    """All series of one name."""

    kind = "untyped"

    def __init__(self, name: str, documentation: str, label_names: Sequence[str] = ()) -> None:
        self.name = name
        self.label_names = tuple(label_names)
        self._series: dict[tuple[str, ...], S] = {}
        self._documentation = documentation.replace("\\", r"\\").replace("\n", r"\n")
        self._shown: dict[bool, str] = {}
        if not label_names:
            self.labels()

    def labels(self, *values: str) -> S:
        """The series of these label values, made where it is new."""
        series = self._series.get(values)
        if series is None:
            assert len(values) == len(self.label_names), (self.name, values)
            pairs = list(zip(self.label_names, values, strict=True))
            series = self._series[values] = self._new(pairs)
            self._changed()
        return series

    def clear(self) -> None:
        """Forgets every series."""
        self._series.clear()
        self._changed()

    def text(self, *, openmetrics: bool) -> str:
        """Its part of a page."""
        shown = self._shown.get(openmetrics)
        if shown is None:
            lines = [self._head(openmetrics=openmetrics)]
            for series in self._series.values():
                lines += series.lines(openmetrics=openmetrics)
            shown = self._shown[openmetrics] = "".join(lines)
        return shown

    def _head(self, *, openmetrics: bool) -> str:
        name, told = self.name, self._documentation
        if openmetrics:
            told = told.replace('"', r"\"")
        elif self.kind == "counter":
            name += "_total"
        return f"# HELP {name} {told}\n# TYPE {name} {self.kind}\n"

    def _changed(self) -> None:
        self._shown.clear()

    def _new(self, labels: Sequence[tuple[str, str]]) -> S:
        raise NotImplementedError


class Counter(Family[Value]):
    kind = "counter"

    def _new(self, labels: Sequence[tuple[str, str]]) -> Value:
        return Value(self._changed, f"{self.name}_total", _labels(labels))


class Gauge(Family[Value]):
    kind = "gauge"

    def _new(self, labels: Sequence[tuple[str, str]]) -> Value:
        return Value(self._changed, self.name, _labels(labels))


class WatchedGauge(Gauge):
    """Without labels; its value is read for each page."""

    def __init__(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        super().__init__(name, documentation)
        self._read = read

    def text(self, *, openmetrics: bool) -> str:
        self.labels().set(self._read())
        return super().text(openmetrics=openmetrics)


class WatchedInfo(Gauge):
    """What its labels say now; its value is the time of the page. None says nothing."""

    def __init__(
        self,
        name: str,
        documentation: str,
        label_names: Sequence[str],
        read: Callable[[], Sequence[str] | None],
    ) -> None:
        super().__init__(name, documentation, label_names)
        self._read = read

    def text(self, *, openmetrics: bool) -> str:
        self.clear()
        values = self._read()
        if values is not None:
            self.labels(*values).set(time.time())
        return super().text(openmetrics=openmetrics)


class Histogram(Family[Distribution]):
    kind = "histogram"

    def __init__(
        self,
        name: str,
        documentation: str,
        label_names: Sequence[str] = (),
        *,
        buckets: Sequence[float],
    ) -> None:
        self._bounds = tuple(float(bound) for bound in buckets)
        super().__init__(name, documentation, label_names)

    def _new(self, labels: Sequence[tuple[str, str]]) -> Distribution:
        return Distribution(self._changed, self.name, labels, self._bounds)


F = TypeVar("F", bound=Family[Value] | Family[Distribution])


class Registry:
    """The families of a page, in the order in which they were added."""

    def __init__(self) -> None:
        self._families: dict[str, Family[Value] | Family[Distribution]] = {}

    def add(self, family: F) -> F:
        assert family.name not in self._families, family.name
        self._families[family.name] = family
        return family

    def __iter__(self) -> Iterator[Family[Value] | Family[Distribution]]:
        return iter(self._families.values())

    def remove(self, family: Family[Value] | Family[Distribution]) -> None:
        del self._families[family.name]

    def page(self, *, openmetrics: bool) -> bytes:
        parts = [family.text(openmetrics=openmetrics) for family in self]
        if openmetrics:
            parts.append("# EOF\n")
        return "".join(parts).encode()


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(float(value))


def _labels(pairs: Iterable[tuple[str, str]]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(pairs))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _exemplar(it: Exemplar) -> str:
    return f' # {{trace_id="{it.trace_id}"}} {_number(it.value)} {it.at!r}'
