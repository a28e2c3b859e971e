"""Requests that outlive their engine: which of them wait, and who may go back when.

A request whose engine was lost waits here and is replayed on the next one, with
the output it has. Where the engine had died, each request that was with it is
counted a death; a request that has got CLEARED_AFTER new tokens since it was
sent is cleared of what came before. A request with SUSPECT_AFTER deaths is a
suspect:

    no suspect              all go back at once
    suspects                one goes back alone, the newest first (the older ran
                            well before it came); once it is cleared or has
                            ended, the next; the rest follow the last suspect
    a death during a trial  the suspect on trial is the cause and ends with
                            INTERNAL; all others are absolved

Where there are several engines, the engine of a trial gets nothing else meanwhile,
and those that are no suspects go to the others. A lost engine whose requests move on
before anybody knows whether it lives counts as dead.

This file decides and remembers; sending and ending are the dispatcher's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.errors import InternalError, PagewireError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frontend.engine_link import EngineLink
    from frontend.request import RequestState
    from pagewire.wire.messages import Ready

CLEARED_AFTER = 2
"""New tokens: the first comes of the prefill, the second of a decode step."""
SUSPECT_AFTER = 2
"""Engine deaths without clearance in between."""
MAX_RETURNS = 2
"""How often one engine may give a request back without clearance in between."""


class Replay:
    def __init__(self) -> None:
        self.waiting: dict[int, RequestState] = {}
        """By internal id, the one that is sent first at the front."""
        self._was_sent: list[RequestState] = []
        """Those in `waiting` that were with the engine when it was lost."""
        self._suspects: list[RequestState] = []
        """Not tried yet; the next is the last."""
        self._on_trial: RequestState | None = None

    @property
    def trial(self) -> RequestState | None:
        """The suspect on trial, as long as nothing is decided."""
        if self._on_trial is None or _cleared(self._on_trial):
            return None
        return self._on_trial

    def is_suspect(self, state: RequestState) -> bool:
        return state in self._suspects

    @property
    def trying(self) -> bool:
        """Whether a request that arrives now must wait for the trials to end, unless
        there is another engine."""
        return self.trial is not None or bool(self._suspects)

    def wait(self, state: RequestState) -> None:
        """A request that no engine has been given yet."""
        self.waiting[state.internal_id] = state

    def lose(self, state: RequestState) -> None:
        """A request that was with the engine, which is gone."""
        self.waiting[state.internal_id] = state
        self._was_sent.append(state)

    def take_back(self, state: RequestState) -> bool:
        """A request that a living engine ended unasked: no death is counted for it.

        Returns False, and does nothing, where this engine has done so MAX_RETURNS times
        without clearance in between.
        """
        if _cleared(state):
            state.num_returns = 0
        if state.num_returns == MAX_RETURNS:
            return False
        state.num_returns += 1
        self.move(state)
        return True

    def move(self, state: RequestState) -> None:
        """A request that was with a living engine, and is to go on with one."""
        self.waiting[state.internal_id] = state
        if state is self._on_trial:
            self._on_trial = None
            self._suspects.append(state)

    def forget(self, state: RequestState) -> bool:
        """The request has ended. Returns whether it was waiting. Idempotent."""
        if state is self._on_trial:
            self._on_trial = None
        if self.waiting.pop(state.internal_id, None) is None:
            return False
        if state in self._suspects:
            self._suspects.remove(state)
        return True

    def engine_back(self, *, died: bool) -> RequestState | None:
        """Before what was lost is sent to an engine: one that came, or another one.
        Returns the request that killed the last one, if that is known."""
        sent = [s for s in self._was_sent if s.internal_id in self.waiting]
        self._was_sent = []
        tried = self._on_trial
        if tried in sent:
            self._on_trial = None
        for state in sent:
            if _cleared(state):
                state.num_deaths = 0
        if not died:
            # Nobody is to blame; a trial begins again.
            if tried in sent and not _cleared(tried):
                self._suspects.append(tried)
            return None
        for state in self.waiting.values():
            state.num_returns = 0
        for state in sent:
            state.num_deaths += 1
        if tried in sent and not _cleared(tried):
            self._suspects = []
            for state in self.waiting.values():
                state.num_deaths = 0
            return tried
        suspects = [s for s in self.waiting.values() if s.num_deaths >= SUSPECT_AFTER]
        self._suspects = sorted(suspects, key=lambda state: state.arrived_at)
        return None

    def next(self, *, elsewhere: bool = False) -> RequestState | None:
        """The request to send now, still waiting until sent() is told.

        `elsewhere`: there is an engine besides that of the trial.
        """
        if self.trial is not None:
            others = (s for s in self.waiting.values() if s.num_deaths < SUSPECT_AFTER)
            return next(others, None) if elsewhere else None
        self._on_trial = None
        if self._suspects:
            return self._suspects[-1]
        return next(iter(self.waiting.values()), None)

    def sent(self, state: RequestState) -> None:
        """The engine was given what next() named."""
        del self.waiting[state.internal_id]
        if self._suspects and state is self._suspects[-1]:
            self._on_trial = self._suspects.pop()


def _cleared(state: RequestState) -> bool:
    return state.engine_finished or len(state.output_ids) - state.num_resent >= CLEARED_AFTER


def guilty_error() -> PagewireError:
    return InternalError("the engine died each time it ran this request")


def misfit(old: Ready, new: Ready) -> PagewireError | None:
    """Why requests cannot go on with the engine that came, if they cannot."""
    if _identity(new) == _identity(old):
        return None
    return Unavailable(
        "engine_dead",
        "the request was lost: the engine came back with another model or vocabulary",
    )


def unplaced(state: RequestState, links: Sequence[EngineLink]) -> PagewireError:
    """For a request that none of these engines can take; there is at least one."""
    assert state.sampling is not None
    adapter = state.job.adapter
    if adapter is not None and not any(link.has(adapter) for link in links):
        return Unavailable(
            "engine_dead",
            f"the request was lost: no engine has the adapter {adapter.name!r} any more",
        )
    if state.sampling.beam is not None:
        return Unavailable(
            "engine_dead",
            f"the request was lost: the engine that came back has no room for its "
            f"{state.sampling.beam.width} beams",
        )
    room = max(link.room() for link in links)
    num_tokens = len(state.prompt_ids) + max(1, state.sampling.max_tokens)
    return Unavailable(
        "engine_dead",
        f"the request was lost: with its max_tokens it needs {num_tokens} tokens, "
        f"and the engine that came back has room for {room}",
    )


def mismatch(reference: Ready, ready: Ready) -> str | None:
    """Why an engine cannot serve beside the one of `reference`, if it cannot."""
    for name in ("model_name", "architecture", "vocab_size", "eos_token_ids", "max_model_len"):
        ours, theirs = getattr(reference, name), getattr(ready, name)
        if ours != theirs:
            return f"its {name} is {theirs!r}, and that of the others {ours!r}"
    return None


def _identity(ready: Ready) -> tuple[object, ...]:
    """What must be the same for the output to be one model's."""
    return (ready.model_name, ready.architecture, ready.vocab_size, ready.eos_token_ids)
