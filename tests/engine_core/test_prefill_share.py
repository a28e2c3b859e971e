"""Short prompts beside a long one: what --short-prefill-share gives them, and what it leaves."""

from __future__ import annotations

import math
import random

import pytest

from engine_core.sched.limits import SchedulerLimits
from tests.support.simulation import Simulation

BUDGET = 64


def steps_to_first_token(share: float, others: int, length: int = 40) -> tuple[int, list[int]]:
    """Of a prompt of 20 whole steps, and of shorter ones of which one comes in each step."""
    simulation = Simulation(
        max_num_seqs=200, max_num_batched_tokens=BUDGET, num_blocks=4000, short_prefill_share=share
    )
    long_prompt = simulation.add(20 * BUDGET, 1)
    simulation.step()
    shorter = []
    while simulation.scheduler.has_unfinished() or len(shorter) < others:
        if len(shorter) < others:
            shorter.append(simulation.add(length, 1))
        rows = [seq.row for seq in simulation.step().seqs]
        assert len(rows) == len(set(rows)), "a row twice in a step"
    waits = []
    for request in (long_prompt, *shorter):
        assert request.first_token_at is not None
        waits.append(round(request.first_token_at - request.arrived_at))
    return waits[0], waits[1:]


def test_short_prompts_get_past_a_long_one() -> None:
    alone, late = steps_to_first_token(0.0, others=10)
    assert alone == 20
    # In order of arrival, the first of them waits for 19 steps.
    assert late[0] == 20
    for length in (1, 2, 40):
        _, soon = steps_to_first_token(0.75, others=10, length=length)
        assert soon == [1] * 10


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_long_one_always_gets_on(share: float) -> None:
    """However many come, it has its part of each step."""
    steps, _ = steps_to_first_token(share, others=150)
    assert 20 < steps <= 1 + math.ceil(19 * BUDGET / (BUDGET - int(BUDGET * share)))


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_alone_it_has_everything(share: float) -> None:
    assert steps_to_first_token(share, others=0)[0] == 20


def test_one_that_is_longer_does_not_keep_those_behind_it_waiting() -> None:
    """Nobody overtakes it in the queue, so it comes to run, with no more than a foothold."""
    simulation = Simulation(max_num_batched_tokens=BUDGET, short_prefill_share=0.5)
    first = simulation.add(3 * BUDGET, 1)
    simulation.step()
    longer, short = simulation.add(4 * BUDGET, 1), simulation.add(10, 1)
    assert simulation.step().num_tokens == BUDGET
    assert simulation.admitted == [first, longer, short]
    assert (longer.num_computed_tokens, short.num_computed_tokens) == (16, 10)
    assert first.num_computed_tokens == 2 * BUDGET - 26
    simulation.step()
    assert longer.num_computed_tokens == 16
    assert first.num_computed_tokens == 3 * BUDGET - 26


@pytest.mark.parametrize(("priority", "shares"), [(0, True), (1, False), (-1, True)])
def test_no_share_is_taken_from_one_that_is_more_urgent(priority: int, shares: bool) -> None:
    simulation = Simulation(max_num_batched_tokens=BUDGET, short_prefill_share=0.5)
    simulation.add(10 * BUDGET, 1, priority=0)
    simulation.step()
    other = simulation.add(16, 1, priority=priority)
    simulation.step()
    assert (other.num_computed_tokens > 0) == shares


def test_shorter_ones_that_run_already_go_on_the_shortest_first() -> None:
    simulation = Simulation(max_num_batched_tokens=BUDGET, num_blocks=400, short_prefill_share=0.25)
    long_prompt = simulation.add(10 * BUDGET, 1)
    simulation.step()
    middle = simulation.add(100, 1)
    simulation.step()
    short = simulation.add(30, 1)
    assert middle.num_computed_tokens == 16
    simulation.step()
    # 84 are left of the one and 30 of the other, which waits: those that run come first.
    assert (middle.num_computed_tokens, short.num_computed_tokens) == (32, 0)
    assert long_prompt.num_computed_tokens == BUDGET + 2 * 48


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_end_in_bounded_steps_with_the_budget_kept(seed: int) -> None:
    rng = random.Random(seed)
    simulation = Simulation(
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.choice([8, 16, BUDGET]),
        num_blocks=rng.randint(14, 40),
        max_model_len=200,
        long_prefill_token_threshold=rng.choice([0, 0, 7]),
        max_mixed_prefill_tokens=rng.choice([0, 5]),
        short_prefill_share=rng.choice([0.1, 0.5, 0.99]),
    )
    requests = []
    for _ in range(120):
        if rng.random() < 0.4:
            length = rng.choice([rng.randint(1, 20), rng.randint(80, 150)])
            requests.append(
                simulation.add(length, rng.randint(1, 30), priority=rng.choice([0, 0, 1]))
            )
        plan = simulation.step()
        assert plan.num_tokens <= simulation.limits.max_num_batched_tokens
        rows = [seq.row for seq in plan.seqs]
        assert len(rows) == len(set(rows)), "a row twice in a step"
    simulation.run()
    assert len(simulation.finished) == len(requests)
    simulation.kv_manager.check_all_free()


@pytest.mark.parametrize("share", [-0.1, 1.0, math.nan])
def test_shares_that_are_none(share: float) -> None:
    with pytest.raises(ValueError, match=r"short_prefill_share is .*, must be 0 to below 1"):
        SchedulerLimits(1, 1, 2, 10, short_prefill_share=share)
