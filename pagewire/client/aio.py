"""The asynchronous client: the same calls, awaited."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import grpc

from pagewire.client.ask import Ask
from pagewire.client.convert import (
    assistant_turn,
    cancel_request,
    generate_request,
    list_request,
    resumable_request,
    stream_request,
    to_dict,
)
from pagewire.client.errors import CallFailed, failure_of
from pagewire.client.received import Received, Resumption
from pagewire.client.retry import RetryPolicy
from pagewire.client.sync import CANCEL_S, channel_options
from pagewire.connection import DEFAULT_ADDRESS, Connection
from pagewire.v1 import inference_pb2_grpc, model_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from pagewire.client.ask import ChatTurn
    from pagewire.v1 import inference_pb2

    Opener = Callable[[inference_pb2.GenerateStreamRequest, float | None], Any]
    """Starts a streaming call with so much time."""


class AsyncClient:
    """As Client is, for one event loop. An asynchronous context manager."""

    def __init__(
        self,
        server: str | Connection = DEFAULT_ADDRESS,
        *,
        timeout: float | None = None,
        retry: RetryPolicy | None = RetryPolicy(),  # noqa: B008  # frozen
    ) -> None:
        """An address, or all that it takes to reach it. Raises ConfigError."""
        connection = Connection(server) if isinstance(server, str) else server
        self.address = connection.address
        self._timeout = timeout
        self._metadata = connection.metadata
        self._channel = connection.aio_channel(channel_options(retry))
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)
        self._cancels: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the calls that still run, once the server knows of those that were cancelled."""
        await asyncio.gather(*self._cancels)
        await self._channel.close(None)

    async def generate(self, ask: Ask | str, timeout: float | None = None) -> dict[str, Any]:
        """The whole response, with the names of the .proto files."""
        return to_dict(await self._generate(ask, timeout))

    async def chat(
        self,
        messages: Sequence[ChatTurn],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | None = None,
        model: str | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """The assistant's turn (role, content and, where there are any, tool_calls), to be
        appended to `messages`. `sampling` is of SamplingParams."""
        ask = Ask(
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            model=model,
            sampling=sampling,
        )
        return assistant_turn(await self._generate(ask, timeout))

    def stream(self, ask: Ask | str, timeout: float | None = None) -> AsyncTextStream:
        """Starts a streaming call of one sequence. What the server refuses comes out of the
        iteration."""
        return AsyncTextStream(self._open(stream_request(ask), self._limit(timeout)))

    def resumable_stream(
        self, ask: Ask | str, timeout: float | None = None, *, attempts: int = 5
    ) -> AsyncResumingStream:
        """A stream that outlives its connection, where the server has --resume-ttl. Another
        frontend cannot go on with it, so `server` should be the address of one."""
        request, id_is_ours = resumable_request(ask)
        received = Received()
        resumption = Resumption(
            request, received, self._limit(timeout), attempts, id_is_ours=id_is_ours
        )
        return AsyncResumingStream(self._open, self._cancel_soon, received, resumption)

    async def cancel(self, request_id: str) -> None:
        """Ends a request by its id (of Ask.options), whoever waits for it."""
        await self._call(self._inference.Cancel, cancel_request(request_id), CANCEL_S)

    async def models(self, timeout: float | None = None) -> list[dict[str, Any]]:
        response = await self._call(self._models.ListModels, list_request(), timeout)
        return [to_dict(model) for model in response.models]

    async def _generate(
        self, ask: Ask | str, timeout: float | None
    ) -> inference_pb2.GenerateResponse:
        response: inference_pb2.GenerateResponse = await self._call(
            self._inference.Generate, generate_request(ask), timeout
        )
        return response

    async def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            return await method(request, timeout=self._limit(timeout), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise failure_of(error) from error

    def _open(self, request: inference_pb2.GenerateStreamRequest, timeout: float | None) -> Any:
        return self._inference.GenerateStream(request, timeout=timeout, metadata=self._metadata)

    def _cancel_soon(self, request_id: str) -> None:
        # Whoever is being cancelled has no time to wait for it.
        task = asyncio.get_running_loop().create_task(self._cancel_quietly(request_id))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _cancel_quietly(self, request_id: str) -> None:
        try:
            await self.cancel(request_id)
        except CallFailed:
            return  # it has ended, or the server keeps it until its resume-ttl

    def _limit(self, timeout: float | None) -> float | None:
        return self._timeout if timeout is None else timeout


class AsyncTextStream:
    """Iterates over pieces of text, once. `async with`, or the end of the task that reads,
    ends the call; a loop that is only left does so when the stream is collected."""

    def __init__(self, call: Any, received: Received | None = None) -> None:
        self._call = call
        self._received = received or Received()

    @property
    def final(self) -> dict[str, Any] | None:
        """The last frame, once it came."""
        return self._received.final

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Those that came so far."""
        return self._received.tool_calls

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self.final is None:
            self.cancel()

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while True:
            try:
                response = await self._read()
            except asyncio.CancelledError:
                self.cancel()
                raise
            if response is grpc.aio.EOF:  # type: ignore[attr-defined]
                raise StopAsyncIteration
            text = self._received.take(response)
            if text:
                return text

    def cancel(self) -> None:
        """Ends the call; the server stops generating. Safe at any time."""
        self._call.cancel()

    async def _read(self) -> Any:
        try:
            return await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise failure_of(error) from error


class AsyncResumingStream(AsyncTextStream):
    """An AsyncTextStream that goes on over lost connections."""

    def __init__(
        self,
        opener: Opener,
        cancel_soon: Callable[[str], None],
        received: Received,
        resumption: Resumption,
    ) -> None:
        super().__init__(opener(resumption.next, resumption.timeout()), received)
        self._opener = opener
        self._cancel_soon = cancel_soon
        self._resumption = resumption
        self._cancelled = False

    def cancel(self) -> None:
        """Ends the request: to the server the end of the call is a lost connection."""
        if not self._cancelled:
            self._cancelled = True
            self._call.cancel()
            self._cancel_soon(self._resumption.request_id)

    async def _read(self) -> Any:
        while True:
            try:
                response = await super()._read()
            except CallFailed as failure:
                if self.final is not None:
                    return grpc.aio.EOF  # type: ignore[attr-defined]
                if self._cancelled:
                    raise
                await asyncio.sleep(self._resumption.after(failure))
                self._call = self._opener(self._resumption.next, self._resumption.timeout())
            else:
                self._resumption.heard()
                return response
