"""The sequences that are with the engine or wait for one, and what it says of them.

    Dispatcher --submit, drop--> EngineSide --Add, Abort--> EngineClient --> engine
         ^                        |   ^                          |
         +-- fail, engine_changed +   +------- StepOutput -------+
    DetokenizeStream <-- ids -----+

Ids come in by step and leave to the tokenizer by step. When the engine is lost,
replay.py decides who waits for the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import TYPE_CHECKING, Protocol

from frontend.branches import add_message
from frontend.engine_client import RETRY_AFTER_S, EngineClient
from frontend.replay import Replay, guilty_error, misfit
from pagewire.errors import DeadlineExceeded, InternalError, InvalidRequest, Unavailable
from pagewire.types import FinishReason
from pagewire.wire.codec import unpack_counts, unpack_ids, unpack_request_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from frontend.detokenize_stream import DetokenizeStream
    from frontend.health import HealthBoard
    from frontend.metrics import Metrics
    from frontend.request import RequestState
    from pagewire.config import FrontendConfig
    from pagewire.errors import PagewireError
    from pagewire.wire.messages import Finished, Ready, Started, StepOutput, StepStats

logger = logging.getLogger(__name__)

DEADLINE_SLACK_S = 0.25
"""The engine may see a deadline this much before the frontend's own timer."""


class Owner(Protocol):
    """Who has the requests: the dispatcher."""

    def engine_changed(self, ready: Ready) -> None:
        """An engine came, the first or another one."""

    def fail(self, state: RequestState, error: PagewireError) -> None:
        """Ends the whole request that `state` is one sequence of."""


