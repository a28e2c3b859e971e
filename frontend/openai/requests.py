"""Bodies of the HTTP routes, as OpenAI's API and vLLM's extensions of it spell them.

A field that is not here is refused by its name, and so is a value of another type. A field
typed None is one that OpenAI's clients know and this server has nothing for: null passes.
https://platform.openai.com/docs/api-reference,
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""What the engine counts in."""


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all."""


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM: usage so far in every chunk."""
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Body):
    name: str = ""
    description: str | None = None
    schema: Raw = Raw()
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's: one of them is set."""

    json: Raw = Raw()
    """A schema, or its text."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationBody(Body):
    """What both ways to generate take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int32 | None = None
    max_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Int32, float] | None = None
    response_format: ResponseFormat | None = None

    # vLLM's.
    top_k: Int32 | None = None
    min_p: float | None = None
    min_tokens: Int32 | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[Int32] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Int32] | None = None
    prompt_logprobs: Int32 | None = None
    truncate_prompt_tokens: Int32 | None = None
    structured_outputs: StructuredOutputs | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None

    # They mean nothing here and change nothing: docs/api.md names them.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionBody(GenerationBody):
    max_tokens: Int32 | None = 16
    """As OpenAI and vLLM have it; null fills the context."""
    prompt: str | list[str | int | list[int]] | None = None
    best_of: Int32 | None = None
    logprobs: Int32 | None = None
    add_special_tokens: bool | None = None
    suffix: None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: str
    arguments: str


class MessageToolCall(Body):
    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Body):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None

    # In answers of OpenAI's, which come back as part of the conversation.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Body):
    function: Function
    type: Literal["function"] = "function"


class FunctionName(Body):
    name: str


class NamedToolChoice(Body):
    function: FunctionName
    type: Literal["function"] = "function"


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message]
    tools: list[FunctionTool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: Literal[False] | None = None
    """A template writes its own."""
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None

    # They mean nothing here.
    reasoning_effort: str | None = None
    verbosity: str | None = None

    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None
    best_of: None = None


class TokenizeBody(Body):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | UnsetType = UNSET
    tools: list[FunctionTool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class LoadAdapterBody(Body):
    lora_name: str
    lora_path: str


class UnloadAdapterBody(Body):
    lora_name: str


class DetokenizeBody(Body):
    tokens: list[Int32]
    model: str | None = None
