"""Draft tokens against what was drawn in their places."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.runner.rows import Rows
    from engine_core.sched.plan import StepPlan


class Verified(NamedTuple):
    token_ids: list[int]
    """[R]: what each row has drawn after the draft tokens it accepts."""
    accepted: dict[int, tuple[int, ...]]
    """By row, for those with draft tokens."""


class Verification:
    """Which of a step's draws count.

    A row with k draft tokens has 1 + k places beside each other among the S that are
    sampled. The draw at each is right if all draft tokens before it are:

        draft         d0   d1   d2
        drawn    d0   d1    x    y        accepted: d0 d1, drawn after them: x
    """

    def __init__(self, plan: StepPlan, rows: Rows) -> None:
        """rows: hold the draft tokens of all."""
        seqs = [seq for seq in plan.seqs if seq.samples]
        self.rows = np.array([seq.row for seq in seqs])
        """[R], each once."""
        self._drafts: list[tuple[int, ...]] = []
        for seq in seqs:
            begin = rows.num_tokens[seq.row]
            drafts = rows.token_ids[seq.row, begin : begin + len(seq.draft_token_ids)]
            self._drafts.append(tuple(drafts.tolist()))

    def read(self, drawn: Sequence[int]) -> Verified:
        """drawn: [S] ids."""
        token_ids, accepted, place = [], {}, 0
        for row, drafts in zip(self.rows.tolist(), self._drafts, strict=True):
            num = 0
            while num < len(drafts) and drawn[place + num] == drafts[num]:
                num += 1
            token_ids.append(drawn[place + num])
            if drafts:
                accepted[row] = drafts[:num]
            place += 1 + len(drafts)
        assert place == len(drawn), (place, len(drawn))
        return Verified(token_ids, accepted)
