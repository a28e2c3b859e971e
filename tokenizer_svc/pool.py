"""The server's side of its worker processes: start, call, notice death, start again.

Workers are started by exec, never by fork: threads of gRPC do not survive a fork.
Each has one socket pair, whose end tells either side that the other is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from pagewire.errors import (
    ConfigError,
    InternalError,
    InvalidRequest,
    ModelLoadError,
    QueueFull,
    Unavailable,
)
from tokenizer_svc.messages import (
    LENGTH,
    DropStream,
    Failed,
    Load,
    Loaded,
    LoadFailed,
    Ping,
    Pong,
    StepDone,
    decode_from_worker,
    encode_frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tokenizer_svc.messages import FromWorker, ToWorker

log = logging.getLogger(__name__)

LIVE_TIMEOUT = 30.0
"""Seconds a call waits for a worker while all of them are starting again."""
_SOON_DEAD_SECONDS = 10.0
_BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
_KILL_GRACE_SECONDS = 2.0
_PINGS = 4
"""Times in a row that a ping finds the one before it unanswered, until a worker hangs."""


class WorkerGone(Exception):
    """The worker died before it answered."""


class Worker(asyncio.Protocol):
    """One life of a worker process; after its death another Worker takes its place."""

    def __init__(self, on_death: Callable[[Worker], None]) -> None:
        self._on_death = on_death
        self._buffer = bytearray()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._transport: asyncio.WriteTransport | None = None
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            # As safe as this process was started: without the current directory on the path.
            flags = ["-P"] if sys.flags.safe_path else []
            # Not in a session of its own, so that a supervisor that kills the process
            # group takes the workers along.
            self.process = subprocess.Popen(  # noqa: S603
                [
                    *(sys.executable, *flags, "-m", "tokenizer_svc.worker"),
                    *("--fd", str(theirs.fileno())),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self.loaded: asyncio.Future[Loaded] | None = None
        self.live = False
        """It has loaded and not died."""
        self.load_bytes = 0
        """Size of the calls it has not answered yet."""
        self.num_sequences = 0
        """Sequences open on it, counted by their streams."""
        self.started_at = time.monotonic()
        self._pings_missed = 0
        self._pinged = False

    async def connect(self, load: Load) -> Loaded:
        """Waits until it has loaded. Raises ModelLoadError, ConfigError or WorkerGone."""
        loop = asyncio.get_running_loop()
        self.loaded = loop.create_future()
        self._socket.setblocking(False)
        transport, _ = await loop.create_unix_connection(lambda: self, sock=self._socket)
        self._transport = transport
        transport.write(encode_frame(load))
        return await self.loaded

    def send(self, message: ToWorker, call: int, size: int) -> asyncio.Future[Any]:
        """Sends a request. The future has its reply, or raises WorkerGone,
        InvalidRequest or InternalError. `size` is the request's, in bytes or so."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self.live:
            future.set_exception(WorkerGone())
            return future
        self._calls[call] = future
        self.load_bytes += size
        future.add_done_callback(lambda done: self._answered(call, size, done))
        self.post(message)
        return future

    def post(self, message: ToWorker) -> None:
        """Sends a message that has no reply."""
        if self._transport is not None and self.live:
            self._transport.write(encode_frame(message))

    def ping(self) -> int:
        """Asks for a sign of life. How often in a row it was asked for in vain."""
        if not self.live:
            return 0
        if self._pinged:
            self._pings_missed += 1
        else:
            self._pinged = True
            self.post(Ping())
        return self._pings_missed

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        else:
            self._socket.close()

    def _answered(self, call: int, size: int, done: asyncio.Future[Any]) -> None:
        self._calls.pop(call, None)
        self.load_bytes -= size
        if not done.cancelled():
            done.exception()  # a caller that went away leaves nobody else to look at it

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(buffer, start)
            end = start + LENGTH.size + size
            if len(buffer) < end:
                break
            self._received(decode_from_worker(bytes(buffer[start + LENGTH.size : end])))
            start = end
        del buffer[:start]

    def _received(self, message: FromWorker) -> None:
        if isinstance(message, Loaded | LoadFailed):
            assert self.loaded is not None
            if isinstance(message, Loaded):
                self.live = True
                self.loaded.set_result(message)
            else:
                kind = ConfigError if message.is_config_error else ModelLoadError
                self.loaded.set_exception(kind(message.message))
            return
        if isinstance(message, Pong | StepDone):
            # A ping behind many steps has its turn late, and each of them is a sign of life.
            self._pings_missed = 0
        if isinstance(message, Pong):
            self._pinged = False
            return
        future = self._calls.get(message.call)
        if future is None or future.done():  # the caller has given up
            return
        if not isinstance(message, Failed):
            future.set_result(message)
        elif message.field is None:
            future.set_exception(InternalError(message.message))
        else:
            future.set_exception(InvalidRequest(message.field, message.message))

    def connection_lost(self, exc: Exception | None) -> None:
        self.live = False
        for future in [*self._calls.values(), self.loaded]:
            if future is not None and not future.done():
                future.set_exception(WorkerGone())
        self._on_death(self)


