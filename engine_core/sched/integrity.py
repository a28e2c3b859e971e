"""What must hold of the requests that a scheduler has, between its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.request import Status
from engine_core.sched.beam_group import together

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine_core.request import Request
    from engine_core.sched.policy import Policy


def check_requests(running: Sequence[Request], waiting: Iterable[Request], policy: Policy) -> None:
    """Raises AssertionError."""
    keys = [policy.running_key(request) for request in running]
    assert keys == sorted(keys), keys
    assert all(request.status is Status.RUNNING for request in running)
    assert len(set(running)) == len(running), "a request runs twice"
    assert all(request in together(request) for request in running)
    for request in waiting:
        assert request.status in (Status.WAITING, Status.PREEMPTED), request
        assert not request.table.blocks, request
        assert request.row == -1, request
        assert request.num_computed_tokens == 0, request
