"""What a step takes, learnt from steps whose times are made up."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from engine_core.sched.plan import SeqStep
from engine_core.sched.step_times import StepLoad, StepTimes

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = (6e-3, 3.4e-3, 6e-6, 1.8e-3, 2.6e-6)
"""SmolLM2 on one core with AVX2, as it was measured."""
GPU = (4e-3, 2e-5, 3e-8, 2e-5, 1e-10)
TEN = StepLoad(10, 4000)
ONE_AND_PROMPT = StepLoad(1, 500, 96, 96 * 248)
TEN_AND_PROMPT = StepLoad(10, 4000, 64, 64 * 32)


def seconds_of(parts: tuple[float, ...]) -> Callable[[StepLoad], float]:
    return lambda load: parts[0] + sum(x * y for x, y in zip(parts[1:], load, strict=True))


def draw(rng: random.Random, num: int) -> list[StepLoad]:
    """Half of them with prompts."""
    loads = []
    for _ in range(num):
        num_decodes = rng.randint(1, 32)
        num_context = num_decodes * rng.randint(100, 600)
        num_prefill = rng.choice([0, rng.randint(8, 128)])
        depth = rng.choice([0, 96, 400])
        pairs = num_prefill * (depth + num_prefill / 2)
        loads.append(StepLoad(num_decodes, num_context, num_prefill, pairs))
    return loads


def learnt(loads: list[StepLoad], seconds: Callable[[StepLoad], float]) -> StepTimes:
    """Learning after each step."""
    times = StepTimes()
    for load in loads:
        times.observe(load, seconds(load))
        times.learn()
    return times


@pytest.mark.parametrize("parts", [CPU, GPU], ids=["cpu", "gpu"])
def test_any_step_is_foretold(parts: tuple[float, ...]) -> None:
    rng = random.Random(1)
    true = seconds_of(parts)
    times = learnt(draw(rng, 200), true)
    for load in draw(rng, 50):
        assert times.seconds(load) == pytest.approx(true(load), rel=0.05)


def test_nothing_is_known_before_both_kinds_of_steps() -> None:
    for with_prompts in (True, False):
        loads = [load for load in draw(random.Random(2), 50) if with_prompts == bool(load[2])]
        assert not learnt(loads, seconds_of(CPU)).is_known
    assert learnt(draw(random.Random(2), 50), seconds_of(CPU)).is_known


def test_one_decode_tells_something_of_many() -> None:
    rng = random.Random(8)
    true = seconds_of(CPU)
    loads = [StepLoad(1, rng.randint(100, 600)) for _ in range(60)]
    loads += [StepLoad(0, 0, length, length * length / 2) for length in range(100, 400, 20)]
    times = learnt(loads, true)
    assert times.seconds(StepLoad(32)) > 25 * CPU[3]


def test_interruptions_hardly_count() -> None:
    rng = random.Random(3)
    true = seconds_of(CPU)
    times = learnt(draw(rng, 400), lambda load: true(load) + (rng.random() < 0.03) * 2.0)
    for load in (TEN, ONE_AND_PROMPT, TEN_AND_PROMPT):
        assert times.seconds(load) == pytest.approx(true(load), rel=0.3)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    rng = random.Random(4)
    true = seconds_of(CPU)
    times = learnt(draw(rng, 200), true)
    for load in draw(rng, 100):
        times.observe(load, 3 * true(load))
        times.learn()
    for load in (TEN, ONE_AND_PROMPT, TEN_AND_PROMPT):
        assert times.seconds(load) == pytest.approx(3 * true(load), rel=0.2)


def test_prompts_are_remembered_over_a_thousand_steps_without() -> None:
    rng = random.Random(5)
    true = seconds_of(CPU)
    times = learnt(draw(rng, 200), true)
    for step in range(1000):
        times.observe(StepLoad(1, 100 + step), true(StepLoad(1, 100 + step)))
    times.learn()
    for load in (ONE_AND_PROMPT, TEN_AND_PROMPT):
        assert times.seconds(load) == pytest.approx(true(load), rel=0.1)


@pytest.mark.parametrize("depth", [0, 4000])
def test_as_many_prompt_tokens_as_fill_a_time(depth: int) -> None:
    times = learnt(draw(random.Random(6), 200), seconds_of(CPU))
    num = times.num_prefill_tokens(0.2, depth)
    filled = TEN._replace(num_prefill_tokens=num, num_pairs=num * (depth + num / 2))
    assert times.seconds(filled) - times.seconds(TEN) == pytest.approx(0.2)


def test_what_costs_nothing_has_no_end() -> None:
    assert StepTimes().num_prefill_tokens(1.0, 0) == float("inf")


def test_the_load_of_a_plan() -> None:
    seqs = (
        SeqStep(0, 10, 1, (), True),
        SeqStep(1, 20, 1, (), True),
        SeqStep(2, 100, 1, (), False),  # a chunk of one token
        SeqStep(3, 0, 8, (), True),
    )
    assert StepLoad.of(seqs) == StepLoad(2, 30, 9, 100.5 + 8 * 4)
