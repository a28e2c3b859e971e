"""Ends the process when a step hangs, so that whoever supervises it starts another.

    feeder thread --every quarter of the limit, if the engine moves--> timer in C

The timer is faulthandler's. It needs no interpreter lock, so it also ends an engine whose
computing thread never gives the lock back: it writes the stack of every thread to stderr
and exits with status 1, without cleaning up. A process that was stopped (SIGSTOP, a frozen
container) for longer than the limit may be ended when it goes on: its frontends have given
it up anyway.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class Watchdog:
    """One in a process: the timer is the process's.

    turn: gives a number that changes as the engine goes on, or None while it has nothing to
    do; called from a thread of the watchdog's own. limit_s: how long a turn may take, in
    seconds.
    """

    def __init__(
        self,
        turn: Callable[[], int | None],
        limit_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._turn = turn
        self._limit_s = limit_s
        self._clock = clock
        self._seen: int | None = None
        self._moved_at = clock()
        self._warned = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._feed()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._stopping.wait(self._limit_s / 4):
            self.look()

    def look(self) -> None:
        """Feeds the timer where the engine has moved since the last look, or rests."""
        turn = self._turn()
        if turn is None or turn != self._seen:
            self._seen = turn
            self._moved_at = self._clock()
            self._warned = False
            self._feed()
            return
        hung_s = self._clock() - self._moved_at
        if hung_s > self._limit_s / 2 and not self._warned:
            self._warned = True
            _log.error(
                "the engine has not moved for %.1f s; after %g s (--engine-hang-timeout) it "
                "writes its stacks and ends",
                hung_s,
                self._limit_s,
            )

    def _feed(self) -> None:
        faulthandler.dump_traceback_later(self._limit_s, exit=True)
