"""Logprobs through scheduler and core, without torch: each position once, whatever
is chunked, preempted or cached; and requests that leave the prefix cache alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from engine_core.core import EngineCore
from engine_core.sched.logprobs import NOTHING_BEFORE, PromptLogprobs
from engine_core.sched.plan import NewSeq, PromptChunk, StepLogprobs, StepPlan, StepResult
from pagewire.types import FinishReason, SamplingParams
from pagewire.wire.codec import pack_ids, unpack_ids, unpack_request_ids
from pagewire.wire.messages import Add, PositionLogprobs, StepOutput
from tests.support.fake_model import EPOCH, DonePending, FakeEngine, FakeRunner, alone

FRONTEND = 1


class ReportingRunner(FakeRunner):
    """Says of prompt position p that its logprob is -p, and of output token i that it is -i."""

    def __init__(self, engine: FakeEngine) -> None:
        kv = engine.runner.kv
        super().__init__(kv.shape[0], kv.shape[1], engine.limits)
        self.entered: dict[int, NewSeq] = {}
        self.num_resumed_in_prompt = 0

    def launch(self, plan: StepPlan) -> DonePending:
        for new in plan.new_seqs:
            self.entered[new.row] = new
            self.num_resumed_in_prompt += new.prompt_logprobs_from not in (None, 1)
        drawn = super().launch(plan).result()
        output, prompt = {}, {}
        for row, token_id in zip(drawn.rows, drawn.token_ids, strict=True):
            seq = self.entered[row]
            if seq.sampling.logprobs is not None:
                index = len(self.rows[row].token_ids) - 1 - seq.num_prompt_tokens
                output[row] = PositionLogprobs(token_id, -float(index), 1)
        for step in plan.seqs:
            seq = self.entered[step.row]
            if seq.prompt_logprobs_from is not None:
                end = step.num_computed_tokens + step.num_new_tokens + 1
                first = max(step.num_computed_tokens + 1, seq.prompt_logprobs_from)
                targets = list(enumerate(seq.token_ids[: seq.num_prompt_tokens]))[first:end]
                positions = tuple(PositionLogprobs(t, -float(p), 1) for p, t in targets)
                prompt[step.row] = PromptChunk(first, positions)
        return DonePending(StepResult(drawn.rows, drawn.token_ids, StepLogprobs(output, prompt)))


@dataclass
class Told:
    token_ids: list[int] = field(default_factory=list)
    output: list[PositionLogprobs] = field(default_factory=list)
    prompts: list[tuple[PositionLogprobs, ...]] = field(default_factory=list)
    prompt_came_with: int = -1
    """Output tokens known when the prompt's came."""


def make(**options: object) -> tuple[FakeEngine, ReportingRunner]:
    engine = FakeEngine(**options)  # type: ignore[arg-type]
    runner = ReportingRunner(engine)
    engine.runner = runner
    engine.core = EngineCore(engine.scheduler, runner, epoch=EPOCH, clock=engine.clock)
    return engine, runner


def take(outputs: dict[int, StepOutput], told: dict[int, Told]) -> None:
    for output in outputs.values():
        ids = unpack_request_ids(output.request_ids)
        for request_id, token_id in zip(ids, unpack_ids(output.token_ids), strict=True):
            told.setdefault(request_id, Told()).token_ids.append(token_id)
        for logprobs in output.logprobs:
            mine = told[logprobs.request_id]
            mine.output += logprobs.output
            if logprobs.prompt:
                mine.prompts.append(logprobs.prompt)
                mine.prompt_came_with = len(mine.token_ids)


