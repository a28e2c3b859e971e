"""Beam searches in the engine: what they find, whoever runs beside them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest

from engine_core.sched.policy import make_policy
from pagewire.errors import ModelLoadError
from pagewire.types import BeamParams, FinishReason, SamplingParams
from pagewire.wire.codec import unpack_ids
from tests.support.beam_reference import beam_reference
from tests.support.fake_model import (
    EOS,
    FakeEngine,
    alone,
    token_bytes,
    token_kv,
    token_logprobs,
)

PROMPT = [3, 5, 7, 3, 5, 7, 3, 5, 7, 3]
EARLY: tuple[Literal["true", "false", "never"], ...] = ("true", "false", "never")


@cache
def _logprobs_of(ids: tuple[int, ...]) -> list[float]:
    values: list[int] = []
    for token_id in ids:
        values.append(token_kv(values[-1] if values else 0, token_id))
    return token_logprobs(np.array(values, dtype=np.int64))


@dataclass(frozen=True)
class Search:
    prompt: tuple[int, ...]
    params: BeamParams
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            self.max_tokens,
            stop_token_ids=self.stop_ids,
            ignore_eos=self.ignore_eos,
            beam=self.params,
        )

    def ends(self, output: list[int]) -> bool:
        if output[-1] in self.stop_ids or (output[-1] == EOS and not self.ignore_eos):
            return True
        text = b"".join(token_bytes()[token_id] for token_id in output)
        return any(stop.encode() in text for stop in self.params.stop)

    def expected(self) -> list[tuple[list[int], float]]:
        return beam_reference(
            lambda ids: _logprobs_of(tuple(ids)),
            list(self.prompt),
            self.params,
            self.max_tokens,
            self.ends,
            (2 + len(self.stop_ids) + 8 * len(self.params.stop)) * self.params.width,
        )


def search_of(max_tokens: int = 12, **fields: Any) -> Search:
    own = {name: fields.pop(name) for name in ("stop_ids", "ignore_eos") if name in fields}
    fields = {"width": 3, "num_return": 1, **fields}
    return Search(tuple(PROMPT), BeamParams(**fields), max_tokens, **own)


def add(engine: FakeEngine, request_id: int, search: Search, **fields: Any) -> None:
    engine.add(request_id, search.prompt, sampling=search.sampling, **fields)


def found(engine: FakeEngine, request_id: int, frontend_id: int = 1) -> list[Any]:
    heard = engine.of(request_id, frontend_id)
    assert not heard.token_ids
    (finished,) = heard.finished
    return [(unpack_ids(beam.token_ids), beam.score) for beam in finished.beams]


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_finds_what_transformers_rule_finds(width: int, penalty: float, early: Any) -> None:
    engine = FakeEngine(block_size=4)
    searches = [
        search_of(width=width, num_return=n, length_penalty=penalty, early_stopping=early, **ends)
        for n in {1, width}
        for ends in ({}, {"stop_ids": tuple(range(3, 15))}, {"stop": ("ab", "q", "xyz")})
    ]
    for number, search in enumerate(searches):
        add(engine, number, search)
        engine.run()
        assert found(engine, number) == search.expected(), search
    engine.check_at_rest()


def test_one_step_and_a_stop_that_almost_everything_ends() -> None:
    engine = FakeEngine(block_size=4)
    every_letter_but_two = tuple("abcdefghijklmnopqrstuvwx")
    searches = [
        search_of(max_tokens=1, width=4, num_return=4),
        search_of(width=4, num_return=3, stop=every_letter_but_two),
        search_of(width=4, num_return=4, stop=(*every_letter_but_two, "y", "z")),
    ]
    for number, search in enumerate(searches):
        add(engine, number, search)
        engine.run()
        ours = found(engine, number)
        assert len(ours) == search.params.num_return
        if number != 1:  # transformers' candidates all end there, ours go further down
            assert ours == search.expected()
    engine.check_at_rest()


def test_reasons_and_what_stopped_it() -> None:
    engine = FakeEngine(block_size=4)
    search = search_of(width=4, num_return=4, stop_ids=tuple(range(3, 30)), stop=("h", "i"))
    add(engine, 1, search)
    engine.run()
    heard = engine.of(1).finished[0]
    kinds = set()
    for beam in heard.beams:
        last = unpack_ids(beam.token_ids)[-1]
        if last in search.stop_ids:
            assert (beam.reason, beam.stop_token_id) == (FinishReason.STOP, last)
            kinds.add("id")
        else:
            assert (beam.reason, beam.stop_token_id) == (FinishReason.STOP, None)
            assert token_bytes()[last] in (b"h", b"i")
            kinds.add("string")
    assert kinds == {"id", "string"}
    assert engine.of(1).reason is FinishReason.STOP
    add(engine, 2, search_of(max_tokens=3, ignore_eos=True))
    engine.run()
    assert engine.of(2).reason is FinishReason.LENGTH


def test_logprobs_of_each_beam() -> None:
    engine = FakeEngine(block_size=4)
    search = search_of(width=4, num_return=4, stop_ids=(9,))
    sampling = SamplingParams(12, stop_token_ids=(9,), logprobs=2, beam=search.params)
    engine.add(1, PROMPT, sampling=sampling)
    engine.run()
    assert found(engine, 1) == search.expected()
    for beam in engine.of(1).finished[0].beams:
        ids = unpack_ids(beam.token_ids)
        assert [position.token_id for position in beam.logprobs] == ids
        total = 0.0
        for at, position in enumerate(beam.logprobs):
            logprobs = _logprobs_of((*PROMPT, *ids[:at]))
            best = sorted(range(len(logprobs)), key=lambda it, of=logprobs: -of[it])  # type: ignore[misc]
            assert position.logprob == logprobs[ids[at]]
            assert position.rank == 1 + best.index(ids[at])
            assert list(position.top_ids) == best[:2]
            total += position.logprob
        assert beam.score == total / len(ids)


def test_a_fork_costs_one_block_and_computes_one_token() -> None:
    engine = FakeEngine(block_size=4)
    add(engine, 1, search_of(width=4, max_tokens=8, ignore_eos=True))
    engine.step()
    engine.step()
    plan = engine.runner.plans[-1]
    assert [seq.num_new_tokens for seq in plan.seqs] == [1] * 4
    # The prompt's two full blocks are everyone's, of the third there are three copies.
    assert len(plan.moves.copy) == 3
    tables = [row.table for row in engine.runner.rows.values()]
    assert len({block for table in tables for block in table}) == 2 + 4
    engine.run()
    computed = sum(plan.num_tokens for plan in engine.runner.plans)
    assert computed == len(PROMPT) + 7 * 4
    engine.check_at_rest()


def test_counts_and_times() -> None:
    engine = FakeEngine(block_size=4, policy=make_policy("fair"))
    search = search_of(width=3, num_return=2, max_tokens=5, ignore_eos=True)
    add(engine, 1, search, tenant="t")
    engine.run()
    (started,) = engine.of(1).started
    finished = engine.of(1).finished[0]
    assert started.queue_s == finished.queue_s
    assert finished.prefill_s == 0.0
    assert finished.decode_s == 4.0
    assert engine.scheduler.total_output_tokens == 10
    assert engine.scheduler.total_prompt_tokens == len(PROMPT)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"beam": BeamParams(9, 1)}, "the beam width is 9, must be from 1 to 8"),
        ({"beam": BeamParams(0, 0)}, "the beam width is 0"),
        ({"beam": BeamParams(2, 3)}, "num_return is 3, must be from 1 to the beam width 2"),
        ({"beam": BeamParams(2, 1, float("nan"))}, "length_penalty is nan"),
        ({"beam": BeamParams(2, 1, 11.0)}, "length_penalty is 11.0, must be from -10 to 10"),
        ({"beam": BeamParams(2, 1, stop=("",))}, "stop holds an empty string"),
        ({"beam": BeamParams(2, 1), "min_tokens": 1}, "excludes min_tokens"),
        ({"beam": BeamParams(2, 1), "prompt_logprobs": 1}, "excludes prompt_logprobs"),
        ({"beam": BeamParams(2, 1), "logit_bias": ((1, 1.0),)}, "excludes logit_bias"),
        (
            {"beam": BeamParams(8, 1), "max_tokens": 100},
            "8 beams of 109 tokens, the first 10 shared, need 210 KV blocks of 4, but the whole",
        ),
    ],
)
def test_refusals_name_the_figures(sampling: dict[str, Any], message: str) -> None:
    engine = FakeEngine(block_size=4)
    engine.add(1, PROMPT, sampling=SamplingParams(**{"max_tokens": 8, **sampling}))
    engine.run()
    finished = engine.of(1).finished[0]
    assert engine.of(1).reason is FinishReason.ERROR
    assert message in finished.error
    assert finished.field == "sampling_params.beam_search"
    engine.check_at_rest()


def test_stop_strings_need_a_vocabulary() -> None:
    engine = FakeEngine(block_size=4)

    def broken() -> list[bytes]:
        raise ModelLoadError("/models/secret/tokenizer.json: damaged")

    engine.core._token_bytes = broken
    add(engine, 1, search_of(stop=("x",)))
    plain = search_of()
    add(engine, 2, plain)
    engine.run()
    finished = engine.of(1).finished[0]
    assert finished.field == "sampling_params.stop"
    assert "secret" not in finished.error
    assert found(engine, 2) == plain.expected()


@pytest.mark.parametrize("when", range(1, 7))
def test_abort_deadline_and_a_lost_frontend_free_all_rows_and_blocks(when: int) -> None:
    for how in ("abort", "deadline", "drop"):
        engine = FakeEngine(block_size=4, max_num_batched_tokens=8)
        deadline_ms = 1000.0 * when - 500 if how == "deadline" else None
        search = search_of(width=5, max_tokens=20, ignore_eos=True)
        add(engine, 1, search, deadline_ms=deadline_ms)
        for _ in range(when):
            engine.step()
        if how == "abort":
            engine.abort(1)
        elif how == "drop":
            engine.core.drop_frontend(1)
        engine.step()
        assert not engine.core.has_work()
        engine.check_at_rest()
        # Rows are whole again.
        add(engine, 2, search)
        engine.run()
        assert found(engine, 2) == search.expected()


def test_a_search_waits_for_its_rows_and_nobody_overtakes_it() -> None:
    engine = FakeEngine(block_size=4, max_num_seqs=5)
    for number in range(3):
        engine.add(number, PROMPT, max_tokens=4 + number, ignore_eos=True)
    search = search_of(width=4, max_tokens=6, ignore_eos=True)
    add(engine, 7, search)
    engine.add(8, PROMPT, max_tokens=2, ignore_eos=True)
    engine.run()
    assert max(len(plan.seqs) for plan in engine.runner.plans) == 5
    assert found(engine, 7) == search.expected()
    assert engine.of(7).started[0].queue_s < engine.of(8).started[0].queue_s
    engine.check_at_rest()


@dataclass
class Asked:
    request_id: int
    arrives: int
    search: Search | None
    prompt: tuple[int, ...]
    max_tokens: int
    fields: dict[str, Any]
    abort_at: int | None


def random_request(rng: random.Random, number: int, engine: FakeEngine, *, crowded: bool) -> Asked:
    room = min(engine.kv_manager.max_tokens + 1, engine.limits.max_model_len)
    num_prompt = rng.randint(1, min(5 if crowded else 20, room - 1))
    prompt = (*(PROMPT + PROMPT)[: num_prompt - 1], rng.choice([3, 5]))
    most = min(24, room - num_prompt)
    max_tokens = most if crowded else rng.randint(1, most)
    search = None
    if rng.random() < 0.6:
        limits = engine.limits
        width = rng.randint(1, min(6, limits.max_num_seqs, limits.max_num_batched_tokens))
        size = engine.kv_manager.block_size
        while width > 0:
            shared = num_prompt // size
            blocks = shared + width * (-(-(num_prompt + max_tokens - 1) // size) - shared)
            if blocks <= engine.kv_manager.num_usable_blocks:
                break
            width -= 1
        params = BeamParams(
            width,
            rng.randint(1, width),
            rng.choice([0.0, 1.0, 2.0, -0.5]),
            rng.choice(EARLY),
            stop=() if crowded else rng.choice([(), (), ("q", "ab")]),
        )
        stop_ids = tuple(rng.sample(range(3, 60), 0 if crowded else rng.choice([0, 0, 2, 10])))
        search = Search(prompt, params, max_tokens, stop_ids, crowded or rng.random() < 0.6)
    return Asked(
        number,
        rng.choice([0, 0, rng.randint(0, 20)]),
        search,
        prompt,
        max_tokens,
        {
            "priority": rng.choice([0, 0, 0, 1, -1]),
            "tenant": rng.choice(["", "a", "b"]),
            "cache_salt": rng.choice(["", "", "x"]),
            "skip_prefix_cache": rng.random() < 0.1,
            "deadline_ms": rng.choice([8, 40]) * 1000.0 if rng.random() < 0.15 else None,
        },
        rng.randint(0, 30) if rng.random() < 0.15 else None,
    )


def drive(rng: random.Random, engine: FakeEngine, requests: list[Asked]) -> None:
    turn = 0
    while turn <= 20 or engine.core.has_work():
        assert turn < 4000, "not over in a bounded number of steps"
        for asked in requests:
            if asked.arrives == turn and asked.search is not None:
                add(engine, asked.request_id, asked.search, **asked.fields)
            elif asked.arrives == turn:
                engine.add(
                    asked.request_id,
                    asked.prompt,
                    max_tokens=asked.max_tokens,
                    ignore_eos=True,
                    **asked.fields,
                )
            if asked.abort_at is not None and max(asked.abort_at, asked.arrives) == turn:
                engine.abort(asked.request_id)
        if rng.random() < 0.01:
            engine.core.reset_prefix_cache()
        engine.step()
        turn += 1


@pytest.mark.parametrize(
    ("seed", "async_scheduling"), [*((seed, False) for seed in range(6)), (0, True), (4, True)]
)
def test_searches_among_others_under_any_schedule(seed: int, async_scheduling: bool) -> None:
    rng = random.Random(seed)
    num_whole = num_preempted = num_ended = num_hits = 0
    for _ in range(24):
        crowded = rng.random() < 0.5
        block_size = rng.choice([1, 2, 4] if crowded else [1, 2, 4, 8])
        engine = FakeEngine(
            # Pools that one search may fill, so that they preempt each other.
            num_blocks=1 + rng.choice([80, 100] if crowded else [40, 64, 150]) // block_size,
            block_size=block_size,
            max_num_seqs=12 if crowded else rng.choice([1, 3, 6, 12]),
            max_num_batched_tokens=rng.choice([12, 64] if crowded else [2, 5, 8, 64]),
            max_model_len=60,
            enable_prefix_caching=rng.random() < 0.6,
            policy=make_policy(rng.choice(["fair", "priority"])),
            num_host_blocks=rng.choice([0, 0, 16]),
            async_scheduling=async_scheduling,
        )
        requests = [
            random_request(rng, number, engine, crowded=crowded)
            for number in range(rng.randint(2, 6))
        ]
        drive(rng, engine, requests)
        engine.check_at_rest()
        for asked in requests:
            heard = engine.of(asked.request_id)
            (finished,) = heard.finished
            if heard.reason is FinishReason.ABORT:
                cause = asked.fields["deadline_ms"] if finished.deadline_missed else asked.abort_at
                assert cause is not None
                assert not finished.beams
                num_ended += 1
            elif asked.search is None:
                assert heard.token_ids == alone(asked.prompt, asked.max_tokens, ())
            else:
                assert found(engine, asked.request_id) == asked.search.expected(), asked
                num_whole += 1
                num_preempted += finished.num_preemptions > 0
        num_hits += engine.kv_manager.num_hit_tokens
    # What the schedules are for must really have happened in them.
    assert num_whole >= 30
    assert num_preempted >= (1 if async_scheduling else 3)
    assert num_ended >= 1
    assert num_hits >= 10
