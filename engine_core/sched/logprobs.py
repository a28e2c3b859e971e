"""From a step's logprobs by row to each request's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine_core.request import Request, Status
from engine_core.sched.plan import NO_TOKEN
from pagewire.wire.messages import PositionLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.sched.plan import SeqStep, StepResult

NOTHING_BEFORE = PositionLogprobs(-1, 0.0, 0)
"""Stands for the first token of a prompt, which nothing predicts."""


@dataclass(frozen=True, slots=True)
class DrawnLogprobs:
    """What a request that asked is told together with the token it has drawn."""

    request: Request
    output: tuple[PositionLogprobs, ...]
    """Of the drawn token, and the draft tokens accepted before it; empty if only the prompt's
    were asked for."""
    prompt: tuple[PositionLogprobs, ...]
    """All prompt positions with the first token, else empty."""


class PromptLogprobs:
    """A prompt's positions as its chunks are computed: each exactly once.

        0                    len(positions)              num_prompt_tokens
        | reported by the runner | to come, chunk by chunk   |

    Preemption leaves it as it is: the recomputed chunks yield only what is
    still missing.
    """

    __slots__ = ("positions",)

    def __init__(self) -> None:
        self.positions: list[PositionLogprobs] = [NOTHING_BEFORE]

    def take(self, first: int, chunk: Sequence[PositionLogprobs]) -> None:
        """Adds a chunk that begins at prompt position `first`."""
        known = len(self.positions) - first
        assert known >= 0, (first, len(self.positions))
        self.positions.extend(chunk[known:])


def take_logprobs(
    requests: Sequence[Request], seqs: Sequence[SeqStep], result: StepResult
) -> list[DrawnLogprobs]:
    """Sorts a step's logprobs by request, before its tokens are taken in.

    requests is parallel to seqs. Those that nobody waits for any more, or that
    have drawn NO_TOKEN, are passed over; what was preempted after it has drawn is not.
    """
    logprobs = result.logprobs
    if logprobs is None:
        return []
    token_ids = dict(zip(result.rows, result.token_ids, strict=True))
    drawn = []
    for request, seq in zip(requests, seqs, strict=True):
        # Those of a beam are its candidates.
        if request.group is not None:
            continue
        if request.status is not Status.RUNNING and not (
            seq.samples and request.status is Status.PREEMPTED
        ):
            continue
        collected = request.prompt_logprobs
        chunk = logprobs.prompt.get(seq.row)
        if chunk is not None and collected is not None:
            collected.take(chunk.first, chunk.positions)
        output = logprobs.accepted.get(seq.row, ())
        if token_ids.get(seq.row, NO_TOKEN) != NO_TOKEN:
            if seq.row in logprobs.output:
                output = (*output, logprobs.output[seq.row])
        elif not output:
            continue
        if output or collected is not None:
            prompt = () if collected is None else tuple(collected.positions)
            assert len(prompt) in (0, request.num_prompt_tokens), (request, len(prompt))
            drawn.append(DrawnLogprobs(request, output, prompt))
            request.prompt_logprobs = None
    return drawn


def cut_logprobs(drawn: list[DrawnLogprobs], request: Request, num_tokens: int) -> None:
    """Leaves a request those of its first num_tokens tokens."""
    for at, each in enumerate(drawn):
        if each.request is request:
            drawn[at] = replace(each, output=each.output[:num_tokens])
