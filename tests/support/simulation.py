"""A scheduler under a simulated clock: no runner, every token drawn is a 5.

Service is counted here from the plans and outcomes alone, so that a policy's own
books can be held against it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING

from engine_core.kv.manager import KVManager
from engine_core.request import Request
from engine_core.sched.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT
from engine_core.sched.limits import SchedulerLimits
from engine_core.sched.plan import StepPlan, StepResult
from engine_core.sched.scheduler import Scheduler
from pagewire.types import SamplingParams

if TYPE_CHECKING:
    from engine_core.sched.policy import Policy

VOCAB_SIZE = 100


class Simulation:
    """Each step takes one second."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 2000,
        num_blocks: int = 100,
        long_prefill_token_threshold: int = 0,
        max_mixed_prefill_tokens: int = 0,
        short_prefill_share: float = 0.0,
    ) -> None:
        self.limits = SchedulerLimits(
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            VOCAB_SIZE,
            long_prefill_token_threshold=long_prefill_token_threshold,
            max_mixed_prefill_tokens=max_mixed_prefill_tokens,
            short_prefill_share=short_prefill_share,
        )
        self.kv_manager = KVManager(num_blocks, 16, enable_prefix_caching=False)
        self.scheduler = Scheduler(self.limits, self.kv_manager, policy)
        self.now = 0.0
        self.admitted: list[Request] = []
        """In the order of their first admission."""
        self.finished: list[Request] = []
        self.service: Counter[str] = Counter()
        """Weighted tokens, by tenant."""
        self._num_added = 0

    def add(
        self,
        num_prompt: int,
        max_tokens: int,
        *,
        tenant: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Request:
        self._num_added += 1
        request = Request(
            frontend_id=1,
            request_id=self._num_added,
            table=self.kv_manager.new_table(array("i", [7] * num_prompt)),
            num_prompt_tokens=num_prompt,
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            max_model_len=self.limits.max_model_len,
            priority=priority,
            tenant=tenant,
            arrived_at=self.now,
            deadline_at=None if deadline_s is None else self.now + deadline_s,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now)
        if plan.seqs:
            rows = tuple(seq.row for seq in plan.seqs if seq.samples)
            result = StepResult(rows, (5,) * len(rows))
            outcome = self.scheduler.update(plan, result, self.now + 1)
            started = sorted(outcome.started, key=lambda request: request.admission_index)
            for request in started:
                self.admitted.append(request)
                self.service[request.tenant] += INPUT_WEIGHT * request.num_prompt_tokens
            for request in outcome.sampled:
                self.service[request.tenant] += OUTPUT_WEIGHT
            self.finished += outcome.finished
        self.now += 1
        self.scheduler.check_integrity()
        return plan

    def run(self, max_steps: int = 5000) -> int:
        """Steps until nothing is left; returns how many."""
        for number in range(max_steps):
            if not self.scheduler.has_unfinished():
                return number
            self.step()
        raise AssertionError("not over in a bounded number of steps")

    def waits(self, tenant: str) -> bool:
        return any(request.tenant == tenant for request in self.scheduler.waiting)
