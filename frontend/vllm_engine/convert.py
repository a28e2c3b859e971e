"""Messages of vllm.grpc.engine to and from plain values; no other file reads or makes them.

The protocol's own rule for a sampling field that is unset, or 0 where 0 makes no sense, is
the neutral value: the gateway has filled in the model's defaults, which GetModelInfo tells.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_proto.generated import common_pb2

from frontend.request import (
    GenerateCall,
    IdsPrompt,
    SamplingCall,
    StructuredOutputCall,
    TextPrompt,
)
from pagewire.errors import InvalidRequest
from pagewire.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from frontend.dispatcher import Stats
    from frontend.request import Prompt
    from frontend.stream import Delta, Finish, SequenceEnd
    from frontend.validate import Limits
    from pagewire.wire.messages import PositionLogprobs, Ready

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_SERVED_FIELDS = frozenset(
    ("request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank")
)
_STRUCTURED = re.compile(r"sampling_params\.structured_output(?:\.(\w+))?")
_FIELD_NAMES = {"prompt": "text", "prompt_token_ids": "tokenized.input_ids"}


def generate_call(request: vllm_engine_pb2.GenerateRequest) -> GenerateCall:
    """Raises InvalidRequest for a field that is set and cannot be obeyed."""
    for field, _ in request.ListFields():
        if field.name not in _SERVED_FIELDS:
            raise InvalidRequest(field.name, f"{field.name} is not supported by this server")
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        raise InvalidRequest(
            "data_parallel_rank",
            f"data_parallel_rank is {request.data_parallel_rank}, and rank 0 is the only one",
        )
    return GenerateCall(
        prompt=_prompt(request),
        sampling=_sampling(request.sampling_params),
        request_id=request.request_id or None,
        return_token_ids=True,
        streams=request.stream,
    )


def wants_stream(request: vllm_engine_pb2.GenerateRequest) -> bool:
    wanted: bool = request.stream
    return wanted


def field_name(path: str) -> str:
    """From a path of pagewire.v1.GenerateRequest to that of this protocol's."""
    constraint = _STRUCTURED.match(path)
    if constraint is not None:
        return f"sampling_params.{constraint[1] or 'constraint'}{path[constraint.end() :]}"
    return _FIELD_NAMES.get(path, path)


def abort_ids(request: vllm_engine_pb2.AbortRequest) -> list[str]:
    return list(request.request_ids)


def abort_response() -> vllm_engine_pb2.AbortResponse:
    return vllm_engine_pb2.AbortResponse()


def chunk(
    delta: Delta, prompt_ids: Sequence[int], num_cached_tokens: int
) -> vllm_engine_pb2.GenerateResponse | None:
    """None for a delta of text alone, of which this protocol has none."""
    if not (delta.token_ids or delta.logprobs or delta.prompt_logprobs):
        return None
    response = vllm_engine_pb2.GenerateResponse()
    message = response.chunk
    message.token_ids.extend(delta.token_ids)
    message.prompt_tokens = len(prompt_ids)
    # Of this chunk: the receiver adds them up.
    message.completion_tokens = len(delta.token_ids)
    message.cached_tokens = num_cached_tokens
    message.index = delta.index
    _fill_output_logprobs(message, delta.logprobs)
    _fill_input_logprobs(message, delta.prompt_logprobs, prompt_ids)
    return response


def completions(
    finish: Finish, outputs: Sequence[Delta] | None, prompt_ids: Sequence[int]
) -> list[vllm_engine_pb2.GenerateResponse]:
    """One for each sequence; `outputs` are theirs, None where chunks have brought them."""
    return [
        _complete(index, end, finish, None if outputs is None else outputs[index], prompt_ids)
        for index, end in enumerate(finish.outputs)
    ]


def health_response(*, healthy: bool) -> vllm_engine_pb2.HealthCheckResponse:
    return vllm_engine_pb2.HealthCheckResponse(
        healthy=healthy, message="serving" if healthy else "not serving"
    )


def model_info(limits: Limits, ready: Ready) -> vllm_engine_pb2.GetModelInfoResponse:
    # Paths stay empty: the model's files are not this process's, and no gateway's either.
    return vllm_engine_pb2.GetModelInfoResponse(
        is_generation=True,
        max_context_length=limits.max_model_len,
        vocab_size=limits.vocab_size,
        served_model_name=limits.model,
        architectures=[ready.architecture],
        eos_token_ids=limits.eos_token_ids,
        max_req_input_len=limits.max_model_len - 1,
        default_sampling_params_json=json.dumps(dict(limits.default_sampling)),
    )


def server_info(
    stats: Stats, *, uptime_s: float, last_received: float
) -> vllm_engine_pb2.GetServerInfoResponse:
    """`last_received` is the time of the last Generate, in seconds since 1970, 0 before it."""
    info = vllm_engine_pb2.GetServerInfoResponse(
        active_requests=stats.num_requests_in_flight,
        is_paused=stats.draining,
        last_receive_timestamp=last_received,
        uptime_seconds=uptime_s,
        # The protocol's name for who speaks it.
        server_type="vllm-grpc",
        data_parallel_size=1,
        max_num_seqs=_max_num_seqs(stats),
        constrained_decoding_start="first_token",
    )
    if stats.ready is not None:
        info.block_size = stats.ready.block_size
        info.model_dtype = stats.ready.dtype
    return info


