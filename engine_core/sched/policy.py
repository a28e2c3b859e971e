"""In which order requests are admitted, who gives way, and who pays.

A policy belongs to one scheduler. The scheduler asks it for the order and tells
it what was spent; it never looks into it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from engine_core.request import Status
from engine_core.sched.fairness import FairQueue
from engine_core.sched.queue import Key, WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine_core.request import Request

PolicyName = Literal["fair", "priority"]


class Queue(Protocol):
    """The waiting requests, in the policy's order."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be taken now."""
        ...

    def push(self, request: Request) -> None: ...

    def peek(self) -> Request:
        """Who is next; the queue must not be empty."""
        ...

    def pop(self) -> Request:
        """Takes whom peek() returned, if nothing happened in between."""
        ...

    def remove(self, request: Request) -> None:
        """Takes a request that ends while it waits."""
        ...


class Policy(Protocol):
    """What the scheduler asks and tells.

    Every request is pushed to `waiting` at least once, and ended() exactly once.
    """

    waiting: Queue

    def running_key(self, request: Request) -> Key:
        """Order of claims on blocks; the largest is preempted first. Fixed while a
        request runs, and no two have the same."""
        ...

    def admitted(self, request: Request, num_tokens: int) -> None:
        """A request left the queue for the first time, and has num_tokens to compute."""
        ...

    def drawn(self, requests: Sequence[Request]) -> None:
        """A step has drawn a token for each."""
        ...

    def ended(self, request: Request) -> None:
        """The request waits and runs no more."""
        ...


class PriorityPolicy:
    """Smaller priority numbers first, then first come, first served.

    Preempted requests go before the others of their priority: they have
    waited, computed, and perhaps streamed already.
    """

    def __init__(self) -> None:
        self.waiting: Queue = WaitingQueue(self)

    def waiting_key(self, request: Request) -> Key:
        fresh = request.status is not Status.PREEMPTED
        return (request.priority, fresh, request.arrival_index)

    def running_key(self, request: Request) -> Key:
        return (request.priority, request.arrival_index)

    def admitted(self, request: Request, num_tokens: int) -> None:
        pass

    def drawn(self, requests: Sequence[Request]) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass


class FairPolicy:
    """Priority, then the tenant served least, then the earliest deadline.

    Deadlines order a tenant's own requests only: they are the callers' claims and
    cost nothing, so across tenants they would be a way to the front of the queue.
    With one tenant it is the earliest deadline first within a priority.

    Those that run keep the order in which the queue let them in, also over a
    preemption: whoever it put first gives way last.
    """

    def __init__(self) -> None:
        self._queue = FairQueue()
        self.waiting: Queue = self._queue

    def served(self, priority: int, tenant: str) -> float:
        """A tenant's virtual token counter in a priority; minus infinity if none is kept."""
        return self._queue.served(priority, tenant)

    def running_key(self, request: Request) -> Key:
        return (request.priority, request.admission_index)

    def admitted(self, request: Request, num_tokens: int) -> None:
        self._queue.charge_admitted(request, num_tokens)

    def drawn(self, requests: Sequence[Request]) -> None:
        self._queue.charge_drawn(requests)

    def ended(self, request: Request) -> None:
        self._queue.forget(request)


def make_policy(name: PolicyName) -> Policy:
    return FairPolicy() if name == "fair" else PriorityPolicy()
