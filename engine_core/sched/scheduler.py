"""Who computes how much in the next step, and what becomes of the result."""

from __future__ import annotations

from bisect import insort
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from engine_core.request import Request, Status
from engine_core.sched.beam_group import together
from engine_core.sched.draft import Draft, InFlight
from engine_core.sched.free_rows import NO_NEWS, FreeRows
from engine_core.sched.integrity import check_requests
from engine_core.sched.limits import SchedulerLimits
from engine_core.sched.logprobs import cut_logprobs, take_logprobs
from engine_core.sched.outcome import StepOutcome
from engine_core.sched.plan import NO_MOVES, NO_TOKEN, NewSeq, StepPlan, StepResult
from engine_core.sched.policy import FairPolicy
from engine_core.sched.prefill_share import first_in_turn, most_ahead, shorter_ones
from engine_core.sched.reserve import owed, reserve
from engine_core.sched.stop import end_status, has_room, is_ending
from pagewire.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_core.kv.manager import Fork, KVManager, PrefixHit
    from engine_core.sched.beam_group import BeamGroup, Entry
    from engine_core.sched.plan import SeqStep
    from engine_core.sched.policy import Policy
    from engine_core.sched.prefill_budget import PrefillBudget
    from engine_core.sched.speculation import Speculation
    from pagewire.wire.messages import PositionLogprobs

__all__ = ["Scheduler", "SchedulerLimits", "StepOutcome"]


_NOTHING_DRAWN = (-1, -1)
_T = TypeVar("_T")