def loads(
    request: vllm_engine_pb2.GetLoadsRequest,
    stats: Stats,
    *,
    num_queued_tokens: int,
    version: str,
    now: datetime,
) -> vllm_engine_pb2.GetLoadsResponse:
    response = vllm_engine_pb2.GetLoadsResponse(
        timestamp=now.isoformat(), version=version, dp_rank_count=1
    )
    if request.HasField("dp_rank") and request.dp_rank != 0:
        return response
    load = response.loads.add()
    load.max_running_requests = _max_num_seqs(stats)
    load.num_waiting_uncached_tokens = num_queued_tokens
    engine, ready = stats.engine, stats.ready
    if engine is None or ready is None:
        return response
    load.num_running_reqs = engine.num_running
    load.num_waiting_reqs = engine.num_waiting
    load.num_total_reqs = engine.num_running + engine.num_waiting
    load.num_used_tokens = (engine.num_blocks - engine.num_free_blocks) * ready.block_size
    load.max_total_num_tokens = engine.num_blocks * ready.block_size
    load.token_usage = load.utilization = stats.kv_cache_usage
    if engine.prefix_cache_queries:
        load.cache_hit_rate = engine.prefix_cache_hits / engine.prefix_cache_queries
    return response


def flush_response(num_blocks_freed: int) -> common_pb2.FlushCacheResponse:
    return common_pb2.FlushCacheResponse(
        success=True, message=f"{num_blocks_freed} blocks are free of cached KV"
    )


def _prompt(request: vllm_engine_pb2.GenerateRequest) -> Prompt | None:
    kind = request.WhichOneof("input")
    if kind == "tokenized":
        return IdsPrompt(list(request.tokenized.input_ids))
    return TextPrompt(request.text) if kind == "text" else None


def _sampling(params: vllm_engine_pb2.SamplingParams) -> SamplingCall:
    seed = _optional(params, "seed")
    return SamplingCall(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        # Signed here, 64 bits everywhere else; -1 is vLLM's word for none.
        seed=None if seed in (None, -1) else seed % 2**64,
        max_tokens=_optional(params, "max_tokens"),
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
        include_stop_str_in_output=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(params.logit_bias.items()),
        logprobs=_optional(params, "logprobs"),
        prompt_logprobs=_optional(params, "prompt_logprobs"),
        n=params.n or 1,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        truncate_prompt_tokens=_optional(params, "truncate_prompt_tokens"),
        structured_output=_structured_output(params),
    )


def _structured_output(params: vllm_engine_pb2.SamplingParams) -> StructuredOutputCall | None:
    # grammar_from_first_token asks for what is always so here.
    kind = params.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "structural_tag":
        raise InvalidRequest(
            "sampling_params.structural_tag", "structural_tag is not supported by this server"
        )
    return StructuredOutputCall(
        kind=kind,
        text=getattr(params, kind) if kind in ("json_schema", "regex", "grammar") else "",
        choices=tuple(params.choice.choices),
        json_object=params.json_object,
    )


def _complete(
    index: int,
    end: SequenceEnd,
    finish: Finish,
    output: Delta | None,
    prompt_ids: Sequence[int],
) -> vllm_engine_pb2.GenerateResponse:
    response = vllm_engine_pb2.GenerateResponse()
    message = response.complete
    message.index = index
    message.finish_reason = _REASONS[end.reason]
    message.prompt_tokens = finish.usage.prompt_tokens
    message.completion_tokens = end.num_tokens
    message.cached_tokens = finish.usage.cached_tokens
    if end.stop_string is not None:
        message.matched_stop_str = end.stop_string
    elif end.stop_token_id is not None:
        message.matched_token_id = end.stop_token_id
    if output is not None:
        message.output_ids.extend(output.token_ids)
        _fill_output_logprobs(message, output.logprobs)
        _fill_input_logprobs(message, output.prompt_logprobs, prompt_ids)
    return response


def _fill_output_logprobs(
    message: vllm_engine_pb2.GenerateStreamChunk | vllm_engine_pb2.GenerateComplete,
    positions: Sequence[PositionLogprobs],
) -> None:
    if not positions:
        return
    target = message.output_logprobs
    for position in positions:
        target.token_ids.append(position.token_id)
        target.token_logprobs.append(position.logprob)
    _fill_top(target, positions)


def _fill_input_logprobs(
    message: vllm_engine_pb2.GenerateStreamChunk | vllm_engine_pb2.GenerateComplete,
    positions: Sequence[PositionLogprobs],
    prompt_ids: Sequence[int],
) -> None:
    if not positions:
        return
    target = message.input_logprobs
    target.token_ids.extend(prompt_ids)
    for position in positions:
        value = target.token_logprobs.add()
        if position.token_id >= 0:
            value.value = position.logprob
    _fill_top(target, positions)


def _fill_top(target: Any, positions: Sequence[PositionLogprobs]) -> None:
    """One a position, or none where only the tokens' own were asked for."""
    if not any(position.top_ids for position in positions):
        return
    for position in positions:
        top = target.top_logprobs.add()
        top.token_ids.extend(position.top_ids)
        top.values.extend(position.top_logprobs)


def _max_num_seqs(stats: Stats) -> int:
    """Over all engines that are ready."""
    return sum(link.ready.max_num_seqs for link in stats.engines if link.ready is not None)


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None
