"""An engine without a model that speaks the real wire over real sockets.

Its text is a fixed cycle of letters, so that every output is known beforehand.
With auto=True it steps by itself; else a test calls step() or emit().
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from engine_core.lora.adapters import AdapterFacts, Adapters
from pagewire.errors import ModelLoadError
from pagewire.types import FinishReason
from pagewire.wire import sockets
from pagewire.wire.codec import (
    decode_command,
    encode,
    pack_counts,
    pack_ids,
    pack_request_ids,
    unpack_ids,
    unpack_request_ids,
)
from pagewire.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    AdapterList,
    Add,
    Beam,
    Command,
    Dead,
    Finished,
    Heartbeat,
    Hello,
    LoadAdapter,
    Output,
    PositionLogprobs,
    Ready,
    RequestLogprobs,
    ResetPrefixCache,
    ResetPrefixCacheReply,
    Started,
    StepOutput,
    StepStats,
    UnloadAdapter,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TEXT = "the quick brown fox jumps over the lazy dog. "
VOCAB_SIZE = 300
EOS = 256
NUM_BLOCKS = 1000


def letters(request: FakeRequest) -> int:
    """The next token: the letters of TEXT, for ever."""
    return ord(TEXT[len(request.output) % len(TEXT)])


@dataclass
class FakeRequest:
    add: Add
    prompt_ids: list[int]
    output: list[int] = field(default_factory=list)
    started: bool = False
    received_at: float = field(default_factory=time.monotonic)

    @property
    def id(self) -> int:
        return self.add.request_id


def fake_position(token_id: int, index: int, top: int) -> PositionLogprobs:
    """What the engine says of a token at a position: eighths, which float32 holds exactly.

    The first two of the likeliest tie.
    """
    values = tuple(-max(place, 1) / 8 for place in range(top))
    return PositionLogprobs(
        token_id, -(index + 1) / 8, index + 1, tuple(range(index, index + top)), values
    )


def fake_logprobs(request: FakeRequest, ids: Sequence[int]) -> RequestLogprobs | None:
    """As the engine sends them with new ids; the prompt's with the first of all."""
    sampling, begin = request.add.sampling, len(request.output)
    output: tuple[PositionLogprobs, ...] = ()
    prompt: tuple[PositionLogprobs, ...] = ()
    if sampling.logprobs is not None:
        top = sampling.logprobs
        output = tuple(fake_position(t, i, top) for i, t in enumerate(ids, begin))
    if sampling.prompt_logprobs is not None and begin == 0:
        top = sampling.prompt_logprobs
        rest = [fake_position(t, i, top) for i, t in enumerate(request.prompt_ids)][1:]
        prompt = (PositionLogprobs(-1, 0.0, 0), *rest)
    if not output and not prompt:
        return None
    return RequestLogprobs(request.id, output, prompt)


class AdapterFiles:
    """An AdapterBackend whose files are a table."""

    DIRECTORY = Path("/adapters")

    def __init__(self, contents: Mapping[str, str]) -> None:
        self._contents = contents

    def fill(self, slot: int, directory: Path) -> AdapterFacts:
        path = str(directory.relative_to(self.DIRECTORY))
        if path not in self._contents:
            raise ModelLoadError(f"{path}: no such directory")
        return AdapterFacts(8, self._contents[path].encode())

    def clear(self, slot: int) -> None:
        pass


