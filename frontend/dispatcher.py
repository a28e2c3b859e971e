"""Who owns the requests: from admission to outcome, between engine, tokenizer and client.

    Generation (an RPC handler) --admit, launch--> Dispatcher --Add, Abort--> EngineClient
            ^                                        |   ^                        |
            +------ Outbox <---- text, stops --------+   +------- StepOutput -----+
                                     DetokenizeStream

All of it runs in one event loop, so that no state here needs a lock, and a
request that ends is aborted at the engine in the same turn of the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frontend.admission import Admission
from frontend.detokenize_stream import DetokenizeStream
from frontend.engine_client import RETRY_AFTER_S, EngineClient
from frontend.metrics import kv_cache_usage
from frontend.request import IdsPrompt, Job, RequestState
from frontend.stream import Finish, Outbox
from frontend.tokenizer_client import TokenizerClient
from frontend.validate import Limits, estimate_tokens, fit_context
from pagewire.errors import (
    AlreadyExists,
    Cancelled,
    ClientError,
    DeadlineExceeded,
    InternalError,
    NotFound,
    PagewireError,
    Unavailable,
)
from pagewire.types import FinishReason, Timings, Usage
from pagewire.wire.codec import pack_ids, unpack_counts, unpack_ids, unpack_request_ids
from pagewire.wire.messages import Add

if TYPE_CHECKING:
    from collections.abc import Callable

    from frontend.convert import TokenizerInfo
    from frontend.health import HealthBoard
    from frontend.metrics import Metrics
    from pagewire.config import FrontendConfig
    from pagewire.wire.messages import Finished, Ready, Started, StepOutput, StepStats

logger = logging.getLogger(__name__)

DEADLINE_SLACK_S = 0.25
"""The engine may see a deadline this much before the frontend's own timer."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What AdminService.GetStats tells."""

    num_requests_in_flight: int
    draining: bool
    engine_step: int
    ready: Ready | None
    engine: StepStats | None
    kv_cache_usage: float


