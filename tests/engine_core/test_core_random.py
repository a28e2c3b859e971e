"""Thousands of random schedules over the fake model: whatever is chunked, batched,
preempted, cached, moved to the host, shared or aborted, the text stays what it is alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from engine_core.kv.restore_policy import MeasuredCosts
from engine_core.sched.drafters import ModelDrafter
from engine_core.sched.policy import make_policy
from engine_core.sched.prefill_budget import PrefillBudget
from engine_core.sched.speculation import Speculation
from engine_core.sched.step_costs import StepCosts
from pagewire.types import FinishReason
from tests.support.fake_model import EOS, FakeEngine, Oracle, alone

SCHEDULES_PER_SEED = 80
SEEDS = 24
ASYNC_SEEDS = 5
"""Of them with plans made before the last result is read."""
SPECULATING_SEEDS = 5
"""Of them with draft tokens, of which some are wrong."""


@dataclass
class Plan:
    """One request to come."""

    frontend_id: int
    request_id: int
    arrives: int
    known: list[int]
    num_output: int
    max_tokens: int
    salt: str
    tenant: str
    priority: int
    ignore_eos: bool
    stop_ids: tuple[int, ...]
    deadline_ms: float | None
    abort_at: int | None
    abort_in_poll: bool
    skip_prefix_cache: bool = False
    sample_index: int = 0
    leader: Plan | None = None
    """Whose prompt it has, and whose blocks it may share."""

    @property
    def expected(self) -> list[int]:
        stops = set(self.stop_ids) | (set() if self.ignore_eos else {EOS})
        return alone(self.known, self.max_tokens - self.num_output, tuple(stops), self.sample_index)


def make_speculation(rng: random.Random) -> Speculation:
    """Over a device on which more tokens cost nothing, or next to nothing."""
    oracle = Oracle(rng, wrong=rng.choice([0.0, 0.1, 0.3]))
    return Speculation(
        rng.choice([oracle, ModelDrafter(StepCosts({1: 0.01, 64: 0.02}))]),
        StepCosts({1: 1.0, 64: rng.choice([1.0, 2.0, 8.0])}),
        num_speculative_tokens=rng.choice([1, 3, 8]),
        max_sampled_tokens=rng.choice([8, 12, 64]),
    )


def make_engine(
    rng: random.Random, *, crowded: bool, async_scheduling: bool, speculates: bool
) -> FakeEngine:
    """crowded: many run at once in a pool that a few of them fill."""
    speculation = make_speculation(rng) if speculates else None
    if crowded:
        block_size = rng.choice([1, 2, 4])
        return FakeEngine(
            num_blocks=1 + rng.randint(30, 60) // block_size,
            block_size=block_size,
            max_num_batched_tokens=rng.choice([3, 6, 8, 16, 64]),
            max_model_len=90,
            async_scheduling=async_scheduling,
            speculation=speculation,
            **scheduling(rng),
        )
    block_size = rng.choice([1, 2, 4, 4, 8, 16])
    # Small pools, so that requests have to give way to one another.
    num_blocks = 1 + max(1, rng.choice([8, 24, 32, 40, 48, 56, 64, 150]) // block_size)
    return FakeEngine(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=rng.choice([1, 3, 4, 6, 8, 8]),
        max_num_batched_tokens=rng.choice([1, 2, 3, 5, 8, 16, 64]),
        max_model_len=rng.choice([20, 60, 90]),
        enable_prefix_caching=rng.random() < 0.85,
        async_scheduling=async_scheduling,
        speculation=speculation,
        **scheduling(rng),
    )


def scheduling(rng: random.Random) -> dict[str, Any]:
    token_s = rng.choice([0.0, 0.1])
    dear = MeasuredCosts(restore_s_per_block=rng.choice([0.1, 0.4]), prefill_s_per_token=0.1)
    return {
        "num_host_blocks": rng.choice([0, 0, 2, 12, 60]),
        "costs": rng.choice([None, dear]),
        "policy": make_policy(rng.choice(["fair", "fair", "fair", "priority"])),
        "long_prefill_token_threshold": rng.choice([0, 0, 1, 4]),
        "short_prefill_share": rng.choice([0.0, 0.3, 0.9]),
        "prefill_budget": rng.choice([None, PrefillBudget(first=1), PrefillBudget(2.0, first=7)]),
        "step_s": lambda num_tokens: 0.9 + token_s * num_tokens,
    }


def make_plans(rng: random.Random, engine: FakeEngine, *, crowded: bool) -> list[Plan]:
    """Requests of which every one fits the pool and the context alone."""
    room = min(engine.kv_manager.max_tokens + 1, engine.limits.max_model_len)
    stems = [[rng.choice([3, 5]) for _ in range(40)] for _ in range(2)]
    plans = []
    for number in range(rng.randint(1, 9)):
        if room < 2:
            break
        longest = rng.choice([5, 5, 20]) if crowded else rng.choice([6, 30])
        num_prompt = min(rng.randint(1, longest), room - 1)
        shared = num_prompt if rng.random() < 0.5 else rng.randint(0, num_prompt)
        prompt = rng.choice(stems)[:shared]
        prompt += [rng.choice([3, 5, 7]) for _ in range(num_prompt - len(prompt))]
        most = min(26 if crowded else rng.choice([4, 40]), room - num_prompt)
        max_tokens = rng.randint(most // 2 if crowded else 1, most)
        stop_ids = (rng.randrange(61),) if rng.random() < 0.2 else ()
        ignore_eos = crowded or rng.random() < 0.7
        plan = Plan(
            # Two frontends count their own ids, so these collide between them.
            frontend_id=1 + number % 2,
            request_id=number // 2,
            arrives=rng.choice([0, 0, rng.randint(0, 25)]),
            known=prompt,
            num_output=0,
            max_tokens=max_tokens,
            salt=rng.choice(["", "", "", "a", "b"]),
            tenant=rng.choice(["", "", "a", "b"]),
            priority=rng.choice([0, 0, 0, 1, -1]),
            ignore_eos=ignore_eos,
            stop_ids=stop_ids,
            deadline_ms=rng.choice([5, 20, 200, 200]) * 1000.0 if rng.random() < 0.3 else None,
            abort_at=rng.randint(0, 30) if rng.random() < 0.25 else None,
            abort_in_poll=rng.random() < 0.5,
            skip_prefix_cache=rng.random() < 0.1,
        )
        whole = plan.expected
        if rng.random() < 0.2 and len(whole) > 1:
            plan.num_output = rng.randint(1, len(whole) - 1)
            plan.known = prompt + whole[: plan.num_output]
        plans.append(plan)
        if rng.random() < 0.2:
            plans += make_followers(rng, plan, prompt)
    return plans


def make_followers(rng: random.Random, leader: Plan, prompt: list[int]) -> list[Plan]:
    """Further sequences of one request, as n > 1 makes them."""
    leader.sample_index = 0
    return [
        replace(
            leader,
            request_id=100 * index + leader.request_id,
            arrives=leader.arrives + rng.choice([0, 0, 0, 3]),
            known=prompt,
            num_output=0,
            abort_at=rng.randint(0, 30) if rng.random() < 0.25 else None,
            sample_index=index,
            leader=leader,
        )
        for index in range(1, rng.randint(2, 4))
    ]


def drive(rng: random.Random, engine: FakeEngine, plans: list[Plan]) -> None:
    """Lets arrivals and aborts come in at their steps until all has ended."""
    bound = 60 + (len(plans) + 1) * sum(len(p.known) + p.max_tokens for p in plans)
    turn = 0
    last_arrival = max((plan.arrives for plan in plans), default=0)
    while turn <= last_arrival or engine.core.has_work():
        assert turn < bound, "not over in a bounded number of steps"
        for plan in plans:
            if plan.arrives == turn:
                engine.add(
                    plan.request_id,
                    plan.known,
                    frontend_id=plan.frontend_id,
                    max_tokens=plan.max_tokens,
                    num_output_tokens=plan.num_output,
                    ignore_eos=plan.ignore_eos,
                    stop_token_ids=plan.stop_ids,
                    cache_salt=plan.salt,
                    tenant=plan.tenant,
                    priority=plan.priority,
                    deadline_ms=plan.deadline_ms,
                    skip_prefix_cache=plan.skip_prefix_cache,
                    sample_index=plan.sample_index,
                    leader_id=plan.leader and plan.leader.request_id,
                )
        aborting = [p for p in plans if p.abort_at == turn and p.arrives <= turn]
        for plan in aborting:
            if not plan.abort_in_poll:
                engine.abort(plan.request_id, frontend_id=plan.frontend_id)

        def poll(aborting: list[Plan] = aborting) -> None:
            for plan in aborting:
                if plan.abort_in_poll:
                    engine.abort(plan.request_id, frontend_id=plan.frontend_id)

        if rng.random() < 0.01:
            engine.core.reset_prefix_cache()
        engine.step(poll)
        turn += 1


def count_drafts(speculation: Speculation) -> tuple[int, int]:
    """Draft tokens that were made, and those that were right."""
    right = speculation.num_accepted_tokens
    assert right == sum(speculation.num_accepted_per_position) <= speculation.num_draft_tokens
    return speculation.num_draft_tokens, right


def check(engine: FakeEngine, plans: list[Plan]) -> None:
    for plan in plans:
        heard = engine.of(plan.request_id, plan.frontend_id)
        expected = plan.expected
        ended = heard.reason  # exactly one Finished
        if ended is FinishReason.ABORT:
            missed = heard.finished[0].deadline_missed
            assert (plan.deadline_ms if missed else plan.abort_at) is not None
            assert heard.token_ids == expected[: len(heard.token_ids)]
            assert len(heard.token_ids) < len(expected)
            continue
        assert heard.token_ids == expected
        assert len(heard.started) == 1
        stopped = expected[-1] in plan.stop_ids or (expected[-1] == EOS and not plan.ignore_eos)
        assert ended is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert heard.finished[0].stop_token_id == (expected[-1] if stopped else None)
        cached = heard.finished[0].num_cached_tokens
        assert cached == heard.started[0].num_cached_tokens
        assert 0 <= cached <= min(len(plan.known) - 1, len(plan.known) - plan.num_output)
        assert not (plan.skip_prefix_cache and plan.leader is None and cached)


@pytest.mark.parametrize(
    ("seed", "how"),
    [
        *((seed, "") for seed in range(SEEDS)),
        *((seed, "async") for seed in range(ASYNC_SEEDS)),
        *((seed, "speculating") for seed in range(SPECULATING_SEEDS)),
    ],
)
def test_text_is_the_same_under_any_schedule(seed: int, how: str) -> None:
    rng = random.Random(seed)
    async_scheduling, speculates = how == "async", how == "speculating"
    num_accepted = num_rejected = 0
    num_preemptions = num_hits = num_aborts = num_missed = num_offloaded = num_restored = 0
    for _ in range(SCHEDULES_PER_SEED):
        crowded = rng.random() < 0.35
        engine = make_engine(
            rng, crowded=crowded, async_scheduling=async_scheduling, speculates=speculates
        )
        wrong = rng.choice([0.0, 0.1, 0.3])
        engine.runner.guesses_wrong = lambda wrong=wrong: rng.random() < wrong  # type: ignore[misc]
        plans = make_plans(rng, engine, crowded=crowded)
        drive(rng, engine, plans)
        check(engine, plans)
        engine.check_at_rest()
        num_preemptions += engine.scheduler.total_preemptions
        num_hits += engine.kv_manager.num_hit_tokens
        if engine.offload is not None:
            num_offloaded += engine.offload.num_offloaded_blocks
            num_restored += engine.offload.num_restored_blocks
        if engine.scheduler.speculation is not None:
            made, right = count_drafts(engine.scheduler.speculation)
            num_accepted += right
            num_rejected += made - right
        num_aborts += sum(h.reason is FinishReason.ABORT for h in engine.heard.values())
        num_missed += sum(h.finished[0].deadline_missed for h in engine.heard.values())
    # What the schedules are for must really have happened in them.
    assert speculates == (num_accepted >= 100) == (num_rejected >= 30)
    assert num_preemptions >= 5
    assert num_hits >= 30
    assert num_aborts >= 5
    assert num_missed >= 5
    assert num_offloaded >= 30
    assert num_restored >= 5
