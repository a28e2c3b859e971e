"""The n sequences of one request.

Each is a RequestState of its own: a sequence like any to the engine and to the
tokenizer, preempted, stopped and replayed alone. They share the job, the outbox, the
place at the door and the deadline. The first, of index 0, stands for the request: it
is admitted, tokenized and measured, and the others begin with its prompt's KV.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import msgspec

from frontend.request import RequestState
from frontend.stream import Finish, SequenceEnd
from pagewire.errors import InvalidRequest
from pagewire.types import MAX_SEQUENCES, FinishReason, Timings, Usage
from pagewire.wire.codec import pack_ids
from pagewire.wire.messages import Add

if TYPE_CHECKING:
    from collections.abc import Callable

    from frontend.request import SamplingCall


def check_n(call: SamplingCall, *, streams: bool) -> tuple[int, int]:
    """n and best_of. Raises InvalidRequest."""
    n, best_of = call.n, call.n if call.best_of is None else call.best_of
    if not 1 <= n <= MAX_SEQUENCES:
        raise InvalidRequest("sampling_params.n", f"n is {n}, must be from 1 to {MAX_SEQUENCES}")
    field = "sampling_params.best_of"
    if not n <= best_of <= MAX_SEQUENCES:
        raise InvalidRequest(
            field, f"best_of is {best_of}, must be from n, which is {n}, to {MAX_SEQUENCES}"
        )
    if streams and best_of > n:
        raise InvalidRequest(
            field,
            f"best_of is {best_of} and n is {n}: which are best is known at the end, so a stream "
            "has none to send",
        )
    return n, best_of


def branches_of(state: RequestState) -> tuple[RequestState, ...]:
    """All sequences of the request that `state` is one of, in order of index."""
    return state.branches or (state,)


def split(first: RequestState, next_id: Callable[[], int]) -> tuple[RequestState, ...]:
    """Makes the others, once the first is ready to be sent; returns all. The engine makes
    them of a beam search."""
    job = first.job
    if job.sampling.beam is not None:
        return (first,)
    if job.best_of > job.n:
        assert first.sampling is not None
        if first.sampling.logprobs is None:
            first.sampling = msgspec.structs.replace(first.sampling, logprobs=0)
    return branch_out(first, next_id)


def branch_out(first: RequestState, next_id: Callable[[], int]) -> tuple[RequestState, ...]:
    """Makes as many others as the job wants; returns all."""
    job = first.job
    if job.best_of > 1:
        others = [_branch(first, index, next_id()) for index in range(1, job.best_of)]
        first.branches = (first, *others)
        for other in others:
            other.branches = first.branches
    return branches_of(first)


def _branch(first: RequestState, index: int, internal_id: int) -> RequestState:
    assert first.sampling is not None
    return RequestState(
        internal_id=internal_id,
        engine_id=internal_id,
        index=index,
        job=first.job,
        outbox=first.outbox,
        reservation=first.reservation,
        share=first.share,
        arrived_at=first.arrived_at,
        deadline=first.deadline,
        prompt_ids=first.prompt_ids,
        echo=first.echo,
        bad_words=first.bad_words,
        # The prompt's are told once.
        sampling=msgspec.structs.replace(first.sampling, prompt_logprobs=None),
    )


def add_message(state: RequestState, engine_id: int, epoch: int, now: float) -> Add:
    """What begins the sequence at the engine of `epoch`, or resumes it as it stands."""
    assert state.sampling is not None
    job, sampling, output_ids = state.job, state.sampling, state.output_ids
    if output_ids:
        # They came with the first token.
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return Add(
        request_id=engine_id,
        epoch=epoch,
        token_ids=pack_ids(itertools.chain(state.prompt_ids, output_ids)),
        num_output_tokens=len(output_ids),
        sampling=sampling,
        deadline_ms=None if state.deadline is None else (state.deadline - now) * 1000,
        priority=job.priority,
        cache_salt=job.cache_salt,
        tenant=job.tenant,
        skip_prefix_cache=job.skip_prefix_cache,
        sample_index=state.index,
        leader_id=branches_of(state)[0].engine_id if state.index else None,
        adapter="" if job.adapter is None else job.adapter.name,
        adapter_digest=b"" if job.adapter is None else job.adapter.digest,
    )


def end_sequence(
    state: RequestState, reason: FinishReason, num_tokens: int, stop_string: str | None
) -> Finish | None:
    """One sequence has ended well; returns the request's outcome if it was the last."""
    assert state.sampling is not None
    stop_token = state.stop_token_id if stop_string is None else None
    is_eos = stop_token is not None and stop_token not in state.sampling.stop_token_ids
    state.end = SequenceEnd(
        index=state.index,
        reason=reason,
        num_tokens=num_tokens,
        stop_string=stop_string,
        stop_token_id=None if is_eos else stop_token,
        eos_token_id=stop_token if is_eos else None,
        called_tools=state.text.has_calls,
        beam_score=state.beam_score,
    )
    branches = branches_of(state)
    ends = tuple(branch.end for branch in branches if branch.end is not None)
    if len(ends) < len(branches):
        return None
    first = branches[0]
    return Finish(
        request_id=first.job.request_id,
        model=first.job.model,
        outputs=ends if first.job.best_of == first.job.n else _best(branches),
        usage=Usage(
            prompt_tokens=len(first.prompt_ids),
            completion_tokens=sum(end.num_tokens for end in ends),
            cached_tokens=first.num_cached_tokens,
        ),
        timings=Timings(
            queue=first.queue_s,
            prefill=first.prefill_s,
            decode=max(branch.decode_s for branch in branches),
        ),
        seed=state.sampling.seed,
    )


def _best(branches: tuple[RequestState, ...]) -> tuple[SequenceEnd, ...]:
    """The n whose tokens have the highest mean log probability, best first."""
    scored: list[tuple[float, SequenceEnd]] = []
    for branch in branches:
        assert branch.end is not None
        positions = branch.logprobs.output(0, branch.end.num_tokens)
        mean = math.fsum(position.logprob for position in positions) / len(positions)
        scored.append((mean, branch.end))
    scored.sort(key=lambda it: it[0], reverse=True)
    return tuple(end for _, end in scored[: branches[0].job.n])
