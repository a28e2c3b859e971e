"""The frontend's end of the ZeroMQ wire: one session with one engine.

    CONNECTING --Ready--> UP --silence, Dead or another epoch--> GONE = CONNECTING

Only here are sockets, epochs and heartbeats known. What the engine says is
handed to an EngineEvents in order, in the event loop. Outputs of an epoch that
is not the current one are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from pagewire.errors import ConfigError, Unavailable
from pagewire.obs.complaints import Complaints
from pagewire.wire import sockets
from pagewire.wire.codec import WireError, decode_output, encode, pack_request_ids
from pagewire.wire.messages import (
    PROTOCOL_VERSION,
    SHUTDOWN,
    Abort,
    AdapterList,
    AdapterReply,
    Dead,
    Heartbeat,
    Hello,
    Output,
    Ping,
    Ready,
    ResetPrefixCache,
    ResetPrefixCacheReply,
    StepOutput,
    StepStats,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pagewire.wire.messages import AdapterInfo, Add, Command

    Reply = ResetPrefixCacheReply | AdapterReply

logger = logging.getLogger(__name__)

HELLO_EVERY_S = 0.5
PING_EVERY_S = 1.0
HEARTBEAT_EVERY_S = 1.0
TICK_S = 0.25
MAX_READS = 4
"""Outputs taken in one turn of the loop: an engine that is faster than this process
must not keep it from writing."""
OVERSLEPT_S = 3 * TICK_S
MISSED_HEARTBEAT_S = 2.5
"""Silence after which the frontend asks again (Hello)."""
LOST_S = 1.5
"""Silence after which it gives the engine up where the connection broke and somebody
answers at its address: a living one says something every second, and answers the Hello
that follows the reconnection. Where both connections broke and nobody answers, the
engine is given up as soon as what it said before has been read."""
REPLACED_S = 0.5
"""The same where another engine can go on with its requests, counted from the break:
enough for a living one to be reconnected and asked again."""
RETRY_AFTER_S = 2.0
"""What a client is told to wait when the engine is gone or not there yet."""


class EngineEvents(Protocol):
    """What an engine session tells its owner."""

    def engine_ready(self, ready: Ready) -> None:
        """A session has begun: with a new epoch, or with an engine that was out of reach."""

    def engine_step(self, output: StepOutput) -> None: ...

    def engine_stats(self, stats: StepStats) -> None:
        """Between steps, with each heartbeat."""

    def engine_adapters(self, adapters: tuple[AdapterInfo, ...]) -> None:
        """What is loaded has changed."""

    def engine_gone(self, reason: str) -> None:
        """The engine died or is out of reach; what it still says will be dropped."""

    def engine_reconnected(self) -> None:
        """The connection broke and the same engine answers again: commands that were on
        their way are lost."""

    def engine_stalled(self, stalled: bool) -> None:
        """The step counter stands still while work is running, or moves again."""


class _Call(NamedTuple):
    """A command that the engine replies to; it is sent again where a connection has lost it."""

    command: Command
    reply: asyncio.Future[Reply]


class EngineClient:
    """Commands go out at once or raise Unavailable; nothing is queued here."""

    def __init__(
        self,
        *,
        commands: str,
        outputs_bind: str,
        outputs_advertise: str | None,
        engine_timeout: float,
        stall_timeout: float,
        events: EngineEvents,
        clock: Callable[[], float],
    ) -> None:
        self._commands_endpoint = commands
        self._outputs_bind = outputs_bind
        self._outputs_advertise = outputs_advertise
        self._engine_timeout = engine_timeout
        self._stall_timeout = stall_timeout
        self._events = events
        self._clock = clock
        self._frontend_id = secrets.randbits(64)
        self._complaints = Complaints(logger, clock=clock)
        self.ready: Ready | None = None
        """None while there is no engine."""
        self.last_step = 0
        self._ever_ready = False
        self._stalled = False
        self._lost = False
        """The connection broke, and the engine has not said Ready since: who has taken its
        address may be another one, which loads its model and does not answer yet."""
        self._lost_at = 0.0
        self._refuses = False
        """Nobody listened at its address when it was tried again."""
        self._hung_up = False
        """It has closed the connection for its outputs."""
        self.replaceable = False
        """Whether another engine can go on with its requests."""
        self._last_heard = 0.0
        self._last_hello = 0.0
        self._last_ping = 0.0
        self._ticked_at = clock()
        self._step_moved_at = 0.0
        self._unsent_aborts: list[int] = []
        self._calls: dict[int, _Call] = {}
        """By call id, those without a reply."""
        self._call_id = 0
        self._refused: str | None = None

    async def start(self) -> None:
        """Binds and connects. Raises ConfigError or BindError; needs no engine yet."""
        self._context = zmq.Context()
        try:
            self._outputs = sockets.bind_outputs(self._context, self._outputs_bind)
            self._advertised = self._outputs_advertise or _reachable(
                sockets.bound_endpoint(self._outputs)
            )
            self._commands = sockets.connect_commands(self._context, self._commands_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._monitor = self._commands.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED
        )
        self._outputs_monitor = self._outputs.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        loop = asyncio.get_running_loop()
        # ZeroMQ's descriptors are edge-triggered: each wake-up reads until EAGAIN.
        loop.add_reader(self._outputs.FD, self._read_outputs)
        loop.add_reader(self._monitor.FD, self._read_monitor)
        loop.add_reader(self._outputs_monitor.FD, self._read_outputs_monitor)
        self._ticker = loop.create_task(self._tick_forever(), name="engine-ticker")
        self._read_outputs()
        self._read_monitor()
        self._read_outputs_monitor()

    async def close(self) -> None:
        """Ends the session. Aborts that are still unsent go out first, if they can."""
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        self._send_aborts()
        self._fail_calls(Unavailable("draining", "the server is shutting down"))
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._outputs.FD)
        loop.remove_reader(self._monitor.FD)
        loop.remove_reader(self._outputs_monitor.FD)
        self._commands.disable_monitor()
        self._outputs.disable_monitor()
        for socket in (self._monitor, self._outputs_monitor, self._outputs, self._commands):
            socket.close()
        # term() waits for the DEALER's LINGER, so it must not run in the loop.
        await loop.run_in_executor(None, self._context.term)

    def leave(self, reason: str) -> None:
        """Counts a living engine as gone; close() is to follow."""
        self._gone(reason)

    @property
    def lost(self) -> bool:
        """Whether the connection broke, and nobody has said Ready since."""
        return self._lost

    @property
    def epoch(self) -> int:
        """The current engine's epoch; 0 while there is none."""
        return self.ready.epoch if self.ready is not None else 0

    def unavailable(self) -> Unavailable:
        """The error for a request that finds no engine."""
        if self._refused is not None:
            return Unavailable("engine_dead", self._refused)
        if self._ever_ready:
            return Unavailable("engine_dead", "the engine is gone", retry_after=RETRY_AFTER_S)
        return Unavailable("loading", "the model is still loading", retry_after=RETRY_AFTER_S)

    def add(self, add: Add) -> None:
        """Sends a request. Raises Unavailable if there is no engine to take it."""
        if self.ready is None:
            raise self.unavailable()
        if not self._send(add):
            raise Unavailable(
                "engine_dead", "the engine takes no requests", retry_after=RETRY_AFTER_S
            )

    def abort(self, request_ids: Iterable[int]) -> None:
        """Sends an abort now; if the wire is full, with the next tick."""
        self._unsent_aborts.extend(request_ids)
        self._send_aborts()

    async def reset_prefix_cache(self) -> int:
        """The number of blocks freed. Raises Unavailable."""
        reply = await self.call(lambda call_id: ResetPrefixCache(call_id=call_id))
        assert isinstance(reply, ResetPrefixCacheReply)
        return reply.num_blocks_freed

    def call(self, make: Callable[[int], Command]) -> asyncio.Future[Reply]:
        """Sends what make(call_id) makes; its reply, or Unavailable. Raises Unavailable."""
        if self.ready is None:
            raise self.unavailable()
        self._call_id += 1
        call_id = self._call_id
        command = make(call_id)
        if not self._send(command):
            raise self.unavailable()
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        reply.add_done_callback(lambda _: self._calls.pop(call_id, None))
        self._calls[call_id] = _Call(command, reply)
        return reply

    # Outgoing.

    def _send(self, command: Command) -> bool:
        try:
            self._commands.send_multipart(encode(command), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _send_aborts(self) -> None:
        if self._unsent_aborts and self._send(
            Abort(request_ids=pack_request_ids(self._unsent_aborts))
        ):
            self._unsent_aborts.clear()

    # Incoming.

    def _read_outputs(self) -> None:
        if self._outputs.closed:
            return
        for _ in range(MAX_READS):
            try:
                frames = self._outputs.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._give_up_the_dead()
                return
            try:
                output = decode_output(frames)
            except WireError as error:
                self._complaints.add("dropped a message on the outputs socket: %s", error)
                continue
            try:
                self._receive(output)
            except Exception:
                # Read on: no edge will come for what is already here.
                logger.exception("an output of the engine could not be handled")
        # There may be more, which no edge will tell: handlers get their turn first.
        asyncio.get_running_loop().call_soon(self._read_outputs)

    def _receive(self, output: Output) -> None:
        if isinstance(output, Ready):
            self._receive_ready(output)
            return
        if isinstance(output, ResetPrefixCacheReply | AdapterReply):
            call = self._calls.get(output.call_id)
            if call is not None and not call.reply.done():
                call.reply.set_result(output)
            return
        if self.ready is None or output.epoch != self.ready.epoch:
            logger.debug("dropped an output of the stale epoch %d", output.epoch)
            return
        self._last_heard = self._clock()
        if isinstance(output, StepOutput):
            self._note_step(output.step, output.stats)
            self._events.engine_step(output)
        elif isinstance(output, Heartbeat):
            self._note_step(output.step, output.stats)
            self._events.engine_stats(output.stats)
        elif isinstance(output, AdapterList):
            self._events.engine_adapters(output.adapters)
        elif isinstance(output, Dead):
            if output.reason == SHUTDOWN:
                self._gone("the engine was stopped")
                return
            logger.error("the engine died: %s", output.reason)
            self._gone("the engine died")

    def _receive_ready(self, ready: Ready) -> None:
        if ready.protocol != PROTOCOL_VERSION:
            refused = (
                f"the engine speaks protocol {ready.protocol}, "
                f"this frontend speaks {PROTOCOL_VERSION}"
            )
            if refused != self._refused:  # it answers every Hello so
                logger.error("%s", refused)
            self._refused = refused
            return
        self._last_heard = self._clock()
        was_lost = self._lost
        self._lost = self._refuses = self._hung_up = False
        if self.ready is not None:
            if ready.epoch == self.ready.epoch:
                if was_lost:
                    for call in self._calls.values():
                        self._send(call.command)
                    self._events.engine_adapters(ready.adapters)
                    self._events.engine_reconnected()
                return
            self._gone("the engine was restarted")
        self._refused = None
        self._ever_ready = True
        self.ready = ready
        self.last_step = 0
        self._step_moved_at = self._last_heard
        logger.info(
            "engine ready: model %s, %d blocks of %d tokens on %s",
            ready.model_name,
            ready.num_blocks,
            ready.block_size,
            ready.device,
        )
        self._events.engine_ready(ready)

    def _read_monitor(self) -> None:
        while self._monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event: dict[str, Any] = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] == zmq.EVENT_CLOSED:  # an attempt that failed
                self._refuses = self._lost
                self._read_outputs()
                continue
            # A restarted engine knows no frontend until it says Hello.
            self._last_hello = 0.0
            self._refuses = False
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._lost = True
                self._lost_at = self._clock()

    def _read_outputs_monitor(self) -> None:
        while self._outputs_monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            recv_monitor_message(self._outputs_monitor, zmq.NOBLOCK)
            self._hung_up = True
            self._read_outputs()

    def _give_up_the_dead(self) -> None:
        """To be called when all outputs that have come are read."""
        if self.ready is not None and self._refuses and self._hung_up:
            self._gone("the engine's process ended")

    # Time.

    async def _tick_forever(self) -> None:
        while True:
            try:
                self._tick()
            except Exception:
                # Without ticks nobody pings, and the engine drops this frontend.
                logger.exception("the engine client's tick failed")
            await asyncio.sleep(TICK_S)

    def _tick(self) -> None:
        now = self._clock()
        limit = self._engine_timeout
        if self._lost:
            limit = min(limit, LOST_S)
            if self.replaceable and now - self._lost_at > REPLACED_S:
                limit = min(limit, REPLACED_S)
        if now - self._ticked_at > OVERSLEPT_S:
            # This process was stopped or starved: what the engine said may be on its way.
            self._last_heard = max(self._last_heard, now - limit / 2)
            self._step_moved_at = max(self._step_moved_at, now - self._stall_timeout / 2)
        self._ticked_at = now
        silence = now - self._last_heard
        if self.ready is not None and silence > limit:
            self._gone(f"the engine has been silent for {silence:.1f} s")
        if self.ready is not None:
            self._check_stall(now)
            self._send_aborts()
            if now - self._last_ping >= PING_EVERY_S and self._send(
                Ping(frontend_id=self._frontend_id)
            ):
                self._last_ping = now
        # While the engine lives but is not heard, Hello makes it connect again.
        asks = self.ready is None or self._lost or silence > MISSED_HEARTBEAT_S
        if asks and now - self._last_hello >= HELLO_EVERY_S:
            hello = Hello(
                protocol=PROTOCOL_VERSION,
                frontend_id=self._frontend_id,
                outputs=self._advertised,
            )
            if self._send(hello):
                self._last_hello = now

    def _note_step(self, step: int, stats: StepStats) -> None:
        if step != self.last_step or stats.num_running + stats.num_waiting == 0:
            self.last_step = step
            self._step_moved_at = self._last_heard
            self._set_stalled(False)

    def _check_stall(self, now: float) -> None:
        if now - self._step_moved_at > self._stall_timeout:
            self._set_stalled(True)

    def _set_stalled(self, stalled: bool) -> None:
        if stalled == self._stalled:
            return
        self._stalled = stalled
        if stalled:
            logger.error(
                "the engine hangs: step %d for more than %g s", self.last_step, self._stall_timeout
            )
        self._events.engine_stalled(stalled)

    def _gone(self, reason: str) -> None:
        logger.warning("engine gone: %s", reason)
        self.ready = None
        self._refuses = self._hung_up = False
        self._last_hello = 0.0
        self._unsent_aborts.clear()
        self._set_stalled(False)
        self._fail_calls(self.unavailable())
        self._events.engine_gone(reason)

    def _fail_calls(self, error: Unavailable) -> None:
        for call in self._calls.values():
            if not call.reply.done():
                call.reply.set_exception(error)
        self._calls.clear()


def _reachable(endpoint: str) -> str:
    """What the engine may connect to, when nobody said. Raises ConfigError."""
    if sockets.is_wildcard(endpoint):
        raise ConfigError(
            f"outputs_bind {endpoint!r} is a wildcard: set outputs_advertise to the address "
            "at which the engine reaches this frontend"
        )
    return endpoint
