"""The sequences that are with an engine or wait for one.

    Dispatcher --submit, drop--> EngineSide --Add, Abort--> EngineLink --> engine
         ^                        |   ^                         |      (one for each)
         +-- fail, engine_changed +   +------- StepOutput ------+
    DetokenizeStream <-- ids -----+

Ids come in by step and leave to the tokenizer by step (step_reader.py). placement.py
says which engine a sequence goes to; when an engine is lost, what it had goes to
another one at once, or waits for the next, in the order that replay.py decides. Engine
ids are never the same twice, whatever the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import TYPE_CHECKING, Protocol

from frontend.beam import find_room_fault
from frontend.branches import add_message
from frontend.engine_client import RETRY_AFTER_S
from frontend.engine_pool import EnginePool
from frontend.engine_stats import total_stats
from frontend.placement import Placement
from frontend.replay import Replay, guilty_error, misfit, mismatch, unplaced
from frontend.step_reader import StepReader
from pagewire.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from frontend.detokenize_stream import DetokenizeStream
    from frontend.engine_link import EngineLink
    from frontend.health import HealthBoard
    from frontend.metrics import Metrics
    from frontend.request import RequestState
    from pagewire.config import FrontendConfig
    from pagewire.errors import PagewireError
    from pagewire.wire.messages import AdapterInfo, Ready, StepOutput, StepStats

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """Who has the requests: the dispatcher."""

    def engine_changed(self, ready: Ready) -> None:
        """An engine came, the first or another one, or has other adapters; `ready` is the
        first's there is."""

    def started(self, state: RequestState) -> None:
        """The first sequence of a request has left an engine's queue, for the first time."""

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
        self.pool = EnginePool(config, self, clock=clock)
        self.new_id = itertools.count(1).__next__
        """Mints internal ids, never the same twice."""
        self._reader = StepReader(metrics, text_stream, self, self.new_id)
        self.replay = Replay()
        self.paused: dict[int, RequestState] = {}
        """By internal id: those whose client is gone, and may come back."""
        self._placement = Placement()
        self._restart_timeout = config.engine_restart_timeout
        self._served: Ready | None = None
        """What the engine that came last said of itself, also while there is none."""
        self._outage: asyncio.TimerHandle | None = None
        """Runs while there is no engine, and one is waited for."""
        self._lost: set[EngineLink] = set()
        """Engines that may have died, with what waits now."""

    async def close(self) -> None:
        self._end_outage()
        await self.pool.close()

    @property
    def first(self) -> EngineLink | None:
        """The first engine that can be used."""
        return next(iter(self.pool.usable()), None)

    @property
    def stats(self) -> StepStats | None:
        """The engines' last ones, added up; None while there is no engine."""
        links = (link for link in self.pool.links if not link.refused)
        return total_stats(link.stats for link in links if link.stats is not None)

    @property
    def live(self) -> dict[int, RequestState]:
        """By engine id: those that an engine works on or whose text is still to come."""
        return {i: state for link in self.pool.links for i, state in link.live.items()}

    @property
    def aborted(self) -> dict[int, float]:
        """Engine id -> when its Abort was sent, until the engine answers."""
        return {i: at for link in self.pool.links for i, at in link.aborted.items()}

    def adapters(self) -> dict[str, AdapterInfo]:
        """By name: those of all engines, and of such as are waited for."""
        found: dict[str, AdapterInfo] = {}
        for link in reversed(self.pool.links):
            if not link.shut_out:
                found |= link.adapters
        return found

    def served(self) -> Ready:
        """What a request can count on: an engine, or the one whose successor is waited
        for. Raises Unavailable."""
        first = self.first
        if self._served is None or (first is None and self._outage is None):
            raise self.unavailable()
        return self._served if first is None or first.ready is None else first.ready

    def unavailable(self) -> Unavailable:
        """The error for a request that finds no engine."""
        links = self.pool.links
        gone = next((link for link in links if link.ready is None and not link.withdrawn), None)
        if gone is not None:
            return gone.client.unavailable()
        reason = "engine_dead" if links else "loading"
        return Unavailable(reason, "there is no engine to use", retry_after=RETRY_AFTER_S)

    def submit(self, state: RequestState) -> None:
        """Sends a new sequence, or lets it wait with the others during an outage.
        Raises Unavailable."""
        usable = self.pool.usable()
        if not usable or self.replay.trying:
            self._note_wait(state)
            self.replay.wait(state)
            self._send_waiting()
            return
        while True:
            # One that no engine has room for is refused by the engine, with its figures.
            link = self._choose(state, usable) or usable[0]
            try:
                self._give(state, link)
            except Unavailable:
                usable.remove(link)
                if not usable:
                    raise
            else:
                return

    def _choose(self, state: RequestState, usable: list[EngineLink]) -> EngineLink | None:
        """The engine for a sequence, None where none has room for it."""
        links = [link for link in usable if fits(state, link)]
        if not links:
            return None
        if len(links) == 1:
            return links[0]
        links = [link for link in links if not link.avoided] or links
        if self.replay.is_suspect(state):
            return min(links, key=lambda link: link.candidate().cost)
        beside = _by_link(state.branches)
        for link in links:
            if link in beside:
                return link
        warm = () if state.job.skip_prefix_cache else state.prompt_ids
        candidates = [link.candidate() for link in links]
        adapter = state.job.adapter
        salt = (
            state.job.cache_salt if adapter is None else f"{state.job.cache_salt}\0{adapter.name}"
        )
        return links[self._placement.choose(candidates, warm, salt)]

    def _give(self, state: RequestState, link: EngineLink) -> None:
        """Sends the request as it stands, under a new id if it is not its first life.
        Raises Unavailable, and then nothing has changed."""
        engine_id = self.new_id() if state.num_adds else state.internal_id
        link.client.add(add_message(state, engine_id, link.client.epoch, self._clock()))
        if state.num_adds:
            self._metrics.request_replayed()
        if state.trace is not None:
            state.trace.given(self._clock(), link.address)
        state.link = link
        state.engine_id = engine_id
        state.num_adds += 1
        state.num_resent = len(state.output_ids)
        link.live[engine_id] = state
        link.sent()

    def drop(self, *states: RequestState) -> None:
        """Nobody waits for the tokens of these sequences any more. Idempotent."""
        for state in states:
            if self.replay.forget(state) or self.paused.pop(state.internal_id, None) is not None:
                self._text_stream.forget(state)
        for link, taken in _by_link(states).items():
            for state in taken:
                self._text_stream.forget(state)
            _take_away(link, taken)

    def pause(self, *states: RequestState) -> None:
        """Frees what these sequences hold at an engine; go_on() sends them again."""
        for state in states:
            if self.replay.forget(state):
                self.paused[state.internal_id] = state
        for link, taken in _by_link(states).items():
            unfinished = [state for state in taken if not state.engine_finished]
            _take_away(link, unfinished)
            self._note_wait(*unfinished)
            self.paused.update({state.internal_id: state for state in unfinished})

    def go_on(self, *states: RequestState) -> None:
        """Sends what was paused. The requests that find no engine end with UNAVAILABLE."""
        for state in states:
            if self.paused.pop(state.internal_id, None) is not None:
                self.replay.wait(state)
        if self.first is None and self._outage is None:
            self._fail_waiting(self.unavailable())
        self._send_waiting()

    def move_off(self, link: EngineLink) -> None:
        """Moves what runs at one engine to the others, as far as they have room."""
        others = [other for other in self.pool.usable() if other is not link]
        moved = [
            state
            for state in link.live.values()
            if not state.engine_finished and any(fits(state, other) for other in others)
        ]
        _take_away(link, moved)
        self._note_wait(*moved)
        for state in moved:
            self.replay.move(state)
        self._send_waiting()

    def update_health(self) -> None:
        """To be called when an engine became usable, or is so no more."""
        usable = self.pool.usable()
        stalled = bool(usable) and all(link.stalled for link in usable)
        self._health.set(engine=bool(usable), stalled=stalled)
        for link in self.pool.links:
            link.client.replaceable = any(other is not link for other in usable)

    def engine_ready(self, link: EngineLink, ready: Ready) -> None:
        reference = self._reference(link)
        refusal = None if reference is None else mismatch(reference, ready)
        link.refused = refusal is not None
        if refusal is not None:
            logger.error("the engine at %s is not used: %s", link.address, refusal)
            return
        link.restore(self.adapters().values())
        first = self.first
        self._metrics.engine_ready(ready)
        if first is not None and first.ready is not None:
            self._owner.engine_changed(first.ready)
        self.update_health()
        if first is not None:
            self._end_outage()
        served, self._served = self._served, ready
        if link.last is not None and link.last.epoch != ready.epoch:
            self._metrics.engine_restarted()
        elif link.left_behind:
            link.client.abort(link.left_behind)
        link.left_behind.clear()
        if served is not None and link.usable:
            self._resume(link, served, ready)

    def _reference(self, link: EngineLink) -> Ready | None:
        """What an engine that came must serve: as the others that are there, or, while
        there is none and one is waited for, as the last of several."""
        others = [other for other in self.pool.links if other is not link]
        for other in others:
            if other.ready is not None and not other.refused and not other.withdrawn:
                return other.ready
        return self._served if others and self._outage is not None else None

    def _resume(self, link: EngineLink, old: Ready, new: Ready) -> None:
        """Puts the requests that wait for an engine to the one that came."""
        alive = self._lost <= {link} and link.last is not None and link.last.epoch == new.epoch
        self._judge(died=not alive)
        error = misfit(old, new)
        if error is not None:
            self._fail_waiting(error)
        if self.replay.waiting:
            logger.info("%d requests go on with the new engine", len(self.replay.waiting))
        self._send_waiting()

    def _judge(self, *, died: bool) -> None:
        """Before what a lost engine had goes to another: whether it is the cause."""
        self._lost.clear()
        guilty = self.replay.engine_back(died=died)
        if guilty is not None:
            logger.error("request %r killed the engine again and again", guilty.job.request_id)
            self._owner.fail(guilty, guilty_error())

    def _send_waiting(self) -> None:
        """As many as may go now. Called whenever an engine is heard."""
        while self.replay.waiting:
            trial = self.replay.trial
            usable = [
                link for link in self.pool.usable() if trial is None or link is not trial.link
            ]
            if not usable:
                return
            state = self.replay.next(elsewhere=True)
            if state is None:
                return
            link = self._choose(state, usable)
            if link is None:
                self._owner.fail(state, unplaced(state, usable))
                continue
            try:
                self._give(state, link)
            except Unavailable:
                return  # the wire is full
            self.replay.sent(state)

    def engine_gone(self, link: EngineLink, reason: str) -> None:
        if self._metrics.model is not None and link.last is not None:
            self._metrics.model.engine_gone(link.last.epoch)
        for engine_id, state in list(link.live.items()):
            if not state.engine_finished:
                del link.live[engine_id]
                self._note_wait(state)
                self.replay.lose(state)
                self._lost.add(link)
        self.update_health()
        if self.first is not None:
            self._judge(died=True)
            if self.replay.waiting:
                logger.info("%d requests move to other engines", len(self.replay.waiting))
            self._send_waiting()
            return
        if link.refused or (link.shut_out and self._outage is not None):
            return
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
        self._fail_waiting(error)
        for link in self.pool.links:
            if link.refused and link.ready is not None:
                self.engine_ready(link, link.ready)

    def _fail_waiting(self, error: PagewireError) -> None:
        for state in list(self.replay.waiting.values()):
            self._owner.fail(state, error)

    def _end_outage(self) -> None:
        if self._outage is not None:
            self._outage.cancel()
            self._outage = None

    def engine_adapters(self, link: EngineLink) -> None:
        first = self.first
        if first is not None and first.ready is not None:
            self._owner.engine_changed(first.ready)

    def engine_reconnected(self, link: EngineLink) -> None:
        """Sends again, under a new id, what the engine has not been heard to have."""
        missing = [state for state in link.live.values() if not _is_heard(state)]
        _take_away(link, missing)
        self._note_wait(*missing)
        for state in missing:
            try:
                self._give(state, link)
            except Unavailable:  # the wire is full
                self.replay.move(state)

    def engine_stalled(self, link: EngineLink) -> None:
        self.update_health()

    def engine_stats(self, link: EngineLink, stats: StepStats) -> None:
        if self.replay.waiting:
            self._send_waiting()
        self._note_stats(link, stats)

    def _note_stats(self, link: EngineLink, stats: StepStats) -> None:
        link.note_stats(stats)
        if self._metrics.model is not None and not link.refused:
            self._metrics.model.engine_stats(stats, link.client.epoch)

    def engine_step(self, link: EngineLink, output: StepOutput) -> None:
        # Before what this step gives back: an engine that shuts down does, and is not to
        # be asked again.
        if self.replay.waiting:
            self._send_waiting()
        num_tokens = self._reader.read(link, output, self._clock())
        self._note_stats(link, output.stats)
        if self.replay.waiting and link.avoided:
            self._send_waiting()
        if self._metrics.model is not None:
            lag_s = (time.monotonic_ns() - output.sent_ns) / 1e9
            self._metrics.model.engine_step(output.stats, num_tokens, lag_s)

    def started(self, state: RequestState) -> None:
        self._owner.started(state)

    def take_back(self, state: RequestState) -> bool:
        """StepReader's: a request waits to be sent again, if an engine is or may come."""
        others = any(link is not state.link for link in self.pool.usable())
        taken = (others or self._restart_timeout > 0) and self.replay.take_back(state)
        if taken:
            self._note_wait(state)
        return taken

    def _note_wait(self, *states: RequestState) -> None:
        for state in states:
            if state.trace is not None:
                state.trace.waits(self._clock())


