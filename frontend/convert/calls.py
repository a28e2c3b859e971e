"""What clients and operators ask, in plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from frontend.request import (
    BeamSearchCall,
    ChatMessage,
    ChatPrompt,
    GenerateCall,
    IdsPrompt,
    Prompt,
    Received,
    ResumeCall,
    SamplingCall,
    StructuredOutputCall,
    TextPrompt,
    ToolChoiceCall,
    WhenLost,
)
from pagewire.errors import InvalidRequest
from pagewire.tools import Tool, ToolCall, plain_schema
from pagewire.v1 import (
    admin_pb2,
    common_pb2,
    inference_pb2,
)

if TYPE_CHECKING:
    from pagewire.types import EarlyStopping

_EARLY_STOPPING: dict[int, EarlyStopping] = {
    common_pb2.BeamSearch.EARLY_STOPPING_UNSPECIFIED: "false",
    common_pb2.BeamSearch.EARLY_STOPPING_TRUE: "true",
    common_pb2.BeamSearch.EARLY_STOPPING_FALSE: "false",
    common_pb2.BeamSearch.EARLY_STOPPING_NEVER: "never",
}
_WHEN_LOST = {
    inference_pb2.ResumeOptions.WHEN_LOST_UNSPECIFIED: WhenLost.RUN_ON,
    inference_pb2.ResumeOptions.WHEN_LOST_RUN_ON: WhenLost.RUN_ON,
    inference_pb2.ResumeOptions.WHEN_LOST_PAUSE: WhenLost.PAUSE,
}


def generate_call(
    request: inference_pb2.GenerateRequest | inference_pb2.GenerateStreamRequest,
) -> GenerateCall:
    """Raises InvalidRequest only for what has no plain form (a template_kwargs value)."""
    return GenerateCall(
        prompt=_prompt(request),
        sampling=_sampling(request.sampling_params),
        request_id=_optional(request, "request_id"),
        model=_optional(request, "model"),
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=_optional(request, "tenant"),
        skip_prefix_cache=request.skip_prefix_cache,
        return_token_ids=request.return_token_ids,
        echo=request.echo,
        streams=isinstance(request, inference_pb2.GenerateStreamRequest),
        **_stream_options(request),
    )


def _stream_options(
    request: inference_pb2.GenerateRequest | inference_pb2.GenerateStreamRequest,
) -> dict[str, Any]:
    if not isinstance(request, inference_pb2.GenerateStreamRequest):
        return {}
    resumable = None
    if request.HasField("resumable"):
        resumable = _WHEN_LOST.get(request.resumable.when_lost)
        if resumable is None:
            raise InvalidRequest(
                "resumable.when_lost",
                f"when_lost is {request.resumable.when_lost}, not a known one",
            )
    return {"resumable": resumable, "report_queue": request.report_queue}


def resume_call(request: inference_pb2.GenerateStreamRequest) -> ResumeCall | None:
    """None where it is no resume. Raises InvalidRequest for a field beside it."""
    if not request.HasField("resume_from"):
        return None
    for field, _ in request.ListFields():
        if field.name not in ("request_id", "resume_from"):
            raise InvalidRequest(
                field.name, f"{field.name} is set beside resume_from: the request has its own"
            )
    return ResumeCall(
        request.request_id,
        tuple(
            Received(
                sequence.index,
                _optional(sequence, "num_tokens"),
                _optional(sequence, "num_chars"),
            )
            for sequence in request.resume_from.sequences
        ),
    )


def model_of(request: object) -> str | None:
    """The optional model field of any request that has one."""
    found: str | None = _optional(request, "model")
    return found


def cancel_id(request: inference_pb2.CancelRequest) -> str:
    return request.request_id


def drain_timeout(request: admin_pb2.DrainRequest) -> float | None:
    """Seconds, None where absent. Raises InvalidRequest for a negative one."""
    if not request.HasField("timeout"):
        return None
    seconds = request.timeout.seconds + request.timeout.nanos / 1e9
    if seconds < 0:
        raise InvalidRequest("timeout", f"timeout is {seconds:g} s, must not be negative")
    return seconds


def drain_engine(request: admin_pb2.DrainRequest) -> str | None:
    """The address of the engine that is to be emptied, None for the whole frontend."""
    address: str | None = _optional(request, "engine")
    return address


def _prompt(
    request: inference_pb2.GenerateRequest | inference_pb2.GenerateStreamRequest,
) -> Prompt | None:
    kind = request.WhichOneof("input")
    if kind == "prompt":
        return TextPrompt(request.prompt)
    if kind == "prompt_token_ids":
        return IdsPrompt(list(request.prompt_token_ids.ids))
    if kind == "chat":
        return _chat(request.chat)
    return None


def _chat(chat: common_pb2.ChatInput) -> ChatPrompt:
    kwargs = None
    if chat.HasField("template_kwargs"):
        try:
            kwargs = json_format.MessageToDict(chat.template_kwargs)
        except (json_format.Error, ValueError) as error:
            raise InvalidRequest("chat.template_kwargs", f"not JSON: {error}") from None
    return ChatPrompt(
        messages=tuple(map(_chat_message, chat.messages)),
        add_generation_prompt=_optional(chat, "add_generation_prompt"),
        continue_final_message=_optional(chat, "continue_final_message"),
        template_kwargs=kwargs,
        tools=tuple(_tool(tool, index) for index, tool in enumerate(chat.tools)),
        tool_choice=_tool_choice(chat.tool_choice) if chat.HasField("tool_choice") else None,
    )


def _chat_message(message: common_pb2.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=tuple(ToolCall(c.id, c.name, c.arguments) for c in message.tool_calls),
        tool_call_id=_optional(message, "tool_call_id"),
        name=_optional(message, "name"),
    )


def _tool(tool: common_pb2.Tool, index: int) -> Tool:
    if not tool.HasField("parameters"):
        return Tool(tool.name, tool.description)
    try:
        parameters = plain_schema(json_format.MessageToDict(tool.parameters))
    except (json_format.Error, ValueError) as error:
        raise InvalidRequest(f"chat.tools[{index}].parameters", f"not JSON: {error}") from None
    return Tool(tool.name, tool.description, parameters)


def _tool_choice(choice: common_pb2.ToolChoice) -> ToolChoiceCall:
    kind = choice.WhichOneof("choice")
    if kind is None or kind == "name":
        return ToolChoiceCall(kind, choice.name)
    return ToolChoiceCall(kind, flag=getattr(choice, kind))


def _sampling(params: common_pb2.SamplingParams) -> SamplingCall:
    return SamplingCall(
        temperature=_optional(params, "temperature"),
        top_p=_optional(params, "top_p"),
        top_k=_optional(params, "top_k"),
        min_p=_optional(params, "min_p"),
        seed=_optional(params, "seed"),
        max_tokens=_optional(params, "max_tokens"),
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens
        if params.HasField("skip_special_tokens")
        else True,
        include_stop_str_in_output=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        repetition_penalty=_optional(params, "repetition_penalty"),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(params.logit_bias.items()),
        bad_words=tuple(params.bad_words),
        allowed_token_ids=tuple(params.allowed_token_ids.ids)
        if params.HasField("allowed_token_ids")
        else None,
        logprobs=_optional(params, "logprobs"),
        prompt_logprobs=_optional(params, "prompt_logprobs"),
        n=params.n if params.HasField("n") else 1,
        best_of=_optional(params, "best_of"),
        spaces_between_special_tokens=params.spaces_between_special_tokens
        if params.HasField("spaces_between_special_tokens")
        else True,
        truncate_prompt_tokens=_optional(params, "truncate_prompt_tokens"),
        beam_search=_beam_search(params.beam_search) if params.HasField("beam_search") else None,
        structured_output=_structured_output(params.structured_output)
        if params.HasField("structured_output")
        else None,
    )


def _structured_output(message: common_pb2.StructuredOutput) -> StructuredOutputCall:
    kind = message.WhichOneof("constraint")
    return StructuredOutputCall(
        kind=kind,
        text=getattr(message, kind) if kind in ("json_schema", "regex", "grammar") else "",
        choices=tuple(message.choice.texts),
        json_object=message.json_object,
    )


def _beam_search(message: common_pb2.BeamSearch) -> BeamSearchCall:
    early_stopping = _EARLY_STOPPING.get(message.early_stopping)
    if early_stopping is None:
        raise InvalidRequest(
            "sampling_params.beam_search.early_stopping",
            f"early_stopping is {message.early_stopping}, not a known one",
        )
    penalty = message.length_penalty if message.HasField("length_penalty") else 1.0
    return BeamSearchCall(message.beam_width, penalty, early_stopping)


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None