class Scheduler:
    """Continuous batching with chunked prefill under a token budget.

    Iteration-level scheduling is of Orca (Yu et al., OSDI 2022); prefill chunks
    that share a step with decodes are of Sarathi-Serve (Agrawal et al., OSDI
    2024); paged KV with preemption by recompute is of PagedAttention (Kwon et
    al., SOSP 2023).

    A plan may be made before the result of the last one is read, so that the device does
    not wait for the host: ids are counted when their plan is made, and read by update().
    What ends a request is then known one step late, unless it is its length; the token
    that such a step draws for it is dropped. add() and finish() may come between any of
    the calls. The most senior running request is never preempted and fits the pool alone,
    so every step brings somebody nearer to the end.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv_manager: KVManager,
        policy: Policy | None = None,
        speculation: Speculation | None = None,
        prefill_budget: PrefillBudget | None = None,
    ) -> None:
        """speculation: needs update() before the next schedule(). Default: no draft tokens.
        prefill_budget: in place of limits.max_mixed_prefill_tokens."""
        self.limits = limits
        self.kv_manager = kv_manager
        self.policy: Policy = policy if policy is not None else FairPolicy()
        self.waiting = self.policy.waiting
        self.speculation = speculation
        self.prefill_budget = prefill_budget
        self.running: list[Request] = []
        """In the policy's running order: the last one is preempted first."""
        self.step = 0
        """Plans made so far."""
        self.num_batched_tokens = 0
        """Tokens in the last plan."""
        self.total_prompt_tokens = 0
        """Prompt tokens of requests whose prefill is done, hits included."""
        self.total_output_tokens = 0
        self.total_preemptions = 0
        self._num_arrived = 0
        self._num_admitted = 0
        self._free_rows = FreeRows(limits.max_num_seqs)
        self._forking: list[BeamGroup] = []
        """Searches that have beams to enter rows with the next plan."""
        self._in_flight: dict[int, InFlight] = {}

    def add(self, request: Request) -> None:
        """Queues a request that intake has found servable."""
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        self.waiting.push(request)

    def finish(self, request: Request, status: Status) -> None:
        """Ends a request from outside (abort, deadline, failure), at once.

        Its blocks are free on return. A step that is still computing it is not
        disturbed: the device runs plans in order, so whoever gets the blocks
        writes them after that step, and the token it draws is dropped.
        """
        if request.status is Status.RUNNING:
            for member in together(request):
                self.running.remove(member)
                self._leave_row(member)
                member.move(status)
        else:
            self.waiting.remove(request)
            request.move(status)
        self.policy.ended(request)

    @property
    def max_mixed_prefill_tokens(self) -> int:
        """Most prompt tokens of a step with decodes, as things are; 0 is no limit."""
        if self.prefill_budget is not None:
            return self.prefill_budget.num_tokens
        return self.limits.max_mixed_prefill_tokens

    def has_unfinished(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def schedule(self, now: float) -> StepPlan:
        """Decides the next step. A plan without seqs needs not be launched.

        now: seconds of the engine's monotonic clock. At most one plan may be without its
        update().
        """
        assert len(self._in_flight) <= 1, sorted(self._in_flight)
        draft = Draft(budget=self.limits.max_num_batched_tokens)
        self._enter_forks(draft)
        self._grow_decodes(draft)
        self._spare_decodes(draft)
        if self.limits.short_prefill_share:
            self._share_prefills(draft, now)
        self._grow_prefills(draft, draft.prefills)
        self._admit_waiting(draft, now)
        self._speculate(draft)
        plan = self._seal(draft)
        self._advance_computed(draft)
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> StepOutcome:
        """Takes in what a launched plan has computed; plans come in their order.

        result must have one id for each seq of the plan that samples, in order.
        """
        in_flight = self._in_flight.pop(plan.step)
        register = self.kv_manager.register_computed
        running, preempted = Status.RUNNING, Status.PREEMPTED
        started = [request for request in in_flight.started if not request.is_finished]
        outcome = StepOutcome(started)
        outcome.logprobs = take_logprobs(in_flight.requests, plan.seqs, result)
        drawn = iter(zip(result.rows, result.token_ids, strict=True))
        for request, seq in zip(in_flight.requests, plan.seqs, strict=True):
            token_id = None
            if seq.samples:
                row, token_id = next(drawn, _NOTHING_DRAWN)
                assert row == seq.row, (plan.step, row, seq.row)
            status, group = request.status, request.group
            if status is running:
                num_sure = seq.num_new_tokens - len(seq.draft_token_ids)
                register(request.table, seq.num_computed_tokens + num_sure)
            elif status is not preempted:
                continue
            if token_id is None:
                continue
            if group is None:
                request.num_unread -= 1
                if seq.draft_token_ids:
                    self._take_accepted(request, seq, result.accepted[seq.row], now, outcome)
                if request.status is status:
                    self._take_token(request, token_id, now, outcome)
            elif status is running:
                assert result.logprobs is not None
                candidates = result.logprobs.output[seq.row]
                self._take_candidates(request, group, candidates, now, outcome)
        assert next(drawn, None) is None, f"step {plan.step} has drawn more than was asked"
        self.total_output_tokens += len(outcome.token_ids)
        self.policy.drawn([*outcome.sampled, *outcome.searched])
        for request in (*outcome.finished, *outcome.dead_ends):
            self.policy.ended(request)
        if outcome.finished or outcome.dead_ends:
            self.running = [request for request in self.running if request.status is running]
        return outcome

    def count_uncached(self, request: Request) -> int:
        """Tokens that a waiting request would have to compute if it were admitted now."""
        return request.num_tokens - self.kv_manager.lookup(request.table).num_cached_tokens

    def check_integrity(self) -> None:
        """Compares blocks, tables, rows and queues. Raises IntegrityError or
        AssertionError."""
        self.kv_manager.check_integrity()
        check_requests(self.running, self.waiting, self.policy)
        self._free_rows.check([request.row for request in self.running])
        unread = [request.num_unread for request in (*self.running, *self.waiting)]
        assert max(unread, default=0) <= len(self._in_flight), (unread, self._in_flight)
        num_held = sum(len(request.table.blocks) > 0 for request in self.running)
        assert num_held == self.kv_manager.num_tables, (num_held, self.kv_manager.num_tables)

    def _enter_forks(self, draft: Draft) -> None:
        """Beams that begin with another's KV, into rows that were reserved for them.

        Nothing of the plan is made yet, so what they share is as the last step left it.
        """
        forking, self._forking = self._forking, []
        for group in forking:
            while group.entering and group.leader.status is Status.RUNNING:
                entry = group.entering[0]
                take = partial(
                    self.kv_manager.fork, entry.source.table, entry.beam.table, entry.num_shared
                )
                fork = self._make_room(group.leader, take, draft)
                if fork is not None:
                    group.entering.popleft()
                    self._enter_fork(entry, fork, draft)

    def _enter_fork(self, entry: Entry, fork: Fork, draft: Draft) -> None:
        beam = entry.beam
        beam.move(Status.RUNNING)
        beam.row = self._free_rows.take()
        beam.num_computed_tokens = entry.num_shared
        insort(self.running, beam, key=self.policy.running_key)
        draft.forks[beam] = NewSeq(
            beam.row,
            tuple(beam.token_ids),
            beam.num_prompt_tokens,
            beam.sampling,
            block_ids=fork.block_ids,
            adapter_slot=beam.adapter_slot,
        )

    def _grow_decodes(self, draft: Draft) -> None:
        """One token for each request that has one to compute."""
        # Preemption takes requests from the end of the list, never from the
        # part that this loop has passed: that is what its order is for.
        for request in self.running:
            computed, num_unread = request.num_computed_tokens, request.num_unread
            num_drawn = len(request.token_ids) + num_unread
            if num_drawn - computed != 1:
                draft.prefills.append(request)
                continue
            if num_unread and num_drawn >= request.max_num_tokens:
                continue  # it is_ending()
            new_block_ids: tuple[int, ...] | None = ()
            if computed == request.table.capacity:
                new_block_ids = self._room_for(request, computed + 1, draft)
            if new_block_ids is not None:
                draft.add(request, 1, new_block_ids)
        # Everybody running has had a token in every step since it was admitted, so
        # nobody was admitted who would make them more than the budget.
        assert draft.budget >= 0, (draft.budget, len(self.running))

    def _spare_decodes(self, draft: Draft) -> None:
        """Decodes wait for the whole step, so prompts get only so much of it beside them."""
        budget = self.prefill_budget
        if budget is not None and draft.num_decodes and (draft.prefills or self.waiting):
            num_running, num_free = len(self.running), self.kv_manager.num_free_blocks
            # As many more as there is room for if they are like those.
            num_fitting = num_running * num_free // (self.kv_manager.num_usable_blocks - num_free)
            num_rows = self.limits.max_num_seqs - num_running
            budget.resize(draft, self.running, min(len(self.waiting), num_rows, num_fitting))
        draft.spare_decodes(self.max_mixed_prefill_tokens)

    def _share_prefills(self, draft: Draft, now: float) -> None:
        """Prompts with less left than the first in order, with their share of the budget."""
        first = first_in_turn(draft.prefills)
        if first is None:
            return
        num_decodes = draft.num_decodes
        num_shared = int(draft.budget * self.limits.short_prefill_share)
        held_back = draft.budget - num_shared
        draft.budget = num_shared
        self._grow_prefills(draft, shorter_ones(draft.prefills, first))
        # What they leave is for those who wait. None of these can be preempted for the first:
        # an admission leaves room for all that running prompts are owed.
        self._admit_waiting(draft, now, first)
        draft.shared.update(draft.requests[num_decodes:])
        draft.budget += held_back

    def _grow_prefills(self, draft: Draft, prefills: Sequence[Request]) -> None:
        """The next chunk of each running prompt, as far as the budget goes."""
        max_chunk = self.limits.max_chunk
        for request in prefills:
            if not draft.budget:
                break
            if request.status is not Status.RUNNING or request in draft.shared:
                continue
            num_left = request.num_tokens - request.num_computed_tokens
            if not num_left:
                continue  # a beam that waits for the others of its search
            num_new = min(num_left, max_chunk, draft.budget)
            new_block_ids = self._room_for(request, request.num_computed_tokens + num_new, draft)
            if new_block_ids is not None:
                draft.add(request, num_new, new_block_ids)

    def _room_for(self, request: Request, num_tokens: int, draft: Draft) -> tuple[int, ...] | None:
        """Room for num_tokens, as _make_room() gets it. None also if there will be room once
        the step before is read: nobody is preempted for want of what is about to be freed."""
        new_block_ids = self.kv_manager.grow(request.table, num_tokens)
        if new_block_ids is not None:
            return new_block_ids
        if any(map(is_ending, self.running)):
            return None
        return self._make_room(
            request, lambda: self.kv_manager.grow(request.table, num_tokens), draft
        )

    def _make_room(
        self, request: Request, attempt: Callable[[], _T | None], draft: Draft
    ) -> _T | None:
        """What an attempt to take blocks yields, at the cost of juniors. None if the
        request itself was among the most junior, and is preempted now."""
        while True:
            taken = attempt()
            if taken is not None:
                return taken
            self._preempt(self.running[-1], draft)
            if request.status is not Status.RUNNING:
                return None

    def _preempt(self, victim: Request, draft: Draft) -> None:
        """Back to the front of its priority in the queue, to be recomputed. A beam takes
        its whole search with it."""
        members = together(victim)
        # They have one place in the order, so they are beside each other.
        assert set(self.running[-len(members) :]) == set(members), victim
        del self.running[-len(members) :]
        draft.preempted = True
        for member in members:
            draft.withdraw(member)
            self._leave_row(member, told=draft.forks.pop(member, None) is None)
            member.move(Status.PREEMPTED)
            member.num_computed_tokens = 0
        if victim.group is not None:
            victim.group.suspend()
            victim = victim.group.leader
        victim.num_preemptions += 1
        self.total_preemptions += 1
        self.waiting.push(victim)

    def _admit_waiting(self, draft: Draft, now: float, first: Request | None = None) -> None:
        """New prompts, first chunk each, while budget, rows and blocks last; ahead of the
        first of those that run, if one is given.

        Strictly in the policy's order: nobody overtakes one who does not fit,
        so a large request is not starved by small ones.
        """
        # Right after a preemption the pool has no room to speak of.
        if draft.preempted or not self.waiting:
            return
        num_owed = sum(owed(request, self.kv_manager) for request in draft.prefills)
        # Each row may have a token to compute in every step.
        num_free_rows = min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        num_free_rows -= sum(request.num_reserved_rows for request in self.running)
        while self.waiting and draft.budget:
            request = self.waiting.peek()
            num_free_rows -= request.num_reserved_rows
            if num_free_rows < 0:
                break
            hit = self.kv_manager.lookup(request.table)
            num_left = request.num_tokens - hit.num_cached_tokens
            num_new = min(num_left, self.limits.max_chunk, draft.budget)
            if first is not None:
                num_new = min(num_new, most_ahead(request, num_left, first))
                if not num_new:
                    break
            kept = reserve(request, num_owed, len(self.running), self.kv_manager)
            block_ids = self.kv_manager.admit(request.table, hit, num_new, kept)
            if block_ids is None:
                break
            self.waiting.pop()
            self._enter_row(request, hit, draft, now)
            draft.add(request, num_new, block_ids)
            num_owed += owed(request, self.kv_manager)
            draft.prefills.append(request)
        assert self.running or not self.waiting, "a request that fits alone was not admitted"

    def _speculate(self, draft: Draft) -> None:
        """Draft tokens for decodes, of what nobody else wants."""
        if self.speculation is not None:
            self.speculation.extend(draft, self.kv_manager)

    def _enter_row(self, request: Request, hit: PrefixHit, draft: Draft, now: float) -> None:
        """From the queue to a row, with the hit's KV found."""
        num_cached = hit.num_cached_tokens
        if request.first_scheduled_at is None:
            request.first_scheduled_at = now
            request.admission_index = self._num_admitted
            self._num_admitted += 1
            self.policy.admitted(request, request.num_tokens - num_cached)
            # On a replay the hit may reach into the output.
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            self.kv_manager.count_lookup(
                request.table, request.num_prompt_tokens, request.num_cached_tokens, hit
            )
            draft.started.append(request)
        request.move(Status.RUNNING)
        request.row = self._free_rows.take()
        request.num_computed_tokens = num_cached
        insort(self.running, request, key=self.policy.running_key)
        draft.enter(request)

    def _leave_row(self, request: Request, *, told: bool = True) -> None:
        """told: whether the runner knows of it."""
        self.kv_manager.free(request.table)
        self._free_rows.give_back(request.row, told=told)
        request.row = -1
        request.num_draft_computed = 0

    def _seal(self, draft: Draft) -> StepPlan:
        self.step += 1
        # An empty plan is not launched, so it must not carry freed rows and moves away.
        moves, rows = NO_MOVES, NO_NEWS
        if draft.seqs:
            moves, rows = self.kv_manager.take_moves(), self._free_rows.tell()
            self._in_flight[self.step] = InFlight(draft.requests, draft.started)
        left = draft.budget + draft.held_back
        self.num_batched_tokens = self.limits.max_num_batched_tokens - left
        new_seqs = (*draft.new_seqs, *draft.forks.values())
        seqs = tuple(draft.seqs)
        drafts = draft.has_drafts, draft.draft_steps
        return StepPlan(self.step, rows.freed, new_seqs, seqs, moves, rows.chosen, *drafts)

    def _advance_computed(self, draft: Draft) -> None:
        """The one place where num_computed_tokens moves forward after admission, and with it
        the count of ids to come.

        It does so when the plan is made, not when it has run, so that the next
        plan can be made meanwhile. Blocks become known to the prefix cache in
        update(), when their KV is really there.
        """
        for request, seq in zip(draft.requests, draft.seqs, strict=True):
            request.num_computed_tokens += seq.num_new_tokens - len(seq.draft_token_ids)
            if seq.samples and request.group is None:
                request.num_unread += 1

    def _take_accepted(
        self,
        request: Request,
        seq: SeqStep,
        accepted: Sequence[int],
        now: float,
        outcome: StepOutcome,
    ) -> None:
        """Draft tokens that were drawn too; their KV is there. One may end the request."""
        assert self.speculation is not None
        self.speculation.observe(request, len(seq.draft_token_ids), len(accepted))
        for num, token_id in enumerate(accepted, start=1):
            self._take_token(request, token_id, now, outcome)
            if request.is_finished:
                cut_logprobs(outcome.logprobs, request, num)
                return
            request.num_computed_tokens += 1
            self.kv_manager.register_computed(request.table, request.num_computed_tokens)

    def _take_token(
        self, request: Request, token_id: int, now: float, outcome: StepOutcome
    ) -> None:
        if token_id == NO_TOKEN:
            outcome.dead_ends.append(request)
            self._end(request, Status.FAILED)
            return
        if request.first_token_at is None:
            self.total_prompt_tokens += request.num_prompt_tokens
        status: Status | None = Status.LENGTH
        if has_room(request):
            request.append(token_id, now)
            outcome.sampled.append(request)
            outcome.token_ids.append(token_id)
            status = end_status(request, token_id)
        else:
            request.end_prefill(now)
        if status is not None:
            if status is Status.STOPPED:
                request.finish_token_id = token_id
            self._end(request, status)
            outcome.finished.append(request)

    def _end(self, request: Request, status: Status) -> None:
        """By a token it has drawn, perhaps before it was preempted."""
        if request.status is Status.RUNNING:
            self._leave_row(request)
        else:
            self.waiting.remove(request)
        request.move(status)

    def _take_candidates(
        self,
        beam: Request,
        group: BeamGroup,
        candidates: PositionLogprobs,
        now: float,
        outcome: StepOutcome,
    ) -> None:
        """The search goes on once all of its beams have drawn."""
        leader, search = group.leader, group.search
        if leader.first_token_at is None:
            self.total_prompt_tokens += leader.num_prompt_tokens
            leader.first_token_at = now
        leader.last_token_at = now
        outcome.searched.append(leader)
        if group.take(beam, candidates):
            for staying in group.advance(now, self._drop_beam):
                self._free_rows.choose(staying.row, staying.token_ids[-1])
        if search.done:
            self.total_output_tokens += search.num_output_tokens
            stopped = search.finish_reason is FinishReason.STOP
            for member in group.in_rows:
                self._leave_row(member)
                member.move(Status.STOPPED if stopped else Status.LENGTH)
            outcome.finished.append(leader)
        elif group.entering:
            self._forking.append(group)

    def _drop_beam(self, beam: Request) -> None:
        """It goes on as none; the search may need it again."""
        self.running.remove(beam)
        self._leave_row(beam)
        beam.move(Status.PREEMPTED)
