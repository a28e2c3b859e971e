"""What a step's result means for its requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_core.request import Request
    from engine_core.sched.logprobs import DrawnLogprobs


@dataclass(slots=True)
class StepOutcome:
    """What a step did for the requests that nobody ended from outside meanwhile."""

    started: list[Request] = field(default_factory=list)
    """Left the queue for the first time."""
    sampled: list[Request] = field(default_factory=list)
    """Drew a token; parallel to token_ids. Who drew several stands here as often, in a row."""
    token_ids: list[int] = field(default_factory=list)
    searched: list[Request] = field(default_factory=list)
    """Leaders of beam searches, once for each of their beams that drew."""
    finished: list[Request] = field(default_factory=list)
    dead_ends: list[Request] = field(default_factory=list)
    """FAILED: their masks left no token to draw."""
    logprobs: list[DrawnLogprobs] = field(default_factory=list)
    """Of those among `sampled` that asked."""
