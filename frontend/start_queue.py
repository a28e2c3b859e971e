"""Requests that wait for their first step, and what those that asked are told of it.

The order is the engine's as far as a frontend knows it: priority, then arrival. It sees
neither other frontends' requests nor what the engine's policy makes of tenants and
deadlines. A wait is the number of starts that it takes times the mean time between two
starts, measured while somebody waited.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frontend.stream import Queued

if TYPE_CHECKING:
    from collections.abc import Callable

    from frontend.request import RequestState

TELL_EVERY_S = 0.1
"""Positions change with every start; nobody is told more often."""
_NUM_GAPS = 64


@dataclass(slots=True)
class _Waiting:
    state: RequestState
    number: int
    told: int | None = None
    """The position that the client knows of."""


class StartQueue:
    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        """By internal id, in order of arrival."""
        self._watchers: dict[int, _Waiting] = {}
        """Those of them that asked for reports."""
        self._gaps: deque[float] = deque(maxlen=_NUM_GAPS)
        """Seconds between starts."""
        self._last_start: float | None = None
        """None while nobody has waited since."""
        self._timer: asyncio.TimerHandle | None = None

    def join(self, state: RequestState) -> None:
        """The request was handed over, and waits."""
        waiting = _Waiting(state, next(self._numbers))
        self._waiting[state.internal_id] = waiting
        if state.job.report_queue:
            self._watchers[state.internal_id] = waiting
            order = _order(waiting)
            self._report(waiting, sum(_order(it) < order for it in self._waiting.values()))
        self._changed()

    def started(self, state: RequestState) -> None:
        now = self._clock()
        if self._last_start is not None:
            self._gaps.append(now - self._last_start)
        self.leave(state)
        self._last_start = now if self._waiting else None

    def leave(self, state: RequestState) -> None:
        """It waits no more. Idempotent."""
        if self._waiting.pop(state.internal_id, None) is None:
            return
        self._watchers.pop(state.internal_id, None)
        if not self._waiting:
            self._last_start = None
        self._changed()

    def _changed(self) -> None:
        if self._watchers and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TELL_EVERY_S, self._tell)

    def _tell(self) -> None:
        self._timer = None
        if not self._watchers:
            return
        for position, waiting in enumerate(sorted(self._waiting.values(), key=_order)):
            if waiting.state.internal_id in self._watchers and waiting.told != position:
                self._report(waiting, position)

    def _report(self, waiting: _Waiting, position: int) -> None:
        waiting.told = position
        wait_s = None
        if self._gaps:
            wait_s = (position + 1) * sum(self._gaps) / len(self._gaps)
        waiting.state.outbox.put_queued(Queued(position, wait_s))


def _order(waiting: _Waiting) -> tuple[int, int]:
    return (waiting.state.job.priority, waiting.number)