class Dispatcher:
    def __init__(
        self,
        config: FrontendConfig,
        metrics: Metrics,
        health: HealthBoard,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._health = health
        self.admission = Admission(
            config.max_requests,
            config.max_queued_tokens,
            clock=clock,
            on_reject=metrics.admission_rejected,
        )
        self.engine = EngineClient(
            commands=config.engine_address,
            outputs_bind=config.outputs_bind,
            outputs_advertise=config.outputs_advertise,
            engine_timeout=config.engine_timeout,
            stall_timeout=config.stall_timeout,
            events=self,
            clock=clock,
        )
        self.tokenizer = TokenizerClient(
            config.tokenizer_address, max_message_bytes=config.max_message_mib * 2**20
        )
        self.text_stream = DetokenizeStream(self.tokenizer, self, clock=clock)
        self._tokenizer_info: TokenizerInfo | None = None
        self._limits: Limits | None = None
        self._engine_stats: StepStats | None = None
        self._next_id = itertools.count(1)
        self._admitted: dict[str, RequestState] = {}
        self._live: dict[int, RequestState] = {}
        """Those that the engine works on or whose text is still to come."""
        self._aborted: dict[int, float] = {}
        """Internal id -> when its Abort was sent, until the engine answers."""
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._watch_gauges()

    def _watch_gauges(self) -> None:
        watch = self._metrics.watch
        watch("pagewire_requests_in_flight", "Requests admitted.", lambda: self.admission.requests)
        watch(
            "pagewire_queued_tokens",
            "Prompt tokens that wait for their first output.",
            lambda: self.admission.queued_tokens,
        )
        watch(
            "pagewire_tokenizer_calls",
            "Calls to the tokenizer in flight.",
            lambda: self.tokenizer.num_tokenizing,
        )
        watch(
            "pagewire_tokenizer_queue",
            "Detokenize messages that wait for their answer.",
            lambda: self.text_stream.num_waiting,
        )

    async def start(self) -> None:
        """Raises ConfigError or BindError. Waits for nobody."""
        await self.engine.start()
        self.text_stream.start()

    async def close(self) -> None:
        await self.text_stream.close()
        await self.tokenizer.close()
        await self.engine.close()

    # What handlers ask.

    def limits(self) -> Limits:
        """What can be served now. Raises Unavailable: draining, loading or dead."""
        if self._draining:
            raise Unavailable("draining", "the server is draining; try another instance")
        if self.engine.ready is None:
            raise self.engine.unavailable()
        if self._tokenizer_info is None:
            raise Unavailable(
                "loading", "the tokenizer is still loading", retry_after=RETRY_AFTER_S
            )
        if not self.text_stream.up:
            raise Unavailable("tokenizer_dead", "the tokenizer is gone", retry_after=RETRY_AFTER_S)
        assert self._limits is not None
        return self._limits

    def is_in_flight(self, request_id: str) -> bool:
        return request_id in self._admitted

    def cancel(self, request_id: str) -> None:
        """Ends a request with CANCELLED. Raises NotFound."""
        state = self._admitted.get(request_id)
        if state is None:
            raise NotFound("request", request_id, field="request_id")
        if not state.outbox.ended:
            self._drop(state)
            state.fail(Cancelled("cancelled by a Cancel call"))

    def stats(self) -> Stats:
        engine = self._engine_stats
        return Stats(
            num_requests_in_flight=self.admission.requests,
            draining=self._draining,
            engine_step=self.engine.last_step,
            ready=self.engine.ready,
            engine=engine,
            kv_cache_usage=0.0 if engine is None else kv_cache_usage(engine),
        )

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer_info is not None and self._tokenizer_info.has_chat_template

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self._draining = True
        self._health.set(draining=True)

    async def wait_idle(self, limit_s: float) -> int:
        """Waits until no request is in flight; the number that still is after limit_s."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return self.admission.requests

    def fail_all(self, error: PagewireError) -> None:
        """Ends every request in flight with `error`."""
        for state in list(self._admitted.values()):
            if not state.outbox.ended:
                self._drop(state)
                state.fail(error)

    # A request's way in and out, called by Generation.

    def admit(self, job: Job, deadline: float | None) -> RequestState:
        """Reserves a place before any work. Raises AlreadyExists or QueueFull."""
        limits = self.limits()
        if job.request_id in self._admitted:
            raise AlreadyExists(f"request {job.request_id!r} is in flight")
        now = self._clock()
        if deadline is not None and deadline <= now:
            raise DeadlineExceeded("the deadline had passed on arrival")
        state = RequestState(
            internal_id=next(self._next_id),
            job=job,
            outbox=Outbox(),
            reservation=self.admission.reserve(estimate_tokens(job.prompt, limits.max_model_len)),
            arrived_at=now,
            deadline=deadline,
        )
        self._admitted[job.request_id] = state
        self._idle.clear()
        return state

    async def tokenize(self, state: RequestState) -> None:
        """Fills in prompt_ids. Raises InvalidRequest, Unavailable, or what ended the request."""
        prompt = state.job.prompt
        if isinstance(prompt, IdsPrompt):
            state.prompt_ids = prompt.ids
            return
        state.tokenizing = asyncio.ensure_future(self.tokenizer.tokenize(prompt))
        try:
            state.prompt_ids = await state.tokenizing
        except asyncio.CancelledError:
            if state.error is not None:
                raise state.error from None
            raise
        finally:
            state.tokenizing = None

    def launch(self, state: RequestState) -> None:
        """Hands the request to the engine. Raises InvalidRequest or Unavailable."""
        if state.error is not None:
            raise state.error
        ready, job, now = self.engine.ready, state.job, self._clock()
        if ready is None:
            raise self.engine.unavailable()
        state.sampling = fit_context(job, len(state.prompt_ids), ready.max_model_len)
        state.reservation.correct(len(state.prompt_ids))
        self.engine.add(
            Add(
                request_id=state.internal_id,
                epoch=ready.epoch,
                token_ids=pack_ids(state.prompt_ids),
                num_output_tokens=0,
                sampling=state.sampling,
                deadline_ms=None if state.deadline is None else (state.deadline - now) * 1000,
                priority=job.priority,
                cache_salt=job.cache_salt,
            )
        )
        state.submitted_at = now
        self._live[state.internal_id] = state
        self.text_stream.open(state)

    def end(self, state: RequestState, error: BaseException | None) -> None:
        """The handler is done with the request, well or not."""
        self._drop(state)
        del self._admitted[state.job.request_id]
        if not state.outcome:
            self._settle_failure(state, error)
        state.reservation.release(completed=state.outcome in ("stop", "length"))
        if not self._admitted:
            self._idle.set()

    def _drop(self, state: RequestState) -> None:
        """Nobody waits for this request's tokens any more. Idempotent."""
        if self._live.pop(state.internal_id, None) is None:
            return
        self.text_stream.forget(state)
        if not state.engine_finished:
            self._aborted[state.internal_id] = self._clock()
            self.engine.abort((state.internal_id,))

    # The engine's events.

    def engine_ready(self, ready: Ready) -> None:
        self._metrics.engine_ready(ready)
        self._make_limits()
        self._health.set(engine=True)

    def engine_gone(self, reason: str) -> None:
        self._health.set(engine=False)
        self._engine_stats = None
        self._aborted.clear()
        if self._metrics.model is not None:
            self._metrics.model.engine_gone()
        error = Unavailable(
            "engine_dead", f"the request was lost: {reason}", retry_after=RETRY_AFTER_S
        )
        for state in list(self._live.values()):
            if not state.engine_finished:
                state.engine_finished = True
                self._drop(state)
                state.fail(error)

    def engine_stalled(self, stalled: bool) -> None:
        self._health.set(stalled=stalled)

    def engine_stats(self, stats: StepStats) -> None:
        self._engine_stats = stats
        if self._metrics.model is not None:
            self._metrics.model.engine_stats(stats, self.engine.epoch)

    def engine_step(self, output: StepOutput) -> None:
        """One pass over a step's columns; the whole step's ids leave in one message."""
        now = self._clock()
        for started in output.started:
            self._engine_started(started)
        num_tokens = self._take_rows(output, now)
        for finished in output.finished:
            self._engine_finished(finished, now)
        for internal_id in output.unknown_aborts:
            self._abort_answered(internal_id, now)
        self.text_stream.flush()
        self.engine_stats(output.stats)
        if self._metrics.model is not None:
            lag_s = (time.monotonic_ns() - output.sent_ns) / 1e9
            self._metrics.model.engine_step(output.stats, num_tokens, lag_s)

    def _take_rows(self, output: StepOutput, now: float) -> int:
        """Appends each row's ids to its request; returns the number taken."""
        live, push = self._live, self.text_stream.push
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
        if self._metrics.model is not None:
            self._metrics.model.first_token(now - state.arrived_at)

    def _engine_started(self, started: Started) -> None:
        state = self._live.get(started.request_id)
        if state is None or state.started:
            return
        state.started = True
        state.num_cached_tokens = started.num_cached_tokens
        state.queue_s = started.queue_s
        if self._metrics.model is not None:
            self._metrics.model.started(state)

    def _engine_finished(self, finished: Finished, now: float) -> None:
        self._abort_answered(finished.request_id, now)
        state = self._live.get(finished.request_id)
        if state is None:
            return
        state.engine_finished = True
        state.finish_reason = finished.reason
        state.stop_token_id = finished.stop_token_id
        state.num_preemptions = finished.num_preemptions
        if finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
            state.num_cached_tokens = finished.num_cached_tokens
            state.queue_s = finished.queue_s
            state.prefill_s = finished.prefill_s
            state.decode_s = finished.decode_s
        else:
            state.error = self._engine_error(state, finished, now)
        # The text of what came before goes out first, also before an error.
        self.text_stream.push(state)

    def _engine_error(self, state: RequestState, finished: Finished, now: float) -> PagewireError:
        if finished.reason == FinishReason.ERROR:
            return InternalError(finished.error or "the engine could not serve the request")
        if state.deadline is not None and state.deadline - now < DEADLINE_SLACK_S:
            return DeadlineExceeded("the deadline passed")
        return Unavailable("engine_dead", "the engine ended the request", retry_after=RETRY_AFTER_S)

    def _abort_answered(self, internal_id: int, now: float) -> None:
        sent_at = self._aborted.pop(internal_id, None)
        if sent_at is not None and self._metrics.model is not None:
            self._metrics.model.abort_answered(now - sent_at)

    # The tokenizer's events.

    def tokenizer_up(self, info: TokenizerInfo) -> None:
        self._tokenizer_info = info
        self._make_limits()
        self._health.set(tokenizer=True)

    def tokenizer_down(self) -> None:
        self._health.set(tokenizer=False)

    def text(self, state: RequestState, text: str, num_tokens: int) -> None:
        ids = state.output_ids[state.num_acked : num_tokens] if state.job.return_token_ids else ()
        state.outbox.put(text, ids)

    def stopped(self, state: RequestState, stop_index: int, num_tokens: int) -> None:
        self._complete(state, FinishReason.STOP, num_tokens, stop_string=state.job.stop[stop_index])

    def flushed(self, state: RequestState) -> None:
        if state.error is not None:
            self._drop(state)
            state.fail(state.error)
            return
        self._complete(state, FinishReason(state.finish_reason), len(state.output_ids))

    def text_lost(self, state: RequestState, error: PagewireError) -> None:
        self._drop(state)
        state.fail(error)

    def batch_answered(self, num_rows: int, seconds: float) -> None:
        if num_rows and self._metrics.model is not None:
            self._metrics.model.batch_answered(num_rows, seconds)

    # Outcomes.

    def _complete(
        self,
        state: RequestState,
        reason: FinishReason,
        num_tokens: int,
        *,
        stop_string: str | None = None,
    ) -> None:
        assert state.sampling is not None
        state.measure()
        self._drop(state)
        stop_token = state.stop_token_id if stop_string is None else None
        is_eos = stop_token is not None and stop_token not in state.sampling.stop_token_ids
        self._settle(state, "length" if reason is FinishReason.LENGTH else "stop")
        state.outbox.finish(
            Finish(
                request_id=state.job.request_id,
                model=state.job.model,
                reason=reason,
                usage=Usage(
                    prompt_tokens=len(state.prompt_ids),
                    completion_tokens=num_tokens,
                    cached_tokens=state.num_cached_tokens,
                ),
                timings=Timings(
                    queue=state.queue_s, prefill=state.prefill_s, decode=state.decode_s
                ),
                seed=state.sampling.seed,
                stop_string=stop_string,
                stop_token_id=None if is_eos else stop_token,
                eos_token_id=stop_token if is_eos else None,
            )
        )

    def _settle_failure(self, state: RequestState, error: BaseException | None) -> None:
        # A CancelledError or GeneratorExit is the client's cancel, disconnect or deadline.
        if not isinstance(error, Exception) or isinstance(error, Cancelled | DeadlineExceeded):
            outcome = "abort"
        elif isinstance(error, ClientError):
            self._metrics.refused(error.code)
            return
        else:
            outcome = "error"
        state.measure()
        self._settle(state, outcome)

    def _settle(self, state: RequestState, outcome: str) -> None:
        assert not state.outcome
        state.outcome = outcome
        if self._metrics.model is not None:
            self._metrics.model.settled(state, self._clock())

    def _make_limits(self) -> None:
        ready, info = self.engine.ready, self._tokenizer_info
        if ready is None or info is None:
            return
        self._limits = Limits(
            model=ready.model_name,
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            eos_token_ids=ready.eos_token_ids,
            default_sampling=ready.default_sampling,
            has_chat_template=info.has_chat_template,
        )
