"""The synchronous client."""

from __future__ import annotations

import contextlib
import threading
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
from pagewire.connection import DEFAULT_ADDRESS, Connection
from pagewire.v1 import inference_pb2_grpc, model_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pagewire.client.ask import ChatTurn
    from pagewire.v1 import inference_pb2

CANCEL_S = 5.0
"""How long a Cancel may take."""


def channel_options(retry: RetryPolicy | None) -> list[tuple[str, Any]]:
    unlimited: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
    ]
    if retry is None:
        return unlimited
    return [*unlimited, ("grpc.service_config", retry.service_config())]


class Client:
    """One channel to one server, or to all addresses of a name. A context manager, and safe to
    be used by several threads.

    Timeouts are in seconds; `timeout` is that of calls which have none of their own. Every
    call raises CallFailed or one of its kinds.
    """

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
        self._channel = connection.channel(channel_options(retry))
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the calls that still run."""
        self._channel.close()

    def generate(self, ask: Ask | str, timeout: float | None = None) -> dict[str, Any]:
        """The whole response, with the names of the .proto files."""
        return to_dict(self._generate(ask, timeout))

    def chat(
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
        return assistant_turn(self._generate(ask, timeout))

    def stream(self, ask: Ask | str, timeout: float | None = None) -> TextStream:
        """Starts a streaming call of one sequence. What the server refuses comes out of the
        iteration."""
        request = stream_request(ask)
        return TextStream(self._inference.GenerateStream(request, timeout=self._limit(timeout)))

    def resumable_stream(
        self, ask: Ask | str, timeout: float | None = None, *, attempts: int = 5
    ) -> ResumingStream:
        """A stream that outlives its connection, where the server has --resume-ttl. Another
        frontend cannot go on with it, so `server` should be the address of one."""
        request, id_is_ours = resumable_request(ask)
        received = Received()
        resumption = Resumption(
            request, received, self._limit(timeout), attempts, id_is_ours=id_is_ours
        )
        return ResumingStream(self._inference, received, resumption)

    def cancel(self, request_id: str) -> None:
        """Ends a request by its id (of Ask.options), whoever waits for it."""
        self._call(self._inference.Cancel, cancel_request(request_id), CANCEL_S)

    def models(self, timeout: float | None = None) -> list[dict[str, Any]]:
        response = self._call(self._models.ListModels, list_request(), timeout)
        return [to_dict(model) for model in response.models]

    def _generate(self, ask: Ask | str, timeout: float | None) -> inference_pb2.GenerateResponse:
        response: inference_pb2.GenerateResponse = self._call(
            self._inference.Generate, generate_request(ask), timeout
        )
        return response

    def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            return method(request, timeout=self._limit(timeout))
        except grpc.RpcError as error:
            raise failure_of(error) from error

    def _limit(self, timeout: float | None) -> float | None:
        return self._timeout if timeout is None else timeout


class TextStream:
    """Iterates over pieces of text, once. To leave the loop ends the call."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self.final is None:
            self.cancel()

    def __iter__(self) -> Iterator[str]:
        try:
            for response in self._call:
                text = self._received.take(response)
                if text:
                    yield text
        except grpc.RpcError as error:
            raise failure_of(error) from error
        finally:
            # Of a call that has ended this is nothing.
            self._call.cancel()

    def cancel(self) -> None:
        """Ends the call; the server stops generating. Safe at any time, from any thread."""
        self._call.cancel()


class ResumingStream(TextStream):
    """A TextStream that goes on over lost connections."""

    def __init__(
        self,
        stub: inference_pb2_grpc.InferenceServiceStub,
        received: Received,
        resumption: Resumption,
    ) -> None:
        call = stub.GenerateStream(resumption.next, timeout=resumption.timeout())
        super().__init__(call, received)
        self._stub = stub
        self._resumption = resumption
        self._cancelled = threading.Event()

    def __iter__(self) -> Iterator[str]:
        try:
            while self.final is None:
                try:
                    for response in self._call:
                        self._resumption.heard()
                        text = self._received.take(response)
                        if text:
                            yield text
                except grpc.RpcError as error:
                    self._go_on(failure_of(error))
        finally:
            if self.final is None:
                self.cancel()

    def cancel(self) -> None:
        """Ends the request: to the server the end of the call is a lost connection."""
        if self._cancelled.is_set():
            return
        self._cancelled.set()
        self._call.cancel()
        with contextlib.suppress(grpc.RpcError):
            self._stub.Cancel(cancel_request(self._resumption.request_id), timeout=CANCEL_S)

    def _go_on(self, failure: CallFailed) -> None:
        if self.final is not None:
            return
        if self._cancelled.is_set() or self._cancelled.wait(self._resumption.after(failure)):
            raise failure
        self._call = self._stub.GenerateStream(
            self._resumption.next, timeout=self._resumption.timeout()
        )
