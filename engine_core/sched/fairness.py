"""Fair shares between tenants: the Virtual Token Counter of "Fairness in Serving
Large Language Models" (Sheng et al., OSDI 2024, arXiv:2401.00588).

Each tenant has a counter of the service it got; the waiting tenant with the
least is next. One that comes back after a pause is lifted to the least of those
that wait, so that time in which it asked for nothing is no credit. Between two
tenants that both always have something waiting, service then differs by at most
2 * max(INPUT_WEIGHT * longest prompt, OUTPUT_WEIGHT * tokens that can run at
once), for however long (theorem 4.4 there).

Counters are kept apart by priority, since a tenant competes only there.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from engine_core.request import Status
from engine_core.sched.queue import RequestHeap

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine_core.request import Request

INPUT_WEIGHT = 1
"""What a computed prompt token costs its tenant."""
OUTPUT_WEIGHT = 2
"""What a drawn token costs: a decode uses the device worse than a prefill."""
MAX_IDLE_TENANTS = 4096
"""Tenants without a request whose counters are remembered, in a priority. Names
come from clients, so there must be a bound; the least served are forgotten first."""
NO_DEADLINE_S = 60.0
"""A request without a deadline is ordered as if due this long after it arrived,
so that no stream of later requests with deadlines keeps it waiting for ever."""


class Account:
    """A tenant's service in one priority."""

    __slots__ = ("num_live", "served", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.served = 0
        """Weighted tokens, lifts included; never falls."""
        self.num_live = 0
        """Requests that have not ended."""


class _Line:
    """A tenant's waiting requests, earliest deadline first, from the first to come
    until none is left."""

    __slots__ = ("account", "requests")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.requests = RequestHeap()


class FairShare:
    """The waiting requests of one priority, and its tenants' accounts.

    Preempted requests go first, in the order of their first admission: they were
    chosen already, and have been paid for. All operations are O(log n) amortized.
    """

    def __init__(self) -> None:
        self.preempted = RequestHeap()
        self.num_live = 0
        """Requests of this priority that have not ended, waiting or running."""
        self.accounts: dict[str, Account] = {}
        self._lines: dict[str, _Line] = {}
        self._order: list[tuple[int, int, _Line]] = []
        """A heap of (served, sequence number, line). An entry's figure may lag behind
        its account; since accounts only grow, the top is put right when looked at."""
        self._numbers = count()
        self._last_left: Account | None = None
        """Whose last waiting request went when nobody else waited."""
        self._idle: list[tuple[int, str]] = []
        """A heap of (served, tenant) of accounts without requests; may be out of date."""

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._lines) or len(self.preempted) > 0

    def __iter__(self) -> Iterator[Request]:
        """As they would be taken if nobody were charged meanwhile. O(n log n)."""
        yield from self.preempted
        for _, _, line in sorted(self._order, key=lambda it: (it[2].account.served, it[1])):
            yield from line.requests

    def open(self, request: Request) -> Account:
        """The account of a request that is new here."""
        account = self.accounts.get(request.tenant)
        if account is None:
            account = self.accounts[request.tenant] = Account(request.tenant)
        account.num_live += 1
        self.num_live += 1
        return account

    def push(self, request: Request) -> None:
        if request.status is Status.PREEMPTED:
            self.preempted.push(request, (request.admission_index,))
            return
        line = self._lines.get(request.tenant)
        if line is None:
            account = self.accounts[request.tenant]
            account.served = max(account.served, self._floor())
            line = self._lines[request.tenant] = _Line(account)
            self._compact()
            heappush(self._order, (account.served, next(self._numbers), line))
        due = request.deadline_at
        if due is None:
            due = request.arrived_at + NO_DEADLINE_S
        line.requests.push(request, (due, request.arrival_index))

    def peek(self) -> Request:
        """Who is next; somebody must wait."""
        if self.preempted:
            return self.preempted.peek()
        line = self._top()
        assert line is not None
        return line.requests.peek()

    def remove(self, request: Request) -> None:
        if request in self.preempted:
            self.preempted.remove(request)
            return
        line = self._lines[request.tenant]
        line.requests.remove(request)
        if not line.requests:
            del self._lines[request.tenant]
            if not self._lines:
                self._last_left = line.account

    def close(self, account: Account) -> None:
        """One of the account's requests has ended."""
        account.num_live -= 1
        self.num_live -= 1
        if not account.num_live:
            heappush(self._idle, (account.served, account.tenant))
            self._forget_idle()

    def _floor(self) -> int:
        """What a tenant that begins to wait is lifted to. Never falls."""
        line = self._top()
        if line is not None:
            return line.account.served
        return 0 if self._last_left is None else self._last_left.served

    def _top(self) -> _Line | None:
        """The line of the tenant with the least service."""
        order = self._order
        while order:
            served, number, line = order[0]
            if not line.requests:
                heappop(order)
            elif served != line.account.served:
                heapreplace(order, (line.account.served, number, line))
            else:
                return line
        return None

    def _compact(self) -> None:
        """Rids the heap of lines that were emptied below its top."""
        if len(self._order) > 2 * len(self._lines) + 8:
            self._order = [entry for entry in self._order if entry[2].requests]
            heapify(self._order)

    def _forget_idle(self) -> None:
        """A tenant at or below the floor would be lifted to it anyway."""
        floor = self._floor()
        while self._idle and (self._idle[0][0] <= floor or len(self._idle) > MAX_IDLE_TENANTS):
            served, tenant = heappop(self._idle)
            account = self.accounts.get(tenant)
            if account is not None and not account.num_live and account.served == served:
                del self.accounts[tenant]


