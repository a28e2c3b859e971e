"""What the scheduler tells the runner, and what comes back: one pair per step.

The runner keeps a row of state per admitted sequence (its token ids, block
table and sampling parameters) and never sees a Request. Rows are numbers in
[0, max_num_seqs) that the scheduler hands out and takes back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_core.grammar.grammar import Grammar
    from pagewire.types import SamplingParams
    from pagewire.wire.messages import PositionLogprobs

BY_MODEL = -1
"""Stands for a draft token that the runner makes itself."""
NO_TOKEN = -1
"""Stands for the id of a row whose own masks leave nothing to draw."""


@dataclass(frozen=True, slots=True)
class NewSeq:
    """A sequence enters (or re-enters, after preemption) row `row`."""

    row: int
    token_ids: tuple[int, ...]
    """All known ids: prompt, then output so far."""
    num_prompt_tokens: int
    sampling: SamplingParams
    prompt_logprobs_from: int | None = None
    """The first prompt position whose logprobs are still wanted; None wants none."""
    grammar: Grammar | None = None
    """What the output must follow."""
    sample_index: int = 0
    """Tells the draws of sequences with the same prompt and seed apart."""
    block_ids: tuple[int, ...] = ()
    """What its block table begins with, where it is a fork."""
    adapter_slot: int | None = None
    """Of the adapter that computes it; None: the base model."""


class SeqStep(msgspec.Struct, frozen=True, gc=False):
    """A row's share of this step: ids [num_computed, num_computed + num_new).

    Made once per running sequence and step, so it is a msgspec struct: ten
    times cheaper to make than a frozen dataclass.

    0            num_computed      +num_new            num_tokens
    | KV in cache    | computed now    | later steps       |
                                                           ^ sampled, if reached

    With draft tokens the ids reach beyond those that are known:

    0            num_computed      num_tokens      +num_new
    | KV in cache    | computed now: known | draft tokens |
                                         ^ sampled, and after each draft token
    """

    row: int
    num_computed_tokens: int
    num_new_tokens: int
    new_block_ids: tuple[int, ...]
    """Appended to the row's block table before the step runs."""
    samples: bool
    """Whether the step reaches the last known id, so that a token is drawn."""
    draft_token_ids: tuple[int, ...] = ()
    """Guesses at the ids that follow, which are the last of the new ones: a token is drawn
    at each of their places too, and counts if all the guesses before it were right. BY_MODEL
    stands for one that the runner's draft model makes."""


class DraftStep(msgspec.Struct, frozen=True, gc=False):
    """What the draft model does for a row before the step: it computes ids
    [num_computed, num_computed + num_new), which reach the last known one if it is to guess."""

    row: int
    num_computed_tokens: int
    num_new_tokens: int
    num_drafts: int


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """KV blocks that are copied whole before the step computes, in the order of the
    fields and, within one, all at the same time."""

    offload: tuple[tuple[int, int], ...] = ()
    """(device block, host block): what the prefix cache evicts."""
    restore: tuple[tuple[int, int], ...] = ()
    """(host block, device block)"""
    copy: tuple[tuple[int, int], ...] = ()
    """(device block, device block): a fork's partial block."""


NO_MOVES = BlockMoves()


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    freed_rows: tuple[int, ...]
    """Rows to forget; applied before new_seqs."""
    new_seqs: tuple[NewSeq, ...]
    seqs: tuple[SeqStep, ...]
    """Decodes (one new token, sampling) first, then those with draft tokens, then prefill
    chunks."""
    moves: BlockMoves = NO_MOVES
    chosen: tuple[tuple[int, int], ...] = ()
    """(row, token id): the row's last token is this one, whatever was drawn."""
    has_drafts: bool = False
    """Whether any of seqs has draft tokens. The next plan is launched after the result."""
    draft_steps: tuple[DraftStep, ...] = ()
    """For a runner with a draft model."""

    @property
    def num_tokens(self) -> int:
        return sum(seq.num_new_tokens for seq in self.seqs)


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Logprobs of prompt tokens [first, first + len(positions))."""

    first: int
    positions: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Of the model itself, by row, for the rows that asked: log softmax of the
    logits before temperature, penalties, masks and filters, in float32."""

    output: Mapping[int, PositionLogprobs] = field(default_factory=dict)
    """Of the tokens drawn."""
    prompt: Mapping[int, PromptChunk] = field(default_factory=dict)
    """Of the prompt tokens that this step's logits predict."""
    accepted: Mapping[int, tuple[PositionLogprobs, ...]] = field(default_factory=dict)
    """Of the draft tokens in StepResult.accepted; `output` is of the token after them."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled ids (or NO_TOKEN) for the rows whose SeqStep.samples is set, in plan order."""

    rows: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: StepLogprobs | None = None
    """None where no row asked."""
    accepted: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By row, for the rows with draft tokens: the leading ones that were drawn too. What
    was drawn after them is in token_ids."""
    offload_s: float = 0.0
    """Seconds that the plan's offloads took."""
    restore_s: float = 0.0
    """Seconds that the plan's restores took."""
