"""How gRPC's C core runs in a room that serves: where it polls, and what its threads may cut off.

grpc.aio has a thread that takes completions from the core and rings for the event loop, once
for each message that is written. On the core's event engine, bytes that arrive pass through
two more threads before they reach it.
"""

from __future__ import annotations

import contextlib
import os
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

EXPERIMENTS = "GRPC_EXPERIMENTS"
_POLLED_BY_THE_COMPLETION_QUEUE = (
    "-event_engine_client,-event_engine_listener,-event_engine_for_all_other_endpoints"
)
_HAS_BOTH_POLLERS = ("1.85.",)
"""Releases of grpcio that were measured and tested with it; another may not know the names."""


def configure() -> None:
    """Call before grpc is imported. What the user has set in the environment stays."""
    # C-core has a line of its own for each connection that speaks no TLS, and strangers
    # could fill the log with them.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if version("grpcio").startswith(_HAS_BOTH_POLLERS):
        os.environ.setdefault(EXPERIMENTS, _POLLED_BY_THE_COMPLETION_QUEUE)


@contextlib.contextmanager
def patient_threads() -> Iterator[None]:
    """Threads that are started inside do not preempt who wakes them, on Linux.

    For what makes the first object of grpc.aio, and with it the polling thread. Woken by each
    of a step's writes it would take the core from the event loop that often, rather than
    take all completions together when the loop waits.
    """
    if not hasattr(os, "SCHED_BATCH"):
        yield
        return
    before = os.sched_getscheduler(0)
    # A sandbox may forbid it; the threads then preempt as threads do.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, before, os.sched_param(0))
