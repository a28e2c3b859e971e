"""A thin synchronous client of the public gRPC services: plain values in and out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import grpc
from google.protobuf.json_format import MessageToDict
from google.rpc import error_details_pb2, status_pb2

from pagewire.v1 import (
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from google.protobuf.message import Message

DEFAULT_ADDRESS = "127.0.0.1:50051"

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
    """What to generate from: a prompt, or a conversation as (role, content) pairs."""

    prompt: str | None = None
    messages: Sequence[tuple[str, str]] = ()
    model: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams; those left out have the server's defaults."""


class Client:
    """One channel to one server. A context manager; timeouts are in seconds."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(address, options=options)
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
        """Starts a streaming call. Errors come out of the iteration."""
        request = inference_pb2.GenerateStreamRequest()
        _fill(request, ask)
        return TextStream(self._inference.GenerateStream(request, timeout=timeout))

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
        self.final: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            for response in self._call:
                if response.WhichOneof("frame") == "final":
                    self.final = _to_dict(response.final)
                elif response.delta.text:
                    yield response.delta.text
        except grpc.RpcError as error:
            raise _failure(error) from error

    def cancel(self) -> None:
        """Ends the call; the server stops generating. Safe at any time."""
        self._call.cancel()


def _fill(
    request: inference_pb2.GenerateRequest | inference_pb2.GenerateStreamRequest, ask: Ask
) -> None:
    if ask.model is not None:
        request.model = ask.model
    if ask.prompt is not None:
        request.prompt = ask.prompt
    else:
        request.chat.messages.extend(
            common_pb2.ChatMessage(role=role, content=content) for role, content in ask.messages
        )
    request.sampling_params.SetInParent()
    for name, value in ask.sampling.items():
        try:
            request.sampling_params.MergeFrom(common_pb2.SamplingParams(**{name: value}))
        except (TypeError, ValueError) as error:
            raise CallFailed(
                "INVALID_ARGUMENT", str(error), field=f"sampling_params.{name}", reached=False
            ) from error


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
