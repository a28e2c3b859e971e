"""Python's cyclic garbage collector, set for a process that serves."""

from __future__ import annotations

import gc

_THRESHOLD = 20_000
"""Container objects made and not freed until the youngest generation is looked through."""


def settle() -> None:
    """Call once a process has started: what is there now stays, and is never visited again.

    A hot path makes containers that reference counts free at once; with Python's own
    threshold of 700 the collector visits all that was imported several times a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_THRESHOLD, 10, 10)
