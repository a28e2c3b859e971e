"""Protobuf <-> plain values; the only file of the frontend that knows messages.

Pure functions. What leaves here towards the rest of the frontend is plain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration

from frontend.request import (
    ChatMessage,
    ChatPrompt,
    GenerateCall,
    IdsPrompt,
    Prompt,
    SamplingCall,
    StructuredOutputCall,
    TextPrompt,
)
from pagewire.errors import InvalidRequest
from pagewire.types import FinishReason
from pagewire.v1 import (
    admin_pb2,
    common_pb2,
    detokenizer_pb2,
    inference_pb2,
    model_pb2,
    tokenizer_pb2,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

    from frontend.detokenize_stream import Batch
    from frontend.dispatcher import Stats
    from frontend.request import RequestState
    from frontend.stream import Delta, Finish, SequenceEnd
    from pagewire.types import Timings, Usage
    from pagewire.wire.messages import PositionLogprobs, Ready

PROMPT_TAIL = 16
"""Prompt ids that the detokenizer gets: enough for the first output to join on."""

_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


# Clients' requests.


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
        streams=isinstance(request, inference_pb2.GenerateStreamRequest),
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
        messages=tuple(ChatMessage(m.role, m.content) for m in chat.messages),
        add_generation_prompt=_optional(chat, "add_generation_prompt"),
        continue_final_message=_optional(chat, "continue_final_message"),
        template_kwargs=kwargs,
    )


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


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


# Answers to clients.


def delta_frame(delta: Delta) -> inference_pb2.GenerateStreamResponse:
    frame = inference_pb2.GenerateStreamResponse(
        delta=inference_pb2.Delta(index=delta.index, text=delta.text, token_ids=delta.token_ids)
    )
    _fill_logprobs(frame.delta.logprobs, delta.logprobs)
    if delta.prompt_logprobs:
        _fill_logprobs(frame.delta.prompt_logprobs.positions, delta.prompt_logprobs)
    return frame


def final_frame(finish: Finish) -> inference_pb2.GenerateStreamResponse:
    return inference_pb2.GenerateStreamResponse(
        final=inference_pb2.Final(
            request_id=finish.request_id,
            model=finish.model,
            outputs=[
                inference_pb2.SequenceFinish(
                    index=index, finish_reason=_REASONS[end.reason], stop_match=_stop_match(end)
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
                finish_reason=_REASONS[end.reason],
                stop_match=_stop_match(end),
            )
            for index, (output, end) in enumerate(zip(outputs, finish.outputs, strict=True))
        ],
        usage=_usage(finish.usage),
        timings=_timings(finish.timings),
        seed=finish.seed,
    )
    for output, sequence in zip(outputs, response.outputs, strict=True):
        _fill_logprobs(sequence.logprobs, output.logprobs)
    if outputs[0].prompt_logprobs:
        _fill_logprobs(response.prompt_logprobs.positions, outputs[0].prompt_logprobs)
    return response


def cancel_response() -> inference_pb2.CancelResponse:
    return inference_pb2.CancelResponse()


def model(ready: Ready, *, has_chat_template: bool) -> model_pb2.Model:
    return model_pb2.Model(
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


def list_models_response(models: list[model_pb2.Model]) -> model_pb2.ListModelsResponse:
    return model_pb2.ListModelsResponse(models=models)


def get_model_response(found: model_pb2.Model) -> model_pb2.GetModelResponse:
    return model_pb2.GetModelResponse(model=found)


def drain_response(num_unfinished: int) -> admin_pb2.DrainResponse:
    return admin_pb2.DrainResponse(num_unfinished=num_unfinished)


def reset_prefix_cache_response(num_blocks_freed: int) -> admin_pb2.ResetPrefixCacheResponse:
    return admin_pb2.ResetPrefixCacheResponse(num_blocks_freed=num_blocks_freed)


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
        response.num_blocks = stats.ready.num_blocks
    if engine is not None:
        response.num_requests_running = engine.num_running
        response.num_requests_waiting = engine.num_waiting
        response.num_free_blocks = engine.num_free_blocks
        response.kv_cache_usage = stats.kv_cache_usage
        response.num_preemptions = engine.total_preemptions
        response.prefix_cache_queries = engine.prefix_cache_queries
        response.prefix_cache_hits = engine.prefix_cache_hits
    return response


def _stop_match(end: SequenceEnd) -> common_pb2.StopMatch | None:
    if end.stop_string is not None:
        return common_pb2.StopMatch(stop_string=end.stop_string)
    if end.stop_token_id is not None:
        return common_pb2.StopMatch(stop_token_id=end.stop_token_id)
    if end.eos_token_id is not None:
        return common_pb2.StopMatch(eos_token_id=end.eos_token_id)
    return None


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


# To and from tokenizer_svc.


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    has_chat_template: bool
    vocab_size: int


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
    return TokenizerInfo(response.has_chat_template, response.vocab_size)


def tokenize_request(prompt: TextPrompt) -> tokenizer_pb2.TokenizeRequest:
    return tokenizer_pb2.TokenizeRequest(text=prompt.text)


def piece_request(text: str) -> tokenizer_pb2.TokenizeRequest:
    return tokenizer_pb2.TokenizeRequest(text=text, add_special_tokens=False)


def chat_template_request(prompt: ChatPrompt) -> tokenizer_pb2.ApplyChatTemplateRequest:
    chat = common_pb2.ChatInput(
        messages=[common_pb2.ChatMessage(role=m.role, content=m.content) for m in prompt.messages],
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
    )
    if prompt.template_kwargs is not None:
        chat.template_kwargs.update(prompt.template_kwargs)
    return tokenizer_pb2.ApplyChatTemplateRequest(chat=chat)


def token_ids(
    response: tokenizer_pb2.TokenizeResponse | tokenizer_pb2.ApplyChatTemplateResponse,
) -> list[int]:
    return list(response.token_ids)


def detokenize_request(batch: Batch) -> detokenizer_pb2.DetokenizeStreamRequest:
    sequences: list[int] = []
    counts: list[int] = []
    ids: list[int] = []
    finished: list[bool] = []
    for row in batch.rows:
        sequences.append(row.state.internal_id)
        counts.append(row.num_tokens - row.start)
        ids += row.state.output_ids[row.start : row.num_tokens]
        finished.append(row.finished)
    return detokenizer_pb2.DetokenizeStreamRequest(
        step=batch.number,
        opens=[_open_sequence(state) for state in batch.opens],
        sequences=sequences,
        counts=counts,
        token_ids=ids,
        finished=finished,
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
    )
