"""The engine process: one thread that computes, two that move bytes.

    frontends --> ROUTER [inbox thread] --events--> loop --outputs--> [outbox thread] PUSH --> each
                                 |                                          ^
                                 +------- sessions, silence, owed finishes -+

The loop is the only one to touch the core. It sleeps in the event queue when
there is no work, and looks into it once within every step.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from engine_core.events import Crashed, Event, Lost, Opened, Received, Stop, Woken
from engine_core.inbox import Inbox
from engine_core.outbox import HEARTBEAT_INTERVAL_S, Outbox
from engine_core.watchdog import Watchdog
from pagewire import collector
from pagewire.wire.codec import unpack_request_ids
from pagewire.wire.messages import (
    SHUTDOWN,
    Abort,
    Add,
    LoadAdapter,
    ResetPrefixCacheReply,
    UnloadAdapter,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import zmq

    from pagewire.wire.messages import (
        AdapterInfo,
        AdapterReply,
        Ready,
        StepOutput,
        StepStats,
    )

_log = logging.getLogger(__name__)


class Core(Protocol):
    """What the loop drives; EngineCore is one."""

    step_id: int

    def add(self, frontend_id: int, add: Add, received_at: float) -> None: ...
    def abort(self, frontend_id: int, request_ids: Sequence[int], received_at: float) -> None: ...
    def drop_frontend(self, frontend_id: int) -> None: ...
    def reset_prefix_cache(self) -> int: ...
    def change_adapters(self, command: LoadAdapter | UnloadAdapter) -> AdapterReply: ...
    def adapter_infos(self) -> tuple[AdapterInfo, ...]: ...
    def has_work(self) -> bool: ...
    def step(self, poll: Callable[[], None]) -> dict[int, StepOutput]: ...
    def stats(self) -> StepStats: ...


class EngineProcess:
    """A core, its threads and its sessions, from start to exit status.

    router: from bind_commands; it is the process's from here on. Intervals and
    timeouts are in seconds. hang_timeout: how long one turn of the loop may take before
    the watchdog ends the process; 0 for ever.
    """

    def __init__(
        self,
        core: Core,
        ready: Ready,
        context: zmq.Context[Any],
        router: Any,
        *,
        frontend_timeout: float,
        hang_timeout: float = 0.0,
        heartbeat_interval: float = HEARTBEAT_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._outbox = Outbox(
            context,
            self._events,
            ready,
            core.stats(),
            heartbeat_interval=heartbeat_interval,
            clock=clock,
        )
        self._inbox = Inbox(
            router, self._events, self._outbox, frontend_timeout=frontend_timeout, clock=clock
        )
        self._open: set[int] = set()
        self._stop: Stop | Crashed | None = None
        self._turn = 0
        self._resting = True
        self._watchdog = Watchdog(self._busy_turn, hang_timeout) if hang_timeout else None

    def stop(self, reason: str = SHUTDOWN) -> None:
        """Ends run() after the step at hand. Safe in any thread and signal handler."""
        self._events.put(Stop(reason))

    def crash(self, told: str) -> None:
        """Ends run() after the step at hand as a failure of the engine, of which frontends
        are told in these words. Safe in any thread."""
        self._events.put(Crashed(RuntimeError(told), told))

    def wake(self) -> None:
        """Makes the loop ask the core for work. Safe in any thread."""
        self._events.put(Woken())

    def run(self, on_serving: Callable[[], None] = lambda: None) -> int:
        """Serves until stopped; returns the exit status, 0 or 1.

        on_serving: called once, when frontends are being answered.
        """
        self._outbox.start()
        self._inbox.start()
        if self._watchdog is not None:
            self._watchdog.start()
        try:
            on_serving()
            self._loop()
        except Exception as error:
            _log.exception("the engine failed after step %d", self._core.step_id)
            return self._end(f"{type(error).__name__} in the engine, see its log", status=1)
        assert self._stop is not None
        if isinstance(self._stop, Crashed):
            return self._end(self._stop.told, status=1)
        return self._end(self._stop.reason, status=0)

    def _loop(self) -> None:
        core = self._core
        while self._stop is None:
            if not core.has_work():
                self._publish()
                self._resting = True
                event = self._events.get()
                self._resting = False
                self._apply(event)
            self._turn += 1
            self._poll()
            # Also before the step: if it hangs, the heartbeat tells what it was about.
            self._publish()
            if self._stop is None and core.has_work():
                for frontend_id, output in core.step(self._poll).items():
                    self._outbox.send(frontend_id, output)

    def _busy_turn(self) -> int | None:
        return None if self._resting else self._turn

    def _poll(self) -> None:
        """Applies all events that have come."""
        for event in self._pending():
            self._apply(event)

    def _pending(self) -> Iterator[Event]:
        while True:
            try:
                yield self._events.get_nowait()
            except Empty:
                return

    def _publish(self) -> None:
        self._outbox.publish(self._core.step_id, self._core.stats())

    def _apply(self, event: Event) -> None:
        match event:
            case Received():
                self._apply_command(event)
            case Opened(frontend_id):
                self._open.add(frontend_id)
            case Lost(frontend_id):
                self._open.discard(frontend_id)
                self._core.drop_frontend(frontend_id)
            case Stop() | Crashed():
                self._stop = self._stop or event
            case Woken():
                pass

    def _apply_command(self, event: Received) -> None:
        frontend_id, command = event.frontend_id, event.command
        if frontend_id not in self._open:
            # The session was lost meanwhile. If the frontend comes back, the
            # outbox answers what it was still owed.
            return
        if isinstance(command, Add):
            self._core.add(frontend_id, command, event.received_at)
        elif isinstance(command, Abort):
            request_ids = unpack_request_ids(command.request_ids)
            self._core.abort(frontend_id, request_ids, event.received_at)
        elif isinstance(command, LoadAdapter | UnloadAdapter):
            reply = self._core.change_adapters(command)
            # First what all are to know, so that whoever gets the reply knows it too.
            self._outbox.set_adapters(self._core.adapter_infos())
            self._outbox.send(frontend_id, reply)
        else:
            num_blocks = self._core.reset_prefix_cache()
            _log.info("prefix cache reset, %d blocks forgotten", num_blocks)
            self._outbox.send(frontend_id, ResetPrefixCacheReply(command.call_id, num_blocks))

    def _end(self, last_word: str, *, status: int) -> int:
        if self._watchdog is not None:
            self._watchdog.stop()
        self._inbox.stop()
        # After a crash the frontend decides what becomes of its requests: Dead
        # tells it at once. A shutdown is meant, so each is ended by name.
        self._outbox.finish(last_word, abort_requests=status == 0)
        return status


def serve(process: EngineProcess, on_serving: Callable[[], None] = lambda: None) -> int:
    """Runs the process in this, the main thread, and returns its exit status.

    SIGTERM and SIGINT stop it; SIGUSR1 dumps all stacks to stderr.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: process.stop(SHUTDOWN))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    collector.settle()
    return process.run(on_serving)
