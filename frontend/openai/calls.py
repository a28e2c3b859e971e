"""HTTP bodies -> GenerateCall, as frontend/convert/calls.py makes it of gRPC messages.

Nothing is checked here that frontend/validate.py checks; field_namer tells its errors in
the body's own words.
"""

from __future__ import annotations

import ctypes
import re
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from frontend.request import (
    BeamSearchCall,
    ChatMessage,
    ChatPrompt,
    GenerateCall,
    IdsPrompt,
    SamplingCall,
    StructuredOutputCall,
    TextPrompt,
    ToolChoiceCall,
)
from pagewire.errors import InvalidRequest
from pagewire.tools import Tool, ToolCall
from pagewire.types import MAX_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from msgspec import Raw

    from frontend.openai.requests import (
        ChatBody,
        CompletionBody,
        FunctionTool,
        GenerationBody,
        Message,
        StructuredOutputs,
    )
    from frontend.request import Prompt

MAX_PROMPTS = 256
MAX_JSON_DEPTH = 30
"""Of what goes to the template: protobuf reads messages 100 deep, and JSON takes three of
them for a level."""

_LIKE_VLLM = {"json_schema": "json"}
_TOOL = re.compile(r"(tools\[\d+\])\.(?=name|parameters)")
_CALL = re.compile(r"(messages\[\d+\]\.tool_calls\[\d+\])\.(?=name|arguments)")


def completion_calls(body: CompletionBody) -> list[GenerateCall]:
    """One for each prompt. Raises InvalidRequest."""
    sampling = _sampling(body, logprobs=body.logprobs, max_tokens=body.max_tokens)
    return [_call(body, prompt, sampling, echo=bool(body.echo)) for prompt in _prompts(body)]


def chat_call(body: ChatBody) -> GenerateCall:
    """Raises InvalidRequest."""
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    elif body.max_tokens is not None:
        raise InvalidRequest(
            "max_completion_tokens", "max_completion_tokens and max_tokens exclude each other"
        )
    prompt = ChatPrompt(
        messages=tuple(chat_message(message) for message in body.messages),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=template_kwargs(body.chat_template_kwargs),
        tools=tools(body.tools),
        tool_choice=_tool_choice(body),
    )
    sampling = _sampling(body, logprobs=_num_top_logprobs(body), max_tokens=max_tokens)
    return _call(body, prompt, sampling, echo=False)


def field_namer(body: GenerationBody, *, chat: bool) -> Callable[[str], str]:
    """From paths of pagewire.v1.GenerateRequest to the body's."""
    renamed = {"beam_search.beam_width": "n", "beam_search": "use_beam_search"}
    if getattr(body, "best_of", None) is not None:
        renamed["beam_search.beam_width"] = "best_of"
    if chat:
        renamed |= {"input": "messages", "chat": "messages", "logprobs": "top_logprobs"}
        renamed["template_kwargs"] = "chat_template_kwargs"
        if getattr(body, "max_completion_tokens", None) is not None:
            renamed["max_tokens"] = "max_completion_tokens"
    else:
        renamed |= {"input": "prompt", "prompt_token_ids": "prompt"}

    def name(path: str) -> str:
        field = path.removeprefix("sampling_params.").removeprefix("chat.")
        if field.split(".")[0] == "structured_output":
            return _constraint_name(field, body)
        if field.startswith("template_kwargs."):
            return f"chat_{field}"
        if field == "beam_search.length_penalty":
            return "length_penalty"
        field = _CALL.sub(r"\1.function.", _TOOL.sub(r"\1.function.", field))
        return renamed.get(field, field)

    return name


