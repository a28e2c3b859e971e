"""Which decodes guess ahead, by how much, and what came of it.

Speculative decoding (Leviathan et al., ICML 2023; Chen et al., 2023,
https://arxiv.org/abs/2302.01318): a step that computes a few guessed tokens beside the
known one costs hardly more where its time goes to reading the weights, and yields a token
for each guess that was right, and one more. What is drawn at a place depends on nothing
but the logits, the parameters, the seed and the place, so the step draws at every one as
if alone; a guess is right if it is what was drawn. The output is that of no guessing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from engine_core.sched.acceptance import Acceptance
from engine_core.sched.draft import DraftTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.kv.manager import KVManager
    from engine_core.request import Request
    from engine_core.sched.draft import Draft
    from engine_core.sched.drafters import Drafter
    from engine_core.sched.step_costs import StepCosts

MIN_GAIN = 1.1
"""Tokens a second must be expected to grow by so much."""


class _Proposal(NamedTuple):
    place: int
    """In the plan."""
    request: Request
    acceptance: Acceptance
    token_ids: Sequence[int]


class Speculation:
    """The scheduler's pass that adds draft tokens to a step, and their account.

    Where it pays is computed from the step's cost by its tokens, and each sequence's
    acceptance: draft tokens are taken in the order of their chance to count, as many as
    make the expected tokens a second the most. So they are fewer the more sequences decode
    already, and none from some number on.
    """

    def __init__(
        self,
        drafter: Drafter,
        costs: StepCosts,
        *,
        num_speculative_tokens: int,
        max_sampled_tokens: int,
    ) -> None:
        """num_speculative_tokens: most for a sequence and step. max_sampled_tokens: most that
        a step can draw, over all sequences."""
        self._drafter = drafter
        self._costs = costs
        self._most = num_speculative_tokens
        self._max_sampled_tokens = max_sampled_tokens
        self.most_decodes = costs.most_decodes(MIN_GAIN)
        """Beyond so many it is off."""
        self.num_drafts = 0
        """Guesses, of any length, that were checked."""
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_per_position = [0] * num_speculative_tokens
        """By the place in the guess."""

    def extend(self, draft: Draft, kv_manager: KVManager) -> None:
        """Gives decodes of a plan that is otherwise done draft tokens from what is left of
        its budget. Nobody is preempted for them."""
        if not 0 < draft.num_decodes <= self.most_decodes or not draft.budget:
            return
        num_sampled = sum(seq.samples for seq in draft.seqs)
        room = min(draft.budget, self._max_sampled_tokens - num_sampled)
        proposals = self._propose(draft, room) if room > 0 else []
        if not proposals:
            draft.draft_steps = self._drafter.steps(())
            return
        num_tokens = sum(seq.num_new_tokens for seq in draft.seqs)
        lengths = self._choose(proposals, num_tokens, num_sampled, room)
        drafts, chosen = {}, []
        for proposal in proposals:
            length, blocks = lengths.get(proposal.place, 0), None
            if length:
                blocks = self._grow(kv_manager, proposal.request, length, len(draft.requests))
            if blocks is None:
                proposal.acceptance.not_tried()
            else:
                chosen.append((proposal.request, length))
                drafts[proposal.place] = DraftTokens(tuple(proposal.token_ids[:length]), blocks)
        if drafts:
            draft.append_drafts(drafts)
        draft.draft_steps = self._drafter.steps(chosen)

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """A step has checked num_drafts guesses of a request."""
        assert request.acceptance is not None, request
        self._drafter.verified(request, num_drafts, num_accepted)
        request.acceptance.observe(num_drafts, num_accepted)
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.num_accepted_per_position[position] += 1

    def totals(self) -> dict[str, Any]:
        """For StepStats."""
        return {
            "total_drafts": self.num_drafts,
            "total_draft_tokens": self.num_draft_tokens,
            "total_accepted_tokens": self.num_accepted_tokens,
            "total_accepted_per_position": tuple(self.num_accepted_per_position),
        }

    def _propose(self, draft: Draft, room: int) -> list[_Proposal]:
        """What ends the output is no guess, since nothing follows."""
        self._drafter.begin_step(draft.budget)
        proposals = []
        for index, request in enumerate(draft.requests[: draft.num_decodes]):
            assert not request.num_unread, "guesses need all that was drawn"
            # A step ends with a token that is no guess.
            most = min(self._most, room, request.max_num_tokens - request.num_tokens - 1)
            if request.group is not None or most < 1:
                continue
            token_ids = self._drafter.propose(request, most)
            if not request.stop_ids.isdisjoint(token_ids):
                ends = (at for at, token_id in enumerate(token_ids) if token_id in request.stop_ids)
                token_ids = token_ids[: next(ends)]
            if token_ids:
                if request.acceptance is None:
                    request.acceptance = Acceptance()
                proposals.append(_Proposal(index, request, request.acceptance, token_ids))
        return proposals

    def _choose(
        self, proposals: Sequence[_Proposal], num_tokens: int, num_sampled: int, room: int
    ) -> dict[int, int]:
        """By the index in the plan, how many of a proposal to take."""
        chances: list[tuple[float, int]] = []
        for proposal in proposals:
            rate = chance = proposal.acceptance.rate
            for _ in proposal.token_ids:
                chances.append((chance, proposal.place))
                chance *= rate
        chances.sort(key=lambda each: -each[0])
        expected = float(num_sampled)
        best = MIN_GAIN * expected / self._costs.seconds(num_tokens)
        num_best = 0
        lengths: dict[int, int] = {}
        longest = 0
        for num, (chance, place) in enumerate(chances[:room], start=1):
            expected += chance
            lengths[place] = lengths.get(place, 0) + 1
            longest = max(longest, lengths[place])
            seconds = self._costs.seconds(num_tokens + num)
            speed = expected / (seconds + self._drafter.seconds(len(lengths), longest))
            if speed > best:
                best, num_best = speed, num
        lengths = {}
        for _, place in chances[:num_best]:
            lengths[place] = lengths.get(place, 0) + 1
        return lengths

    @staticmethod
    def _grow(
        kv_manager: KVManager, request: Request, length: int, num_running: int
    ) -> tuple[int, ...] | None:
        """Room for a guess, of blocks that the others do not need for their next token."""
        num_tokens = request.num_computed_tokens + 1 + length
        num_new = kv_manager.blocks_for(num_tokens) - len(request.table.blocks)
        if num_new > 0 and kv_manager.num_free_blocks - num_new < num_running:
            return None
        return kv_manager.grow(request.table, num_tokens)
