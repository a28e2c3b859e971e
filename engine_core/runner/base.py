"""The seam between deciding and computing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine_core.sched.plan import StepPlan, StepResult


class PendingStep(Protocol):
    """A step that the device may still be running."""

    def result(self) -> StepResult:
        """Waits for the device. Raises what the step raised."""
        ...


class Runner(Protocol):
    """Runs plans on one device, in order.

    The runner appends each sampled id to its row itself, so the next plan
    may be launched before the last one's result is read.
    """

    def launch(self, plan: StepPlan) -> PendingStep: ...