def chat_message(message: Message) -> ChatMessage:
    content = message.content
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    return ChatMessage(
        role=message.role,
        content=content,
        tool_calls=tuple(
            ToolCall(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def tools(given: Sequence[FunctionTool] | None) -> tuple[Tool, ...]:
    """Raises InvalidRequest."""
    made = []
    for index, entry in enumerate(given or ()):
        function = entry.function
        _check_json(function.parameters, f"tools[{index}].function.parameters")
        made.append(Tool(function.name, function.description or "", function.parameters))
    return tuple(made)


def template_kwargs(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Raises InvalidRequest."""
    _check_json(given, "chat_template_kwargs")
    return given


def _check_json(value: Any, field: str, depth: int = 1) -> None:
    if isinstance(value, int):
        # The template gets floats, as it does over gRPC.
        if abs(value) > sys.float_info.max:
            raise InvalidRequest(field, f"{field} holds a number that is out of range")
        return
    if not isinstance(value, dict | list):
        return
    if depth > MAX_JSON_DEPTH:
        raise InvalidRequest(field, f"{field} is nested more than {MAX_JSON_DEPTH} deep")
    for element in value.values() if isinstance(value, dict) else value:
        _check_json(element, field, depth + 1)


def _call(
    body: GenerationBody, prompt: Prompt, sampling: SamplingCall, *, echo: bool
) -> GenerateCall:
    streams = bool(body.stream)
    options = body.stream_options
    if options is not None and not streams:
        raise InvalidRequest("stream_options", "stream_options is set, and stream is not")
    if streams and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", "prompt_logprobs and stream exclude each other")
    counts = options is not None and bool(options.continuous_usage_stats)
    return GenerateCall(
        prompt=prompt,
        sampling=sampling,
        request_id=body.request_id,
        model=body.model,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        return_token_ids=bool(body.return_token_ids) or counts,
        echo=echo,
        streams=streams,
    )


def _prompts(body: CompletionBody) -> list[Prompt]:
    given, special = body.prompt, body.add_special_tokens is not False
    if given is None:
        raise InvalidRequest("prompt", "prompt is missing")
    if isinstance(given, str):
        return [TextPrompt(given, special)]
    if not given:
        raise InvalidRequest("prompt", "prompt is empty")
    if all(type(entry) is int for entry in given):
        return [IdsPrompt(given)]  # type: ignore[arg-type]
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest("prompt", f"{len(given)} prompts, at most {MAX_PROMPTS} are allowed")
    prompts: list[Prompt] = []
    for index, entry in enumerate(given):
        if not entry and not isinstance(entry, int):
            raise InvalidRequest(f"prompt[{index}]", "the prompt is empty")
        if isinstance(entry, int) or type(entry) is not type(given[0]):
            raise InvalidRequest(
                f"prompt[{index}]",
                "a list of prompts holds texts alone, or lists of token ids alone",
            )
        prompts.append(TextPrompt(entry, special) if isinstance(entry, str) else IdsPrompt(entry))
    return prompts


def _sampling(
    body: GenerationBody, *, logprobs: int | None, max_tokens: int | None
) -> SamplingCall:
    best_of = getattr(body, "best_of", None)
    n = 1 if body.n is None else body.n
    beams = None
    if body.use_beam_search:
        # vLLM searches as wide as the number of sequences that are wanted.
        beams = BeamSearchCall(n if best_of is None else best_of, _penalty(body))
        best_of = None
    elif body.length_penalty is not None and body.length_penalty != 1:
        raise InvalidRequest("length_penalty", "length_penalty is for use_beam_search")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingCall(
        temperature=_float32(body.temperature),
        top_p=_float32(body.top_p),
        top_k=body.top_k,
        min_p=_float32(body.min_p),
        seed=_seed(body.seed),
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
        repetition_penalty=_float32(body.repetition_penalty),
        presence_penalty=_float32(body.presence_penalty) or 0.0,
        frequency_penalty=_float32(body.frequency_penalty) or 0.0,
        logit_bias=tuple(
            (token_id, ctypes.c_float(bias).value)
            for token_id, bias in (body.logit_bias or {}).items()
        ),
        bad_words=tuple(body.bad_words or ()),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        n=n,
        best_of=best_of,
        structured_output=_structured_output(body),
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        beam_search=beams,
    )


def _float32(value: float | None) -> float | None:
    """As a message of pagewire.v1 would carry it, so that both doors give the same answer."""
    return None if value is None else ctypes.c_float(value).value


def _penalty(body: GenerationBody) -> float:
    penalty = _float32(body.length_penalty)
    return 1.0 if penalty is None else penalty


def _seed(seed: int | None) -> int | None:
    if seed is None:
        return None
    if not -(2**63) <= seed < 2**64:
        raise InvalidRequest("seed", f"seed is {str(seed)[:32]}, must fit in 64 bits")
    return seed % 2**64


def _num_top_logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs
    if not body.logprobs:
        if top:
            raise InvalidRequest("top_logprobs", "top_logprobs is set, and logprobs is not")
        return None
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequest(
            "top_logprobs", f"top_logprobs is {top}, must be in [0, {MAX_LOGPROBS}]"
        )
    return top or 0


def _tool_choice(body: ChatBody) -> ToolChoiceCall | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if isinstance(choice, str):
        return ToolChoiceCall(choice)
    return ToolChoiceCall("name", choice.function.name)


def _structured_output(body: GenerationBody) -> StructuredOutputCall | None:
    asked = None if body.structured_outputs is None else _constraint(body.structured_outputs)
    form = body.response_format
    if form is None or form.type == "text":
        return asked
    if asked is not None:
        raise InvalidRequest(
            "structured_outputs", "structured_outputs and response_format exclude each other"
        )
    if form.type == "json_object":
        return StructuredOutputCall("json_object", json_object=True)
    schema = "" if form.json_schema is None else _json_text(form.json_schema.schema)
    if not schema:
        raise InvalidRequest("response_format.json_schema", "response_format has no json_schema")
    return StructuredOutputCall("json_schema", schema)


def _constraint(given: StructuredOutputs) -> StructuredOutputCall:
    schema = _json_text(given.json)
    if schema.startswith('"'):
        schema = msgspec.json.decode(schema, type=str)
    values: dict[str, Any] = {
        "json_schema": schema or None,
        "regex": given.regex,
        "grammar": given.grammar,
        "choice": given.choice,
        "json_object": given.json_object,
    }
    found = [kind for kind, value in values.items() if value is not None]
    if len(found) != 1:
        raise InvalidRequest(
            "structured_outputs", "set one of json, regex, choice, grammar and json_object"
        )
    if found[0] == "choice":
        return StructuredOutputCall("choice", choices=tuple(given.choice or ()))
    if found[0] == "json_object":
        return StructuredOutputCall("json_object", json_object=bool(given.json_object))
    return StructuredOutputCall(found[0], text=values[found[0]])  # type: ignore[arg-type]


def _json_text(raw: Raw) -> str:
    """Empty for null and for what is absent."""
    text = bytes(raw).decode()
    return "" if text == "null" else text


def _constraint_name(field: str, body: GenerationBody) -> str:
    if body.structured_outputs is None and body.response_format is not None:
        return "response_format"
    _, _, kind = field.partition(".")
    head, dot, tail = kind.partition("[")
    head = _LIKE_VLLM.get(head, head)
    return f"structured_outputs.{head}{dot}{tail}" if head else "structured_outputs"
