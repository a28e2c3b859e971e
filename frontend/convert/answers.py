"""What clients and operators are told, from plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration

from pagewire.types import FinishReason
from pagewire.v1 import (
    admin_pb2,
    common_pb2,
    inference_pb2,
    model_pb2,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

    from frontend.adapters import AdapterStatus, AdapterSurvey
    from frontend.dispatcher import Stats
    from frontend.engine_link import EngineLink
    from frontend.stream import Delta, Finish, Queued, SequenceEnd
    from pagewire.tools import ToolCall
    from pagewire.types import Timings, Usage
    from pagewire.wire.messages import AdapterInfo, PositionLogprobs, Ready

_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


def queued_frame(queued: Queued) -> inference_pb2.GenerateStreamResponse:
    frame = inference_pb2.GenerateStreamResponse(
        queued=inference_pb2.Queued(position=queued.position)
    )
    if queued.wait_s is not None:
        frame.queued.estimated_wait.CopyFrom(_duration(queued.wait_s))
    return frame


def delta_frame(delta: Delta) -> inference_pb2.GenerateStreamResponse:
    # In place: made by their constructors, messages are copied into each other.
    frame = inference_pb2.GenerateStreamResponse()
    message = frame.delta
    message.text = delta.text
    if delta.index:
        message.index = delta.index
    if delta.token_ids:
        message.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        _fill_logprobs(message.logprobs, delta.logprobs)
    if delta.prompt_logprobs:
        _fill_logprobs(message.prompt_logprobs.positions, delta.prompt_logprobs)
    if delta.tool_calls:
        _fill_tool_calls(message.tool_calls, delta.tool_calls)
    return frame


def final_frame(finish: Finish) -> inference_pb2.GenerateStreamResponse:
    return inference_pb2.GenerateStreamResponse(
        final=inference_pb2.Final(
            request_id=finish.request_id,
            model=finish.model,
            outputs=[
                inference_pb2.SequenceFinish(
                    index=index,
                    finish_reason=_reason(end),
                    stop_match=_stop_match(end),
                    beam_score=end.beam_score,
                )
                for index, end in enumerate(finish.outputs)
            ],
            usage=_usage(finish.usage),
            timings=_timings(finish.timings),
            seed=finish.seed,
        )
    )


def generate_response(outputs: list[Delta], finish: Finish) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(
        request_id=finish.request_id,
        model=finish.model,
        outputs=[
            inference_pb2.GeneratedSequence(
                index=index,
                text=output.text,
                token_ids=output.token_ids,
                finish_reason=_reason(end),
                stop_match=_stop_match(end),
                beam_score=end.beam_score,
            )
            for index, (output, end) in enumerate(zip(outputs, finish.outputs, strict=True))
        ],
        usage=_usage(finish.usage),
        timings=_timings(finish.timings),
        seed=finish.seed,
    )
    for output, sequence in zip(outputs, response.outputs, strict=True):
        _fill_logprobs(sequence.logprobs, output.logprobs)
        _fill_tool_calls(sequence.tool_calls, output.tool_calls)
    if outputs[0].prompt_logprobs:
        _fill_logprobs(response.prompt_logprobs.positions, outputs[0].prompt_logprobs)
    return response


def cancel_response() -> inference_pb2.CancelResponse:
    return inference_pb2.CancelResponse()


def model(
    ready: Ready, adapter: AdapterInfo | None = None, *, has_chat_template: bool
) -> model_pb2.Model:
    """The model itself, or an adapter of it."""
    found = model_pb2.Model(
        name=ready.model_name,
        architecture=ready.architecture,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        dtype=ready.dtype,
        device=ready.device,
        eos_token_ids=ready.eos_token_ids,
        num_blocks=ready.num_blocks,
        block_size=ready.block_size,
        max_num_seqs=ready.max_num_seqs,
        max_num_batched_tokens=ready.max_num_batched_tokens,
        has_chat_template=has_chat_template,
    )
    if adapter is not None:
        found.name, found.parent = adapter.name, ready.model_name
    return found


def list_models_response(models: list[model_pb2.Model]) -> model_pb2.ListModelsResponse:
    return model_pb2.ListModelsResponse(models=models)


def get_model_response(found: model_pb2.Model) -> model_pb2.GetModelResponse:
    return model_pb2.GetModelResponse(model=found)


def drain_response(num_unfinished: int) -> admin_pb2.DrainResponse:
    return admin_pb2.DrainResponse(num_unfinished=num_unfinished)


def reset_prefix_cache_response(num_blocks_freed: int) -> admin_pb2.ResetPrefixCacheResponse:
    return admin_pb2.ResetPrefixCacheResponse(num_blocks_freed=num_blocks_freed)


def load_adapter_response(name: str, found: AdapterSurvey) -> admin_pb2.LoadAdapterResponse:
    loaded = (status for status in found.adapters if status.info.name == name)
    return admin_pb2.LoadAdapterResponse(adapter=next(map(_adapter, loaded), None))


def unload_adapter_response() -> admin_pb2.UnloadAdapterResponse:
    return admin_pb2.UnloadAdapterResponse()


def list_adapters_response(found: AdapterSurvey) -> admin_pb2.ListAdaptersResponse:
    return admin_pb2.ListAdaptersResponse(
        adapters=map(_adapter, found.adapters), max_adapters=found.max_loras
    )


def _adapter(status: AdapterStatus) -> admin_pb2.Adapter:
    info = status.info
    return admin_pb2.Adapter(
        name=info.name,
        path=info.path,
        rank=info.rank,
        num_requests_in_flight=status.num_requests,
        is_static=info.is_static,
    )


def stats_response(stats: Stats) -> admin_pb2.GetStatsResponse:
    engine = stats.engine
    response = admin_pb2.GetStatsResponse(
        num_requests_in_flight=stats.num_requests_in_flight,
        engine_ready=stats.ready is not None,
        draining=stats.draining,
        engine_step=stats.engine_step,
    )
    if stats.ready is not None:
        response.engine_epoch = stats.ready.epoch
        response.engine_pid = stats.ready.pid
        response.num_blocks = stats.num_blocks
    if engine is not None:
        response.num_requests_running = engine.num_running
        response.num_requests_waiting = engine.num_waiting
        response.num_free_blocks = engine.num_free_blocks
        response.kv_cache_usage = stats.kv_cache_usage
        response.num_preemptions = engine.total_preemptions
        response.prefix_cache_queries = engine.prefix_cache_queries
        response.prefix_cache_hits = engine.prefix_cache_hits
    for link in stats.engines:
        _fill_engine_stats(response.engines.add(), link)
    return response


def _fill_engine_stats(target: admin_pb2.EngineStats, link: EngineLink) -> None:
    target.address = link.address
    target.ready = link.ready is not None and not link.refused
    target.draining = link.draining or link.withdrawn
    target.num_requests_in_flight = link.num_requests
    if link.ready is not None:
        target.epoch = link.ready.epoch
        target.step = link.client.last_step
        target.pid = link.ready.pid
        target.num_blocks = link.ready.num_blocks
    if link.stats is not None:
        target.num_requests_running = link.stats.num_running
        target.num_requests_waiting = link.stats.num_waiting
        target.num_free_blocks = link.stats.num_free_blocks


def _stop_match(end: SequenceEnd) -> common_pb2.StopMatch | None:
    if end.stop_string is not None:
        return common_pb2.StopMatch(stop_string=end.stop_string)
    if end.stop_token_id is not None:
        return common_pb2.StopMatch(stop_token_id=end.stop_token_id)
    if end.eos_token_id is not None:
        return common_pb2.StopMatch(eos_token_id=end.eos_token_id)
    return None


def _reason(end: SequenceEnd) -> common_pb2.FinishReason:
    if end.called_tools and end.reason is FinishReason.STOP:
        return common_pb2.FINISH_REASON_TOOL_CALLS
    return _REASONS[end.reason]


def _fill_tool_calls(
    target: RepeatedCompositeFieldContainer[common_pb2.ToolCall], calls: Sequence[ToolCall]
) -> None:
    for call in calls:
        target.add(id=call.id, name=call.name, arguments=call.arguments)


def _fill_logprobs(
    target: RepeatedCompositeFieldContainer[common_pb2.PositionLogprobs],
    positions: Sequence[PositionLogprobs],
) -> None:
    # In place and field by field: a long prompt has 100 000 of these, and messages made
    # by their constructors are copied into each other.
    for position in positions:
        message = target.add()
        if position.token_id < 0:
            continue
        token = message.token
        token.token_id = position.token_id
        token.logprob = position.logprob
        token.rank = position.rank
        add, values = message.top.add, position.top_logprobs
        rank, last = 0, None
        for place, token_id in enumerate(position.top_ids):
            value = values[place]
            if value != last:  # equally likely tokens share a rank
                rank, last = place + 1, value
            top = add()
            top.token_id = token_id
            top.logprob = value
            top.rank = rank


def _usage(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _timings(timings: Timings) -> common_pb2.Timings:
    return common_pb2.Timings(
        queue=_duration(timings.queue),
        prefill=_duration(timings.prefill),
        decode=_duration(timings.decode),
    )


def _duration(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
