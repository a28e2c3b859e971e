"""The engine's loop body: decide, compute, tell the frontends."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from engine_core.grammar.gate import GrammarGate, compile_nothing
from engine_core.grammar.grammar import BadConstraint
from engine_core.kv.offload import NO_TIER
from engine_core.lora.adapters import Adapters
from engine_core.request import Request, Status
from engine_core.sched.deadline import DeadlineWatch, SpeedEstimate
from engine_core.sched.followers import Followers, has_same_prompt
from engine_core.sched.intake import Refused, all_is_supported, no_token_bytes, read_add
from pagewire.types import FinishReason
from pagewire.wire.codec import pack_counts, pack_ids, pack_request_ids
from pagewire.wire.messages import (
    Finished,
    RequestLogprobs,
    Started,
    StepOutput,
    StepStats,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_core.runner.base import PendingStep, Runner
    from engine_core.sched.intake import FindUnsupported
    from engine_core.sched.plan import StepPlan
    from engine_core.sched.scheduler import Scheduler, StepOutcome
    from pagewire.wire.messages import (
        AdapterInfo,
        AdapterReply,
        Add,
        Beam,
        LoadAdapter,
        UnloadAdapter,
    )

_DEAD_END = (
    "structured_output, allowed_token_ids, bad_words and min_tokens together leave no token to draw"
)


@dataclass(slots=True)
class _Outbox:
    """What one frontend is to be told with the next output."""

    request_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Of token_ids, for each of request_ids."""
    token_ids: list[int] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    unknown_aborts: list[int] = field(default_factory=list)
    abort_to_free_s: list[float] = field(default_factory=list)
    logprobs: list[RequestLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose result has not been read."""

    plan: StepPlan
    num_tokens: int
    pending: PendingStep
    began_at: float
    """When its plan was begun."""


class EngineCore:
    """Requests of all frontends over one scheduler and one runner.

    With asynchronous scheduling a step's result is read once the next step is planned and
    launched, so that the device goes from one to the other without waiting for the host:

        host    plan 1 | plan 2 | read 1, plan 3 | read 2, plan 4 | ...
        device         | step 1          | step 2          | step 3 ...

    Single-threaded: every method is called from the one thread that computes.
    A request is known by its frontend and the id that frontend gave it. Each
    Add is answered by exactly one Finished, whatever happens to it, unless its
    frontend is dropped.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarGate | None = None,
        token_bytes: Callable[[], Sequence[bytes]] = no_token_bytes,
        find_unsupported: FindUnsupported = all_is_supported,
        async_scheduling: bool = False,
        adapters: Adapters | None = None,
    ) -> None:
        """epoch: random 64 bit, one per engine process life. clock: seconds, monotonic.
        grammars: where structured output is compiled; by default all of it is refused.
        token_bytes: for beam searches with stop strings, asked once there is one.
        find_unsupported: what the runner cannot do, which is refused.
        async_scheduling: for a runner whose launch() returns while the device works.
        adapters: those that requests may name; by default none."""
        if async_scheduling and scheduler.speculation is not None:
            raise ValueError("draft tokens follow from a result, which a step must not precede")
        self.epoch = epoch
        self.step_id = 0
        """Steps finished; stands still while one runs."""
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._requests: dict[int, dict[int, Request]] = {}
        """frontend id -> request id -> unfinished request."""
        limits = scheduler.limits
        self._speed = SpeedEstimate(limits.max_num_batched_tokens, limits.max_chunk)
        self._deadlines = DeadlineWatch(self._speed, scheduler.count_uncached)
        self._followers = Followers()
        self._token_bytes = token_bytes
        self._find_unsupported = find_unsupported
        self._adapters = adapters if adapters is not None else Adapters()
        self._grammars = grammars if grammars is not None else GrammarGate(compile_nothing)
        self._outboxes: dict[int, _Outbox] = {}
        self._async_scheduling = async_scheduling
        self._launched: _Launched | None = None
        """Between steps: the one to be read by the next step()."""
        self._read_at = -math.inf
        """When the last result was there."""
        self._last_step_s = 0.0
        self._last_num_batched = 0

    def add(self, frontend_id: int, add: Add, received_at: float) -> None:
        """Queues a request, or refuses it with an ERROR finish; never raises.

        An id that is in use here would be answered twice, and its frontend
        could not tell which of the two was meant. So one ERROR finish ends
        both. An Add for another epoch says nothing about a request of this one
        and leaves it alone.
        """
        rival = self._requests.get(frontend_id, {}).get(add.request_id)
        if add.epoch != self.epoch:
            if rival is None:
                self._refuse(
                    frontend_id,
                    add.request_id,
                    f"meant for engine epoch {add.epoch}, this is {self.epoch}",
                )
            return
        if rival is not None:
            self._end(rival, Status.FAILED, "request_id is in use, both requests were ended")
            return
        try:
            request = read_add(
                frontend_id,
                add,
                received_at,
                limits=self._scheduler.limits,
                kv_manager=self._scheduler.kv_manager,
                token_bytes=self._token_bytes,
                find_unsupported=self._find_unsupported,
                adapters=self._adapters,
            )
            self._queue(request, add.leader_id)
        except Refused as refusal:
            self._refuse(frontend_id, add.request_id, str(refusal), refusal.field)
            return
        self._requests.setdefault(frontend_id, {})[request.request_id] = request
        self._deadlines.watch(request, received_at)
        if request.adapter is not None:
            self._adapters.enter(request.adapter)

    def _queue(self, request: Request, leader_id: int | None) -> None:
        """Queues a request, now or once its leader has computed the prompt. Raises Refused."""
        leader = None
        if leader_id is not None:
            leader = self._requests.get(request.frontend_id, {}).get(leader_id)
        # Shared blocks have no logits, so who reports the prompt's computes it.
        if leader is None or request.prompt_logprobs is not None:
            self._enter(request)
            return
        if not has_same_prompt(leader, request):
            raise Refused(f"leader_id {leader_id} is a request with another prompt or cache_salt")
        self._scheduler.kv_manager.share(leader.table, request.table, request.num_prompt_tokens)
        if leader.first_token_at is None:
            self._followers.hold(leader, request)
        else:
            self._enter(request)

    def _enter(self, request: Request) -> None:
        """Queues a request, now or once what constrains it is compiled."""
        if request.sampling.structured_output is None:
            self._scheduler.add(request)
        else:
            self._grammars.enter(request)

    def _take_compiled(self) -> None:
        """Queues those whose constraint is there, and ends those whose is none."""
        for request, result in self._grammars.take_ready():
            if isinstance(result, BadConstraint):
                wanted = request.sampling.structured_output
                assert wanted is not None, request
                request.move(Status.FAILED)
                self._report_finished(
                    request,
                    self._clock(),
                    str(result),
                    f"sampling_params.structured_output.{wanted.kind}",
                )
            else:
                request.grammar = result
                self._scheduler.add(request)

    def abort(self, frontend_id: int, request_ids: Sequence[int], received_at: float) -> None:
        """Ends requests at once with an ABORT finish each; their blocks are free
        on return. Ids that are not (or no longer) known go to unknown_aborts."""
        mine = self._requests.get(frontend_id, {})
        outbox = self._outbox(frontend_id)
        for request_id in request_ids:
            request = mine.get(request_id)
            if request is None:
                outbox.unknown_aborts.append(request_id)
                continue
            self._end(request, Status.ABORTED)
            outbox.abort_to_free_s.append(self._clock() - received_at)

    def drop_frontend(self, frontend_id: int) -> None:
        """Ends all requests of a frontend that is gone, and tells nobody."""
        for request in list(self._requests.get(frontend_id, {}).values()):
            self._end(request, Status.ABORTED)
        self._outboxes.pop(frontend_id, None)

    def reset_prefix_cache(self) -> int:
        """Forgets all cached prefixes; returns how many blocks could have been hit."""
        return self._scheduler.kv_manager.reset_prefix_cache()

    def change_adapters(self, command: LoadAdapter | UnloadAdapter) -> AdapterReply:
        """Never raises. A step that runs has read what it needs, or will before the change."""
        return self._adapters.apply(command)

    def adapter_infos(self) -> tuple[AdapterInfo, ...]:
        return self._adapters.infos()

    def has_work(self) -> bool:
        """Whether step() has something to compute or to tell."""
        # Not for those whose constraint is being compiled, nor for their followers.
        return bool(
            self._outboxes
            or self._launched is not None
            or self._scheduler.has_unfinished()
            or self._grammars.has_ready
            or self._followers.has_due
        )

    def step(self, poll: Callable[[], None]) -> dict[int, StepOutput]:
        """One turn: at most one launch and at most one result, then one output per
        frontend concerned.

        poll: takes in commands that have come, by calling add() and abort(). It
        is called once, after the launch, so an abort ends its request with this
        very step. Raises what the runner raises; the core is of no use then.
        """
        began_at = self._clock()
        self._expire_deadlines(began_at)
        self._take_compiled()
        for follower in self._followers.take_due():
            self._enter(follower)
        self._take_compiled()
        plan = self._scheduler.schedule(began_at)
        launched = None
        if plan.seqs:
            num_tokens = self._scheduler.num_batched_tokens
            launched = _Launched(plan, num_tokens, self._runner.launch(plan), began_at)
        poll()
        due = launched
        if self._async_scheduling:
            due, self._launched = self._launched, launched
        if due is not None:
            self._read(due)
        elif launched is None:
            self._last_num_batched = 0
            self._last_step_s = self._clock() - began_at
            self.step_id = plan.step
        if not self._requests:
            self._scheduler.kv_manager.check_all_free()
        return self._flush()

    def _read(self, launched: _Launched) -> None:
        """Waits for a step's result and takes it in."""
        plan = launched.plan
        result = launched.pending.result()
        ended_at = self._clock()
        # The device took it up when it was done with the step before.
        step_s = ended_at - max(launched.began_at, self._read_at)
        self._read_at = ended_at
        self._speed.observe(launched.num_tokens, step_s)
        self._scheduler.kv_manager.observe_step(plan, result, step_s)
        if self._scheduler.prefill_budget is not None:
            self._scheduler.prefill_budget.observe(plan, step_s)
        self._deliver(self._scheduler.update(plan, result, ended_at))
        self._last_num_batched = launched.num_tokens
        self._last_step_s = self._clock() - ended_at + step_s
        self.step_id = plan.step

    def stats(self) -> StepStats:
        """The state after the last step, without abort_to_free_s, which rides on
        the output that answers the aborts."""
        scheduler = self._scheduler
        kv_manager = scheduler.kv_manager
        tier = NO_TIER if kv_manager.offload is None else kv_manager.offload.stats()
        return StepStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._followers) + len(self._grammars),
            num_blocks=kv_manager.num_usable_blocks,
            num_free_blocks=kv_manager.num_free_blocks,
            num_batched_tokens=self._last_num_batched,
            step_s=self._last_step_s,
            total_prompt_tokens=scheduler.total_prompt_tokens,
            total_output_tokens=scheduler.total_output_tokens,
            total_preemptions=scheduler.total_preemptions,
            prefix_cache_queries=kv_manager.num_queried_tokens,
            prefix_cache_hits=kv_manager.num_hit_tokens,
            host_cache_queries=tier.num_queried_tokens,
            host_cache_hits=tier.num_hit_tokens,
            num_host_blocks=tier.num_blocks,
            num_used_host_blocks=tier.num_used_blocks,
            total_offloaded_blocks=tier.num_offloaded_blocks,
            total_restored_blocks=tier.num_restored_blocks,
            num_free_cached_blocks=kv_manager.pool.num_free_cached_blocks,
            max_mixed_prefill_tokens=scheduler.max_mixed_prefill_tokens,
            **({} if scheduler.speculation is None else scheduler.speculation.totals()),
        )

    def check_integrity(self) -> None:
        """Compares all bookkeeping with itself. O(blocks + requests). Raises
        IntegrityError or AssertionError with the figures."""
        self._scheduler.check_integrity()
        num_here = sum(len(requests) for requests in self._requests.values())
        # A beam search is known by its leader.
        running = [it for it in self._scheduler.running if it.num_reserved_rows]
        num_there = len(running) + len(self._scheduler.waiting)
        num_there += len(self._followers) + len(self._grammars)
        assert num_here == num_there, (num_here, num_there)
        self._adapters.check_integrity(
            request.adapter
            for requests in self._requests.values()
            for request in requests.values()
            if request.adapter is not None
        )

    def _expire_deadlines(self, now: float) -> None:
        """Ends what nobody waits for any more, in the queue or running, and what
        waits in vain."""
        while (request := self._deadlines.next_late(now)) is not None:
            self._end(request, Status.ABORTED, deadline_missed=True)

    def _end(
        self,
        request: Request,
        status: Status,
        error: str = "",
        *,
        deadline_missed: bool = False,
    ) -> None:
        """Ends a request from outside of a step."""
        if self._followers.withdraw(request) or self._grammars.leave(request):
            request.move(status)
        else:
            self._scheduler.finish(request, status)
        self._report_finished(request, self._clock(), error, deadline_missed=deadline_missed)

    def _refuse(self, frontend_id: int, request_id: int, error: str, field: str = "") -> None:
        refusal = Finished(
            request_id=request_id, reason=int(FinishReason.ERROR), error=error, field=field
        )
        self._outbox(frontend_id).finished.append(refusal)

    def _report_finished(
        self,
        request: Request,
        now: float,
        error: str = "",
        bad_field: str = "",
        *,
        deadline_missed: bool = False,
    ) -> None:
        """The request's one terminal outcome; forgets the request."""
        mine = self._requests[request.frontend_id]
        del mine[request.request_id]
        if not mine:
            del self._requests[request.frontend_id]
        self._deadlines.forget(request)
        if request.adapter is not None:
            self._adapters.leave(request.adapter)
        reason = request.finish_reason
        assert reason is not None, request
        beams: tuple[Beam, ...] = ()
        if request.group is not None and request.group.search.done:
            beams = request.group.search.beams()
        timings = request.timings(now)
        self._outbox(request.frontend_id).finished.append(
            Finished(
                request_id=request.request_id,
                reason=int(reason),
                stop_token_id=request.finish_token_id,
                num_cached_tokens=request.num_cached_tokens,
                queue_s=timings.queue,
                prefill_s=timings.prefill,
                decode_s=timings.decode,
                num_preemptions=request.num_preemptions,
                error=error,
                field=bad_field,
                deadline_missed=deadline_missed,
                beams=beams,
            )
        )

    def _deliver(self, outcome: StepOutcome) -> None:
        """Sorts a step's outcome by frontend."""
        for request in outcome.started:
            assert request.first_scheduled_at is not None
            self._outbox(request.frontend_id).started.append(
                Started(
                    request_id=request.request_id,
                    num_cached_tokens=request.num_cached_tokens,
                    queue_s=request.first_scheduled_at - request.arrived_at,
                )
            )
        frontend_id, before = -1, None
        for request, token_id in zip(outcome.sampled, outcome.token_ids, strict=True):
            if request.frontend_id != frontend_id:  # mostly they are all of one
                frontend_id = request.frontend_id
                outbox = self._outbox(frontend_id)
            outbox.token_ids.append(token_id)
            if request is before:
                outbox.counts[-1] += 1
                continue
            before = request
            outbox.request_ids.append(request.request_id)
            outbox.counts.append(1)
        for drawn in outcome.logprobs:
            self._outbox(drawn.request.frontend_id).logprobs.append(
                RequestLogprobs(drawn.request.request_id, drawn.output, drawn.prompt)
            )
        for request in outcome.finished:
            assert request.last_token_at is not None
            self._report_finished(request, request.last_token_at)
        for request in outcome.dead_ends:
            self._report_finished(request, self._clock(), _DEAD_END, "sampling_params")

    def _outbox(self, frontend_id: int) -> _Outbox:
        outbox = self._outboxes.get(frontend_id)
        if outbox is None:
            outbox = self._outboxes[frontend_id] = _Outbox()
        return outbox

    def _flush(self) -> dict[int, StepOutput]:
        """Empties all outboxes into one columnar output each."""
        stats = self.stats()
        outputs = {
            frontend_id: self._output(outbox, stats)
            for frontend_id, outbox in self._outboxes.items()
        }
        self._outboxes.clear()
        return outputs

    def _output(self, outbox: _Outbox, stats: StepStats) -> StepOutput:
        # Each abort's time goes to the frontend that sent it, so that their sum
        # over all frontends counts it once.
        if outbox.abort_to_free_s:
            stats = msgspec.structs.replace(stats, abort_to_free_s=tuple(outbox.abort_to_free_s))
        return StepOutput(
            epoch=self.epoch,
            step=self.step_id,
            sent_ns=int(self._clock() * 1e9),
            request_ids=pack_request_ids(outbox.request_ids),
            counts=pack_counts(outbox.counts),
            token_ids=pack_ids(outbox.token_ids),
            started=tuple(outbox.started),
            finished=tuple(outbox.finished),
            unknown_aborts=tuple(outbox.unknown_aborts),
            stats=stats,
            logprobs=tuple(outbox.logprobs),
        )
