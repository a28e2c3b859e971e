"""How many prompt tokens a step takes beside decodes, by what steps were measured to take.

A token budget that keeps the time between tokens within bounds is Sarathi-Serve's (Agrawal
et al., OSDI 2024), where it is profiled beforehand; here it follows the load and the machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.sched.prefill_share import first_in_turn
from engine_core.sched.step_times import StepLoad, StepTimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.request import Request
    from engine_core.sched.draft import Draft
    from engine_core.sched.plan import StepPlan

MOST_TIMES = 2.0
"""As long as the step in which all that are there decode, where there is no ITL target."""
MIN_TOKENS = 32
"""Of any step, so that prompts get on. With fewer, what decodes cost is paid so often that the
prompt takes much longer."""
_MAX_TOKENS = 1 << 30
"""More than any step has."""


class PrefillBudget:
    """Measured on steps without draft tokens, and reckoned as if there were none."""

    def __init__(self, itl_target_s: float | None = None, *, first: int = 0) -> None:
        """itl_target_s: the longest that prompts may make a step with decodes, where that is
        given. first: tokens until enough steps were measured; 0 is no limit."""
        self._itl_target_s = itl_target_s
        self._times = StepTimes()
        self.num_tokens = first
        """Of the last step with both; 0 is no limit."""

    def observe(self, plan: StepPlan, step_s: float) -> None:
        """A step took step_s seconds."""
        moves = plan.moves
        is_plain = not (plan.has_drafts or plan.draft_steps or moves.offload or moves.restore)
        if is_plain and step_s > 0:
            self._times.observe(StepLoad.of(plan.seqs), step_s)

    def resize(self, draft: Draft, running: Sequence[Request], num_soon: int) -> None:
        """For a step that has its decodes, of which there are some.

        num_soon: requests beside those running that could run too.
        """
        times = self._times
        times.learn()
        if not times.is_known:
            return
        longest_s = self._itl_target_s
        if longest_s is None:
            longest_s = MOST_TIMES * times.seconds(_all_decode(running, num_soon))
        left_s = max(0.0, longest_s - times.seconds(StepLoad.of(draft.seqs)))
        first = first_in_turn(draft.prefills)
        depth = first.num_computed_tokens if first is not None else 0
        most = min(times.num_prefill_tokens(left_s, depth), _MAX_TOKENS)
        self.num_tokens = max(MIN_TOKENS, int(most))


def _all_decode(running: Sequence[Request], num_soon: int) -> StepLoad:
    """Those that come are taken to be as long as those that run."""
    num_tokens = sum(request.num_tokens for request in running)
    num_all = len(running) + num_soon
    return StepLoad(num_all, num_tokens * num_all // len(running))
