"""In which order requests are admitted, and who gives way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine_core.request import Status

if TYPE_CHECKING:
    from engine_core.request import Request

Key = tuple[float, ...]
"""Compared as tuples; the smaller goes first."""


class Policy(Protocol):
    """Keys must be fixed while a request waits or runs, and differ between requests."""

    def waiting_key(self, request: Request) -> Key:
        """Order of admission."""
        ...

    def running_key(self, request: Request) -> Key:
        """Order of claims on blocks; the largest is preempted first."""
        ...


class PriorityPolicy:
    """Smaller priority numbers first, then first come, first served.

    Preempted requests go before the others of their priority: they have
    waited, computed, and perhaps streamed already.
    """

    def waiting_key(self, request: Request) -> Key:
        fresh = request.status is not Status.PREEMPTED
        return (request.priority, fresh, request.arrival_index)

    def running_key(self, request: Request) -> Key:
        return (request.priority, request.arrival_index)