class FairQueue:
    """All waiting requests, and who pays for what.

    The order: the smallest priority number; in it preempted requests; then the
    tenant that was served least; of that tenant's, the earliest deadline; then
    first come, first served.
    """

    def __init__(self) -> None:
        self._shares: dict[int, FairShare] = {}
        """By priority, while requests of that priority are waiting or running."""
        self._priorities: list[int] = []
        """A heap; has every priority in which somebody waits, and perhaps more."""
        self._listed: set[int] = set()
        """What is in that heap."""
        self._accounts: dict[Request, Account] = {}
        """Of all requests that have not ended."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """As they would be taken if nobody were charged meanwhile. O(n log n)."""
        for priority in sorted(self._shares):
            yield from self._shares[priority]

    def push(self, request: Request) -> None:
        share = self._shares.get(request.priority)
        if share is None:
            share = self._shares[request.priority] = FairShare()
        if request not in self._accounts:
            self._accounts[request] = share.open(request)
        share.push(request)
        self._num_waiting += 1
        if request.priority not in self._listed:
            self._compact()
            self._listed.add(request.priority)
            heappush(self._priorities, request.priority)

    def peek(self) -> Request:
        """Who is next; the queue must not be empty."""
        while True:
            share = self._shares.get(self._priorities[0])
            if share:
                return share.peek()
            self._listed.remove(heappop(self._priorities))

    def pop(self) -> Request:
        """Takes who is next; the queue must not be empty."""
        request = self.peek()
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Takes a request from wherever it is; it must be there."""
        self._shares[request.priority].remove(request)
        self._num_waiting -= 1

    def _compact(self) -> None:
        """Rids the heap of priorities that nobody has any more, below its top."""
        if len(self._priorities) > 2 * len(self._shares) + 8:
            self._listed = {priority for priority, share in self._shares.items() if share}
            self._priorities = sorted(self._listed)

    def served(self, priority: int, tenant: str) -> float:
        """A tenant's counter; minus infinity if none is kept."""
        share = self._shares.get(priority)
        account = None if share is None else share.accounts.get(tenant)
        return -inf if account is None else account.served

    def charge_admitted(self, request: Request, num_tokens: int) -> None:
        """The whole prompt at once, as in the paper, so that the next choice of the
        same step already knows of it."""
        self._accounts[request].served += INPUT_WEIGHT * num_tokens

    def charge_drawn(self, requests: Sequence[Request]) -> None:
        accounts = self._accounts
        for request in requests:
            accounts[request].served += OUTPUT_WEIGHT

    def forget(self, request: Request) -> None:
        """The request has ended, and waits no more."""
        share = self._shares[request.priority]
        share.close(self._accounts.pop(request))
        # Nobody competes in this priority any more: a new busy time begins at par.
        if not share.num_live:
            del self._shares[request.priority]
