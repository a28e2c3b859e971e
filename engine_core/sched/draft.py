"""A step plan in the making."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_core.sched.plan import NewSeq, SeqStep

if TYPE_CHECKING:
    from engine_core.request import Request


@dataclass(slots=True)
class Draft:
    """What each pass of the scheduler adds to.

    0        num_decodes            len(seqs)
    | one token, sampling | longer chunks |
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
    new_seqs: list[NewSeq] = field(default_factory=list)
    forks: dict[Request, NewSeq] = field(default_factory=dict)
    """Beams that enter a row."""
    started: list[Request] = field(default_factory=list)
    preempted: bool = False

    def spare_decodes(self, max_prefill_tokens: int) -> None:
        """Beside decodes, which wait for it, prefill gets at most so many tokens from here on;
        0 sets no such limit."""
        if max_prefill_tokens and self.num_decodes:
            self.held_back = max(0, self.budget - max_prefill_tokens)
            self.budget -= self.held_back

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

    def withdraw(self, request: Request) -> None:
        """Takes back what a request was given, if anything."""
        for index, planned in enumerate(self.requests):
            if planned is request:
                self.budget += self.seqs[index].num_new_tokens
                self.num_decodes -= index < self.num_decodes
                del self.requests[index], self.seqs[index]
                return
