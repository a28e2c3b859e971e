"""Where guesses come from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from engine_core.sched.ngram import NgramIndex, follow
from engine_core.sched.plan import BY_MODEL, DraftStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.request import Request
    from engine_core.sched.step_costs import StepCosts

_MOST_INDEXED = 2048
"""Ids that are indexed in a step, over all requests: a long prompt takes a few."""
_SHORT = 16
"""Tokens that the draft model computes on the way to a guess; before more than that it only
catches up."""


class Drafter(Protocol):
    def begin_step(self, budget: int) -> None:
        """budget: tokens that the step leaves unused."""
        ...

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to `most` ids that may follow those of a request, best guess; BY_MODEL for each
        that is known once the step runs."""
        ...

    def seconds(self, num_rows: int, length: int) -> float:
        """What guesses of that length take beside the step, for so many rows at once."""
        ...

    def steps(self, chosen: Sequence[tuple[Request, int]]) -> tuple[DraftStep, ...]:
        """What the draft model has to do in this step; chosen: how many guesses for whom."""
        ...

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """So many of a request's guesses were right; they are not among its ids yet."""
        ...


class NgramDrafter:
    """Prompt lookup: see engine_core/sched/ngram.py."""

    def __init__(self, min_size: int, max_size: int) -> None:
        """min_size, max_size: ids that must, and that can, be like those before a place."""
        self._min_size = min_size
        self._max_size = max_size
        self._left = 0

    def begin_step(self, budget: int) -> None:
        self._left = _MOST_INDEXED

    def propose(self, request: Request, most: int) -> Sequence[int]:
        token_ids, index = request.token_ids, request.ngrams
        if index is None:
            index = request.ngrams = NgramIndex(self._min_size)
        # The place after the last id has no id yet.
        self._left -= index.extend(token_ids, self._left)
        if index.num_indexed + 1 < len(token_ids):
            return ()
        place = index.find(token_ids, self._max_size)
        return follow(token_ids, place, most) if place >= 0 else ()

    def seconds(self, num_rows: int, length: int) -> float:
        return 0.0

    def steps(self, chosen: Sequence[tuple[Request, int]]) -> tuple[DraftStep, ...]:
        return ()

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        pass


class ModelDrafter:
    """The runner's draft model, whose KV is followed here.

    0        num_draft_computed                num_tokens
    | its KV is there | at most _SHORT: computed, then guesses |
    | its KV is there | more: a chunk of the prompt, no guess  |
    """

    def __init__(self, costs: StepCosts, max_model_len: int | None = None) -> None:
        """costs: of the draft model. max_model_len: tokens that it can look at, past which it
        guesses nothing; None: as many as a request can have."""
        self._costs = costs
        self._max_model_len = math.inf if max_model_len is None else max_model_len
        self._left = 0
        self._chunks: list[DraftStep] = []

    def begin_step(self, budget: int) -> None:
        self._left = budget
        self._chunks = []

    def propose(self, request: Request, most: int) -> Sequence[int]:
        # It looks at all of a guess but the last token.
        most = int(min(most, self._max_model_len - request.num_tokens + 1))
        if most < 1:
            return ()
        computed = request.num_draft_computed
        if request.num_tokens - computed > _SHORT:
            # The last one is left, so that there is something to guess from.
            num_new = min(request.num_tokens - 1 - computed, self._left)
            if num_new:
                self._left -= num_new
                self._chunks.append(DraftStep(request.row, computed, num_new, 0))
                request.num_draft_computed += num_new
            return ()
        return (BY_MODEL,) * most

    def seconds(self, num_rows: int, length: int) -> float:
        return length * self._costs.seconds(num_rows)

    def steps(self, chosen: Sequence[tuple[Request, int]]) -> tuple[DraftStep, ...]:
        drafting = (
            DraftStep(
                request.row,
                request.num_draft_computed,
                request.num_tokens - request.num_draft_computed,
                length,
            )
            for request, length in chosen
        )
        return (*self._chunks, *drafting)

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        # It has not computed its own last guess.
        request.num_draft_computed = request.num_tokens + min(num_accepted, num_drafts - 1)
