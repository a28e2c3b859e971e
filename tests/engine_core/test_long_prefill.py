"""Long prompts beside others: what --long-prefill-token-threshold bounds."""

from __future__ import annotations

import pytest

from engine_core.sched.limits import SchedulerLimits
from pagewire.types import FinishReason
from tests.support.fake_model import FakeEngine, alone
from tests.support.simulation import Simulation


def prompt(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


def test_decodes_go_on_in_every_step_and_steps_stay_small() -> None:
    simulation = Simulation(
        max_num_seqs=8, max_num_batched_tokens=64, long_prefill_token_threshold=8
    )
    decoding = [simulation.add(1, 100) for _ in range(4)]
    simulation.step()
    long_prompt = simulation.add(400, 1)
    num_steps = 0
    while long_prompt.num_output_tokens == 0:
        before = [request.num_output_tokens for request in decoding]
        plan = simulation.step()
        num_steps += 1
        # The gap between two tokens of a decode: one step, of so many tokens.
        assert [request.num_output_tokens for request in decoding] == [n + 1 for n in before]
        assert plan.num_tokens <= 4 + 8
    assert num_steps == 400 // 8


def test_without_it_a_step_may_take_the_whole_budget() -> None:
    simulation = Simulation(max_num_seqs=8, max_num_batched_tokens=64)
    for _ in range(4):
        simulation.add(1, 100)
    simulation.step()
    simulation.add(400, 1)
    assert simulation.step().num_tokens == 64


@pytest.mark.parametrize("threshold", [0, 16])
def test_a_short_prompt_gets_past_a_long_one(threshold: int) -> None:
    simulation = Simulation(max_num_batched_tokens=64, long_prefill_token_threshold=threshold)
    long_prompt = simulation.add(640, 1)
    simulation.step()
    short = simulation.add(10, 1)
    simulation.run()
    assert long_prompt.first_token_at is not None
    assert short.first_token_at is not None
    assert (short.first_token_at < long_prompt.first_token_at) == bool(threshold)
    if threshold:
        assert short.first_token_at == short.arrived_at + 1


def test_long_prompts_in_chunks_do_not_count_on_the_same_blocks() -> None:
    """The second has room beside what the first has been given so far, but not
    beside what it will need."""
    engine = FakeEngine(
        num_blocks=13, block_size=4, max_num_batched_tokens=64, long_prefill_token_threshold=4
    )
    engine.add(0, prompt(30), max_tokens=2, ignore_eos=True)
    engine.add(1, prompt(30, 300), max_tokens=2, ignore_eos=True)
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == [0]
    engine.run()
    assert engine.scheduler.total_preemptions == 0
    assert engine.of(1).token_ids == alone(prompt(30, 300), 2, ())


def test_two_that_fit_are_admitted_together() -> None:
    engine = FakeEngine(
        num_blocks=25, block_size=4, max_num_batched_tokens=64, long_prefill_token_threshold=4
    )
    for number in range(2):
        engine.add(number, prompt(30, 300 * number + 100), max_tokens=2, ignore_eos=True)
    engine.step()
    assert [seq.num_new_tokens for seq in engine.runner.plans[0].seqs] == [4, 4]
    engine.run()
    assert engine.scheduler.total_preemptions == 0


def test_a_threshold_above_the_budget_is_none() -> None:
    engine = FakeEngine(max_num_batched_tokens=16, long_prefill_token_threshold=1000)
    engine.add(0, prompt(40), max_tokens=2, ignore_eos=True)
    engine.run()
    assert [plan.num_tokens for plan in engine.runner.plans] == [16, 16, 8, 1]
    assert engine.of(0).reason is FinishReason.LENGTH


def test_a_negative_one_is_refused() -> None:
    with pytest.raises(ValueError, match="long_prefill_token_threshold is -1"):
        SchedulerLimits(1, 1, 2, 1, long_prefill_token_threshold=-1)
