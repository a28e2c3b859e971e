"""Prompts beside decodes: what --max-mixed-prefill-tokens bounds."""

from __future__ import annotations

import pytest

from engine_core.sched.limits import SchedulerLimits
from tests.support.fake_model import FakeEngine, alone
from tests.support.simulation import Simulation


def test_all_prompts_together_get_so_many_tokens_beside_decodes() -> None:
    simulation = Simulation(max_num_seqs=8, max_num_batched_tokens=64, max_mixed_prefill_tokens=8)
    decoding = [simulation.add(1, 100) for _ in range(3)]
    simulation.step()
    prompts = [simulation.add(20, 1), simulation.add(12, 1)]
    sizes = []
    while any(request.num_output_tokens == 0 for request in prompts):
        before = [request.num_output_tokens for request in decoding]
        sizes.append(simulation.step().num_tokens)
        assert [request.num_output_tokens for request in decoding] == [n + 1 for n in before]
        assert simulation.scheduler.num_batched_tokens == sizes[-1]
    assert sizes == [3 + 8] * 4


def test_alone_prompts_get_the_whole_budget() -> None:
    simulation = Simulation(max_num_batched_tokens=64, max_mixed_prefill_tokens=8)
    simulation.add(100, 1)
    assert [simulation.step().num_tokens for _ in range(2)] == [64, 36]


def test_a_budget_below_the_limit_holds() -> None:
    simulation = Simulation(max_num_batched_tokens=8, max_mixed_prefill_tokens=32)
    simulation.add(1, 100)
    simulation.step()
    simulation.add(40, 1)
    assert simulation.step().num_tokens == 8


def test_the_text_does_not_depend_on_it() -> None:
    engine = FakeEngine(max_num_batched_tokens=32, max_mixed_prefill_tokens=3)
    prompts = {i: list(range(10 * i, 10 * i + 5 + 7 * i)) for i in range(1, 5)}
    for request_id, ids in prompts.items():
        engine.add(request_id, ids, max_tokens=6, ignore_eos=True)
        engine.step()
    engine.run()
    for request_id, ids in prompts.items():
        assert engine.of(request_id).token_ids == alone(ids, 6, ())


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_mixed_prefill_tokens is -1"):
        SchedulerLimits(1, 1, 2, 1, max_mixed_prefill_tokens=-1)
