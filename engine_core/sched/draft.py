"""A step plan in the making."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine_core.sched.plan import NewSeq, SeqStep

if TYPE_CHECKING:
    from engine_core.request import Request
    from engine_core.sched.plan import DraftStep


class DraftTokens(NamedTuple):
    """What a decode gets beside its one token."""

    token_ids: tuple[int, ...]
    new_block_ids: tuple[int, ...]


@dataclass(slots=True)
class Draft:
    """What each pass of the scheduler adds to.

    0        num_decodes                            len(seqs)
    | one token, sampling | with draft tokens | longer chunks |
    """

    budget: int
    """Tokens still to give away."""
    held_back: int = 0
    """Tokens of the step's budget that are not given away."""
    requests: list[Request] = field(default_factory=list)
    """Parallel to seqs."""
    seqs: list[SeqStep] = field(default_factory=list)
    num_decodes: int = 0
    prefills: list[Request] = field(default_factory=list)
    """Running requests with more than one token to compute."""
    shared: set[Request] = field(default_factory=set)
    """Those that were given tokens before the one whose turn it was."""
    new_seqs: list[NewSeq] = field(default_factory=list)
    forks: dict[Request, NewSeq] = field(default_factory=dict)
    """Beams that enter a row."""
    started: list[Request] = field(default_factory=list)
    preempted: bool = False
    has_drafts: bool = False
    """Whether any of seqs has draft tokens."""
    draft_steps: tuple[DraftStep, ...] = ()
    """For the draft model."""

    def spare_decodes(self, max_prefill_tokens: int) -> None:
        """Beside decodes, which wait for it, prefill gets at most so many tokens from here on;
        0 sets no such limit."""
        if max_prefill_tokens and self.num_decodes:
            self.held_back = max(0, self.budget - max_prefill_tokens)
            self.budget -= self.held_back

    def enter(self, request: Request) -> None:
        """A request has a row now."""
        wanted = request.prompt_logprobs
        self.new_seqs.append(
            NewSeq(
                request.row,
                tuple(request.token_ids),
                request.num_prompt_tokens,
                request.sampling,
                None if wanted is None else len(wanted.positions),
                request.grammar,
                request.sample_index,
                adapter_slot=request.adapter_slot,
            )
        )

    def add(self, request: Request, num_new: int, new_block_ids: tuple[int, ...]) -> None:
        computed = request.num_computed_tokens
        samples = computed + num_new == len(request.token_ids) + request.num_unread
        seq = SeqStep(request.row, computed, num_new, new_block_ids, samples)
        self.budget -= num_new
        if samples and num_new == 1:
            # The end of the list, but for a prompt whose last token alone is left.
            self.seqs.insert(self.num_decodes, seq)
            self.requests.insert(self.num_decodes, request)
            self.num_decodes += 1
        else:
            self.seqs.append(seq)
            self.requests.append(request)

    def append_drafts(self, drafts: dict[int, DraftTokens]) -> None:
        """Gives draft tokens to decodes, by their index in seqs; nothing is added or
        withdrawn after it."""
        decodes = range(self.num_decodes)
        order = [index for index in decodes if index not in drafts] + list(drafts)
        longer: list[SeqStep] = []
        for index, drafted in drafts.items():
            seq = self.seqs[index]
            blocks = seq.new_block_ids + drafted.new_block_ids
            num_new = seq.num_new_tokens + len(drafted.token_ids)
            longer.append(
                SeqStep(seq.row, seq.num_computed_tokens, num_new, blocks, True, drafted.token_ids)
            )
            self.budget -= len(drafted.token_ids)
        plain = [self.seqs[index] for index in order[: len(order) - len(longer)]]
        self.seqs[: self.num_decodes] = [*plain, *longer]
        self.requests[: self.num_decodes] = [self.requests[index] for index in order]
        self.num_decodes = len(plain)
        self.has_drafts = bool(longer)

    def withdraw(self, request: Request) -> None:
        """Takes back what a request was given, if anything."""
        for index, planned in enumerate(self.requests):
            if planned is request:
                self.budget += self.seqs[index].num_new_tokens
                self.num_decodes -= index < self.num_decodes
                del self.requests[index], self.seqs[index]
                return


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan handed out and not yet updated with its result."""

    requests: list[Request]
    """Parallel to the plan's seqs."""
    started: list[Request]