def params(max_tokens: int, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens,
        temperature=0.0,
        ignore_eos=True,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def test_each_position_once_under_any_schedule() -> None:
    """vllm-project/vllm#8268, #3251: with a cached prefix, prompt logprobs were misplaced."""
    rng = random.Random(8)
    num_preemptions = num_resumed = num_hits = 0
    for _ in range(120):
        block_size = rng.choice([1, 2, 4])
        engine, runner = make(
            num_blocks=1 + 44 // block_size,
            block_size=block_size,
            max_num_batched_tokens=rng.choice([2, 3, 5, 16]),
            max_model_len=60,
        )
        prompts, asked, told = {}, {}, {}
        for request_id in range(6):
            stem = [3] * rng.choice([0, 8, 16])
            prompt = stem + [rng.choice([3, 5, 7]) for _ in range(rng.randint(1, 24 - len(stem)))]
            asks = params(rng.randint(1, 20), rng.choice([None, 0, 2]), rng.choice([None, 0, 3]))
            prompts[request_id], asked[request_id] = prompt, asks
            engine.add(request_id, prompt, sampling=asks, priority=rng.choice([0, 1, -1]))
            for _ in range(rng.randint(0, 4)):
                take(engine.step(), told)
        while engine.core.has_work():
            take(engine.step(), told)
        for request_id, mine in told.items():
            prompt, asks = prompts[request_id], asked[request_id]
            assert mine.token_ids == alone(prompt, asks.max_tokens, ())
            if asks.logprobs is None:
                assert mine.output == []
            else:
                assert [p.token_id for p in mine.output] == mine.token_ids
                assert [p.logprob for p in mine.output] == [
                    -float(i) for i in range(asks.max_tokens)
                ]
            if asks.prompt_logprobs is None:
                assert mine.prompts == []
                continue
            (positions,) = mine.prompts
            assert mine.prompt_came_with == 1
            assert positions[0] is NOTHING_BEFORE
            assert [(p.token_id, p.logprob) for p in positions[1:]] == [
                (token_id, -float(p)) for p, token_id in enumerate(prompt) if p
            ]
            assert engine.of(request_id).finished[0].num_cached_tokens == 0
        num_preemptions += engine.scheduler.total_preemptions
        num_resumed += runner.num_resumed_in_prompt
        num_hits += engine.kv_manager.num_hit_tokens
    # What the schedules are for must really have happened in them.
    assert num_preemptions >= 20
    assert num_resumed >= 3
    assert num_hits >= 30


def test_a_chunk_that_is_computed_again_adds_only_what_is_missing() -> None:
    positions = [PositionLogprobs(i, -1.0, 1) for i in range(1, 9)]
    collected = PromptLogprobs()
    collected.take(1, positions[:4])
    collected.take(1, positions[:3])
    collected.take(3, positions[2:8])
    assert collected.positions == [NOTHING_BEFORE, *positions]
    with pytest.raises(AssertionError):
        collected.take(11, positions[:1])


def test_prompt_logprobs_do_not_read_the_prefix_cache_but_write_it() -> None:
    engine, _ = make(block_size=4)
    prompt = list(range(100, 117))
    told: dict[int, Told] = {}
    for request_id, asks in enumerate([None, 1, 1, None]):
        engine.add(request_id, prompt, sampling=params(1, None, asks))
        while engine.core.has_work():
            take(engine.step(), told)
        if request_id == 2:
            engine.core.reset_prefix_cache()
            engine.add(9, prompt, sampling=params(1, None, 1))
            engine.run()
    cached = [engine.of(i).finished[0].num_cached_tokens for i in range(4)]
    assert cached == [0, 0, 0, 16]
    assert told[1].prompts == told[2].prompts
    # Only those that looked are counted.
    assert engine.kv_manager.num_queried_tokens == 2 * len(prompt)


def test_skip_prefix_cache_neither_reads_nor_writes() -> None:
    engine, _ = make(block_size=4)
    prompt = list(range(100, 117))

    def ask(request_id: int, *, skip: bool) -> int:
        add = Add(
            request_id,
            EPOCH,
            pack_ids(prompt),
            0,
            params(4, None, None),
            skip_prefix_cache=skip,
        )
        engine.core.add(FRONTEND, add, 0.0)
        engine.run()
        assert engine.of(request_id).token_ids == alone(prompt, 4, ())
        return engine.of(request_id).finished[0].num_cached_tokens

    assert ask(1, skip=True) == 0
    assert engine.kv_manager.pool.num_cached_blocks == 0
    assert ask(2, skip=False) == 0
    assert ask(3, skip=True) == 0
    assert ask(4, skip=False) == 16


def test_a_replay_does_not_tell_the_prompt_again() -> None:
    engine, _ = make(block_size=4)
    prompt = list(range(10, 20))
    first = alone(prompt, 1, ())
    told: dict[int, Told] = {}
    engine.add(1, prompt + first, num_output_tokens=1, sampling=params(4, 1, 1))
    while engine.core.has_work():
        take(engine.step(), told)
    assert told[1].prompts == []
    assert first + told[1].token_ids == alone(prompt, 4, ())
    assert [p.token_id for p in told[1].output] == told[1].token_ids


@pytest.mark.parametrize("count", [-1, 21])
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_a_count_out_of_range_is_refused(name: str, count: int) -> None:
    engine, _ = make()
    engine.add(1, [3, 4], sampling=SamplingParams(2, **{name: count}))
    engine.run()
    (finished,) = engine.of(1).finished
    assert finished.reason == FinishReason.ERROR
    assert finished.error == f"{name} is {count}, must be from 0 to 20"
