"""A small synchronous frontend, to speak with an engine over real sockets."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import zmq

from pagewire.types import FinishReason, SamplingParams
from pagewire.wire.codec import (
    decode_output,
    encode,
    pack_ids,
    pack_request_ids,
    unpack_counts,
    unpack_ids,
    unpack_request_ids,
)
from pagewire.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    AdapterReply,
    Add,
    Command,
    Finished,
    Hello,
    LoadAdapter,
    Output,
    Ping,
    Ready,
    ResetPrefixCache,
    ResetPrefixCacheReply,
    Started,
    StepOutput,
    UnloadAdapter,
)
from pagewire.wire.sockets import bind_outputs, bound_endpoint, connect_commands

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

HELLO_EVERY_S = 0.5
PING_EVERY_S = 0.5
TIMEOUT_S = 60.0


@dataclass(slots=True)
class Outcome:
    """What a request has brought so far."""

    token_ids: list[int] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)

    @property
    def reason(self) -> FinishReason:
        """Fails unless there was exactly one finish."""
        (finished,) = self.finished
        return FinishReason(finished.reason)


class WireClient:
    """Use it as a context manager. Waiting methods raise TimeoutError.

    `outputs` is where it binds its PULL. While it waits it pings, as a frontend
    does; a test that wants silence does not wait through it.
    """

    def __init__(
        self,
        commands: str,
        *,
        outputs: str = "tcp://127.0.0.1:0",
        frontend_id: int | None = None,
        protocol: int = PROTOCOL_VERSION,
    ) -> None:
        self.frontend_id = secrets.randbits(64) if frontend_id is None else frontend_id
        self.ready: Ready | None = None
        self.outcomes: dict[int, Outcome] = {}
        self.unknown_aborts: list[int] = []
        self.outputs: list[Output] = []
        """Everything received, in order."""
        self._protocol = protocol
        self._context: zmq.Context[Any] = zmq.Context()
        self._pull = bind_outputs(self._context, outputs)
        self._dealer = connect_commands(self._context, commands)
        self._pinged_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """Where its PULL listens."""
        return bound_endpoint(self._pull)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def send(self, command: Command, timeout: float = TIMEOUT_S) -> None:
        self.send_frames(encode(command), timeout)

    def send_frames(self, frames: Sequence[bytes | memoryview], timeout: float = TIMEOUT_S) -> None:
        """Sends once an engine is connected."""
        if not self._dealer.poll(1000 * timeout, zmq.POLLOUT):
            raise TimeoutError("no engine takes the command")
        self._dealer.send_multipart(frames, zmq.NOBLOCK)

    def hello(self, timeout: float = TIMEOUT_S) -> Ready:
        """Says Hello until Ready comes, and returns it."""
        hello = Hello(self._protocol, self.frontend_id, self.endpoint)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.send(hello, timeout)
            again_at = time.monotonic() + HELLO_EVERY_S
            while (remaining := again_at - time.monotonic()) > 0:
                if isinstance(self._receive(remaining), Ready):
                    assert self.ready is not None
                    return self.ready
        raise TimeoutError("no Ready")

    def ping(self) -> None:
        self.send(Ping(self.frontend_id))

    def add(
        self,
        request_id: int,
        token_ids: Sequence[int],
        *,
        max_tokens: int = 8,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        num_output_tokens: int = 0,
        epoch: int | None = None,
        sampling: SamplingParams | None = None,
        adapter: str = "",
    ) -> None:
        """Begins a request; `epoch` defaults to that of the last Ready."""
        if epoch is None:
            assert self.ready is not None, "hello() first"
            epoch = self.ready.epoch
        self.send(
            Add(
                request_id=request_id,
                epoch=epoch,
                token_ids=pack_ids(token_ids),
                num_output_tokens=num_output_tokens,
                sampling=sampling
                or SamplingParams(
                    max_tokens=max_tokens, temperature=temperature, ignore_eos=ignore_eos
                ),
                adapter=adapter,
            )
        )

    def abort(self, *request_ids: int) -> None:
        self.send(Abort(pack_request_ids(request_ids)))

    def reset_prefix_cache(self, call_id: int = 1) -> int:
        """The number of blocks freed."""
        self.send(ResetPrefixCache(call_id))
        reply = self.wait_for(
            lambda output: isinstance(output, ResetPrefixCacheReply) and output.call_id == call_id
        )
        assert isinstance(reply, ResetPrefixCacheReply)
        return reply.num_blocks_freed

    def change_adapters(self, command: LoadAdapter | UnloadAdapter) -> AdapterReply:
        self.send(command)
        reply = self.wait_for(
            lambda output: isinstance(output, AdapterReply) and output.call_id == command.call_id
        )
        assert isinstance(reply, AdapterReply)
        return reply

    def outcome(self, request_id: int) -> Outcome:
        return self.outcomes.setdefault(request_id, Outcome())

    def collect(self, *request_ids: int, timeout: float = TIMEOUT_S) -> dict[int, Outcome]:
        """Waits until each of the requests has finished."""

        def unfinished() -> list[int]:
            return [number for number in request_ids if not self.outcome(number).finished]

        deadline = time.monotonic() + timeout
        while unfinished():
            if self.receive(deadline - time.monotonic()) is None:
                raise TimeoutError(f"no finish for {unfinished()}")
        return {number: self.outcome(number) for number in request_ids}

    def wait_for(self, wanted: Callable[[Output], bool], timeout: float = TIMEOUT_S) -> Output:
        """The next output that is wanted."""
        deadline = time.monotonic() + timeout
        while (output := self.receive(deadline - time.monotonic())) is not None:
            if wanted(output):
                return output
        raise TimeoutError("the output did not come")

    def receive(self, timeout: float) -> Output | None:
        """The next output, or None after `timeout` seconds. Pings meanwhile."""
        deadline = time.monotonic() + timeout
        while (remaining := deadline - time.monotonic()) > 0:
            now = time.monotonic()
            # Without an engine there is nobody to ping, and nothing to wait for.
            if now - self._pinged_at >= PING_EVERY_S and self._dealer.poll(0, zmq.POLLOUT):
                self.ping()
                self._pinged_at = now
            output = self._receive(min(remaining, PING_EVERY_S))
            if output is not None:
                return output
        return None

    def _receive(self, timeout: float) -> Output | None:
        if not self._pull.poll(1000 * timeout):
            return None
        output = decode_output(self._pull.recv_multipart())
        self.outputs.append(output)
        if isinstance(output, Ready):
            self.ready = output
        elif isinstance(output, StepOutput):
            self._take(output)
        return output

    def _take(self, output: StepOutput) -> None:
        for started in output.started:
            self.outcome(started.request_id).started.append(started)
        token_ids = unpack_ids(output.token_ids)
        begin = 0
        rows = zip(
            unpack_request_ids(output.request_ids), unpack_counts(output.counts), strict=True
        )
        for request_id, count in rows:
            self.outcome(request_id).token_ids += token_ids[begin : begin + count]
            begin += count
        for finished in output.finished:
            self.outcome(finished.request_id).finished.append(finished)
        self.unknown_aborts += output.unknown_aborts
