"""Beam search as transformers' _beam_search spells it, in numpy, over any model of sequences.

It keeps that code's shape (fixed-size tables, -1e9 for what is not there) so that it can be
held against it line by line, and shares nothing with ours. One beam is greedy there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagewire.types import BeamParams

_NOTHING = -1.0e9


def beam_reference(
    logprobs_of: Callable[[list[int]], Sequence[float]],
    prompt: list[int],
    params: BeamParams,
    max_tokens: int,
    ends: Callable[[list[int]], bool],
    num_candidates: int,
) -> list[tuple[list[int], float]]:
    """logprobs_of: by id, of what follows a sequence. ends: whether an output is complete.
    num_candidates: how many are looked at in each step.

    Returns the best num_return outputs with their scores, best first.
    """
    if params.width == 1:
        return [_greedy(logprobs_of, prompt, params, max_tokens, ends)]
    width = params.width
    running: list[tuple[list[int], float]] = [([], 0.0)]
    complete: list[tuple[list[int], float, bool]] = [([], _NOTHING, False)] * width
    for length in range(1, max_tokens + 1):
        table = np.array([np.array(logprobs_of(prompt + ids)) + total for ids, total in running])
        order = np.argsort(-table, axis=None, kind="stable")[:num_candidates]
        places = [divmod(int(at), table.shape[1]) for at in order]
        candidates = [
            ([*running[row][0], token], float(table[row, token])) for row, token in places
        ]
        stops = [length == max_tokens or ends(ids) for ids, _ in candidates]
        running = [it for it, stopped in zip(candidates, stops, strict=True) if not stopped][:width]
        new = [
            (ids, total / length**params.length_penalty, True)
            for (ids, total), stopped in zip(candidates[:width], stops[:width], strict=True)
            if stopped
        ]
        complete = sorted(complete + new, key=lambda it: -it[1])[:width]
        if not running:
            break
        full = all(finished for _, _, finished in complete)
        never = params.early_stopping == "never" and params.length_penalty > 0
        hypothetical = max_tokens if never else length
        best = running[0][1] / hypothetical**params.length_penalty
        worst = [min(it[1] for it in complete) if it[2] else _NOTHING for it in complete]
        improvement_possible = any(best > score for score in worst)
        if not improvement_possible or (full and params.early_stopping == "true"):
            break
    return [(ids, score) for ids, score, _ in complete[: params.num_return]]


def _greedy(
    logprobs_of: Callable[[list[int]], Sequence[float]],
    prompt: list[int],
    params: BeamParams,
    max_tokens: int,
    ends: Callable[[list[int]], bool],
) -> tuple[list[int], float]:
    ids: list[int] = []
    total = 0.0
    while not ids or (len(ids) < max_tokens and not ends(ids)):
        logprobs = logprobs_of(prompt + ids)
        ids.append(int(np.argmax(logprobs)))
        total += logprobs[ids[-1]]
    return ids, total / len(ids) ** params.length_penalty