class FakeEngine:
    def __init__(
        self,
        *,
        bind: str = "tcp://127.0.0.1:0",
        auto: bool = True,
        step_s: float = 0.0,
        max_num_seqs: int = 256,
        max_model_len: int = 4096,
        next_token: Callable[[FakeRequest], int] = letters,
        heartbeat_s: float = 0.2,
        model_name: str = "fake",
        default_sampling: dict[str, float] | None = None,
        max_loras: int = 0,
        adapter_files: Mapping[str, str] | None = None,
        adapters: Sequence[str] = (),
    ) -> None:
        """adapter_files: path -> content; adapters: names that are loaded at the start, each
        from the path that is called so."""
        self.epoch = secrets.randbits(64)
        self.running: dict[int, FakeRequest] = {}
        self.waiting: dict[int, FakeRequest] = {}
        self.commands: list[Command] = []
        self.aborted: list[int] = []
        self.num_unknown_aborts = 0
        self.silent = False
        self.step_number = 0
        self.auto = auto
        self.next_token = next_token
        self._step_s = step_s
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._heartbeat_s = heartbeat_s
        self._model_name = model_name
        self._default_sampling = default_sampling or {}
        self._bind = bind
        files = AdapterFiles(adapter_files or {})
        self.adapters = Adapters(
            files, max_loras, base_name=model_name, directory=AdapterFiles.DIRECTORY
        )
        for name in adapters:
            self.adapters.load_static(name, str(AdapterFiles.DIRECTORY / name))
        self._changed = asyncio.Event()
        self._push: Any = None
        self._prompt_tokens = self._output_tokens = 0
        self._finished: list[Finished] = []
        self._unknown: list[int] = []
        self._ids = itertools.count()

    # Life.

    async def start(self) -> None:
        self._context: Any = zmq.Context()
        self._router = sockets.bind_commands(self._context, self._bind)
        self.address = sockets.bound_endpoint(self._router)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._router.FD, self._read)
        self._tasks = [loop.create_task(self._beat())]
        if self.auto:
            self._tasks.append(loop.create_task(self._step_forever()))
        self._read()

    async def kill(self) -> None:
        """The end of a process: sockets gone, nothing said. Idempotent."""
        if self._context.closed:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        asyncio.get_running_loop().remove_reader(self._router.FD)
        self._context.destroy(linger=0)

    def die(self, reason: str = "out of luck") -> None:
        """A last word; kill() must follow."""
        self._send(Dead(epoch=self.epoch, reason=reason))
        self.silent = True

    async def wait_for(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Until `condition` holds; it is looked at after every command."""
        async with asyncio.timeout(limit_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def wait_running(self, count: int = 1) -> list[FakeRequest]:
        """Until `count` requests have come; those not yet ended, oldest first."""
        await self.wait_for(lambda: len(self.running) + len(self.waiting) >= count)
        return [*self.running.values(), *self.waiting.values()]

    # Steps.

    def step(self) -> None:
        """One token for every running request."""
        self._admit()
        rows: dict[int, list[int]] = {}
        for request in list(self.running.values()):
            # With max_tokens 0 the prompt is all there is to compute.
            wants_output = request.add.sampling.max_tokens > 0
            rows[request.id] = [self.next_token(request)] if wants_output else []
        self.emit(rows)

    def emit(
        self,
        rows: Mapping[int, Sequence[int]] | None = None,
        *,
        errors: Mapping[int, str] | None = None,
        **stats: Any,
    ) -> None:
        """One step with exactly these rows; finishes what reached its end."""
        self._admit()
        started: list[Started] = []
        told: list[RequestLogprobs] = []
        rows = rows or {}
        for internal_id, ids in rows.items():
            request = self.running.get(internal_id)
            if request is None:
                continue
            if not request.started:
                request.started = True
                self._prompt_tokens += len(request.prompt_ids)
                started.append(Started(internal_id, num_cached_tokens=1, queue_s=0.25))
            logprobs = fake_logprobs(request, ids)
            if logprobs is not None:
                told.append(logprobs)
            request.output.extend(ids)
            self._output_tokens += len(ids)
            self._finish_if_done(request)
        for internal_id, message in (errors or {}).items():
            self._end(internal_id, FinishReason.ERROR, error=message)
        self.step_number += 1
        finished, self._finished = tuple(self._finished), []
        unknown, self._unknown = tuple(self._unknown), []
        self._admit()
        rows = {internal_id: ids for internal_id, ids in rows.items() if ids}
        self._send(
            StepOutput(
                epoch=self.epoch,
                step=self.step_number,
                sent_ns=time.monotonic_ns(),
                request_ids=pack_request_ids(rows),
                counts=pack_counts(len(ids) for ids in rows.values()),
                token_ids=pack_ids(t for ids in rows.values() for t in ids),
                started=tuple(started),
                finished=finished,
                unknown_aborts=unknown,
                stats=self._stats(num_batched_tokens=sum(map(len, rows.values())), **stats),
                logprobs=tuple(told),
            )
        )

    def emit_stale(self, rows: Mapping[int, Sequence[int]], epoch: int) -> None:
        """A step of another epoch; nothing here changes by it."""
        self._send(
            StepOutput(
                epoch=epoch,
                step=1,
                sent_ns=time.monotonic_ns(),
                request_ids=pack_request_ids(rows),
                counts=pack_counts(len(ids) for ids in rows.values()),
                token_ids=pack_ids(t for ids in rows.values() for t in ids),
                started=(),
                finished=tuple(Finished(i, FinishReason.LENGTH) for i in rows),
                unknown_aborts=(),
                stats=self._stats(),
            )
        )

    def _finish_if_done(self, request: FakeRequest) -> None:
        sampling, last = request.add.sampling, request.output[-1] if request.output else -1
        if (last == EOS and not sampling.ignore_eos) or last in sampling.stop_token_ids:
            self._end(request.id, FinishReason.STOP, stop_token_id=last)
        elif len(request.output) >= sampling.max_tokens:
            self._end(request.id, FinishReason.LENGTH)

    def _end(self, internal_id: int, reason: FinishReason, **fields: Any) -> None:
        self.running.pop(internal_id, None)
        self.waiting.pop(internal_id, None)
        self._finished.append(
            Finished(
                internal_id,
                reason,
                num_cached_tokens=1,
                queue_s=0.25,
                prefill_s=0.5,
                decode_s=1.5,
                **fields,
            )
        )

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_num_seqs:
            internal_id = next(iter(self.waiting))
            self.running[internal_id] = self.waiting.pop(internal_id)

    def _stats(self, **fields: Any) -> StepStats:
        values: dict[str, Any] = {
            "num_running": len(self.running),
            "num_waiting": len(self.waiting),
            "num_blocks": NUM_BLOCKS,
            "num_free_blocks": NUM_BLOCKS - len(self.running),
            "num_batched_tokens": 0,
            "step_s": 0.001,
            "total_prompt_tokens": self._prompt_tokens,
            "total_output_tokens": self._output_tokens,
            "total_preemptions": 0,
            "prefix_cache_queries": self._prompt_tokens,
            "prefix_cache_hits": self._prompt_tokens // 2,
        }
        return StepStats(**(values | fields))

    async def _step_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self.running and not self.waiting:
                await self.wait_for(lambda: bool(self.running or self.waiting), limit_s=1e6)
            began = loop.time()
            # ZeroMQ's high-water mark is where a frontend cannot keep up.
            if self._push.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
                self.step()
            await asyncio.sleep(max(0.0, began + self._step_s - loop.time()))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if not self.silent:
                self.heartbeat()

    def heartbeat(self, **stats: Any) -> None:
        self._send(
            Heartbeat(
                epoch=self.epoch,
                step=self.step_number,
                sent_ns=time.monotonic_ns(),
                stats=self._stats(**stats),
            )
        )

    # Wire.

    def ready(self) -> Ready:
        return Ready(
            protocol=PROTOCOL_VERSION,
            epoch=self.epoch,
            model_name=self._model_name,
            architecture="FakeForCausalLM",
            max_model_len=self._max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            dtype="float32",
            device="cpu",
            num_blocks=NUM_BLOCKS,
            block_size=16,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=2048,
            pid=os.getpid(),
            default_sampling=self._default_sampling,
            adapters=self.adapters.infos(),
            max_loras=self.adapters.num_slots,
        )

    def _send(self, output: Output) -> None:
        if self._push is not None:
            self._push.send_multipart(encode(output), zmq.NOBLOCK)

    def _read(self) -> None:
        while True:
            try:
                _, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            command = decode_command(frames)
            self.commands.append(command)
            self._apply(command)
            self._changed.set()

    def _apply(self, command: Command) -> None:
        if isinstance(command, Hello):
            if self.silent:
                return
            if self._push is not None:
                self._push.close(0)
            self._push = sockets.connect_outputs(self._context, command.outputs)
            self._send(self.ready())
        elif isinstance(command, Add):
            ids = unpack_ids(command.token_ids)
            num_prompt = len(ids) - command.num_output_tokens
            self.waiting[command.request_id] = FakeRequest(
                command, ids[:num_prompt], ids[num_prompt:]
            )
            if command.epoch != self.epoch:
                self._end(command.request_id, FinishReason.ERROR, error="another epoch")
            if command.adapter:
                self._check_adapter(command)
            self._admit()
        elif isinstance(command, LoadAdapter | UnloadAdapter):
            reply = self.adapters.apply(command)
            self._send(AdapterList(self.epoch, self.adapters.infos()))
            self._send(reply)
        elif isinstance(command, Abort):
            self._abort(unpack_request_ids(command.request_ids))
        elif isinstance(command, ResetPrefixCache):
            self._send(ResetPrefixCacheReply(call_id=command.call_id, num_blocks_freed=7))

    def _check_adapter(self, add: Add) -> None:
        found = self.adapters.find(add.adapter)
        if found is None or found.digest != add.adapter_digest:
            self.refuse(add.request_id, f"model {add.adapter!r} does not exist", "model")

    def abort_now(self, internal_id: int) -> None:
        """Ends a request as its deadline or a shutdown of the engine would."""
        self._end(internal_id, FinishReason.ABORT)
        self.emit()

    def refuse(self, internal_id: int, error: str, field: str) -> None:
        """Ends a request that its sender can mend."""
        self._end(internal_id, FinishReason.ERROR, error=error, field=field)
        self.emit()

    def miss_deadline(self, internal_id: int) -> None:
        """Ends a request as one that cannot meet its deadline any more."""
        self._end(internal_id, FinishReason.ABORT, deadline_missed=True)
        self.emit()

    def end_search(self, internal_id: int, *beams: Beam) -> None:
        """Ends a beam search with what it found."""
        self._end(internal_id, FinishReason.STOP, beams=beams)
        self.emit()

    def _abort(self, internal_ids: list[int]) -> None:
        for internal_id in internal_ids:
            self.aborted.append(internal_id)
            if internal_id in self.running or internal_id in self.waiting:
                self._end(internal_id, FinishReason.ABORT)
            else:
                self.num_unknown_aborts += 1
                self._unknown.append(internal_id)
        if not self.silent:
            self.emit(abort_to_free_s=(0.002,))


async def _main(bind: str, step_s: float, max_num_seqs: int, max_model_len: int) -> None:
    engine = FakeEngine(
        bind=bind, step_s=step_s, max_num_seqs=max_num_seqs, max_model_len=max_model_len
    )
    engine.commands = _Nothing()
    await engine.start()
    await asyncio.Event().wait()


class _Nothing(list[Any]):
    """Keeps no record, so that a long run stays small."""

    def append(self, item: Any) -> None:
        pass


if __name__ == "__main__":
    import uvloop

    parser = argparse.ArgumentParser()
    parser.add_argument("--bind", default="tcp://127.0.0.1:5557")
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=8192)
    arguments = parser.parse_args()
    uvloop.run(
        _main(
            arguments.bind,
            arguments.step_s,
            arguments.max_num_seqs,
            arguments.max_model_len,
        )
    )
