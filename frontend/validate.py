"""Limits -> InvalidRequest. Every message says what was wrong with which field.

Pure functions over plain values: what arrived is a GenerateCall, what leaves is
a Job. Field paths are those of pagewire.v1.GenerateRequest.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from frontend.auth import current_principal
from frontend.beam import beam_params
from frontend.branches import check_n
from frontend.logits_params import check_ids, logits_params
from frontend.logprobs import check_logprobs
from frontend.prompt import check_max_tokens, check_truncation
from frontend.request import ChatPrompt, GenerateCall, IdsPrompt, Job, Prompt, TextPrompt
from frontend.structured_output import structured_output
from frontend.tool_choice import plan_tools
from pagewire.errors import InvalidRequest, NotFound
from pagewire.types import MAX_TENANT_CHARS, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from frontend.request import SamplingCall
    from pagewire.tools import ToolCallFormat
    from pagewire.wire.messages import AdapterInfo

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_CHARS = 256
MAX_CHARS_PER_TOKEN = 512
"""No tokenizer we know has a longer token, so a text of more characters than
this times the context is too long without tokenizing it."""
GREEDY_BELOW = 1e-5
"""A temperature that divides logits into overflow means greedy."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model allows, learnt from the engine and the tokenizer."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, float]
    has_chat_template: bool
    chat_template_has_tools: bool = False
    tool_call_format: ToolCallFormat = "none"
    tool_call_special_tokens: tuple[str, ...] = ()
    adapters: Mapping[str, AdapterInfo] = field(default_factory=dict)
    """By name; each is a model of its own to clients."""


def check_model(model: str | None, limits: Limits, *, field: str = "model") -> None:
    """Raises NotFound unless `model` is the served one, an adapter of it, or absent."""
    if model is not None and model != limits.model and model not in limits.adapters:
        raise NotFound("model", model[:256], field=field)


