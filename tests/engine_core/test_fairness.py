"""Shares between tenants under a simulated clock, and the queue behind them."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import pytest

from engine_core.kv.manager import KVManager
from engine_core.request import Request, Status
from engine_core.sched import fairness
from engine_core.sched.fairness import INPUT_WEIGHT, NO_DEADLINE_S, OUTPUT_WEIGHT, FairQueue
from engine_core.sched.policy import FairPolicy, PriorityPolicy, make_policy
from pagewire.types import SamplingParams
from tests.support.simulation import Simulation

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_core.sched.policy import Policy

LONGEST_PROMPT = 40
MOST_OUTPUT = 30
MAX_NUM_SEQS = 8
TOKENS_AT_ONCE = MAX_NUM_SEQS * (LONGEST_PROMPT + MOST_OUTPUT)
# Theorem 4.4: service of two tenants that both wait differs by no more.
BOUND = 2 * max(INPUT_WEIGHT * LONGEST_PROMPT, OUTPUT_WEIGHT * TOKENS_AT_ONCE)


def worst_difference(simulation: Simulation) -> tuple[int, int]:
    """Over all intervals in which "a" and "b" both wait: the largest difference of
    what they got in one. And what both got in all of that time."""
    lowest = highest = 0
    first = simulation.service.copy()
    while simulation.waits("a") and simulation.waits("b"):
        simulation.step()
        gained = simulation.service - first
        difference = gained["a"] - gained["b"]
        lowest, highest = min(lowest, difference), max(highest, difference)
    gained = simulation.service - first
    return highest - lowest, gained["a"] + gained["b"]


def flood(simulation: Simulation, rng: random.Random, *, deadlines: bool) -> None:
    """ "a" puts 500 requests into the queue before "b" puts its 120, four times as long."""
    for _ in range(500):
        deadline_s = rng.uniform(1e6, 2e6) if deadlines else None
        simulation.add(rng.randint(1, 12), rng.randint(1, 8), tenant="a", deadline_s=deadline_s)
    for _ in range(120):
        simulation.add(rng.randint(20, LONGEST_PROMPT), rng.randint(15, MOST_OUTPUT), tenant="b")


@pytest.mark.parametrize("deadlines", [False, True])
def test_a_flood_gets_no_more_than_its_share(deadlines: bool) -> None:
    simulation = Simulation(max_num_seqs=MAX_NUM_SEQS)
    flood(simulation, random.Random(1), deadlines=deadlines)
    difference, total = worst_difference(simulation)
    assert total > 5 * BOUND, total
    assert difference <= BOUND, (difference, BOUND)
    simulation.run()
    assert len(simulation.finished) == 620


def test_first_come_first_served_breaks_that_bound() -> None:
    """So the test above can fail."""
    simulation = Simulation(PriorityPolicy(), max_num_seqs=MAX_NUM_SEQS)
    flood(simulation, random.Random(1), deadlines=False)
    difference, _ = worst_difference(simulation)
    assert difference > BOUND


def test_the_books_are_what_was_served() -> None:
    policy = FairPolicy()
    simulation = Simulation(policy, max_num_seqs=MAX_NUM_SEQS)
    flood(simulation, random.Random(2), deadlines=False)
    for _ in range(200):
        simulation.step()
        for tenant in ("a", "b"):
            assert policy.served(0, tenant) == simulation.service[tenant]


def test_a_modest_tenant_does_not_wait_behind_a_flood() -> None:
    waits: dict[type[Policy], float] = {}

    def wait(request: Request, now: float) -> float:
        until = now if request.first_scheduled_at is None else request.first_scheduled_at
        return until - request.arrived_at

    for make in (FairPolicy, PriorityPolicy):
        simulation = Simulation(make(), max_num_seqs=4)
        for _ in range(300):
            simulation.add(8, 8, tenant="flood")
        modest = []
        for number in range(400):
            if number % 25 == 0:
                modest.append(simulation.add(8, 4, tenant="modest"))
            simulation.step()
        assert simulation.waits("flood")
        assert all(request.first_scheduled_at is not None for request in modest) == (
            make is FairPolicy
        )
        waits[make] = max(wait(request, simulation.now) for request in modest)
    # No longer than one of the four that run takes to end.
    assert waits[FairPolicy] <= 8
    assert waits[PriorityPolicy] > 200


def test_time_in_which_a_tenant_asked_for_nothing_is_no_credit() -> None:
    simulation = Simulation(max_num_seqs=MAX_NUM_SEQS)
    for _ in range(600):
        simulation.add(10, 8, tenant="a")
    for _ in range(200):
        simulation.step()
    assert simulation.service["a"] > 2 * BOUND
    for _ in range(300):
        simulation.add(10, 8, tenant="b")
    difference, total = worst_difference(simulation)
    assert total > 2 * BOUND
    assert difference <= BOUND


def test_nor_is_it_when_nobody_waited_at_its_return() -> None:
    """The one that comes when the queue is empty starts level with who left last."""
    policy = FairPolicy()
    simulation = Simulation(policy, max_num_seqs=2)
    simulation.add(10, 50, tenant="a")
    simulation.step()
    before = simulation.service["a"]
    simulation.add(10, 50, tenant="b")
    assert policy.served(0, "b") == before == 12


def test_nobody_is_idle_while_somebody_waits() -> None:
    alone = {}
    for make in (FairPolicy, PriorityPolicy):
        simulation = Simulation(make(), max_num_seqs=4, max_num_batched_tokens=32)
        for number in range(100):
            tenant = "a" if make is FairPolicy and number % 10 == 0 else ""
            simulation.add(5 + number % 7, 6, tenant=tenant)
        while simulation.scheduler.waiting:
            plan = simulation.step()
            full = len(plan.seqs) == 4 or plan.num_tokens == 32
            assert full or not simulation.scheduler.waiting
        alone[make] = simulation.run() + simulation.now
    # Who is first changes little in when the last is served: some rounding at the end.
    assert alone[FairPolicy] == pytest.approx(alone[PriorityPolicy], rel=0.05)


def test_nobody_starves_among_many_tenants() -> None:
    simulation = Simulation(max_num_seqs=2)
    rng = random.Random(3)
    requests = [
        simulation.add(
            rng.randint(1, 9),
            rng.randint(1, 9),
            tenant=rng.choice("abcdef"),
            deadline_s=rng.choice([None, 1e5, 2e5]),
        )
        for _ in range(200)
    ]
    simulation.run()
    assert all(request.status is Status.LENGTH for request in requests)


class TestOrder:
    def order(self, simulation: Simulation) -> list[int]:
        simulation.run()
        return [request.request_id for request in simulation.admitted]

    def test_first_come_first_served_within_a_tenant(self) -> None:
        simulation = Simulation(max_num_seqs=1)
        for number in range(30):
            simulation.add(1 + number % 3, 1 + number % 4, tenant="ab"[number % 2])
        order = self.order(simulation)
        assert [i for i in order if i % 2] == list(range(1, 31, 2))
        assert [i for i in order if not i % 2] == list(range(2, 31, 2))

    def test_earliest_deadline_first(self) -> None:
        simulation = Simulation(max_num_seqs=1)
        for deadline_s in (900.0, 300.0, 500.0, 300.0, 100.0):
            simulation.add(2, 2, deadline_s=deadline_s)
        assert self.order(simulation) == [5, 2, 4, 3, 1]

    def test_priority_before_deadline(self) -> None:
        simulation = Simulation(max_num_seqs=1)
        simulation.add(2, 2, priority=1, deadline_s=100.0)
        simulation.add(2, 2, deadline_s=900.0)
        simulation.add(2, 2, priority=-1)
        assert self.order(simulation) == [3, 2, 1]

    def test_one_without_a_deadline_is_not_overtaken_for_ever(self) -> None:
        simulation = Simulation(max_num_seqs=1)
        simulation.add(1, 3)
        simulation.step()
        patient = simulation.add(1, 3)
        while patient.first_scheduled_at is None:
            assert simulation.now < 2 * NO_DEADLINE_S
            if int(simulation.now) % 2 == 0:
                simulation.add(1, 3, deadline_s=10.0)
            simulation.step()
        # Those that were due before it went first.
        waited = patient.first_scheduled_at - patient.arrived_at
        assert waited > NO_DEADLINE_S - 10.0

    def test_fcfs_policy_looks_at_neither(self) -> None:
        simulation = Simulation(make_policy("priority"), max_num_seqs=1)
        simulation.add(2, 2, deadline_s=900.0)
        simulation.add(2, 2, deadline_s=300.0)
        simulation.add(2, 2, tenant="b")
        assert self.order(simulation) == [1, 2, 3]

    def test_a_preempted_request_returns_before_its_tenant_has_waited_out_its_debt(self) -> None:
        # Two fit the pool until they have grown.
        simulation = Simulation(max_num_seqs=2, num_blocks=6)
        simulation.add(30, 40, tenant="a")
        victim = simulation.add(30, 40, tenant="a")
        while not simulation.scheduler.total_preemptions:
            simulation.step()
        simulation.add(1, 1, tenant="b")
        assert [r.request_id for r in simulation.scheduler.waiting] == [victim.request_id, 3]
        simulation.run()
        assert victim.status is Status.LENGTH


@dataclass
class _Naive:
    """The rule by scanning lists."""

    waiting: list[Request] = field(default_factory=list)
    live: list[Request] = field(default_factory=list)
    served: dict[tuple[int, str], int] = field(default_factory=dict)
    since: dict[tuple[int, str], int] = field(default_factory=dict)
    left: dict[int, tuple[int, str]] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=count)

    def key(self, request: Request) -> tuple[int, str]:
        return (request.priority, request.tenant)

    def active(self, priority: int) -> set[tuple[int, str]]:
        return {
            self.key(r)
            for r in self.waiting
            if r.priority == priority and r.status is Status.WAITING
        }

    def push(self, request: Request) -> None:
        key = self.key(request)
        active = self.active(request.priority)
        if request.status is Status.WAITING and key not in active:
            floor = min((self.served[k] for k in active), default=0)
            if not active and request.priority in self.left:
                floor = self.served[self.left[request.priority]]
            self.served[key] = max(self.served.get(key, 0), floor)
            self.since[key] = next(self.numbers)
        self.waiting.append(request)
        if request not in self.live:
            self.live.append(request)

    def next(self) -> Request:
        return min(self.waiting, key=self.rank)

    def rank(self, request: Request) -> tuple[float, ...]:
        if request.status is Status.PREEMPTED:
            return (request.priority, 0, request.admission_index)
        key = self.key(request)
        due = request.deadline_at or request.arrived_at + NO_DEADLINE_S
        return (
            request.priority,
            1,
            self.served[key],
            self.since[key],
            due,
            request.arrival_index,
        )

    def remove(self, request: Request) -> None:
        self.waiting.remove(request)
        if request.status is Status.WAITING and not self.active(request.priority):
            self.left[request.priority] = self.key(request)

    def end(self, request: Request) -> None:
        self.live.remove(request)
        if all(r.priority != request.priority for r in self.live):
            self.left.pop(request.priority, None)
            for key in [k for k in self.served if k[0] == request.priority]:
                del self.served[key]


def make_request(index: int, tenant: str, priority: int, deadline_at: float | None) -> Request:
    request = Request(
        frontend_id=1,
        request_id=index,
        table=KVManager(8, 4).new_table(array("i", [5])),
        num_prompt_tokens=1,
        sampling=SamplingParams(max_tokens=4),
        max_model_len=100,
        priority=priority,
        tenant=tenant,
        arrived_at=float(index),
        deadline_at=deadline_at,
    )
    request.arrival_index = index
    return request


@pytest.mark.parametrize("seed", range(30))
def test_queue_agrees_with_scanning(seed: int) -> None:
    rng = random.Random(seed)
    queue, naive = FairQueue(), _Naive()
    running: list[Request] = []
    admissions = count()
    arrivals = count()

    def arrive() -> None:
        index = next(arrivals)
        deadline_at = index + rng.choice([1.0, 30.0, 100.0]) if rng.random() < 0.5 else None
        priority = rng.choice([0, 0, 0, 0, -1, 3])
        request = make_request(index, rng.choice("aabcd"), priority, deadline_at)
        queue.push(request)
        naive.push(request)

    def admit() -> None:
        assert queue.peek() is naive.next()
        request = queue.pop()
        naive.remove(request)
        if request.status is Status.WAITING:
            request.admission_index = next(admissions)
            cost = rng.randint(0, 20)
            queue.charge_admitted(request, cost)
            naive.served[naive.key(request)] += cost * INPUT_WEIGHT
        request.status = Status.RUNNING
        running.append(request)

    def draw() -> None:
        queue.charge_drawn(running)
        for request in running:
            naive.served[naive.key(request)] += OUTPUT_WEIGHT

    def preempt() -> None:
        request = running.pop(rng.randrange(len(running)))
        request.status = Status.PREEMPTED
        queue.push(request)
        naive.push(request)

    def end(pick: Callable[[], Request]) -> None:
        request = pick()
        if request in running:
            running.remove(request)
        else:
            queue.remove(request)
            naive.remove(request)
        queue.forget(request)
        naive.end(request)

    for _ in range(300):
        action = rng.random()
        if action < 0.35:
            arrive()
        elif action < 0.55 and naive.waiting:
            admit()
        elif action < 0.7:
            draw()
        elif action < 0.8 and running:
            preempt()
        elif naive.live:
            end(lambda: rng.choice(naive.live))
        assert len(queue) == len(naive.waiting)
        assert list(queue) == sorted(naive.waiting, key=naive.rank)
        assert not naive.waiting or queue.peek() is naive.next()
    while naive.live:
        end(lambda: naive.live[0])
    assert queue._shares == {}
    assert queue._accounts == {}


def test_idle_tenants_are_forgotten_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names come from clients: a new one with each request must not cost memory."""
    monkeypatch.setattr(fairness, "MAX_IDLE_TENANTS", 50)
    policy = FairPolicy()
    simulation = Simulation(policy, max_num_seqs=4)
    for number in range(400):
        simulation.add(3, 2, tenant=f"tenant {number}")
        if number % 3 == 0:
            simulation.step()
    (share,) = policy._queue._shares.values()
    live = len({r.tenant for r in [*simulation.scheduler.waiting, *simulation.scheduler.running]})
    assert live + 50 <= 400
    assert len(share.accounts) <= live + 50
    assert len(share._idle) <= 50
    simulation.run()
    assert policy._queue._shares == {}


def test_entries_of_emptied_lines_and_priorities_do_not_pile_up() -> None:
    queue = FairQueue()
    stays = make_request(0, "first", -1, None)
    queue.push(stays)
    low = make_request(1, "low", 0, None)
    queue.push(low)
    for index in range(2, 1000):
        request = make_request(index, f"t{index}", 0, None)
        other = make_request(index, "t", index, None)
        for passing in (request, other):
            queue.push(passing)
            queue.remove(passing)
            queue.forget(passing)
        assert len(queue._shares[0]._order) <= 16
        assert len(queue._priorities) <= 16
    assert list(queue) == [stays, low]
