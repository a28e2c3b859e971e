"""The page behind /metrics: in the format asked for, and no newer than it needs to be."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.exposition import choose_encoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from frontend.metrics import Metrics

MAX_AGE_S = 0.04
"""Routers poll every 50 ms: one of them always gets new figures, and a second one, or ten
of them, cost nothing more."""
_OPENMETRICS = "application/openmetrics-text"


class Page(NamedTuple):
    body: bytes
    content_type: str


class MetricsPage:
    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._made: dict[bool, tuple[float, bytes]] = {}
        """By whether it is OpenMetrics: when, and what."""

    def get(self, accept: str) -> Page:
        """`accept` is the header of that name."""
        content_type = choose_encoder(accept)[1]
        openmetrics = content_type.startswith(_OPENMETRICS)
        now = self._clock()
        made_at, body = self._made.get(openmetrics, (0.0, b""))
        if not body or now - made_at >= MAX_AGE_S:
            body = self._metrics.exposition(openmetrics=openmetrics)
            self._made[openmetrics] = (now, body)
        return Page(body, content_type)
