"""Rank 0: has the scheduler and the frontends, and tells the other ranks each plan.

    rank 0   plan --pipe--> rank 1, 2, ..
    all      the same step on their own weights and KV, meeting in collectives

A rank that has ended cannot be replaced: its KV is gone, and collectives of the others wait
for it. So the engine ends, whoever supervises it starts another, and frontends replay there
what was running.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

import torch.distributed

from engine_core.parallel.group import RankGroup, connect
from engine_core.parallel.messages import encode_plan, write_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from engine_core.parallel.processes import RankProcesses
    from engine_core.runner.base import PendingStep, Runner
    from engine_core.sched.plan import StepPlan


class LeadingRank:
    """Ranks (engine_core/parallel/ranks.py) for rank 0."""

    rank = 0

    def __init__(self, processes: RankProcesses) -> None:
        self.size = processes.size
        self._processes = processes
        self._group: RankGroup | None = None

    def connect(self, device: torch.device) -> RankGroup:
        self._processes.start()
        store_file, config = self._processes.store_file, self._processes.config
        self._group = connect(store_file, 0, config, device)
        return self._group

    def lead(self, runner: Runner) -> Runner:
        return LeadingRunner(runner, self._processes.pipes)

    def watch(self, on_death: Callable[[str], None]) -> None:
        self._processes.watch(on_death)

    def close(self) -> None:
        self._processes.close()
        if self._group is not None:
            self._group.close()


class LeadingRunner:
    """A Runner whose plans go to the other ranks first."""

    def __init__(self, inner: Runner, pipes: Sequence[IO[bytes]]) -> None:
        self._inner = inner
        self._pipes = pipes

    def launch(self, plan: StepPlan) -> PendingStep:
        """Raises OSError where a rank is gone."""
        frame = encode_plan(plan)
        for pipe in self._pipes:
            write_frame(pipe, frame)
        return self._inner.launch(plan)
