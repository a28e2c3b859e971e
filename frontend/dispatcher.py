"""Who owns the requests: from admission to outcome, between engine, tokenizer and client.

    Generation (an RPC handler) --admit, launch--> Dispatcher --submit, drop--> EngineSide
            ^                                        |   ^                          |
            +------------- Outbox <------------------+   +- text -- DetokenizeStream <- ids

All of it runs in one event loop, so that no state here needs a lock, and a
request that ends is aborted at the engine in the same turn of the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from frontend.adapters import adapters_info
from frontend.admission import Admission
from frontend.auth import current_principal
from frontend.bad_words import tokenize_bad_word
from frontend.beam import check_beam_room
from frontend.branches import branches_of, end_sequence, split
from frontend.call_trace import current_trace
from frontend.detokenize_stream import DetokenizeStream
from frontend.engine_client import RETRY_AFTER_S
from frontend.engine_side import EngineSide
from frontend.engine_stats import kv_cache_usage
from frontend.logits_params import check_drawable
from frontend.output_text import OutputText
from frontend.prompt import needs_tokenizer, read_prompt, truncate
from frontend.request import IdsPrompt, Job, RequestState
from frontend.request_log import log_request
from frontend.request_trace import RequestTrace
from frontend.start_queue import StartQueue
from frontend.tenant_limits import TenantLimits, cost_of, cost_so_far
from frontend.tokenizer_client import TokenizerClient
from frontend.validate import Limits, estimate_tokens, fit_context
from pagewire.errors import (
    AlreadyExists,
    Cancelled,
    ClientError,
    DeadlineExceeded,
    NotFound,
    PagewireError,
    Unavailable,
)
from pagewire.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from frontend.admission import Reservation
    from frontend.convert.tokenizer import TokenizerInfo
    from frontend.engine_link import EngineLink
    from frontend.health import HealthBoard
    from frontend.metrics import Metrics
    from frontend.prompt import ReadPrompt
    from frontend.stream import Outbox
    from frontend.tenant_limits import TenantShare
    from pagewire.config import FrontendConfig
    from pagewire.wire.messages import (
        PositionLogprobs,
        Ready,
        StepStats,
    )


@dataclass(frozen=True, slots=True)
class Stats:
    """What AdminService.GetStats tells."""

    num_requests_in_flight: int
    draining: bool
    engine_step: int
    """Of the first that is ready, as is `ready`."""
    ready: Ready | None
    num_blocks: int
    engine: StepStats | None
    """Sums over all that are ready."""
    kv_cache_usage: float
    engines: tuple[EngineLink, ...]


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
        self.tenants = TenantLimits(
            config.tenant_limits, clock=clock, on_reject=metrics.admission_rejected
        )
        self._log_prompts = config.log_prompts
        self.tokenizer = TokenizerClient(
            config.tokenizer_address, max_message_bytes=config.max_message_mib * 2**20
        )
        self.text_stream = DetokenizeStream(self.tokenizer, self, clock=clock)
        self.engine_side = EngineSide(config, metrics, health, self.text_stream, self, clock=clock)
        self.start_queue = StartQueue(clock=clock)
        self._tokenizer_info: TokenizerInfo | None = None
        self._limits: Limits | None = None
        self._admitted: dict[str, RequestState] = {}
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
        self._metrics.registry.add(adapters_info(self.engine_side))

    async def start(self) -> None:
        """Raises ConfigError or BindError. Waits for nobody."""
        await self.engine_side.pool.start()
        self.text_stream.start()

    async def close(self) -> None:
        await self.text_stream.close()
        await self.tokenizer.close()
        await self.engine_side.close()

    # What handlers ask.

    def limits(self) -> Limits:
        """What can be served now. Raises Unavailable: draining, loading or dead."""
        if self._draining:
            raise Unavailable("draining", "the server is draining; try another instance")
        if self.engine_side.first is None:
            raise self.engine_side.unavailable()
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

    def free_request_id(self, wanted: str) -> str:
        """For a request without an id: x-request-id, which may cover several calls, whose
        own ids must differ."""
        if not self.is_in_flight(wanted):
            return wanted
        return f"{wanted[:111]}-{secrets.token_hex(8)}"

    def cancel(self, request_id: str) -> None:
        """Ends a request with CANCELLED. Raises NotFound."""
        state = self._admitted.get(request_id)
        if state is None or not current_principal().acts_for(state.job.tenant):
            raise NotFound("request", request_id, field="request_id")
        if not state.outbox.ended:
            self.fail(state, Cancelled("cancelled by a Cancel call"))

    def stats(self) -> Stats:
        links = self.engine_side.pool.links
        serving = [link for link in links if link.ready is not None and not link.refused]
        ready = [link.ready for link in serving if link.ready is not None]
        engine = self.engine_side.stats
        return Stats(
            num_requests_in_flight=self.admission.requests,
            draining=self._draining,
            engine_step=serving[0].client.last_step if serving else 0,
            ready=ready[0] if ready else None,
            num_blocks=sum(it.num_blocks for it in ready),
            engine=engine,
            kv_cache_usage=0.0 if engine is None else kv_cache_usage(engine),
            engines=tuple(links),
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
                self.fail(state, error)

    # A request's way in and out, called by Generation.

    def admit(self, job: Job, deadline: float | None, outbox: Outbox) -> RequestState:
        """Reserves a place before any work. Raises AlreadyExists, QueueFull or QuotaExceeded."""
        limits = self.limits()
        if job.request_id in self._admitted:
            raise AlreadyExists(f"request {job.request_id!r} is in flight")
        now = self._clock()
        if deadline is not None and deadline <= now:
            raise DeadlineExceeded("the deadline had passed on arrival")
        num_tokens = estimate_tokens(job.prompt, limits.max_model_len)
        reservation, share = self._reserve(job, num_tokens, limits)
        internal_id = self.engine_side.new_id()
        state = RequestState(
            internal_id=internal_id,
            engine_id=internal_id,
            job=job,
            outbox=outbox,
            reservation=reservation,
            share=share,
            arrived_at=now,
            deadline=deadline,
        )
        trace = current_trace()
        if trace is not None and trace.sampled:
            state.trace_id = trace.trace_id
            if trace.span is not None:
                state.trace = RequestTrace(trace.span, job, now)
        self._admitted[job.request_id] = state
        self._idle.clear()
        return state

    def _reserve(
        self, job: Job, num_tokens: int, limits: Limits
    ) -> tuple[Reservation, TenantShare]:
        max_tokens = job.max_tokens
        if max_tokens is None:
            max_tokens = limits.max_model_len - num_tokens
        share = self.tenants.reserve(job.tenant, cost_of(job, num_tokens, max_tokens))
        try:
            return self.admission.reserve(num_tokens), share
        except BaseException:
            share.correct(0)
            share.release()
            raise

    async def tokenize(self, state: RequestState) -> None:
        """Fills in prompt_ids and bad_words. Raises InvalidRequest, Unavailable, or what
        ended the request."""
        prompt = state.job.prompt
        if isinstance(prompt, IdsPrompt) and not needs_tokenizer(state.job):
            served = self.engine_side.served()
            state.prompt_ids = truncate(state.job, prompt.ids, served.max_model_len)
            return
        begun_at = self._clock()
        state.tokenizing = asyncio.ensure_future(self._encode(state))
        try:
            state.prompt_ids, state.echo = await state.tokenizing
        except asyncio.CancelledError:
            if state.error is not None:
                raise state.error from None
            raise
        finally:
            state.tokenizing = None
            if state.trace is not None:
                state.trace.tokenized(begun_at, self._clock())

    async def _encode(self, state: RequestState) -> ReadPrompt:
        """The prompt; sets bad_words. All texts are tokenized at the same time."""
        assert self._tokenizer_info is not None
        words = [
            asyncio.ensure_future(tokenize_bad_word(self.tokenizer, word, index))
            for index, word in enumerate(state.job.bad_words)
        ]
        try:
            prompt = await read_prompt(
                self.tokenizer,
                state.job,
                max_model_len=self.engine_side.served().max_model_len,
                tokenizer_vocab_size=self._tokenizer_info.vocab_size,
            )
            state.bad_words = tuple(itertools.chain(*[await word for word in words]))
        finally:
            for word in words:
                word.cancel()
            await asyncio.gather(*words, return_exceptions=True)
        return prompt

    def launch(self, state: RequestState) -> None:
        """Hands the request to the engine. Raises InvalidRequest or Unavailable.

        One that was admitted before an outage began waits for its end with the others.
        """
        if state.error is not None:
            raise state.error
        served = self.engine_side.served()
        sampling = fit_context(state.job, len(state.prompt_ids), served.max_model_len)
        sampling = msgspec.structs.replace(sampling, bad_words=state.bad_words)
        check_drawable(sampling, served.eos_token_ids)
        check_beam_room(sampling, len(state.prompt_ids), served)
        state.sampling = sampling
        state.reservation.correct(len(state.prompt_ids))
        state.share.correct(cost_of(state.job, len(state.prompt_ids), sampling.max_tokens))
        for branch in split(state, self.engine_side.new_id):
            branch.text = OutputText(branch.echo, branch.job.tools.parser())
            self.engine_side.submit(branch)
            branch.submitted_at = self._clock()
            self.text_stream.open(branch)
        self.start_queue.join(state)

    def end(self, state: RequestState, error: BaseException | None) -> None:
        """The handler is done with the request, well or not."""
        self.engine_side.drop(*branches_of(state))
        self.start_queue.leave(state)
        del self._admitted[state.job.request_id]
        if not state.outcome:
            self._settle_failure(state, error)
        state.share.correct(cost_so_far(state))
        for held in (state.reservation, state.share):
            held.release(completed=state.outcome in ("stop", "length"))
        now = self._clock()
        log_request(state, error, now, with_prompt=self._log_prompts)
        if state.trace is not None:
            state.trace.end(state, error, now)
        if not self._admitted:
            self._idle.set()

    def fail(self, state: RequestState, error: PagewireError) -> None:
        """Ends the whole request that `state` is one sequence of."""
        branches = branches_of(state)
        self.engine_side.drop(*branches)
        branches[0].fail(error)

    def engine_changed(self, ready: Ready) -> None:
        self._make_limits(ready)

    def started(self, state: RequestState) -> None:
        self.start_queue.started(state)

    # The tokenizer's events.

    def tokenizer_up(self, info: TokenizerInfo) -> None:
        self._tokenizer_info = info
        first = self.engine_side.first
        self._make_limits(None if first is None else first.ready)
        self._health.set(tokenizer=True)

    def tokenizer_down(self) -> None:
        self._health.set(tokenizer=False)

    def text(self, state: RequestState, text: str, num_tokens: int) -> None:
        job, logprobs = state.job, state.logprobs
        ids = state.output_ids[state.num_acked : num_tokens] if job.return_token_ids else []
        positions: Sequence[PositionLogprobs] = ()
        if job.sampling.logprobs is not None:
            positions = logprobs.output(state.num_acked, num_tokens)
        prompt = logprobs.take_prompt() if job.sampling.prompt_logprobs is not None else ()
        if state.text.is_plain:
            state.outbox.put(text, ids, positions, prompt, state.index)
            return
        shown = state.text.add(text)
        state.outbox.put(shown.text, ids, positions, prompt, state.index, shown.tool_calls)

    def stopped(self, state: RequestState, stop_index: int, num_tokens: int) -> None:
        self._complete(state, FinishReason.STOP, num_tokens, stop_string=state.job.stop[stop_index])

    def flushed(self, state: RequestState) -> None:
        if state.error is not None:
            self.fail(state, state.error)
            return
        self._complete(state, FinishReason(state.finish_reason), len(state.output_ids))

    def text_lost(self, state: RequestState, error: PagewireError) -> None:
        self.fail(state, error)

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
        state.measure()
        self.engine_side.drop(state)
        rest = state.text.finish()
        state.outbox.put(rest.text, index=state.index, tool_calls=rest.tool_calls)
        finish = end_sequence(state, reason, num_tokens, stop_string)
        if finish is None:
            return  # the request's other sequences go on
        cut = any(end.reason is FinishReason.LENGTH for end in finish.outputs)
        self._settle(branches_of(state)[0], "length" if cut else "stop")
        state.outbox.finish(finish)

    def _settle_failure(self, state: RequestState, error: BaseException | None) -> None:
        # A CancelledError or GeneratorExit is the client's cancel, disconnect or deadline.
        if not isinstance(error, Exception) or isinstance(error, Cancelled | DeadlineExceeded):
            outcome = "abort"
        elif isinstance(error, ClientError) and not state.submitted_at:
            self._metrics.refused(error.code)
            return
        else:
            outcome = "error"
        state.measure()
        self._settle(state, outcome)

    def _settle(self, state: RequestState, outcome: str) -> None:
        assert not state.outcome
        state.outcome = outcome
        now = self._clock()
        if self._metrics.model is not None:
            self._metrics.model.settled(state, now)
        if state.trace is not None:
            state.trace.settled(now)

    def _make_limits(self, ready: Ready | None) -> None:
        info = self._tokenizer_info
        if ready is None or info is None:
            return
        self._limits = Limits(
            model=ready.model_name,
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            eos_token_ids=ready.eos_token_ids,
            default_sampling=ready.default_sampling,
            has_chat_template=info.has_chat_template,
            chat_template_has_tools=info.chat_template_has_tools,
            tool_call_format=info.tool_call_format,
            tool_call_special_tokens=info.tool_call_special_tokens,
            adapters=self.engine_side.adapters(),
        )
