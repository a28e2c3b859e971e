"""Plain values to messages, and back."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from pagewire.client.ask import Ask
from pagewire.client.errors import invalid
from pagewire.v1 import common_pb2, inference_pb2, model_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.message import Message

    from pagewire.client.ask import ChatTurn

_Request = TypeVar("_Request", inference_pb2.GenerateRequest, inference_pb2.GenerateStreamRequest)
_OPTIONS = frozenset(
    {
        "priority",
        "tenant",
        "cache_salt",
        "echo",
        "request_id",
        "return_token_ids",
        "skip_prefix_cache",
    }
)


def generate_request(ask: Ask | str) -> inference_pb2.GenerateRequest:
    """Raises InvalidArgument, as all of these do."""
    return _filled(inference_pb2.GenerateRequest(), ask)


def stream_request(ask: Ask | str) -> inference_pb2.GenerateStreamRequest:
    if isinstance(ask, Ask) and ask.sampling.get("n", 1) != 1:
        raise invalid(
            "sampling_params.n", "the texts of several sequences would mix: use generate()"
        )
    return _filled(inference_pb2.GenerateStreamRequest(), ask)


def resumable_request(ask: Ask | str) -> tuple[inference_pb2.GenerateStreamRequest, bool]:
    """And whether its id was made up here, such that nobody can guess it."""
    request = stream_request(ask)
    # Where these are asked for the server counts tokens, and text that it held back for a stop
    # string would come twice.
    if request.return_token_ids:
        raise invalid("return_token_ids", "a resumable stream brings text alone")
    for name in ("logprobs", "prompt_logprobs"):
        if request.sampling_params.HasField(name):
            raise invalid(f"sampling_params.{name}", "a resumable stream brings text alone")
    id_is_ours = not request.request_id
    if id_is_ours:
        request.request_id = secrets.token_hex(16)
    request.resumable.SetInParent()
    return request, id_is_ours


def resume_request(request_id: str, num_chars: int) -> inference_pb2.GenerateStreamRequest:
    received = inference_pb2.ReceivedSequence(index=0, num_chars=num_chars)
    return inference_pb2.GenerateStreamRequest(
        request_id=request_id, resume_from=inference_pb2.ResumePoint(sequences=[received])
    )


def cancel_request(request_id: str) -> inference_pb2.CancelRequest:
    return inference_pb2.CancelRequest(request_id=request_id)


def list_request() -> model_pb2.ListModelsRequest:
    return model_pb2.ListModelsRequest()


def to_dict(message: Message) -> dict[str, Any]:
    """With the names of the .proto files."""
    values: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return values


def assistant_turn(response: inference_pb2.GenerateResponse) -> dict[str, Any]:
    """The fields of a ChatMessage, to be appended to the conversation as they are."""
    output = response.outputs[0]
    turn: dict[str, Any] = {"role": "assistant", "content": output.text}
    if output.tool_calls:
        turn["tool_calls"] = [to_dict(call) for call in output.tool_calls]
    return turn


def _filled(request: _Request, ask: Ask | str) -> _Request:
    if isinstance(ask, str):
        ask = Ask(prompt=ask)
    if ask.model is not None:
        request.model = ask.model
    _fill_input(request, ask)
    request.sampling_params.SetInParent()
    for name, value in ask.sampling.items():
        try:
            request.sampling_params.MergeFrom(common_pb2.SamplingParams(**{name: value}))
        except (TypeError, ValueError) as error:
            raise invalid(f"sampling_params.{name}", str(error)) from error
    for name, value in ask.options.items():
        if name not in _OPTIONS:
            raise invalid(name, f"not an option; these are: {', '.join(sorted(_OPTIONS))}")
        try:
            setattr(request, name, value)
        except (TypeError, ValueError) as error:
            raise invalid(name, str(error)) from error
    return request


def _fill_input(
    request: inference_pb2.GenerateRequest | inference_pb2.GenerateStreamRequest, ask: Ask
) -> None:
    given = [ask.prompt is not None, ask.prompt_token_ids is not None, bool(ask.messages)]
    if sum(given) > 1:
        raise invalid("input", "of prompt, prompt_token_ids and messages only one can be")
    if ask.prompt is not None:
        request.prompt = ask.prompt
    elif ask.prompt_token_ids is not None:
        try:
            request.prompt_token_ids.ids.extend(ask.prompt_token_ids)
        except (TypeError, ValueError) as error:
            raise invalid("prompt_token_ids", str(error)) from error
    else:
        _fill_chat(request.chat, ask.messages, ask.tools, ask.tool_choice)


def _fill_chat(
    chat: common_pb2.ChatInput,
    messages: Sequence[ChatTurn],
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | None,
) -> None:
    try:
        for message in messages:
            if not isinstance(message, Mapping):
                message = dict(zip(("role", "content"), message, strict=True))
            ParseDict(dict(message), chat.messages.add())
        for tool in tools:
            ParseDict(dict(tool), chat.tools.add())
    except (ParseError, ValueError) as error:
        raise invalid("chat", str(error)) from error
    if tool_choice in ("auto", "none", "required"):
        setattr(chat.tool_choice, tool_choice, True)
    elif tool_choice is not None:
        chat.tool_choice.name = tool_choice