def validate(
    call: GenerateCall, limits: Limits, default_request_id: str, default_tenant: str = ""
) -> Job:
    """Checks everything that needs no tokenizer. Raises InvalidRequest or NotFound.

    The defaults come from the call's metadata. Raises PermissionDenied for another tenant
    than the caller's own.
    """
    check_model(call.model, limits)
    if call.request_id is not None:
        check_request_id(call.request_id)
    if call.prompt is None:
        raise InvalidRequest("input", "set one of prompt, chat and prompt_token_ids")
    if len(call.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidRequest(
            "cache_salt", f"cache_salt is longer than {MAX_CACHE_SALT_CHARS} characters"
        )
    _check_prompt(call.prompt, limits, cut=call.sampling.truncate_prompt_tokens is not None)
    sampling = call.sampling
    tools = plan_tools(call.prompt, sampling, limits)
    if tools.constraint is not None:
        sampling = replace(sampling, structured_output=tools.constraint)
    if call.echo and sampling.prompt_logprobs is None and sampling.beam_search is None:
        # The text begins with the prompt, and so do its logprobs; a beam search has none.
        sampling = replace(sampling, prompt_logprobs=sampling.logprobs)
    _check_stops(sampling, limits)
    check_logprobs(sampling)
    n, best_of = check_n(sampling, streams=call.streams)
    check_max_tokens(sampling, echo=call.echo, best_of=best_of)
    check_truncation(sampling, limits.max_model_len)
    beam = beam_params(
        sampling, with_tools=tools.format is not None or tools.constraint is not None
    )
    if beam is not None:
        # The model's own distribution is searched.
        limits = replace(limits, default_sampling={})
    return Job(
        request_id=call.request_id if call.request_id is not None else default_request_id,
        model=limits.model if call.model is None else call.model,
        adapter=None if call.model is None else limits.adapters.get(call.model),
        prompt=call.prompt,
        sampling=msgspec.structs.replace(_sampling_params(sampling, limits), beam=beam),
        max_tokens=sampling.max_tokens,
        stop=sampling.stop,
        bad_words=sampling.bad_words,
        skip_special_tokens=sampling.skip_special_tokens,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        truncate_prompt_tokens=sampling.truncate_prompt_tokens,
        echo=call.echo,
        tools=tools,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        priority=call.priority,
        cache_salt=call.cache_salt,
        tenant=_tenant(call.tenant, default_tenant),
        skip_prefix_cache=call.skip_prefix_cache,
        return_token_ids=call.return_token_ids,
        resumable=call.resumable,
        report_queue=call.report_queue,
        n=n,
        best_of=best_of,
    )


def fit_context(job: Job, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """The job's sampling with max_tokens decided, once the prompt's length is known.

    Raises InvalidRequest when the prompt is empty or leaves no room.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequest(job.prompt.field, "the prompt has no tokens")
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise InvalidRequest(
            job.prompt.field,
            f"the prompt has {num_prompt_tokens} tokens; the context of {max_model_len} "
            "must also hold at least one output token",
        )
    if job.max_tokens is not None and job.max_tokens > room:
        raise InvalidRequest(
            "sampling_params.max_tokens",
            f"the context holds {max_model_len} tokens; the prompt has {num_prompt_tokens} "
            f"and max_tokens is {job.max_tokens}",
        )
    max_tokens = room if job.max_tokens is None else job.max_tokens
    if job.sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            "sampling_params.min_tokens",
            f"min_tokens is {job.sampling.min_tokens}; the context of {max_model_len} has room "
            f"for {room} after the prompt of {num_prompt_tokens} tokens",
        )
    return msgspec.structs.replace(job.sampling, max_tokens=max_tokens)


def estimate_tokens(prompt: Prompt, max_model_len: int) -> int:
    """Roughly how many tokens a prompt has, for admission before tokenizing.

    A longer prompt than the context is refused later, so it never counts more.
    """
    if isinstance(prompt, IdsPrompt):
        estimate = len(prompt.ids)
    elif isinstance(prompt, TextPrompt):
        estimate = len(prompt.text) // 4 + 1
    else:
        estimate = sum(len(message.content) // 4 + 8 for message in prompt.messages)
        estimate += sum(len(str(tool.parameters)) // 4 + 32 for tool in prompt.tools)
    return min(estimate, max_model_len)


def check_request_id(request_id: str, field: str = "request_id") -> None:
    """1 to 128 printable ASCII characters without spaces, so that it survives a header."""
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(
            field,
            f"{field} has {len(request_id)} characters, must have 1 to {MAX_REQUEST_ID_CHARS}",
        )
    if not is_printable_ascii(request_id):
        raise InvalidRequest(field, f"{field} may only hold printable ASCII without spaces")


def is_printable_ascii(text: str) -> bool:
    return all("!" <= char <= "~" for char in text)


def _tenant(given: str | None, default: str) -> str:
    tenant = current_principal().tenant_of(default if given is None else given)
    if len(tenant) > MAX_TENANT_CHARS:
        source = "x-tenant-id" if given is None else "tenant"
        raise InvalidRequest(
            "tenant",
            f"{source} has {len(tenant)} characters, at most {MAX_TENANT_CHARS} are allowed",
        )
    return tenant


def _check_prompt(prompt: Prompt, limits: Limits, *, cut: bool) -> None:
    """cut: what does not fit is left out."""
    if isinstance(prompt, IdsPrompt):
        if not prompt.ids:
            raise InvalidRequest(prompt.field, "prompt_token_ids is empty")
        check_ids(prompt.field, prompt.ids, limits.vocab_size)
        return
    if isinstance(prompt, TextPrompt):
        if not prompt.text:
            raise InvalidRequest(prompt.field, "prompt is empty")
        num_chars = len(prompt.text)
    else:
        _check_chat(prompt, limits)
        num_chars = sum(len(message.content) for message in prompt.messages)
    if not cut and num_chars > limits.max_model_len * MAX_CHARS_PER_TOKEN:
        raise InvalidRequest(
            prompt.field,
            f"the prompt has {num_chars} characters, which cannot fit the context of "
            f"{limits.max_model_len} tokens",
        )


def _check_chat(chat: ChatPrompt, limits: Limits) -> None:
    if not limits.has_chat_template:
        raise InvalidRequest("chat", "the model has no chat template; use prompt instead")
    if not chat.messages:
        raise InvalidRequest("chat.messages", "chat has no messages")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequest(f"chat.messages[{index}].role", "role is empty")
    if chat.add_generation_prompt and chat.continue_final_message:
        raise InvalidRequest(
            "chat.continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other",
        )


def _check_stops(sampling: SamplingCall, limits: Limits) -> None:
    field = "sampling_params.stop"
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            field, f"{len(sampling.stop)} stop strings, at most {MAX_STOP_STRINGS} are allowed"
        )
    for index, stop in enumerate(sampling.stop):
        if not stop:
            raise InvalidRequest(f"{field}[{index}]", "a stop string is empty")
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"{field}[{index}]",
                f"a stop string has {len(stop)} characters, at most {MAX_STOP_CHARS} are allowed",
            )
    field = "sampling_params.stop_token_ids"
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            field,
            f"{len(sampling.stop_token_ids)} stop tokens, at most {MAX_STOP_TOKEN_IDS} are allowed",
        )
    check_ids(field, sampling.stop_token_ids, limits.vocab_size)


def _sampling_params(call: SamplingCall, limits: Limits) -> SamplingParams:
    defaults = limits.default_sampling

    def given(value: float | None, name: str, fallback: float) -> float:
        return value if value is not None else defaults.get(name, fallback)

    temperature = given(call.temperature, "temperature", 1.0)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidRequest(
            "sampling_params.temperature",
            f"temperature is {temperature:g}, must be finite and at least 0",
        )
    top_p = given(call.top_p, "top_p", 1.0)
    if not 0 < top_p <= 1:
        raise InvalidRequest("sampling_params.top_p", f"top_p is {top_p:g}, must be in (0, 1]")
    top_k = int(given(call.top_k, "top_k", 0))
    if top_k < -1:
        raise InvalidRequest(
            "sampling_params.top_k", f"top_k is {top_k}, must be at least 0, or -1 for all"
        )
    min_p = given(call.min_p, "min_p", 0.0)
    if not 0 <= min_p <= 1:
        raise InvalidRequest("sampling_params.min_p", f"min_p is {min_p:g}, must be in [0, 1]")
    return SamplingParams(
        max_tokens=0,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=min_p,
        seed=call.seed if call.seed is not None else secrets.randbits(64),
        stop_token_ids=call.stop_token_ids,
        ignore_eos=call.ignore_eos,
        logprobs=call.logprobs,
        prompt_logprobs=call.prompt_logprobs,
        structured_output=structured_output(call, limits.eos_token_ids),
        **logits_params(call, defaults, limits.vocab_size),
    )
