"""max_tokens 0: the prompt is computed, nothing is written, and there is one outcome."""

from __future__ import annotations

import random

import pytest

from engine_core.sched.logprobs import NOTHING_BEFORE
from pagewire.types import FinishReason, SamplingParams, StructuredOutput
from pagewire.wire.codec import pack_ids
from pagewire.wire.messages import Add
from tests.engine_core.test_logprobs import FRONTEND, Told, make, take
from tests.support.fake_model import EPOCH, alone


def asks(prompt_logprobs: int | None = 1, **fields: object) -> SamplingParams:
    return SamplingParams(0, prompt_logprobs=prompt_logprobs, **fields)  # type: ignore[arg-type]


def test_beside_others_under_any_schedule() -> None:
    """vllm-project/vllm#6521: chunked, preempted and after others with the same prompt."""
    rng = random.Random(3)
    num_preemptions = 0
    for _ in range(80):
        block_size = rng.choice([1, 2, 4])
        engine, _ = make(
            num_blocks=1 + 44 // block_size,
            block_size=block_size,
            max_num_batched_tokens=rng.choice([2, 3, 5, 16]),
            max_model_len=60,
        )
        prompts: dict[int, list[int]] = {}
        asked: dict[int, SamplingParams] = {}
        told: dict[int, Told] = {i: Told() for i in range(6)}
        for request_id in told:
            prompts[request_id] = [3] * rng.choice([0, 8]) + [5] * rng.randint(1, 16)
            sampling = asked[request_id] = asks(rng.choice([None, 0, 3]))
            if request_id % 2:
                sampling = SamplingParams(rng.randint(1, 20), temperature=0.0, ignore_eos=True)
            engine.add(
                request_id,
                prompts[request_id],
                sampling=sampling,
                priority=rng.choice([0, 1, -1]),
            )
            take(engine.step(), told)
        while engine.core.has_work():
            take(engine.step(), told)
        for request_id, mine in told.items():
            (finished,) = engine.of(request_id).finished
            assert finished.reason == FinishReason.LENGTH
            if request_id % 2:
                assert mine.token_ids == alone(prompts[request_id], len(mine.token_ids), ())
                continue
            assert mine.token_ids == []
            assert mine.output == []
            if asked[request_id].prompt_logprobs is None:
                assert mine.prompts == []
            else:
                (positions,) = mine.prompts
                assert positions[0] is NOTHING_BEFORE
                assert [p.token_id for p in positions[1:]] == prompts[request_id][1:]
        num_preemptions += engine.scheduler.total_preemptions
    assert num_preemptions >= 10


def test_what_is_for_an_output_is_passed_over() -> None:
    """No ban leaves nothing to draw, no constraint is compiled, no logprob has no token."""
    engine, _ = make()
    told: dict[int, Told] = {1: Told()}
    sampling = asks(
        logprobs=2,
        allowed_token_ids=(5,),
        bad_words=((5,),),
        structured_output=StructuredOutput("regex", "a"),
        stop_token_ids=(5,),
    )
    engine.add(1, [3, 5, 7], sampling=sampling)
    while engine.core.has_work():
        take(engine.step(), told)
    (finished,) = engine.of(1).finished
    assert (finished.reason, finished.stop_token_id) == (FinishReason.LENGTH, None)
    assert told[1].output == []
    assert len(told[1].prompts[0]) == 3
    assert engine.scheduler.total_prompt_tokens == 3
    assert engine.scheduler.total_output_tokens == 0


def test_followers_go_on_when_their_leader_has_ended() -> None:
    engine, _ = make(block_size=4)
    prompt = list(range(10, 30))
    for request_id in (1, 2, 3):
        leader = None if request_id == 1 else 1
        add = Add(request_id, EPOCH, pack_ids(prompt), 0, asks(None), leader_id=leader)
        engine.core.add(FRONTEND, add, 0.0)
    engine.run()
    ends = [engine.of(request_id).finished for request_id in (1, 2, 3)]
    assert [[end.reason for end in told] for told in ends] == [[FinishReason.LENGTH]] * 3


def test_a_prompt_that_fills_the_cache_fits() -> None:
    engine, _ = make(num_blocks=5, block_size=4)
    engine.add(1, [3] * 16, sampling=asks(None))
    engine.add(2, [3] * 17, sampling=asks(None))
    engine.run()
    (fits,), (refused,) = engine.of(1).finished, engine.of(2).finished
    assert fits.reason == FinishReason.LENGTH
    assert refused.reason == FinishReason.ERROR
    assert "17 tokens" in refused.error


@pytest.mark.parametrize("num_output_tokens", [1, 2])
def test_it_is_not_resumed_with_output(num_output_tokens: int) -> None:
    engine, _ = make()
    engine.add(1, [3, 5, 7], num_output_tokens=num_output_tokens, sampling=asks())
    engine.run()
    (finished,) = engine.of(1).finished
    assert finished.reason == FinishReason.ERROR
