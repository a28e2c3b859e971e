"""The engine's end of one frontend's output: a socket, its state, a backlog."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from pagewire.errors import ConfigError
from pagewire.wire.sockets import connect, make_outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_BACKLOG_BYTES = 64 * 2**20
_CONNECT_PATIENCE_S = 2.0
_MAX_RECENT = 4096

_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_DOWN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED  # an attempt that failed
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Session:
    """From a Hello until the connection ends, the frontend falls silent or
    stops reading. Used under the outbox's lock; only the output thread polls it.

    Raises ConfigError for an endpoint that cannot be connected to.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        frontend_id: int,
        endpoint: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.frontend_id = frontend_id
        self.endpoint = endpoint
        self.owed: set[int] = set()
        """Requests added and not yet finished."""
        self.recently_finished: deque[int] = deque(maxlen=_MAX_RECENT)
        """Their finish was sent, and may have been lost with the connection."""
        self.broken: str | None = None
        """Why nothing more can be sent."""
        self._clock = clock
        self._backlog: deque[Sequence[bytes | memoryview]] = deque()
        self._backlog_bytes = 0
        self._opened_at = clock()
        self._is_up = False
        self._push = make_outputs(context)
        self._monitor = self._push.get_monitor_socket(_UP | _DOWN)
        try:
            connect(self._push, endpoint)
        except ConfigError:
            self._monitor.close(0)
            raise

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def answers(self, endpoint: str) -> bool:
        """Whether another Hello with this endpoint can be answered as things stand."""
        patient = self._is_up or self._clock() - self._opened_at < _CONNECT_PATIENCE_S
        return endpoint == self.endpoint and self.broken is None and patient

    def register(self, poller: zmq.Poller) -> None:
        """Waits for news of the connection, and for room if anything waits for it."""
        poller.register(self._monitor, zmq.POLLIN)
        if self._backlog:
            poller.register(self._push, zmq.POLLOUT)

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Sends now or keeps for later, in order; breaks when too much is kept."""
        if self.broken is not None or (not self._backlog and self._try_send(frames)):
            return
        self._backlog.append(frames)
        self._backlog_bytes += sum(len(frame) for frame in frames)
        if self._backlog_bytes > MAX_BACKLOG_BYTES:
            self.broken = f"it does not read: {self._backlog_bytes >> 20} MiB wait for it"

    def pump(self) -> None:
        """Takes note of what happened to the connection, and sends what waited."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event & _UP:
                self._is_up = True
            elif event & _DOWN:
                self.broken = self.broken or "its connection is gone"
        while self._backlog and self.broken is None and self._try_send(self._backlog[0]):
            sent = self._backlog.popleft()
            self._backlog_bytes -= sum(len(frame) for frame in sent)

    def _try_send(self, frames: Sequence[bytes | memoryview]) -> bool:
        try:
            self._push.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int = 0) -> None:
        self._push.disable_monitor()
        self._monitor.close(0)
        self._push.close(linger_ms)
        self._backlog.clear()
