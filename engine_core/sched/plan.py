"""What the scheduler tells the runner, and what comes back: one pair per step.

The runner keeps a row of state per admitted sequence (its token ids, block
table and sampling parameters) and never sees a Request. Rows are numbers in
[0, max_num_seqs) that the scheduler hands out and takes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pagewire.types import SamplingParams


@dataclass(frozen=True, slots=True)
class NewSeq:
    """A sequence enters (or re-enters, after preemption) row `row`."""

    row: int
    token_ids: tuple[int, ...]
    """All known ids: prompt, then output so far."""
    num_prompt_tokens: int
    sampling: SamplingParams


class SeqStep(msgspec.Struct, frozen=True, gc=False):
    """A row's share of this step: ids [num_computed, num_computed + num_new).

    Made once per running sequence and step, so it is a msgspec struct: ten
    times cheaper to make than a frozen dataclass.

    0            num_computed      +num_new            num_tokens
    | KV in cache    | computed now    | later steps       |
                                                           ^ sampled, if reached
    """

    row: int
    num_computed_tokens: int
    num_new_tokens: int
    new_block_ids: tuple[int, ...]
    """Appended to the row's block table before the step runs."""
    samples: bool
    """Whether the step reaches the last known id, so that a token is drawn."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    freed_rows: tuple[int, ...]
    """Rows to forget; applied before new_seqs."""
    new_seqs: tuple[NewSeq, ...]
    seqs: tuple[SeqStep, ...]
    """Decodes (one new token, sampling) first, then prefill chunks."""

    @property
    def num_tokens(self) -> int:
        return sum(seq.num_new_tokens for seq in self.seqs)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled ids for the rows whose SeqStep.samples is set, in plan order."""

    rows: tuple[int, ...]
    token_ids: tuple[int, ...]
