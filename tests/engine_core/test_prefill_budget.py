"""Prompts beside decodes, in steps whose times are made up: how long they become."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_core.device.cpu import CpuDevice
from engine_core.engine_builder import make_prefill_budget
from engine_core.sched.plan import SeqStep, StepPlan
from engine_core.sched.prefill_budget import MIN_TOKENS, PrefillBudget
from pagewire.config import EngineConfig
from pagewire.errors import ConfigError
from tests.support.fake_model import FakeEngine, alone

BASE_S, TOKEN_S = 0.05, 0.001


def step_s(num_tokens: int) -> float:
    return BASE_S + TOKEN_S * num_tokens


class Measured:
    """A FakeEngine whose steps are looked at."""

    def __init__(self, prefill_budget: PrefillBudget, **settings: Any) -> None:
        self.engine = FakeEngine(
            num_blocks=2000,
            max_model_len=2000,
            max_num_batched_tokens=1000,
            step_s=settings.pop("step_s", step_s),
            prefill_budget=prefill_budget,
            **settings,
        )
        self.plans: list[StepPlan] = []
        launched = self.engine.runner.on_launch

        def on_launch(plan: StepPlan) -> None:
            self.plans.append(plan)
            launched(plan)

        self.engine.runner.on_launch = on_launch
        self._num_added = 0

    def add(self, num_prompt: int, max_tokens: int) -> int:
        self._num_added += 1
        prompt = [self._num_added, *(at % 900 for at in range(num_prompt - 1))]
        self.engine.add(self._num_added, prompt, max_tokens=max_tokens, ignore_eos=True)
        return self._num_added

    def learn(self) -> None:
        """Steps of both kinds, one prompt after the other."""
        self.add(40, 200)
        for _ in range(6):
            self.add(300, 3)
            self.steps(12)

    def steps(self, num: int) -> list[StepPlan]:
        before = len(self.plans)
        for _ in range(num):
            self.engine.step()
        return self.plans[before:]


def mixed_s(plans: list[StepPlan], step_s: Any = step_s) -> list[float]:
    """Seconds of those with more than decodes."""
    return [step_s(plan.num_tokens) for plan in plans if plan.num_tokens > len(plan.seqs)]


def test_before_anything_is_known_it_is_a_constant() -> None:
    measured = Measured(PrefillBudget(first=50))
    measured.add(4, 100)
    measured.steps(1)
    measured.add(120, 1)
    assert [plan.num_tokens for plan in measured.steps(3)] == [51, 51, 21]


def test_a_step_takes_twice_what_it_does_when_all_decode() -> None:
    measured = Measured(PrefillBudget(first=50))
    measured.learn()
    measured.add(900, 5)
    times = mixed_s(measured.steps(8))
    assert len(times) > 5
    assert max(times) <= 1.1 * 2 * step_s(2)
    assert sorted(times)[len(times) // 2] >= 0.9 * 2 * step_s(2)


def test_those_that_wait_count_as_far_as_there_are_rows() -> None:
    for max_num_seqs, num_all in ((8, 8), (30, 21)):
        measured = Measured(PrefillBudget(first=50), max_num_seqs=max_num_seqs)
        measured.learn()
        for _ in range(20):
            measured.add(150, 5)
        times = mixed_s(measured.steps(3))
        assert max(times) == pytest.approx(2 * step_s(num_all), rel=0.1)


def test_a_target_is_kept_and_used() -> None:
    measured = Measured(PrefillBudget(0.25, first=50))
    measured.learn()
    measured.add(900, 5)
    times = mixed_s(measured.steps(4))
    assert len(times) == 4
    assert max(times) == pytest.approx(0.25, rel=0.1)
    assert min(times) == pytest.approx(0.25, rel=0.1)


def test_prompts_get_on_where_nothing_fits() -> None:
    measured = Measured(PrefillBudget(0.001, first=50))
    measured.learn()
    last = measured.add(5 * MIN_TOKENS, 1)
    plans = measured.steps(5)
    assert [plan.num_tokens for plan in plans] == [1 + MIN_TOKENS] * 5
    assert measured.engine.of(last).finished


def test_nobody_decodes_so_nobody_waits() -> None:
    measured = Measured(PrefillBudget(0.001, first=50))
    measured.learn()
    measured.engine.run()
    measured.add(900, 1)
    assert [plan.num_tokens for plan in measured.steps(1)] == [900]


def test_a_slower_machine_gets_smaller_chunks() -> None:
    slowness = 1.0

    def slow_step_s(num_tokens: int) -> float:
        return slowness * step_s(num_tokens)

    measured = Measured(PrefillBudget(0.4, first=50), step_s=slow_step_s)
    measured.learn()
    slowness = 3.0
    measured.add(900, 5)
    assert mixed_s(measured.steps(1), slow_step_s)[0] == pytest.approx(3 * 0.4, rel=0.1)
    measured.learn()
    measured.add(900, 5)
    assert max(mixed_s(measured.steps(5), slow_step_s)) == pytest.approx(0.4, rel=0.2)


def test_guesses_are_no_measure() -> None:
    budget = PrefillBudget(0.25, first=50)
    seq = SeqStep(0, 10, 4, (), True, (1, 2, 3))
    for _ in range(100):
        budget.observe(StepPlan(1, (), (), (seq,), has_drafts=True), 9.0)
    measured = Measured(budget)
    measured.learn()
    measured.add(900, 5)
    assert max(mixed_s(measured.steps(4))) == pytest.approx(0.25, rel=0.1)


def test_the_text_does_not_depend_on_it() -> None:
    measured = Measured(PrefillBudget(first=7))
    prompts = {}
    for number in range(30):
        length = 1 + (53 * number) % 200
        prompts[measured.add(length, 9)] = [number + 1, *range(length - 1)]
        measured.steps(2)
    measured.engine.run()
    for request_id, ids in prompts.items():
        assert measured.engine.of(request_id).token_ids == alone(ids, 9, ())


def test_frontends_are_told() -> None:
    measured = Measured(PrefillBudget(0.25, first=50))
    measured.add(4, 100)
    measured.steps(1)
    assert measured.engine.stats is not None
    assert measured.engine.stats.max_mixed_prefill_tokens == 50
    measured.learn()
    assert measured.engine.stats.max_mixed_prefill_tokens == pytest.approx(200, rel=0.1)


def make(default: int, **settings: Any) -> PrefillBudget | None:
    device: Any = SimpleNamespace(default_max_mixed_prefill_tokens=default)
    return make_prefill_budget(EngineConfig(**settings), device)


def test_which_flags_measure() -> None:
    assert make(0) is None
    assert make(0, itl_target_ms=20.0) is not None
    first = make(96)
    assert first is not None
    assert first.num_tokens == 96
    assert make(96, max_mixed_prefill_tokens=0) is None
    with pytest.raises(ConfigError, match=r"--itl-target-ms 20 .*--max-mixed-prefill-tokens 64"):
        make(96, itl_target_ms=20.0, max_mixed_prefill_tokens=64)


def test_a_cpu_measures() -> None:
    assert CpuDevice("64MiB", None).default_max_mixed_prefill_tokens > 0
