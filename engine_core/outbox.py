"""The outputs: sent by the loop itself where nothing is in the way, else by the output
thread, which opens and closes sessions, sends what had to wait, and beats while the loop
computes."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from engine_core.doorbell import Doorbell
from engine_core.events import Crashed, Event, Lost, Opened
from engine_core.session import Session
from pagewire.errors import ConfigError
from pagewire.types import FinishReason
from pagewire.wire.codec import encode
from pagewire.wire.messages import AdapterList, Dead, Finished, Heartbeat, StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pagewire.wire.messages import AdapterInfo, Output, Ready, StepStats

_log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 1.0
_FLUSH_S = 1.0
_MAX_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class _Open:
    frontend_id: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class _Close:
    frontend_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Expect:
    frontend_id: int
    request_id: int


@dataclass(frozen=True, slots=True)
class _Send:
    frontend_id: int
    message: Output


@dataclass(frozen=True, slots=True)
class _SetAdapters:
    adapters: tuple[AdapterInfo, ...]


@dataclass(frozen=True, slots=True)
class _Finish:
    last_word: str
    abort_requests: bool


_Task = _Open | _Close | _Expect | _Send | _SetAdapters | _Finish


class Outbox:
    """Sends each frontend what is its own; a frontend that does not read costs
    the others nothing and the engine a bounded backlog.

    Methods may be called from any thread and never wait for a frontend, except finish().
    It also knows which requests each frontend is owed a finish for, so that
    none ends in silence: those that were lost with a session are answered when
    the frontend comes back, those that still run at shutdown are aborted.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        events: SimpleQueue[Event],
        ready: Ready,
        stats: StepStats,
        *,
        heartbeat_interval: float = HEARTBEAT_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._events = events
        self._ready = ready
        self._heartbeat_interval = heartbeat_interval
        self._clock = clock
        self._pulse: tuple[int, StepStats] = (0, stats)
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._sessions: dict[int, Session] = {}
        self._unanswered: OrderedDict[int, set[int]] = OrderedDict()
        """Requests lost with their session, for each frontend, oldest loss first."""
        self._lock = threading.Lock()
        """Held by whoever uses sessions or their sockets."""
        self._finished = False
        self._doorbell = Doorbell()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def open(self, frontend_id: int, endpoint: str) -> None:
        """Answers a Hello: connects unless the session stands, and sends Ready."""
        self._put(_Open(frontend_id, endpoint))

    def close(self, frontend_id: int, reason: str) -> None:
        """Gives a frontend up. Does nothing for an unknown one."""
        self._put(_Close(frontend_id, reason))

    def expect(self, frontend_id: int, request_id: int) -> None:
        """Notes an Add, before the loop sees it: the request is owed a finish."""
        self._tasks.put(_Expect(frontend_id, request_id))  # no hurry, hence no ring

    def send(self, frontend_id: int, message: Output) -> None:
        # To ring lets the output thread have the GIL, and the caller waits until it is done.
        if not self._send_at_once(frontend_id, message):
            self._put(_Send(frontend_id, message))

    def _send_at_once(self, frontend_id: int, message: Output) -> bool:
        """False, and nothing was done, if anything has to be seen to before."""
        with self._lock:
            session = self._sessions.get(frontend_id)
            # While a session has a backlog, the output thread polls its socket.
            if session is None or session.has_backlog or not self._tasks.empty():
                return False
            self._send(session, message)
            needs_thread = session.has_backlog or session.broken is not None
        if needs_thread:
            self._doorbell.ring()
        return True

    def publish(self, step: int, stats: StepStats) -> None:
        """What the next heartbeat says."""
        self._pulse = (step, stats)

    def set_adapters(self, adapters: tuple[AdapterInfo, ...]) -> None:
        """Tells every frontend, now and with each Ready from here on."""
        self._put(_SetAdapters(adapters))

    def finish(self, last_word: str, *, abort_requests: bool) -> None:
        """Sends ABORT for all that is unfinished (if asked) and Dead, flushes for
        at most a second, and ends the thread."""
        if self._thread.is_alive():
            self._put(_Finish(last_word, abort_requests))
            self._thread.join()
        self._doorbell.close()

    def _put(self, task: _Task) -> None:
        self._tasks.put(task)
        self._doorbell.ring()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            _log.exception("the output thread died")
            self._events.put(Crashed(error))
        finally:
            for session in self._sessions.values():
                session.close()

    def _serve(self) -> None:
        beat_at = self._clock()
        while not self._finished:
            self._wait(beat_at - self._clock())
            self._doorbell.silence()
            with self._lock:
                self._work_off()
                for session in list(self._sessions.values()):
                    session.pump()
                    self._lose_if_broken(session)
                if self._clock() >= beat_at:
                    self._beat()
                    beat_at = self._clock() + self._heartbeat_interval

    def _wait(self, timeout: float) -> None:
        poller = zmq.Poller()
        poller.register(self._doorbell.fileno(), zmq.POLLIN)
        for session in self._sessions.values():
            session.register(poller)
        poller.poll(max(0, math.ceil(1000 * timeout)))

    def _work_off(self) -> None:
        # What comes meanwhile rings again: a flood must not hold up the heartbeat.
        for _ in range(self._tasks.qsize()):
            task = self._tasks.get_nowait()
            match task:
                case _Send():
                    session = self._sessions.get(task.frontend_id)
                    if session is not None:  # else its requests are among the unanswered
                        self._send(session, task.message)
                        self._lose_if_broken(session)
                case _Expect():
                    self._expect(task)
                case _Open():
                    self._open(task)
                case _Close():
                    self._lose(task.frontend_id, task.reason)
                case _SetAdapters():
                    self._set_adapters(task.adapters)
                case _Finish():
                    self._say_last_words(task)
                    return

    def _send(self, session: Session, message: Output) -> None:
        if isinstance(message, StepOutput):
            for finished in message.finished:
                session.owed.discard(finished.request_id)
                session.recently_finished.append(finished.request_id)
        session.send(encode(message))

    def _set_adapters(self, adapters: tuple[AdapterInfo, ...]) -> None:
        if adapters == self._ready.adapters:
            return
        self._ready = msgspec.structs.replace(self._ready, adapters=adapters)
        frames = encode(AdapterList(self._ready.epoch, adapters))
        for session in self._sessions.values():
            session.send(frames)

    def _expect(self, task: _Expect) -> None:
        session = self._sessions.get(task.frontend_id)
        if session is not None:
            session.owed.add(task.request_id)
        else:
            self._remember(task.frontend_id, (task.request_id,))

    def _open(self, task: _Open) -> None:
        session = self._sessions.get(task.frontend_id)
        if session is None or not session.answers(task.endpoint):
            self._lose(task.frontend_id, "it opened a new session")
            for other in list(self._sessions.values()):
                if other.endpoint == task.endpoint:
                    self._lose(other.frontend_id, "another frontend has its address")
            try:
                session = Session(self._context, task.frontend_id, task.endpoint, clock=self._clock)
            except ConfigError as error:
                _log.warning("refused frontend %016x: %s", task.frontend_id, error)
                return
            self._sessions[task.frontend_id] = session
            _log.info("frontend %016x: session opened to %s", task.frontend_id, task.endpoint)
            # Before Ready, so that the loop knows the session before it can add.
            self._events.put(Opened(task.frontend_id))
            self._answer_lost_requests(session)
        session.send(encode(self._ready))

    def _answer_lost_requests(self, session: Session) -> None:
        request_ids = self._unanswered.pop(session.frontend_id, None)
        if request_ids:
            # ABORT: the frontend may send them again, as nothing is wrong with them.
            session.send(encode(self._finish_all(request_ids, FinishReason.ABORT)))
            # This connection may break as well, before that has arrived.
            session.recently_finished.extend(request_ids)

    def _lose_if_broken(self, session: Session) -> None:
        if session.broken is not None:
            self._lose(session.frontend_id, session.broken)

    def _lose(self, frontend_id: int, reason: str) -> None:
        session = self._sessions.pop(frontend_id, None)
        if session is None:
            return
        session.close()
        unanswered = session.owed.union(session.recently_finished)
        if unanswered:
            self._remember(frontend_id, unanswered)
        self._events.put(Lost(frontend_id))
        _log.log(
            logging.WARNING if session.owed else logging.INFO,
            "frontend %016x: session over, %d requests dropped: %s",
            frontend_id,
            len(session.owed),
            reason,
        )

    def _remember(self, frontend_id: int, request_ids: Iterable[int]) -> None:
        self._unanswered.setdefault(frontend_id, set()).update(request_ids)
        self._unanswered.move_to_end(frontend_id)
        while len(self._unanswered) > _MAX_REMEMBERED:
            self._unanswered.popitem(last=False)  # by now it is not coming back

    def _finish_all(self, request_ids: Iterable[int], reason: FinishReason) -> StepOutput:
        step, stats = self._pulse
        return StepOutput(
            epoch=self._ready.epoch,
            step=step,
            sent_ns=time.monotonic_ns(),
            request_ids=b"",
            counts=b"",
            token_ids=b"",
            started=(),
            finished=tuple(Finished(request_id, int(reason)) for request_id in request_ids),
            unknown_aborts=(),
            stats=stats,
        )

    def _beat(self) -> None:
        step, stats = self._pulse
        heartbeat = Heartbeat(
            epoch=self._ready.epoch,
            step=step,
            sent_ns=time.monotonic_ns(),
            stats=stats,
        )
        frames = encode(heartbeat)
        for session in self._sessions.values():
            session.send(frames)

    def _say_last_words(self, task: _Finish) -> None:
        dead = encode(Dead(self._ready.epoch, task.last_word))
        for session in self._sessions.values():
            if task.abort_requests and session.owed:
                session.send(encode(self._finish_all(session.owed, FinishReason.ABORT)))
            session.send(dead)
        give_up_at = time.monotonic() + _FLUSH_S
        while any(
            session.has_backlog and not session.broken for session in self._sessions.values()
        ):
            remaining = give_up_at - time.monotonic()
            if remaining <= 0:
                break
            self._wait(remaining)
            for session in self._sessions.values():
                session.pump()
        for session in self._sessions.values():
            session.close(linger_ms=int(1000 * _FLUSH_S))
        self._sessions.clear()
        self._finished = True
