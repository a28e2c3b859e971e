"""protobuf <-> plain values; the only file of this room that touches protobuf."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import any_pb2, json_format
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from pagewire.errors import InvalidRequest, PagewireError, QueueFull, Unavailable
from pagewire.tools import Tool, ToolCall, check_tools, plain_schema
from pagewire.v1 import detokenizer_pb2, tokenizer_pb2
from tokenizer_svc.messages import (
    Chat,
    ChatMessage,
    Decode,
    Encode,
    Open,
    Spell,
    pack_ids,
    unpack_ids,
)
from tokenizer_svc.stream import StepRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

    from pagewire.v1 import common_pb2
    from tokenizer_svc.messages import Decoded, Encoded, Loaded, Spelled
    from tokenizer_svc.stream import StepResponse

DOMAIN = "pagewire"
_MAX_MESSAGE_CHARS = 1000
_CODES = {
    "invalid_request": grpc.StatusCode.INVALID_ARGUMENT,
    "queue_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "internal": grpc.StatusCode.INTERNAL,
}
"""Of pagewire.errors, those that this room can raise."""


def encode_request(request: tokenizer_pb2.TokenizeRequest) -> Callable[[int], Encode]:
    text, add_special_tokens = request.text, _or_true(request, "add_special_tokens")
    return lambda call: Encode(call, text, add_special_tokens)


def encode_response(reply: Encoded) -> tokenizer_pb2.TokenizeResponse:
    return tokenizer_pb2.TokenizeResponse(token_ids=unpack_ids(reply.token_ids))


def decode_request(request: tokenizer_pb2.DetokenizeRequest) -> Callable[[int], Decode]:
    ids = pack_ids(request.token_ids)
    skip_special_tokens = _or_true(request, "skip_special_tokens")
    spaces = _or_true(request, "spaces_between_special_tokens")
    complete_only = request.complete_characters_only
    return lambda call: Decode(call, ids, skip_special_tokens, spaces, complete_only)


def decode_response(reply: Decoded) -> tokenizer_pb2.DetokenizeResponse:
    return tokenizer_pb2.DetokenizeResponse(text=reply.text)


def spell_request(request: detokenizer_pb2.GetTokenBytesRequest) -> Callable[[int], Spell]:
    ids = pack_ids(request.token_ids)
    return lambda call: Spell(call, ids)


def spell_response(reply: Spelled) -> detokenizer_pb2.GetTokenBytesResponse:
    return detokenizer_pb2.GetTokenBytesResponse(tokens=reply.tokens)


def chat_request(request: tokenizer_pb2.ApplyChatTemplateRequest) -> Callable[[int], Chat]:
    """Raises InvalidRequest for a bad tool, and for a number that JSON has no form for."""
    chat = request.chat
    messages = [_message(message) for message in chat.messages]
    tools = [_tool(tool, index) for index, tool in enumerate(chat.tools)]
    check_tools(tools)
    generation = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
    try:
        template_kwargs: dict[str, Any] = json_format.MessageToDict(chat.template_kwargs)
    except (json_format.Error, ValueError) as error:
        raise InvalidRequest("chat.template_kwargs", f"not JSON: {error}") from None
    continuing = chat.continue_final_message
    return lambda call: Chat(call, messages, generation, continuing, template_kwargs, tools)


def chat_response(reply: Encoded) -> tokenizer_pb2.ApplyChatTemplateResponse:
    return tokenizer_pb2.ApplyChatTemplateResponse(
        text=reply.text, token_ids=unpack_ids(reply.token_ids)
    )


def info_response(facts: Loaded, num_workers: int) -> detokenizer_pb2.GetTokenizerInfoResponse:
    return detokenizer_pb2.GetTokenizerInfoResponse(
        has_chat_template=facts.has_chat_template,
        vocab_size=facts.vocab_size,
        num_workers=num_workers,
        tool_call_format=facts.tool_call_format,
        chat_template_has_tools=facts.template_has_tools,
        tool_call_special_tokens=facts.tool_call_special_tokens,
    )


def step_request(request: detokenizer_pb2.DetokenizeStreamRequest) -> StepRequest:
    return StepRequest(
        step=request.step,
        opens=[_open(opening) for opening in request.opens],
        sequences=list(request.sequences),
        counts=list(request.counts),
        token_ids=list(request.token_ids),
        finished=list(request.finished),
        closes=list(request.closes),
    )


def step_response(response: StepResponse) -> detokenizer_pb2.DetokenizeStreamResponse:
    return detokenizer_pb2.DetokenizeStreamResponse(
        step=response.step,
        sequences=response.sequences,
        texts=response.texts,
        stops=[
            detokenizer_pb2.SequenceStop(
                row=stop.row, stop_index=stop.stop_index, num_tokens=stop.num_tokens
            )
            for stop in response.stops
        ],
        errors=[
            detokenizer_pb2.SequenceError(sequence=lost.sequence, message=lost.message)
            for lost in response.errors
        ],
    )


def status_of(error: PagewireError) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """The gRPC code and the google.rpc.Status with its details: ErrorInfo always,
    BadRequest for a field, RetryInfo where a retry is worth while."""
    code = _CODES[error.code]
    message = error.message[:_MAX_MESSAGE_CHARS]
    reason = error.reason if isinstance(error, Unavailable) else error.code
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=reason.upper(), domain=DOMAIN)]
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, QueueFull | Unavailable) and error.retry_after is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return code, status


def _or_true(request: Message, field: str) -> bool:
    return bool(getattr(request, field)) if request.HasField(field) else True


def _open(opening: detokenizer_pb2.OpenSequence) -> Open:
    return Open(
        sequence=opening.sequence,
        prompt_tail=list(opening.prompt_tail),
        skip_special_tokens=opening.skip_special_tokens,
        stop=list(opening.stop),
        include_stop_str_in_output=opening.include_stop_str_in_output,
        replay_token_ids=list(opening.replay_token_ids),
        replay_emitted_chars=opening.replay_emitted_chars,
        min_tokens=opening.min_tokens,
        spaces_between_special_tokens=opening.spaces_between_special_tokens,
        kept_special_tokens=list(opening.kept_special_tokens),
    )


def _message(message: common_pb2.ChatMessage) -> ChatMessage:
    return ChatMessage(
        message.role,
        message.content,
        [ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls],
        message.tool_call_id if message.HasField("tool_call_id") else None,
        message.name if message.HasField("name") else None,
    )


def _tool(tool: common_pb2.Tool, index: int) -> Tool:
    if not tool.HasField("parameters"):
        return Tool(tool.name, tool.description)
    try:
        parameters = plain_schema(json_format.MessageToDict(tool.parameters))
    except (json_format.Error, ValueError) as error:
        raise InvalidRequest(f"chat.tools[{index}].parameters", f"not JSON: {error}") from None
    return Tool(tool.name, tool.description, parameters)
