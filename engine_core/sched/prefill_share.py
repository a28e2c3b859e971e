"""Whose prompts may go before the one whose turn it is, with a share of a step's budget.

In order of arrival, a prompt of thousands of tokens takes whole steps one after the other, and a
prompt of ten that comes behind it waits for all of them. Shortest remaining first is best for
the mean (Schrage, Operations Research 16, 1968), but lets long prompts starve; so it
rules over a part of the budget only, and the first in order always has the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine_core.request import Request

_FOOTHOLD = 16
"""Tokens: too few to cost anybody anything."""


def num_left(request: Request) -> int:
    """Known ids of a running request that are still to be computed."""
    return request.num_tokens - request.num_computed_tokens


def first_in_turn(prefills: Iterable[Request]) -> Request | None:
    """Of those that have anything left, in the running order."""
    return next((request for request in prefills if num_left(request)), None)


def most_ahead(request: Request, num_tokens: int, first: Request) -> int:
    """Tokens that a waiting request, with so many to compute, may have ahead of the first.

    Nobody overtakes another in the queue, so one that is no shorter gets a foothold: then
    it runs, and those behind it can come.
    """
    if request.priority > first.priority:
        return 0
    return num_tokens if _goes_before(request, num_tokens, first) else _FOOTHOLD


def _goes_before(request: Request, num_tokens: int, first: Request) -> bool:
    if request.priority != first.priority:
        return request.priority < first.priority
    return num_tokens < num_left(first)


def shorter_ones(prefills: Iterable[Request], first: Request) -> list[Request]:
    """Those that go before the first, the most urgent and then the shortest first."""
    ahead = [it for it in prefills if it is not first and _goes_before(it, num_left(it), first)]
    return sorted(ahead, key=lambda it: (it.priority, num_left(it)))