def fits(state: RequestState, link: EngineLink) -> bool:
    """Whether a usable engine has the adapter, if one is asked for, and room for the whole
    sequence."""
    assert state.sampling is not None
    num_prompt, adapter = len(state.prompt_ids), state.job.adapter
    if adapter is not None and not link.has(adapter):
        return False
    if num_prompt + max(1, state.sampling.max_tokens) > link.room():
        return False
    return link.ready is None or find_room_fault(state.sampling, num_prompt, link.ready) is None


def _is_heard(state: RequestState) -> bool:
    """Whether the engine has said something of the sequence since it was given it."""
    if state.engine_finished or len(state.output_ids) > state.num_resent:
        return True
    return state.started and state.num_adds == 1


def _by_link(states: Iterable[RequestState]) -> dict[EngineLink, list[RequestState]]:
    """Those that are with an engine, by engine."""
    found: dict[EngineLink, list[RequestState]] = {}
    for state in states:
        if state.link is not None and state.engine_id in state.link.live:
            found.setdefault(state.link, []).append(state)
    return found


def _take_away(link: EngineLink, states: Iterable[RequestState]) -> None:
    """The engine is to forget these sequences of its own."""
    unfinished = []
    for state in states:
        del link.live[state.engine_id]
        if not state.engine_finished:
            unfinished.append(state.engine_id)
    if unfinished:
        link.abort(*unfinished)
    link.note_empty()