class WorkerPool:
    """N workers. Start the processes before the event loop has gRPC in it.

    One that serves no steps for hang_timeout seconds is killed, and another takes its
    place as after any death; 0 lets it hang.
    """

    def __init__(
        self,
        load: Load,
        num_workers: int,
        *,
        max_waiting_bytes: int,
        hang_timeout: float = 0.0,
    ) -> None:
        self._load = load
        self._hang_timeout = hang_timeout
        self._max_waiting_bytes = max_waiting_bytes
        self._ids = itertools.count(1)
        self._changed = asyncio.Event()
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers: list[Worker] = [Worker(self._died) for _ in range(num_workers)]
        self._deaths_in_a_row = 0
        self.deaths = 0
        """Counts deaths, so that a stream knows when to look for lost sequences."""
        self.facts: Loaded | None = None
        self.on_change: Callable[[bool], None] = lambda live: None
        """Called with whether any worker is live, when that may have changed."""

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    async def connect(self) -> Loaded:
        """Waits until all workers have loaded. Raises ModelLoadError, ConfigError, or
        InternalError if a worker died instead."""
        try:
            facts = await asyncio.gather(*(worker.connect(self._load) for worker in self._workers))
        except WorkerGone:
            raise InternalError("a tokenizer worker died while it was loading") from None
        self.facts = facts[0]
        if self._hang_timeout:
            self._keep(self._watch())
        self._notify()
        return facts[0]

    def new_id(self) -> int:
        """A number for a call or a stream."""
        return next(self._ids)

    async def live_worker(self, load: Callable[[Worker], int]) -> Worker:
        """The live worker with the least `load`; waits while none is live.

        Raises Unavailable after LIVE_TIMEOUT.
        """
        try:
            async with asyncio.timeout(LIVE_TIMEOUT):
                while not (live := [worker for worker in self._workers if worker.live]):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable(
                "tokenizer_dead", "no tokenizer worker is alive", retry_after=1.0
            ) from None
        return min(live, key=load)

    async def call(self, message: Callable[[int], ToWorker], size: int) -> Any:
        """Has a request served by the worker with the least waiting, and once more by
        another if that one dies. `message` makes it from its call number.

        Returns Encoded for Encode and Chat, Decoded for Decode, Spelled for Spell. Raises
        InvalidRequest, InternalError, QueueFull or Unavailable.
        """
        waiting = sum(worker.load_bytes for worker in self._workers)
        if waiting and waiting + size > self._max_waiting_bytes:
            raise QueueFull(
                f"{waiting} bytes of text wait to be tokenized",
                retry_after=1.0,
                queue_depth=self.num_calls,
            )
        for _ in range(2):
            worker = await self.live_worker(lambda worker: worker.load_bytes)
            call = self.new_id()
            with contextlib.suppress(WorkerGone):
                return await worker.send(message(call), call, size)
        raise Unavailable(
            "tokenizer_dead", "the tokenizer worker died twice on this call", retry_after=1.0
        )

    @property
    def num_calls(self) -> int:
        """Calls without an answer yet."""
        return sum(worker.num_calls for worker in self._workers)

    def drop_stream(self, stream: int) -> None:
        for worker in self._workers:
            worker.post(DropStream(stream))

    def _died(self, worker: Worker) -> None:
        if self._closing:
            return
        self.deaths += 1
        self._notify()
        if self.facts is not None:  # before that, connect() reports it
            self._keep(self._replace(worker))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        """Kills workers that hang. Pings are counted rather than the time, which also
        passes while this process itself is stopped."""
        while True:
            await asyncio.sleep(self._hang_timeout / _PINGS)
            for index, worker in enumerate(self._workers):
                if worker.ping() >= _PINGS:
                    log.error(
                        "worker %d (pid %d) hangs: no answer for %g s",
                        index,
                        worker.process.pid,
                        self._hang_timeout,
                    )
                    worker.process.kill()

    async def _replace(self, dead: Worker) -> None:
        """Starts a worker in the place of a dead one, until one has loaded."""
        index = self._workers.index(dead)
        while not self._closing:
            status = await _reap(dead.process)
            lived = time.monotonic() - dead.started_at
            self._deaths_in_a_row = self._deaths_in_a_row + 1 if lived < _SOON_DEAD_SECONDS else 0
            delay = _BACKOFF_SECONDS[min(self._deaths_in_a_row, len(_BACKOFF_SECONDS) - 1)]
            log.warning(
                "worker %d (pid %d) ended with status %s; starting another in %g s",
                index,
                dead.process.pid,
                status,
                delay,
            )
            await asyncio.sleep(delay)
            # Its death while loading is handled here, not by another _replace.
            worker = Worker(self._died_loading)
            self._workers[index] = dead = worker
            try:
                await worker.connect(self._load)
            except WorkerGone:
                continue
            except (ModelLoadError, ConfigError) as error:
                log.error("worker %d cannot load: %s", index, error)
                continue
            worker._on_death = self._died
            if not worker.live:
                self.deaths += 1  # it was live for a moment, and may have been given sequences
                continue
            log.info("worker %d (pid %d) serves", index, worker.process.pid)
            self._notify()
            return

    def _died_loading(self, worker: Worker) -> None:
        """_replace is waiting for it."""

    def _notify(self) -> None:
        self._changed.set()
        self.on_change(any(worker.live for worker in self._workers))

    async def close(self) -> None:
        """Ends all workers."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        for worker in self._workers:
            worker.close()
        await asyncio.gather(*(_reap(worker.process) for worker in self._workers))


async def _reap(process: subprocess.Popen[bytes]) -> int:
    """Waits for a process whose socket is closed; kills it if it stays."""
    try:
        return await asyncio.to_thread(process.wait, _KILL_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return await asyncio.to_thread(process.wait)
