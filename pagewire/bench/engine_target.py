"""An engine_core of our own, spoken to by its wire: no gRPC, no text, no network.

What `bench throughput` and `bench latency` measure. The engine runs as the process
that `pagewire serve` would start, so that nothing of it is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Self

import zmq

from pagewire.bench.load import RequestFailed, clock
from pagewire.config import EngineConfig
from pagewire.errors import ConfigError, ModelLoadError
from pagewire.launch import die_with_parent
from pagewire.obs.ready import read_ready_file
from pagewire.settings import ENV_PREFIX, as_flags
from pagewire.types import FinishReason, SamplingParams
from pagewire.wire import sockets
from pagewire.wire.codec import (
    decode_output,
    encode,
    pack_ids,
    unpack_counts,
    unpack_request_ids,
)
from pagewire.wire.messages import (
    PROTOCOL_VERSION,
    Add,
    Dead,
    Finished,
    Hello,
    Ping,
    Ready,
    StepOutput,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pagewire.bench.record import Record
    from pagewire.bench.workload import Ask

_POLL_S = 0.05
_PING_EVERY_S = 1.0
_STOP_S = 10.0
_FRONTEND_ID = 1


class EngineTarget:
    """Starts the engine on entering, and ends it on leaving."""

    def __init__(self, config: EngineConfig, directory: Path, start_timeout: float) -> None:
        """Sockets and the ready file live in `directory`."""
        self._commands_endpoint = f"ipc://{directory}/commands.sock"
        self._outputs_endpoint = f"ipc://{directory}/outputs.sock"
        self._ready_file = directory / "engine.json"
        self._config = config.model_copy(
            update={
                "engine_bind": self._commands_endpoint,
                "ready_file": str(self._ready_file),
            }
        )
        self._start_timeout = start_timeout
        self._requests: dict[int, tuple[Record, asyncio.Future[None]]] = {}
        self._next_id = 0
        self._ready: asyncio.Future[Ready] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.ready: Ready
        """What the engine has; set once it is entered."""

    async def __aenter__(self) -> Self:
        """Raises ConfigError or ModelLoadError where the engine cannot start."""
        environment = {k: v for k, v in os.environ.items() if not k.upper().startswith(ENV_PREFIX)}
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "engine_core"),
            *as_flags(self._config, EngineConfig),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
        )
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            await self._connect()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if hasattr(self, "_outputs"):
            asyncio.get_running_loop().remove_reader(self._outputs.FD)
        self._context.destroy(linger=0)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._start_timeout):
            # A file has no event to wait for.
            while read_ready_file(self._ready_file) is None:
                if self._process.returncode is not None:
                    raise _start_error(self._process.returncode)
                await asyncio.sleep(_POLL_S)
            self._ready = loop.create_future()
            self._outputs = sockets.bind_outputs(self._context, self._outputs_endpoint)
            self._commands = sockets.connect_commands(self._context, self._commands_endpoint)
            loop.add_reader(self._outputs.FD, self._read)
            hello = Hello(PROTOCOL_VERSION, _FRONTEND_ID, self._outputs_endpoint)
            # IMMEDIATE: it takes nothing before it is connected.
            while not self._send(hello):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            self._read()
            self.ready = await self._ready
        self._tasks = [loop.create_task(self._ping()), loop.create_task(self._watch())]

    async def send(self, ask: Ask, record: Record) -> None:
        self._next_id += 1
        request_id, done = self._next_id, asyncio.get_running_loop().create_future()
        self._requests[request_id] = (record, done)
        record.prompt_tokens = len(ask.ids)
        add = Add(
            request_id=request_id,
            epoch=self.ready.epoch,
            token_ids=pack_ids(ask.ids),
            num_output_tokens=0,
            sampling=SamplingParams(ask.max_tokens, temperature=0.0, ignore_eos=True),
        )
        try:
            if not self._send(add):
                raise RequestFailed("UNAVAILABLE", "the engine takes no requests")
            await done
        finally:
            self._requests.pop(request_id, None)

    def _send(self, command: Add | Hello | Ping) -> bool:
        try:
            self._commands.send_multipart(encode(command), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _read(self) -> None:
        # ZeroMQ's descriptor is edge-triggered: read until there is nothing.
        with contextlib.suppress(zmq.Again):
            while True:
                output = decode_output(self._outputs.recv_multipart(zmq.NOBLOCK))
                if isinstance(output, StepOutput):
                    self._take(output)
                elif isinstance(output, Ready):
                    assert self._ready is not None
                    if not self._ready.done():
                        self._ready.set_result(output)
                elif isinstance(output, Dead):
                    self._fail_all(f"the engine died: {output.reason}")

    def _take(self, output: StepOutput) -> None:
        now = clock()
        for request_id, count in zip(
            unpack_request_ids(output.request_ids), unpack_counts(output.counts), strict=True
        ):
            if count and request_id in self._requests:
                record, _ = self._requests[request_id]
                record.chunk_times.append(now)
                record.chunk_tokens.append(count)
                record.output_tokens += count
        for finished in output.finished:
            self._finish(finished)

    def _finish(self, finished: Finished) -> None:
        if finished.request_id not in self._requests:
            return
        record, done = self._requests[finished.request_id]
        record.cached_tokens = finished.num_cached_tokens
        if done.done():
            return
        if finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
            done.set_result(None)
        else:
            done.set_exception(RequestFailed(FinishReason(finished.reason).name, finished.error))

    def _fail_all(self, message: str) -> None:
        for _, done in self._requests.values():
            if not done.done():
                done.set_exception(RequestFailed("ENGINE_DEAD", message))

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(_PING_EVERY_S)
            self._send(Ping(_FRONTEND_ID))

    async def _watch(self) -> None:
        status = await self._process.wait()
        self._fail_all(f"the engine ended with status {status}")


def _start_error(status: int) -> Exception:
    if status == 3:
        return ModelLoadError("the engine cannot load the model; see above")
    return ConfigError(f"the engine ended with status {status} before it was ready; see above")
