"""Giving up what cannot be in time any more, and nothing else, under a simulated clock."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from engine_core.sched.deadline import MIN_STEPS, WINDOW, SpeedEstimate
from pagewire.types import FinishReason
from tests.support.fake_model import FakeEngine, Heard

if TYPE_CHECKING:
    from collections.abc import Callable

BUDGET = 64


def prompt(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


def step_s(num_tokens: int) -> float:
    """The simulated device."""
    return 0.1 + 0.01 * num_tokens


def first_token_s(num_tokens: int) -> float:
    """What a prompt takes alone on it."""
    full, rest = divmod(num_tokens, BUDGET)
    return full * step_s(BUDGET) + (step_s(rest) if rest else 0.0)


def measured(cost: Callable[[int], float] = step_s, rounds: int = MIN_STEPS) -> SpeedEstimate:
    speed = SpeedEstimate(BUDGET, BUDGET)
    for _ in range(rounds):
        for num_tokens in range(1, BUDGET + 1):
            speed.observe(num_tokens, cost(num_tokens))
    return speed


class TestSpeedEstimate:
    def test_nothing_is_hopeless_before_anything_is_measured(self) -> None:
        assert SpeedEstimate(BUDGET, BUDGET).first_token_s(10_000) == 0.0

    def test_nor_by_the_first_steps_alone(self) -> None:
        speed = SpeedEstimate(BUDGET, BUDGET)
        for _ in range(MIN_STEPS - 1):
            speed.observe(BUDGET, 9.0)
        assert speed.first_token_s(BUDGET) == 0.0
        speed.observe(BUDGET, 1.0)
        assert speed.first_token_s(BUDGET) == 1.0

    def test_decodes_alone_say_little_of_prefills(self) -> None:
        speed = SpeedEstimate(2048, 2048)
        for _ in range(MIN_STEPS):
            speed.observe(1, 0.02)
        # Not 1000 times 0.02: only that a larger step takes no less.
        assert speed.first_token_s(1000) == 0.02
        assert speed.first_token_s(2 * 2048) == 0.04

    def test_large_steps_say_nothing_of_small_ones(self) -> None:
        speed = SpeedEstimate(BUDGET, BUDGET)
        for _ in range(MIN_STEPS):
            speed.observe(40, 1.0)
        assert speed.first_token_s(39) == 0.0
        assert speed.first_token_s(BUDGET) == 1.0

    @pytest.mark.parametrize("budget", [1, 2, 3, 63, 64, 65, 500])
    def test_full_steps_are_known_exactly_whatever_the_budget(self, budget: int) -> None:
        speed = SpeedEstimate(budget, budget)
        for _ in range(MIN_STEPS):
            speed.observe(budget, 0.5)
        assert speed.first_token_s(3 * budget) == 1.5

    def test_a_cap_on_chunks_makes_more_steps(self) -> None:
        speed = SpeedEstimate(BUDGET, 16)
        for _ in range(MIN_STEPS):
            speed.observe(16, 0.5)
        assert speed.first_token_s(40) == 1.0
        assert speed.first_token_s(48) == 1.5

    @pytest.mark.parametrize("seed", range(10))
    def test_it_is_never_more_than_the_truth(self, seed: int) -> None:
        rng = random.Random(seed)
        speed = measured(lambda n: step_s(n) * rng.choice([1.0, 1.5, 8.0]))
        for num_tokens in range(1, 5 * BUDGET):
            assert speed.first_token_s(num_tokens) <= first_token_s(num_tokens) * 8.0
        speed = measured(lambda n: step_s(n) * rng.choice([1.0, 8.0]), rounds=60)
        for num_tokens in range(1, 5 * BUDGET):
            # With the fast steps seen.
            assert speed.first_token_s(num_tokens) <= first_token_s(num_tokens) * 1.0001
        whole = 4 * BUDGET
        assert speed.first_token_s(whole) >= 0.5 * first_token_s(whole)

    def test_a_device_that_got_slower_is_noticed(self) -> None:
        speed = measured()
        before = speed.first_token_s(BUDGET)
        for _ in range(2 * WINDOW):
            speed.observe(BUDGET, 3 * step_s(BUDGET))
        assert before == pytest.approx(step_s(BUDGET), rel=0.5)
        assert speed.first_token_s(BUDGET) == 3 * step_s(BUDGET)

    def test_one_that_got_faster_at_once(self) -> None:
        speed = measured()
        speed.observe(BUDGET, 0.001)
        assert speed.first_token_s(BUDGET) <= step_s(BUDGET // 2)


@pytest.fixture
def engine() -> FakeEngine:
    """Measured, with one row, which a request holds for 400 steps of 0.11 s."""
    engine = FakeEngine(
        max_num_seqs=1, max_num_batched_tokens=BUDGET, num_blocks=200, step_s=step_s
    )
    for number in range(MIN_STEPS):
        engine.add(1000 + number, prompt(BUDGET * 2, 10 * number), max_tokens=4, ignore_eos=True)
    engine.run()
    engine.add(0, prompt(2), max_tokens=400, ignore_eos=True)
    engine.step()
    return engine


def ended_after(engine: FakeEngine, request_id: int, since: float) -> float:
    while not engine.of(request_id).finished:
        engine.step()
    return engine.clock.now - since


def assert_given_up(heard: Heard) -> None:
    assert heard.reason is FinishReason.ABORT
    assert heard.finished[0].deadline_missed
    assert not heard.started
    assert not heard.token_ids


class TestGivingUp:
    def test_hopeless_on_arrival(self, engine: FakeEngine) -> None:
        num_tokens = engine.scheduler.total_prompt_tokens
        deadline_s = first_token_s(4 * BUDGET) - 0.1
        engine.add(1, prompt(4 * BUDGET, 500), deadline_ms=deadline_s * 1000)
        assert ended_after(engine, 1, engine.clock.now) < 0.2
        assert_given_up(engine.of(1))
        assert engine.scheduler.total_prompt_tokens == num_tokens

    def test_as_soon_as_it_has_become_hopeless(self, engine: FakeEngine) -> None:
        engine.add(1, prompt(4 * BUDGET, 500), deadline_ms=10_000)
        at = ended_after(engine, 1, engine.clock.now)
        assert_given_up(engine.of(1))
        last_start = 10 - first_token_s(4 * BUDGET)
        assert last_start < at < last_start + 0.3

    def test_not_while_a_start_would_still_do(self, engine: FakeEngine) -> None:
        engine.abort(0)
        deadline_s = first_token_s(4 * BUDGET) + 0.01
        engine.add(1, prompt(4 * BUDGET, 500), max_tokens=1, deadline_ms=deadline_s * 1000)
        assert ended_after(engine, 1, engine.clock.now) <= deadline_s
        assert engine.of(1).reason is FinishReason.LENGTH

    def test_not_if_the_prefix_cache_has_most_of_it(self, engine: FakeEngine) -> None:
        engine.abort(0)
        engine.add(1, prompt(4 * BUDGET, 500), max_tokens=1)
        engine.run()
        engine.add(2, prompt(4 * BUDGET, 500), max_tokens=1, deadline_ms=500)
        engine.run()
        assert engine.of(2).reason is FinishReason.LENGTH

    def test_not_once_it_runs(self, engine: FakeEngine) -> None:
        """Its first token cannot come in time any more; but it may have been chosen
        on a good estimate, and the deadline itself ends it."""
        engine.abort(0)
        engine.add(1, prompt(6 * BUDGET, 500), deadline_ms=first_token_s(6 * BUDGET) * 1000 + 10)
        began_at = engine.clock.now
        engine.step()
        engine.clock.pass_time(0.5)
        while not engine.of(1).finished:
            engine.step()
        assert engine.clock.now - began_at >= first_token_s(6 * BUDGET)
        assert engine.of(1).finished[0].deadline_missed
        assert engine.of(1).started

    def test_it_learns_while_the_request_waits(self) -> None:
        """Queued before anything was measured, dropped by what was measured since."""
        engine = FakeEngine(
            max_num_seqs=1, max_num_batched_tokens=BUDGET, num_blocks=200, step_s=step_s
        )
        engine.add(0, prompt(7 * BUDGET), max_tokens=60, ignore_eos=True)
        engine.step()
        engine.add(1, prompt(7 * BUDGET, 500), deadline_ms=9000)
        at = ended_after(engine, 1, engine.clock.now)
        assert_given_up(engine.of(1))
        assert at < 9 - first_token_s(7 * BUDGET) + 9 / 8 + 0.3

    def test_an_abort_of_a_watched_request(self, engine: FakeEngine) -> None:
        engine.add(1, prompt(4), deadline_ms=50_000)
        engine.abort(1)
        engine.step()
        assert not engine.of(1).finished[0].deadline_missed
        assert len(engine.core._deadlines) == 0


@pytest.mark.parametrize("seed", range(6))
def test_who_is_given_up_would_have_been_late_alone(seed: int) -> None:
    rng = random.Random(seed)
    engine = FakeEngine(
        max_num_seqs=3,
        max_num_batched_tokens=BUDGET,
        num_blocks=300,
        enable_prefix_caching=False,
        step_s=step_s,
    )
    due: dict[int, tuple[float, int]] = {}
    ended_at: dict[int, float] = {}

    def step() -> None:
        began_at = engine.clock.now
        engine.step()
        for known in due:
            if engine.of(known).finished:
                ended_at.setdefault(known, began_at)

    for number in range(80):
        length = rng.randint(1, 6 * BUDGET)
        deadline_s = rng.uniform(0.5, 40.0)
        engine.add(
            number, prompt(length), max_tokens=rng.randint(1, 20), deadline_ms=deadline_s * 1000
        )
        due[number] = (engine.clock.now + deadline_s, length)
        # With lulls, so that not everybody is late.
        for _ in range(rng.choice([0, 1, 8])):
            step()
    while engine.core.has_work():
        step()
    early = in_time = 0
    for number, (deadline_at, length) in due.items():
        heard = engine.of(number)
        if not heard.finished[0].deadline_missed:
            in_time += 1
            continue
        if not heard.started:
            assert ended_at[number] + first_token_s(length) > deadline_at - 1e-9
            early += ended_at[number] < deadline_at
    assert early >= 2
    assert in_time >= 5
    engine.check_at_rest()
