"""Warnings about what strangers send: they must not fill the log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

COMPLAINT_INTERVAL_S = 5.0


class Complaints:
    """At most one warning in five seconds; the next tells how many were withheld."""

    def __init__(
        self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._next_at = clock()
        self._num_withheld = 0

    def add(self, message: str, *args: object) -> None:
        now = self._clock()
        if now < self._next_at:
            self._num_withheld += 1
            return
        if self._num_withheld:
            message += f" (and {self._num_withheld} like it, unlogged)"
        self._logger.warning(message, *args)
        self._num_withheld = 0
        self._next_at = now + COMPLAINT_INTERVAL_S
