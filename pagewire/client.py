"""A thin synchronous client of the public gRPC services: plain values in and out."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.rpc import error_details_pb2, status_pb2

from pagewire.connection import DEFAULT_ADDRESS, Connection
from pagewire.v1 import (
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from google.protobuf.message import Message

_DETAILS_KEY = "grpc-status-details-bin"


class CallFailed(Exception):
    """A call ended with a status other than OK.

    `code` is the gRPC status's name, `field` the request's field that is at
    fault, if the server named one, and `reached` is False where no server
    answered at all.
    """

    def __init__(self, code: str, message: str, *, field: str | None, reached: bool) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.reached = reached


@dataclass(frozen=True, slots=True)
class Ask:
    """What to generate from: a prompt, or a conversation.

    A message is a (role, content) pair or the fields of a ChatMessage, a tool the fields of
    a Tool; tool_choice is auto, none, required or the name of a tool.
    """

    prompt: str | None = None
    messages: Sequence[tuple[str, str] | Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | None = None
    model: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams; those left out have the server's defaults."""


class Client:
    """One channel to one server. A context manager; timeouts are in seconds."""

    def __init__(self, server: str | Connection = DEFAULT_ADDRESS) -> None:
        """An address, or all that it takes to reach it. Raises ConfigError."""
        connection = Connection(server) if isinstance(server, str) else server
        self.address = connection.address
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = connection.channel(options)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(self, ask: Ask, timeout: float | None = None) -> dict[str, Any]:
        """The whole response, with the names of the .proto files."""
        request = inference_pb2.GenerateRequest()
        _fill(request, ask)
        try:
            return _to_dict(self._inference.Generate(request, timeout=timeout))
        except grpc.RpcError as error:
            raise _failure(error) from error

    def stream(self, ask: Ask, timeout: float | None = None) -> TextStream:
        """Starts a streaming call of one sequence. Errors come out of the iteration."""
        if ask.sampling.get("n", 1) != 1:
            raise CallFailed(
                "INVALID_ARGUMENT",
                "the texts of several sequences would mix: use generate()",
                field="sampling_params.n",
                reached=False,
            )
        request = inference_pb2.GenerateStreamRequest()
        _fill(request, ask)
        return TextStream(self._inference.GenerateStream(request, timeout=timeout))

    def resumable_stream(
        self, ask: Ask, timeout: float | None = None, *, attempts: int = 5
    ) -> ResumingStream:
        """A stream that outlives its connection, where the server has --resume-ttl."""
        request = inference_pb2.GenerateStreamRequest(request_id=secrets.token_hex(16))
        request.resumable.SetInParent()
        _fill(request, ask)
        return ResumingStream(self._inference, request, timeout, attempts)

    def models(self, timeout: float | None = None) -> list[dict[str, Any]]:
        try:
            response = self._models.ListModels(model_pb2.ListModelsRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise _failure(error) from error
        return [_to_dict(model) for model in response.models]


class TextStream:
    """Iterates over pieces of text; `final` holds the last frame once it came."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._cancelled = False
        self.final: dict[str, Any] | None = None
        self.tool_calls: list[dict[str, Any]] = []
        """Those that came so far."""

    def __iter__(self) -> Iterator[str]:
        try:
            for response in self._call:
                if response.WhichOneof("frame") == "final":
                    self.final = _to_dict(response.final)
                self._take_calls(response.delta.tool_calls)
                if response.delta.text:
                    yield response.delta.text
        except grpc.RpcError as error:
            raise _failure(error) from error

    def _take_calls(self, calls: Iterable[common_pb2.ToolCall]) -> None:
        # One that came just before a connection was lost may come again.
        known = {call["id"] for call in self.tool_calls}
        self.tool_calls += [_to_dict(call) for call in calls if call.id not in known]

    def cancel(self) -> None:
        """Ends the call; the server stops generating. Safe at any time."""
        self._cancelled = True
        self._call.cancel()


class ResumingStream(TextStream):
    """A TextStream of one sequence that goes on over `attempts` lost connections in a row."""

    def __init__(
        self,
        stub: inference_pb2_grpc.InferenceServiceStub,
        request: inference_pb2.GenerateStreamRequest,
        timeout: float | None,
        attempts: int,
    ) -> None:
        super().__init__(stub.GenerateStream(request, timeout=timeout))
        self._stub = stub
        self._request_id = request.request_id
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._attempts = attempts

    def __iter__(self) -> Iterator[str]:
        num_chars = failures = 0
        while self.final is None:
            try:
                for text in super().__iter__():
                    num_chars += len(text)
                    failures = 0
                    yield text
            except CallFailed as failure:
                # A status of the server's own has details, and is meant.
                if failures == self._attempts or failure.reached or self._cancelled:
                    raise
                time.sleep(min(2.0, 0.1 * 2**failures) if failures else 0)
                failures += 1
                self._call = self._resume(num_chars)

    def cancel(self) -> None:
        """Ends the request: to the server the end of the call is a lost connection."""
        super().cancel()
        with contextlib.suppress(grpc.RpcError):
            self._stub.Cancel(inference_pb2.CancelRequest(request_id=self._request_id), timeout=5)

    def _resume(self, num_chars: int) -> Any:
        received = inference_pb2.ReceivedSequence(index=0, num_chars=num_chars)
        request = inference_pb2.GenerateStreamRequest(
            request_id=self._request_id,
            resume_from=inference_pb2.ResumePoint(sequences=[received]),
        )
        timeout = None if self._deadline is None else self._deadline - time.monotonic()
        return self._stub.GenerateStream(request, timeout=timeout)


def _fill(
    request: inference_pb2.GenerateRequest | inference_pb2.GenerateStreamRequest, ask: Ask
) -> None:
    if ask.model is not None:
        request.model = ask.model
    if ask.prompt is not None:
        request.prompt = ask.prompt
    else:
        _fill_chat(request.chat, ask)
    request.sampling_params.SetInParent()
    for name, value in ask.sampling.items():
        try:
            request.sampling_params.MergeFrom(common_pb2.SamplingParams(**{name: value}))
        except (TypeError, ValueError) as error:
            raise CallFailed(
                "INVALID_ARGUMENT", str(error), field=f"sampling_params.{name}", reached=False
            ) from error


def _fill_chat(chat: common_pb2.ChatInput, ask: Ask) -> None:
    try:
        for message in ask.messages:
            if not isinstance(message, Mapping):
                message = dict(zip(("role", "content"), message, strict=True))
            ParseDict(dict(message), chat.messages.add())
        for tool in ask.tools:
            ParseDict(dict(tool), chat.tools.add())
    except (ParseError, ValueError) as error:
        raise CallFailed("INVALID_ARGUMENT", str(error), field="chat", reached=False) from error
    if ask.tool_choice in ("auto", "none", "required"):
        setattr(chat.tool_choice, ask.tool_choice, True)
    elif ask.tool_choice is not None:
        chat.tool_choice.name = ask.tool_choice


def _to_dict(message: Message) -> dict[str, Any]:
    values: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return values


def _failure(error: Any) -> CallFailed:
    code = error.code()
    field_name = None
    reached = code is not grpc.StatusCode.UNAVAILABLE
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY:
            continue
        # Only a server of ours sends details: a refused connection has none.
        reached = True
        for detail in status_pb2.Status.FromString(value).details:
            bad_request = error_details_pb2.BadRequest()
            if detail.Unpack(bad_request) and bad_request.field_violations:
                field_name = bad_request.field_violations[0].field
    return CallFailed(code.name, error.details() or "", field=field_name, reached=reached)