class EngineSide:
    def __init__(
        self,
        config: FrontendConfig,
        metrics: Metrics,
        health: HealthBoard,
        text_stream: DetokenizeStream,
        owner: Owner,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._health = health
        self._text_stream = text_stream
        self._owner = owner
        self._clock = clock
        self.client = EngineClient(
            commands=config.engine_address,
            outputs_bind=config.outputs_bind,
            outputs_advertise=config.outputs_advertise,
            engine_timeout=config.engine_timeout,
            stall_timeout=config.stall_timeout,
            events=self,
            clock=clock,
        )
        self.new_id = itertools.count(1).__next__
        """Mints internal ids, never the same twice."""
        self.stats: StepStats | None = None
        """The engine's last, None while there is none."""
        self.live: dict[int, RequestState] = {}
        """By engine id: those that the engine works on or whose text is still to come."""
        self.aborted: dict[int, float] = {}
        """Engine id -> when its Abort was sent, until the engine answers."""
        self.replay = Replay()
        self._restart_timeout = config.engine_restart_timeout
        self._served: Ready | None = None
        """What the last engine said of itself, also while it is gone."""
        self._outage: asyncio.TimerHandle | None = None
        """Runs while a lost engine is waited for."""
        self._left_behind: set[int] = set()
        """What the lost engine may still work on, if it lives."""

    async def close(self) -> None:
        self._end_outage()
        await self.client.close()

    def served(self) -> Ready:
        """What a request can count on: the engine, or the one whose successor is waited
        for. Raises Unavailable."""
        if self._served is None or (self.client.ready is None and self._outage is None):
            raise self.client.unavailable()
        return self.client.ready or self._served

    def submit(self, state: RequestState) -> None:
        """Sends a new sequence, or lets it wait with the others during an outage.
        Raises Unavailable."""
        if self.client.ready is None or self.replay.trying:
            self.replay.wait(state)
        else:
            self._give(state)

    def _give(self, state: RequestState) -> None:
        """Sends the request as it stands, under a new id if it is not its first life.
        Raises Unavailable, and then nothing has changed."""
        assert self._served is not None
        engine_id = self.new_id() if state.num_adds else state.internal_id
        self.client.add(add_message(state, engine_id, self._served.epoch, self._clock()))
        if state.num_adds:
            self._metrics.request_replayed()
        state.engine_id = engine_id
        state.num_adds += 1
        state.num_resent = len(state.output_ids)
        self.live[engine_id] = state

    def drop(self, *states: RequestState) -> None:
        """Nobody waits for the tokens of these sequences any more. Idempotent."""
        to_abort = []
        for state in states:
            waited = self.replay.forget(state)
            if not waited and self.live.pop(state.engine_id, None) is None:
                continue
            self._text_stream.forget(state)
            if not waited and not state.engine_finished:
                self.aborted[state.engine_id] = self._clock()
                to_abort.append(state.engine_id)
        if to_abort:
            self.client.abort(to_abort)

    def engine_ready(self, ready: Ready) -> None:
        self._metrics.engine_ready(ready)
        self._owner.engine_changed(ready)
        self._health.set(engine=True)
        self._end_outage()
        served, self._served = self._served, ready
        if served is not None:
            self._resume(served, ready)

    def _resume(self, old: Ready, new: Ready) -> None:
        """Puts the requests that wait for an engine to the one that came."""
        died = new.epoch != old.epoch
        if died:
            self._metrics.engine_restarted()
        elif self._left_behind:
            self.client.abort(self._left_behind)
        self._left_behind.clear()
        guilty = self.replay.engine_back(died=died)
        if guilty is not None:
            logger.error("request %r killed the engine again and again", guilty.job.request_id)
            self._owner.fail(guilty, guilty_error())
        for state in list(self.replay.waiting.values()):
            error = misfit(state, old, new)
            if error is not None:
                self._owner.fail(state, error)
        if self.replay.waiting:
            logger.info("%d requests go on with the new engine", len(self.replay.waiting))
        self._send_waiting()

    def _send_waiting(self) -> None:
        """As many as may go back now. Called whenever the engine is heard."""
        while (state := self.replay.next()) is not None:
            try:
                self._give(state)
            except Unavailable:
                return  # the wire is full
            self.replay.sent(state)

    def engine_gone(self, reason: str) -> None:
        self._health.set(engine=False)
        self.stats = None
        if self._metrics.model is not None:
            self._metrics.model.engine_gone()
        self._left_behind = {*self.live, *self.aborted}
        self.aborted.clear()
        for engine_id, state in list(self.live.items()):
            if not state.engine_finished:
                del self.live[engine_id]
                self.replay.lose(state)
        self._end_outage()
        if self._restart_timeout > 0:
            self._outage = asyncio.get_running_loop().call_later(
                self._restart_timeout, self._give_up, reason
            )
        else:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        """No engine came in time."""
        self._outage = None
        if self._restart_timeout > 0:
            reason += f", and is not back after {self._restart_timeout:g} s"
        error = Unavailable(
            "engine_dead", f"the request was lost: {reason}", retry_after=RETRY_AFTER_S
        )
        for state in list(self.replay.waiting.values()):
            self._owner.fail(state, error)

    def _end_outage(self) -> None:
        if self._outage is not None:
            self._outage.cancel()
            self._outage = None

    def engine_stalled(self, stalled: bool) -> None:
        self._health.set(stalled=stalled)

    def engine_stats(self, stats: StepStats) -> None:
        if self.replay.waiting:
            self._send_waiting()
        self._note_stats(stats)

    def _note_stats(self, stats: StepStats) -> None:
        self.stats = stats
        if self._metrics.model is not None:
            self._metrics.model.engine_stats(stats, self.client.epoch)

    def engine_step(self, output: StepOutput) -> None:
        """One pass over a step's columns; the whole step's ids leave in one message."""
        now = self._clock()
        # Before what this step gives back: an engine that shuts down does, and is not to
        # be asked again.
        if self.replay.waiting:
            self._send_waiting()
        for started in output.started:
            self._engine_started(started)
        self._take_logprobs(output)
        num_tokens = self._take_rows(output, now)
        for finished in output.finished:
            self._engine_finished(finished, now)
        for internal_id in output.unknown_aborts:
            self._abort_answered(internal_id, now)
        self._text_stream.flush()
        self._note_stats(output.stats)
        if self._metrics.model is not None:
            lag_s = (time.monotonic_ns() - output.sent_ns) / 1e9
            self._metrics.model.engine_step(output.stats, num_tokens, lag_s)

    def _take_logprobs(self, output: StepOutput) -> None:
        for logprobs in output.logprobs:
            state = self.live.get(logprobs.request_id)
            if state is not None:
                state.logprobs.add(logprobs)

    def _take_rows(self, output: StepOutput, now: float) -> int:
        """Appends each row's ids to its request; returns the number taken."""
        live, push = self.live, self._text_stream.push
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
        if self._metrics.model is not None and not state.index:
            self._metrics.model.first_token(now - state.arrived_at)

    def _engine_started(self, started: Started) -> None:
        state = self.live.get(started.request_id)
        if state is None or state.started:
            return
        state.started = True
        state.num_cached_tokens = started.num_cached_tokens
        state.queue_s = started.queue_s
        if self._metrics.model is not None and not state.index:
            self._metrics.model.started(state)

    def _engine_finished(self, finished: Finished, now: float) -> None:
        self._abort_answered(finished.request_id, now)
        state = self.live.get(finished.request_id)
        if state is None or state.engine_finished:
            return
        if finished.reason == FinishReason.ABORT and self._take_back(state, finished, now):
            del self.live[finished.request_id]
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
            state.error = self._engine_error(state, finished, now)
            if finished.deadline_missed and not state.started and not state.index:
                self._metrics.deadline_given_up()
        # The text of what came before goes out first, also before an error.
        self._text_stream.push(state)

    def _take_back(self, state: RequestState, finished: Finished, now: float) -> bool:
        """Whether a request that the engine ended unasked waits to be sent again: the
        engine shuts down, or had lost the connection."""
        near = state.deadline is not None and state.deadline - now < DEADLINE_SLACK_S
        if near or finished.deadline_missed:
            return False
        return self._restart_timeout > 0 and self.replay.take_back(state)

    def _engine_error(self, state: RequestState, finished: Finished, now: float) -> PagewireError:
        if finished.reason == FinishReason.ERROR and finished.field:
            return InvalidRequest(finished.field, finished.error)
        if finished.reason == FinishReason.ERROR:
            return InternalError(finished.error or "the engine could not serve the request")
        if state.deadline is not None and state.deadline - now < DEADLINE_SLACK_S:
            return DeadlineExceeded("the deadline passed")
        if finished.deadline_missed:
            return DeadlineExceeded("the deadline could not be met any more")
        return Unavailable("engine_dead", "the engine ended the request", retry_after=RETRY_AFTER_S)

    def _abort_answered(self, internal_id: int, now: float) -> None:
        sent_at = self.aborted.pop(internal_id, None)
        if sent_at is not None and self._metrics.model is not None:
            self._metrics.model.abort_answered(now - sent_at)
