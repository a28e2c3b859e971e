"""The spans of one request, made at its end of the times that were taken anyway.

    chat MODEL                        admission to outcome
      tokenize                        the wait for the prompt's ids
      queue                           handed to the engine, until its first step
      prefill                         until the first token
      decode                          until the last token
      detokenize                      the last token's way to its text, and the outcome

A request that outlives its engine has lives. Each but the last is cut off where the
engine was lost, and what follows is

      wait_for_engine                 until another one was given it
      queue                           there
      resume                          the KV computed again, and the tokens from then on

Names and attributes are those of OpenTelemetry's conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/), and beside them
vLLM's gen_ai.latency.*. No text and no token id goes into a span.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frontend.branches import branches_of
from frontend.call_trace import is_our_fault
from frontend.request import ChatPrompt
from frontend.status import STATUS
from pagewire.errors import Cancelled, PagewireError

if TYPE_CHECKING:
    from frontend.request import Job, RequestState
    from pagewire.obs.traces import Attributes, Span

_PROVIDER = "pagewire"


@dataclass(slots=True)
class _Life:
    """With one engine. Times are monotonic seconds, as the request's are."""

    given_at: float
    queue_s: float | None = None
    """None while it waits there."""
    left_at: float | None = None


class RequestTrace:
    """`parent` is the span of the call that brought the request."""

    def __init__(self, parent: Span, job: Job, now: float) -> None:
        self._epoch_ns = time.time_ns() - int(now * 1e9)
        operation = "chat" if isinstance(job.prompt, ChatPrompt) else "text_completion"
        self._span = parent.child(f"{operation} {job.model}", self._ns(now), _asked(job, operation))
        self._tokenized: tuple[float, float] | None = None
        self._waits_since: float | None = None
        self._waits: list[tuple[float, float]] = []
        self._lives: list[_Life] = []
        self._settled_at: float | None = None

    def tokenized(self, begin: float, end: float) -> None:
        self._tokenized = (begin, end)

    def waits(self, now: float) -> None:
        """There is no engine for it; or it has lost the one that it had."""
        if self._lives and self._lives[-1].left_at is None:
            self._lives[-1].left_at = now
        if self._waits_since is None:
            self._waits_since = now

    def given(self, now: float, engine: str) -> None:
        """An engine was given it."""
        if self._waits_since is not None:
            self._waits.append((self._waits_since, now))
            self._waits_since = None
        if self._lives:
            self._span.note("replay", self._ns(now), {"pagewire.engine.address": engine})
        self._lives.append(_Life(now))

    def started(self, queue_s: float) -> None:
        """It left the queue of the engine that has it."""
        if self._lives and self._lives[-1].queue_s is None:
            self._lives[-1].queue_s = queue_s

    def settled(self, now: float) -> None:
        """Its outcome is known; the last of it may still be on its way to the client."""
        self._settled_at = now

    def end(self, state: RequestState, error: BaseException | None, now: float) -> None:
        """Makes and ends all spans."""
        if self._tokenized is not None:
            self._child("tokenize", *self._tokenized)
        if self._waits_since is not None:
            self._waits.append((self._waits_since, now))
        for begin, end in self._waits:
            self._child("wait_for_engine", begin, end)
        text_from = self._live(state, now)
        if text_from is not None and self._settled_at is not None:
            self._child("detokenize", text_from, self._settled_at)
        self._span.set(_came_to(state, now))
        code = _code(error)
        if code is not None:
            self._span.set({"error.type": code})
            if is_our_fault(STATUS[code]):
                self._span.fail(code)
        self._span.end(self._ns(now))

    def _live(self, state: RequestState, now: float) -> float | None:
        """Makes the spans of all lives. Returns when the last token of a whole output came."""
        first, last = state.first_token_at, state.last_token_at
        whole = state.outcome in ("stop", "length") and first > 0
        for life in self._lives:
            is_last = life is self._lives[-1]
            end = last if whole and is_last else now
            if life.left_at is not None:
                end = life.left_at
            if life.queue_s is None:
                self._child("queue", life.given_at, end)
                continue
            is_first = life.given_at <= first <= end
            queued = min(life.given_at + life.queue_s, first if is_first else end)
            self._child("queue", life.given_at, queued)
            if is_first:
                self._child("prefill", queued, first)
                self._child("decode", first, end)
            else:
                self._child("resume" if first else "prefill", queued, end)
        return last if whole else None

    def _child(self, name: str, begin: float, end: float) -> None:
        self._span.child(name, self._ns(begin)).end(self._ns(max(begin, end)))

    def _ns(self, seconds: float) -> int:
        return self._epoch_ns + int(seconds * 1e9)


def _asked(job: Job, operation: str) -> Attributes:
    sampling = job.sampling
    attributes: dict[str, str | bool | int | float | list[str]] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": job.model,
        "gen_ai.request.id": job.request_id,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    if job.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = job.max_tokens
    if job.n != 1:
        attributes["gen_ai.request.choice.count"] = job.n
    if job.tenant:
        attributes["pagewire.tenant"] = job.tenant
    return attributes


def _came_to(state: RequestState, now: float) -> Attributes:
    branches = branches_of(state)
    attributes: dict[str, str | bool | int | float | list[str]] = {
        "gen_ai.response.id": state.job.request_id,
        "gen_ai.response.model": state.job.model,
        "gen_ai.usage.input_tokens": len(state.prompt_ids),
        "gen_ai.usage.output_tokens": sum(len(branch.output_ids) for branch in branches),
        "gen_ai.usage.cache_read.input_tokens": state.num_cached_tokens,
        "gen_ai.latency.e2e": now - state.arrived_at,
        "pagewire.engines": sum(branch.num_adds for branch in branches),
        "pagewire.preemptions": sum(branch.num_preemptions for branch in branches),
    }
    reasons = [branch.end.reason.name.lower() for branch in branches if branch.end is not None]
    if reasons:
        attributes["gen_ai.response.finish_reasons"] = reasons
    if state.started:
        attributes["gen_ai.latency.time_in_queue"] = state.queue_s
    if state.first_token_at:
        attributes["gen_ai.latency.time_to_first_token"] = state.first_token_at - state.arrived_at
        attributes["gen_ai.latency.time_in_model_prefill"] = state.prefill_s
        attributes["gen_ai.latency.time_in_model_decode"] = state.decode_s
    return attributes


def _code(error: BaseException | None) -> str | None:
    """What ended the request, by our table of codes; None where it ended well."""
    if error is None:
        return None
    if isinstance(error, PagewireError):
        return error.code
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return Cancelled.code
    return PagewireError.code
