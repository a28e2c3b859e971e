"""The input thread: owns the ROUTER, decodes commands, knows who is silent."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine_core.doorbell import Doorbell
from engine_core.events import Crashed, Event, Received
from pagewire.obs.complaints import Complaints
from pagewire.wire.codec import WireError, decode_command
from pagewire.wire.messages import PROTOCOL_VERSION, Add, Hello, Ping
from pagewire.wire.sockets import close_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from queue import SimpleQueue

    from engine_core.outbox import Outbox

_log = logging.getLogger(__name__)

_FOREIGN_PEER = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_BURST = 1000


@dataclass(slots=True)
class _Peer:
    frontend_id: int
    last_seen: float


class Inbox:
    """Reads commands until stopped; the loop gets them as events.

    `frontend_timeout` is in seconds. The ROUTER is this thread's from start()
    on, and is closed by it.
    """

    def __init__(
        self,
        router: Any,
        events: SimpleQueue[Event],
        outbox: Outbox,
        *,
        frontend_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._events = events
        self._outbox = outbox
        self._frontend_timeout = frontend_timeout
        self._clock = clock
        self._peers: dict[bytes, _Peer] = {}
        self._complaints = Complaints(_log, clock=clock)
        self._doorbell = Doorbell()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, once it has handed over what it holds."""
        self._stopping = True
        self._doorbell.ring()
        self._thread.join()
        self._doorbell.close()

    def _run(self) -> None:
        monitor = self._router.get_monitor_socket(_FOREIGN_PEER)
        try:
            self._serve(monitor)
        except BaseException as error:
            _log.exception("the input thread died")
            self._events.put(Crashed(error))
        finally:
            self._router.disable_monitor()
            monitor.close(0)
            close_bound(self._router)

    def _serve(self, monitor: Any) -> None:
        poller = zmq.Poller()
        for readable in (self._router, monitor, self._doorbell.fileno()):
            poller.register(readable, zmq.POLLIN)
        interval = min(1.0, self._frontend_timeout / 4)
        checked_at = self._clock()
        while not self._stopping:
            poller.poll(math.ceil(1000 * interval))
            self._doorbell.silence()
            self._receive_all()
            self._note_foreign_peers(monitor)
            now = self._clock()
            if now - checked_at >= interval:
                self._drop_silent(now, overslept=now - checked_at > 3 * interval)
                checked_at = now

    def _receive_all(self) -> None:
        for _ in range(_BURST):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(frames[0], frames[1:])

    def _receive(self, identity: bytes, frames: Sequence[bytes]) -> None:
        now = self._clock()
        try:
            command = decode_command(frames)
        except WireError as error:
            self._complaints.add("ignored a malformed message: %s", error)
            return
        if isinstance(command, Hello):
            self._greet(identity, command, now)
            return
        peer = self._peers.get(identity)
        if peer is None:
            # Sent to an earlier engine, or after this one gave the frontend up.
            # Its Hello will follow, and it replays what it still wants.
            self._complaints.add(
                "ignored %s from a frontend without a session", type(command).__name__
            )
            return
        peer.last_seen = now
        if isinstance(command, Ping):
            return
        if isinstance(command, Add):
            self._outbox.expect(peer.frontend_id, command.request_id)
        self._events.put(Received(peer.frontend_id, command, now))

    def _greet(self, identity: bytes, hello: Hello, now: float) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            self._complaints.add(
                "refused frontend %016x: it speaks protocol %d, this engine %d",
                hello.frontend_id,
                hello.protocol,
                PROTOCOL_VERSION,
            )
            return
        for other, peer in list(self._peers.items()):
            if peer.frontend_id == hello.frontend_id and other != identity:
                del self._peers[other]  # the same frontend, over a new socket
        former = self._peers.get(identity)
        if former is not None and former.frontend_id != hello.frontend_id:
            self._outbox.close(former.frontend_id, "another frontend took its place")
        self._peers[identity] = _Peer(hello.frontend_id, now)
        self._outbox.open(hello.frontend_id, hello.outputs)

    def _drop_silent(self, now: float, *, overslept: bool) -> None:
        for identity, peer in list(self._peers.items()):
            if overslept:
                # This process was stopped or starved: the pings may be on their way.
                peer.last_seen = max(peer.last_seen, now - self._frontend_timeout / 2)
            elif now - peer.last_seen > self._frontend_timeout:
                del self._peers[identity]
                self._outbox.close(peer.frontend_id, f"silent for {now - peer.last_seen:.1f} s")

    def _note_foreign_peers(self, monitor: Any) -> None:
        while monitor.poll(0):
            recv_monitor_message(monitor)
            self._complaints.add("closed a connection that does not speak ZeroMQ")
