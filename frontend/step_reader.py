"""What a step of an engine says, taken into the record of the requests it is of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from frontend.beam import take_beams
from frontend.engine_client import RETRY_AFTER_S
from pagewire.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from pagewire.types import FinishReason
from pagewire.wire.codec import unpack_counts, unpack_ids, unpack_request_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from frontend.detokenize_stream import DetokenizeStream
    from frontend.engine_link import EngineLink
    from frontend.metrics import Metrics
    from frontend.request import RequestState
    from pagewire.errors import PagewireError
    from pagewire.wire.messages import Beam, Finished, Started, StepOutput

DEADLINE_SLACK_S = 0.25
"""The engine may see a deadline this much before the frontend's own timer."""


class StepEvents(Protocol):
    """What of a step is not for the record alone."""

    def started(self, state: RequestState) -> None:
        """The first sequence of a request has left the engine's queue, for the first time."""

    def take_back(self, state: RequestState) -> bool:
        """The engine gave a request back unasked. Whether it goes on elsewhere."""


class StepReader:
    def __init__(
        self,
        metrics: Metrics,
        text_stream: DetokenizeStream,
        events: StepEvents,
        new_id: Callable[[], int],
    ) -> None:
        self._metrics = metrics
        self._text_stream = text_stream
        self._events = events
        self._new_id = new_id

    def read(self, link: EngineLink, output: StepOutput, now: float) -> int:
        """One pass over the step's columns; its ids leave in one message. Returns the
        number of tokens taken."""
        for started in output.started:
            self._start(link, started)
        self._take_logprobs(link, output)
        num_tokens = self._take_rows(link, output, now)
        for finished in output.finished:
            self._finish(link, finished, now)
        for internal_id in output.unknown_aborts:
            self._abort_answered(link, internal_id, now)
        self._text_stream.flush()
        return num_tokens

    def _take_logprobs(self, link: EngineLink, output: StepOutput) -> None:
        for logprobs in output.logprobs:
            state = link.live.get(logprobs.request_id)
            if state is not None:
                state.logprobs.add(logprobs)

    def _take_rows(self, link: EngineLink, output: StepOutput, now: float) -> int:
        """Appends each row's ids to its request; returns the number taken."""
        live, push = link.live, self._text_stream.push
        ids = unpack_ids(output.token_ids)
        gaps: dict[float, int] = {}
        end = taken = 0
        for internal_id, count in zip(
            unpack_request_ids(output.request_ids), unpack_counts(output.counts), strict=True
        ):
            begin, end = end, end + count
            state = live.get(internal_id)
            if state is None or count == 0:
                continue
            if count == 1:
                state.output_ids.append(ids[begin])
            else:
                state.output_ids += ids[begin:end]
            taken += count
            if state.first_token_at:
                gap = now - state.last_token_at
                gaps[gap] = gaps.get(gap, 0) + 1
            else:
                self._first_token(state, now)
            state.last_token_at = now
            push(state)
        if gaps and self._metrics.model is not None:
            self._metrics.model.token_gaps(gaps)
        return taken

    def _first_token(self, state: RequestState, now: float) -> None:
        state.first_token_at = now
        state.reservation.first_output()
        if self._metrics.model is not None and not state.index:
            self._metrics.model.first_token(state, now)

    def _start(self, link: EngineLink, started: Started) -> None:
        state = link.live.get(started.request_id)
        if state is not None and state.trace is not None:
            state.trace.started(started.queue_s)
        if state is None or state.started:
            return
        state.started = True
        state.num_cached_tokens = started.num_cached_tokens
        state.queue_s = started.queue_s
        if not state.index:
            self._events.started(state)
        if self._metrics.model is not None and not state.index:
            self._metrics.model.started(state)

    def _finish(self, link: EngineLink, finished: Finished, now: float) -> None:
        self._abort_answered(link, finished.request_id, now)
        state = link.live.get(finished.request_id)
        if state is None or state.engine_finished:
            return
        if finished.reason == FinishReason.ABORT and self._taken_back(state, finished, now):
            del link.live[finished.request_id]
            link.avoid()
            return
        state.engine_finished = True
        state.finish_reason = finished.reason
        state.stop_token_id = finished.stop_token_id
        state.num_preemptions = finished.num_preemptions
        if finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
            if state.num_adds == 1:
                state.num_cached_tokens = finished.num_cached_tokens
                state.queue_s = finished.queue_s
            state.prefill_s = finished.prefill_s
            state.decode_s = finished.decode_s
        else:
            state.error = _error_of(state, finished, now)
            if finished.deadline_missed and not state.started and not state.index:
                self._metrics.deadline_given_up()
        if finished.beams:
            self._take_beams(link, state, finished.beams, now)
        # The text of what came before goes out first, also before an error.
        self._text_stream.push(state)

    def _take_beams(
        self, link: EngineLink, state: RequestState, beams: Sequence[Beam], now: float
    ) -> None:
        """The sequences of a beam search, whose text is still to come."""
        self._first_token(state, now)
        for sequence in take_beams(state, beams, self._new_id, now):
            sequence.link = link
            link.live[sequence.engine_id] = sequence
            if sequence is not state:
                self._text_stream.open(sequence)
                self._text_stream.push(sequence)

    def _taken_back(self, state: RequestState, finished: Finished, now: float) -> bool:
        """Whether a request that the engine ended unasked goes on elsewhere: the engine
        shuts down, or had lost the connection."""
        if finished.deadline_missed or _is_due(state, now):
            return False
        return self._events.take_back(state)

    def _abort_answered(self, link: EngineLink, internal_id: int, now: float) -> None:
        sent_at = link.aborted.pop(internal_id, None)
        if sent_at is not None and self._metrics.model is not None:
            self._metrics.model.abort_answered(now - sent_at)


def _error_of(state: RequestState, finished: Finished, now: float) -> PagewireError:
    if finished.reason == FinishReason.ERROR and finished.field == "model":
        return _adapter_gone(state)
    if finished.reason == FinishReason.ERROR and finished.field:
        field = state.job.tools.field_at_fault(finished.field)
        return InvalidRequest(field, finished.error)
    if finished.reason == FinishReason.ERROR:
        return InternalError(finished.error or "the engine could not serve the request")
    if _is_due(state, now):
        return DeadlineExceeded("the deadline passed")
    if finished.deadline_missed:
        return DeadlineExceeded("the deadline could not be met any more")
    return Unavailable("engine_dead", "the engine ended the request", retry_after=RETRY_AFTER_S)


def _adapter_gone(state: RequestState) -> PagewireError:
    """It was unloaded, or another one loaded under its name, after the request was checked."""
    if state.num_adds == 1:
        return NotFound("model", state.job.model, field="model")
    return Unavailable(
        "engine_dead", f"the request was lost: the adapter {state.job.model!r} is gone"
    )


def _is_due(state: RequestState, now: float) -> bool:
    return state.deadline is not None and state.deadline - now < DEADLINE_SLACK_S
