"""Several sequences of one prompt: each is what it is alone, and the prompt is computed once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine_core.sched.policy import make_policy
from pagewire.types import FinishReason, SamplingParams
from pagewire.wire.codec import pack_ids, unpack_ids, unpack_request_ids
from pagewire.wire.messages import Add
from tests.parity.harness import EPOCH, FRONTEND_ID, Engine, Loaded, load
from tests.support.fake_model import FakeEngine, alone
from tests.support.tiny_model import TinySpec, write_hf

PROMPT = [3, 5, 7, 3, 5, 7, 3, 5, 7, 3]


def add_group(engine: FakeEngine, first_id: int, n: int, prompt: list[int], **fields: Any) -> None:
    for index in range(n):
        engine.add(
            first_id + index,
            prompt,
            sample_index=index,
            leader_id=first_id if index else None,
            ignore_eos=True,
            **fields,
        )


def expected(prompt: list[int], max_tokens: int, index: int) -> list[int]:
    return alone(prompt, max_tokens, (), index)


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_full_blocks_of_the_prompt_are_computed_and_held_once(caching: bool) -> None:
    engine = FakeEngine(block_size=4, max_num_batched_tokens=6, enable_prefix_caching=caching)
    add_group(engine, 1, 4, PROMPT, max_tokens=6)
    engine.step()
    engine.step()
    assert [heard.token_ids for heard in engine.heard.values()] == [expected(PROMPT, 1, 0)]
    assert engine.core.stats().num_waiting == 3
    engine.step()
    # 3 blocks for 12 tokens, of which the first two are the prompt's and everyone's; of
    # the third each has a copy, and computes the prompt's last token for its own draw.
    plan = engine.runner.plans[-1]
    assert [seq.num_new_tokens for seq in plan.seqs] == [1, 1, 1, 1]
    (source,) = {source for source, _ in plan.moves.copy}
    assert source == engine.runner.rows[plan.seqs[0].row].table[2]
    assert len(plan.moves.copy) == 3
    tables = [row.table for row in engine.runner.rows.values()]
    assert len(tables) == 4
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    held = engine.kv_manager.num_usable_blocks - engine.kv_manager.num_free_blocks
    assert held == 2 + 4
    engine.run()
    for index in range(4):
        assert engine.of(1 + index).token_ids == expected(PROMPT, 6, index)
        assert engine.of(1 + index).reason is FinishReason.LENGTH
    computed = sum(plan.num_tokens for plan in engine.runner.plans)
    assert computed == len(PROMPT) + 3 * 1 + 4 * 5
    engine.check_at_rest()


def test_without_the_cache_for_one_request_its_sequences_still_share() -> None:
    engine = FakeEngine(block_size=4)
    add_group(engine, 1, 3, PROMPT, max_tokens=4, skip_prefix_cache=True)
    engine.run()
    assert [engine.of(i).finished[0].num_cached_tokens for i in (1, 2, 3)] == [0, 9, 9]
    engine.add(9, PROMPT)
    engine.run()
    assert engine.of(9).finished[0].num_cached_tokens == 0


def test_a_reset_of_the_cache_parts_those_who_have_not_begun() -> None:
    engine = FakeEngine(block_size=4, max_num_batched_tokens=64)
    add_group(engine, 1, 2, PROMPT, max_tokens=9)
    engine.step()
    engine.core.reset_prefix_cache()
    engine.run()
    assert engine.of(2).finished[0].num_cached_tokens == 0
    assert engine.of(2).token_ids == expected(PROMPT, 9, 1)
    engine.check_at_rest()


def test_prompt_logprobs_are_computed_by_whoever_wants_them() -> None:
    engine = FakeEngine(block_size=4)
    engine.add(1, PROMPT)
    engine.step()
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0)
    engine.add(2, PROMPT, leader_id=1, sampling=params)
    # Nothing of it may be shared; the fake model has no logprobs to report.
    assert engine.scheduler.waiting.peek().table.donor is None
    assert engine.scheduler.count_uncached(engine.scheduler.waiting.peek()) == len(PROMPT)


def test_abort_ends_those_that_run_and_those_that_wait_for_their_leader() -> None:
    engine = FakeEngine(block_size=4, max_num_batched_tokens=4)
    add_group(engine, 1, 4, PROMPT, max_tokens=6)
    engine.step()
    engine.abort(1, 2, 3, 4)
    assert engine.kv_manager.num_free_blocks == engine.kv_manager.num_usable_blocks
    engine.run()
    assert [engine.of(i).reason for i in (1, 2, 3, 4)] == [FinishReason.ABORT] * 4
    engine.check_at_rest()


def test_followers_outlive_their_leader() -> None:
    engine = FakeEngine(block_size=4, max_num_batched_tokens=4)
    add_group(engine, 1, 3, PROMPT, max_tokens=6)
    engine.step()
    engine.abort(1)
    engine.run()
    for index in (1, 2):
        assert engine.of(1 + index).token_ids == expected(PROMPT, 6, index)
    engine.check_at_rest()


def test_a_held_follower_is_dropped_with_its_frontend_and_by_its_deadline() -> None:
    engine = FakeEngine(block_size=4, max_num_batched_tokens=1)
    add_group(engine, 1, 3, PROMPT, max_tokens=6, deadline_ms=3000.0)
    add_group(engine, 1, 3, PROMPT, max_tokens=6, frontend_id=2)
    for _ in range(2):
        engine.step()
    engine.core.drop_frontend(2)
    engine.run()
    assert all(engine.of(i).finished[0].deadline_missed for i in (1, 2, 3))
    engine.check_at_rest()


def test_one_that_replays_output_shares_the_prompt_only() -> None:
    engine = FakeEngine(block_size=4)
    outputs = [expected(PROMPT, 12, index) for index in range(3)]
    for index, output in enumerate(outputs):
        engine.add(
            7 + index,
            [*PROMPT, *output[:5]],
            num_output_tokens=5,
            max_tokens=12,
            ignore_eos=True,
            sample_index=index,
            leader_id=7 if index else None,
        )
    engine.run()
    for index, output in enumerate(outputs):
        assert engine.of(7 + index).token_ids == output[5:]
    assert engine.of(8).finished[0].num_cached_tokens == len(PROMPT)
    engine.check_at_rest()


def test_an_unknown_leader_is_no_leader() -> None:
    engine = FakeEngine()
    engine.add(5, PROMPT, leader_id=4, sample_index=1, ignore_eos=True)
    engine.add(6, PROMPT, leader_id=6, sample_index=2, ignore_eos=True)
    engine.run()
    assert engine.of(5).token_ids == expected(PROMPT, 8, 1)
    assert engine.of(6).token_ids == expected(PROMPT, 8, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sample_index": -1}, "sample_index is -1"),
        ({"sample_index": 2**31}, "sample_index is 2147483648"),
        ({"token_ids": [3, 6, 7]}, "leader_id 1 is a request with another prompt"),
        ({"token_ids": [3, 5, 7, 9]}, "leader_id 1 is a request with another prompt"),
        ({"cache_salt": "a"}, "leader_id 1 is a request with another prompt or cache_salt"),
    ],
)
def test_what_would_share_the_wrong_blocks_is_refused(fields: dict[str, Any], message: str) -> None:
    engine = FakeEngine()
    engine.add(1, [3, 5, 7])
    engine.add(2, **{"token_ids": [3, 5, 7], "leader_id": 1, **fields})
    engine.run()
    assert engine.of(2).reason is FinishReason.ERROR
    assert message in engine.of(2).finished[0].error
    assert engine.of(1).reason is not FinishReason.ERROR
    engine.check_at_rest()


@dataclass
class Group:
    first_id: int
    arrives: int
    prompt: list[int]
    n: int
    max_tokens: int
    aborts: dict[int, int] = field(default_factory=dict)
    """Index -> turn."""


def random_group(rng: random.Random, number: int, room: int) -> Group:
    num_prompt = rng.randint(1, min(20, room - 1))
    n = rng.randint(1, 4)
    aborted = rng.sample(range(n), rng.randint(1, n)) if rng.random() < 0.3 else []
    at = rng.randint(0, 30)
    return Group(
        first_id=10 * number,
        arrives=rng.choice([0, 0, rng.randint(0, 15)]),
        prompt=[rng.choice([3, 5]) for _ in range(num_prompt)],
        n=n,
        max_tokens=rng.randint(1, min(24, room - num_prompt)),
        aborts=dict.fromkeys(aborted, at),
    )


@pytest.mark.parametrize("seed", range(8))
def test_each_sequence_is_what_it_is_alone_under_any_schedule(seed: int) -> None:
    rng = random.Random(seed)
    num_preemptions = num_shared = num_aborts = 0
    for _ in range(40):
        block_size = rng.choice([1, 2, 4, 8])
        engine = FakeEngine(
            # Small pools, so that sequences of one group preempt each other.
            num_blocks=1 + rng.choice([16, 24, 24, 32, 48]) // block_size,
            block_size=block_size,
            max_num_seqs=rng.choice([1, 2, 4, 8]),
            max_num_batched_tokens=rng.choice([1, 3, 8, 64]),
            max_model_len=60,
            enable_prefix_caching=rng.random() < 0.5,
            policy=make_policy(rng.choice(["fair", "priority"])),
        )
        room = min(engine.kv_manager.max_tokens + 1, engine.limits.max_model_len)
        groups = [random_group(rng, number, room) for number in range(rng.randint(1, 5))]
        turn = 0
        while turn <= 15 or engine.core.has_work():
            assert turn < 3000
            for group in groups:
                if group.arrives == turn:
                    add_group(
                        engine, group.first_id, group.n, group.prompt, max_tokens=group.max_tokens
                    )
                due = [i for i, at in group.aborts.items() if max(at, group.arrives + 1) == turn]
                if due:
                    engine.abort(*(group.first_id + index for index in due))
            engine.step()
            turn += 1
        engine.check_at_rest()
        for group in groups:
            for index in range(group.n):
                heard = engine.of(group.first_id + index)
                whole = expected(group.prompt, group.max_tokens, index)
                if heard.reason is FinishReason.ABORT:
                    assert index in group.aborts
                    assert heard.token_ids == whole[: len(heard.token_ids)]
                    num_aborts += 1
                else:
                    assert heard.token_ids == whole
                    num_shared += index and heard.finished[0].num_cached_tokens
        num_preemptions += engine.scheduler.total_preemptions
    assert num_preemptions >= 5
    assert num_shared >= 100
    assert num_aborts >= 5


# With a real sampler.


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(str(write_hf(tmp_path_factory.mktemp("tiny") / "model", TinySpec())), "cpu")


def serve(loaded: Loaded, indices: list[int], **schedule: Any) -> list[list[int]]:
    """A prompt's sequences of these indices, together."""
    engine = Engine(loaded, **schedule)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=9, ignore_eos=True)
    prompt = pack_ids(range(60, 95))
    for index in indices:
        add = Add(index, EPOCH, prompt, 0, params, sample_index=index, leader_id=indices[0])
        engine.core.add(FRONTEND_ID, add, 0.0)
    outputs: dict[int, list[int]] = {index: [] for index in indices}
    while engine.core.has_work():
        for output in engine.core.step(lambda: None).values():
            ids = unpack_request_ids(output.request_ids)
            for index, token_id in zip(ids, unpack_ids(output.token_ids), strict=True):
                outputs[index].append(token_id)
        engine.core.check_integrity()
    engine.kv_manager.check_all_free()
    return list(outputs.values())


def test_sequences_draw_their_own_numbers_whatever_the_schedule(loaded: Loaded) -> None:
    each_alone = [serve(loaded, [index])[0] for index in range(3)]
    assert len({tuple(ids) for ids in each_alone}) == 3
    assert all(len(ids) == 12 for ids in each_alone)
    for schedule in (
        {},
        {"prefix_caching": True},
        {"max_num_batched_tokens": 7, "max_num_seqs": 2},
        {"num_blocks": 6},
    ):
        assert serve(loaded, [0, 1, 2], **schedule) == each_alone
