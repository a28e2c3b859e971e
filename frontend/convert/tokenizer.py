"""What tokenizer_svc is asked and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, get_args

from pagewire.tools import Tool, ToolCallFormat
from pagewire.v1 import (
    common_pb2,
    detokenizer_pb2,
    tokenizer_pb2,
)

if TYPE_CHECKING:
    from frontend.detokenize_stream import Batch
    from frontend.request import (
        ChatMessage,
        ChatPrompt,
        Job,
        RequestState,
        TextPrompt,
    )

PROMPT_TAIL = 16
"""Prompt ids that the detokenizer gets: enough for the first output to join on."""

_FORMATS: dict[str, ToolCallFormat] = {name: name for name in get_args(ToolCallFormat)}


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    has_chat_template: bool
    vocab_size: int
    tool_call_format: ToolCallFormat
    chat_template_has_tools: bool
    tool_call_special_tokens: tuple[str, ...]
    """The format's markers that are special tokens."""


@dataclass(frozen=True, slots=True)
class TextStop:
    stop_index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DetokenizeReply:
    number: int
    texts: dict[int, str]
    """Internal id -> new text."""
    stops: dict[int, TextStop]
    errors: list[tuple[int, str]]


_R = TypeVar("_R")


def without_model(request: _R) -> _R:
    """A copy for tokenizer_svc, whose own name for the model does not matter."""
    copy = type(request)()
    copy.CopyFrom(request)  # type: ignore[attr-defined]
    copy.ClearField("model")  # type: ignore[attr-defined]
    return copy


def tokenizer_info_request() -> detokenizer_pb2.GetTokenizerInfoRequest:
    return detokenizer_pb2.GetTokenizerInfoRequest()


def tokenizer_info(response: detokenizer_pb2.GetTokenizerInfoResponse) -> TokenizerInfo:
    return TokenizerInfo(
        has_chat_template=response.has_chat_template,
        vocab_size=response.vocab_size,
        # One that is newer than this process, or older than the field, is no format to it.
        tool_call_format=_FORMATS.get(response.tool_call_format, "none"),
        chat_template_has_tools=response.chat_template_has_tools,
        tool_call_special_tokens=tuple(response.tool_call_special_tokens),
    )


def tokenize_request(prompt: TextPrompt) -> tokenizer_pb2.TokenizeRequest:
    return tokenizer_pb2.TokenizeRequest(
        text=prompt.text, add_special_tokens=prompt.add_special_tokens
    )


def piece_request(text: str) -> tokenizer_pb2.TokenizeRequest:
    return tokenizer_pb2.TokenizeRequest(text=text, add_special_tokens=False)


def chat_template_request(prompt: ChatPrompt) -> tokenizer_pb2.ApplyChatTemplateRequest:
    chat = common_pb2.ChatInput(
        messages=[_chat_message_proto(message) for message in prompt.messages],
        tools=[_tool_proto(tool) for tool in prompt.tools],
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
    )
    if prompt.template_kwargs is not None:
        chat.template_kwargs.update(prompt.template_kwargs)
    return tokenizer_pb2.ApplyChatTemplateRequest(chat=chat)


def _chat_message_proto(message: ChatMessage) -> common_pb2.ChatMessage:
    return common_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=[
            common_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _tool_proto(tool: Tool) -> common_pb2.Tool:
    message = common_pb2.Tool(name=tool.name, description=tool.description)
    if tool.parameters is not None:
        message.parameters.SetInParent()
        message.parameters.update(tool.parameters)
    return message


def rendered_text(response: tokenizer_pb2.ApplyChatTemplateResponse) -> str:
    return response.text


def detokenize_prompt_request(ids: list[int], job: Job) -> tokenizer_pb2.DetokenizeRequest:
    return tokenizer_pb2.DetokenizeRequest(
        token_ids=ids,
        skip_special_tokens=job.skip_special_tokens,
        spaces_between_special_tokens=job.spaces_between_special_tokens,
        complete_characters_only=True,
    )


def token_bytes_request(ids: list[int]) -> detokenizer_pb2.GetTokenBytesRequest:
    return detokenizer_pb2.GetTokenBytesRequest(token_ids=ids)


def token_bytes(response: detokenizer_pb2.GetTokenBytesResponse) -> list[bytes]:
    return list(response.tokens)


def detokenize_text_request(ids: list[int]) -> tokenizer_pb2.DetokenizeRequest:
    return tokenizer_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)


def detokenized_text(response: tokenizer_pb2.DetokenizeResponse) -> str:
    return response.text


def token_ids(
    response: tokenizer_pb2.TokenizeResponse | tokenizer_pb2.ApplyChatTemplateResponse,
) -> list[int]:
    return list(response.token_ids)


def detokenize_request(batch: Batch) -> detokenizer_pb2.DetokenizeStreamRequest:
    return detokenizer_pb2.DetokenizeStreamRequest(
        step=batch.number,
        opens=[_open_sequence(state) for state in batch.opens],
        sequences=[state.internal_id for state in batch.states],
        counts=batch.counts,
        token_ids=batch.token_ids,
        finished=batch.finished,
        closes=batch.closes,
    )


def detokenize_reply(message: object) -> DetokenizeReply:
    assert isinstance(message, detokenizer_pb2.DetokenizeStreamResponse)
    sequences = list(message.sequences)
    return DetokenizeReply(
        number=message.step,
        texts=dict(zip(sequences, message.texts, strict=True)),
        stops={sequences[s.row]: TextStop(s.stop_index, s.num_tokens) for s in message.stops},
        errors=[(e.sequence, e.message) for e in message.errors],
    )


def _open_sequence(state: RequestState) -> detokenizer_pb2.OpenSequence:
    job = state.job
    return detokenizer_pb2.OpenSequence(
        sequence=state.internal_id,
        prompt_tail=state.prompt_ids[-PROMPT_TAIL:],
        skip_special_tokens=job.skip_special_tokens,
        stop=job.stop,
        include_stop_str_in_output=job.include_stop_str_in_output,
        replay_token_ids=state.output_ids[: state.num_acked],
        replay_emitted_chars=state.emitted_chars,
        min_tokens=job.sampling.min_tokens,
        spaces_between_special_tokens=job.spaces_between_special_tokens,
        kept_special_tokens=job.tools.markers,
    )
