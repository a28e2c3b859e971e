"""Plans made before the last result is read: what is known late, and what must not change."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.types import BeamParams, FinishReason, SamplingParams
from tests.support.fake_model import EOS, FakeEngine, alone

PROMPT = [3, 5, 7, 3, 5, 7, 3, 5, 9]


def make_engine(**settings: Any) -> FakeEngine:
    return FakeEngine(**{"block_size": 4, "async_scheduling": True, **settings})


def prompt_that_stops(num_output: int) -> list[int]:
    """Whose output ends by EOS with that many tokens."""
    for start in range(3, 60):
        for length in range(1, 40):
            prompt = [start] * length
            if len(alone(prompt, num_output + 1)) == num_output and (
                alone(prompt, num_output)[-1] == EOS
            ):
                return prompt
    raise AssertionError(f"no prompt stops after {num_output} tokens")


def test_the_next_step_is_launched_before_the_last_is_read() -> None:
    engine = make_engine()
    events: list[tuple[str, int]] = []
    engine.runner.on_launch = lambda plan: events.append(("launch", plan.step))
    engine.runner.on_read = lambda plan: events.append(("read", plan.step))
    engine.add(1, PROMPT, max_tokens=4, ignore_eos=True)
    engine.run()
    assert events == [
        ("launch", 1),
        ("launch", 2),
        ("read", 1),
        ("launch", 3),
        ("read", 2),
        ("launch", 4),
        ("read", 3),
        # The length is known in advance: there is no fifth.
        ("read", 4),
    ]
    assert engine.of(1).token_ids == alone(PROMPT, 4, ())
    engine.check_at_rest()


def test_the_device_does_not_wait_for_the_host() -> None:
    """With a second of host time a step, and one of the device's."""

    def seconds(async_scheduling: bool) -> float:
        engine = make_engine(async_scheduling=async_scheduling, step_s=lambda num_tokens: 1.0)
        engine._between_s = 1.0
        engine.add(1, PROMPT, max_tokens=50, ignore_eos=True)
        engine.run()
        assert engine.of(1).token_ids == alone(PROMPT, 50, ())
        return engine.clock.now

    assert seconds(False) - 1000 == pytest.approx(100, abs=2)
    assert seconds(True) - 1000 == pytest.approx(51, abs=2)


def test_what_is_computed_beyond_a_stop_is_dropped() -> None:
    prompt = prompt_that_stops(3)
    engine = make_engine()
    engine.add(1, prompt, max_tokens=30)
    engine.run()
    heard = engine.of(1)
    assert heard.token_ids == alone(prompt, 30)
    assert heard.reason is FinishReason.STOP
    assert heard.finished[0].stop_token_id == EOS
    # One step more than tokens, whose token nobody gets.
    assert len(engine.runner.plans) == len(heard.token_ids) + 1
    assert engine.scheduler.total_output_tokens == len(heard.token_ids)
    engine.check_at_rest()


def test_blocks_of_one_that_stopped_are_given_away_while_its_last_step_runs() -> None:
    prompt = prompt_that_stops(3)
    # Room for one of them at a time.
    engine = make_engine(num_blocks=1 + 10, max_num_seqs=1)
    engine.add(1, prompt, max_tokens=41 - len(prompt))
    engine.add(2, PROMPT, max_tokens=32, ignore_eos=True)
    engine.run()
    assert engine.of(1).reason is FinishReason.STOP
    assert engine.of(2).token_ids == alone(PROMPT, 32, ())
    last, first = engine.runner.plans[4 - 1], engine.runner.plans[4]
    assert [seq.row for seq in last.seqs] == [seq.row for seq in first.seqs] == [0]
    assert first.freed_rows == (0,)
    engine.check_at_rest()


@pytest.mark.parametrize("how", ["abort", "deadline", "drop"])
@pytest.mark.parametrize("in_poll", [False, True])
def test_ended_from_outside_between_launch_and_result(how: str, in_poll: bool) -> None:
    engine = make_engine()
    engine.add(1, PROMPT, max_tokens=50, deadline_ms=3500.0 if how == "deadline" else None)
    engine.add(2, PROMPT[::-1], max_tokens=12, ignore_eos=True, frontend_id=2)
    for _ in range(4):
        engine.step()

    def end() -> None:
        if how == "abort":
            engine.abort(1)
        elif how == "drop":
            engine.core.drop_frontend(1)

    if not in_poll:
        end()
    engine.step(end if in_poll else lambda: None)
    assert [request.request_id for request in engine.scheduler.running] == [2]
    engine.run()
    heard = engine.of(1)
    if how != "drop":
        assert heard.reason is FinishReason.ABORT
        assert heard.token_ids == alone(PROMPT, len(heard.token_ids), ())
    assert engine.of(2, 2).token_ids == alone(PROMPT[::-1], 12, ())
    engine.check_at_rest()


def test_the_last_step_is_read_when_nobody_is_left() -> None:
    engine = make_engine()
    engine.add(1, PROMPT, max_tokens=50, ignore_eos=True)
    engine.step()
    engine.step(poll=lambda: engine.abort(1))
    assert engine.of(1).reason is FinishReason.ABORT
    assert engine.core.has_work()
    engine.step()
    engine.check_at_rest()


def test_a_token_drawn_before_a_preemption_is_kept() -> None:
    engine = make_engine(num_blocks=1 + 8)
    for request_id in (1, 2):
        engine.add(request_id, [request_id + 2] * 8, max_tokens=16, ignore_eos=True)
    while not engine.scheduler.total_preemptions:
        before = len(engine.of(2).token_ids)
        engine.step()
    # Preempted by the step that has read its last token.
    (request,) = engine.scheduler.waiting
    assert request.request_id == 2
    assert request.num_unread == 0
    assert len(engine.of(2).token_ids) == before + 1 == request.num_output_tokens
    engine.run()
    for request_id in (1, 2):
        assert engine.of(request_id).token_ids == alone([request_id + 2] * 8, 16, ())
    engine.check_at_rest()


def test_one_that_was_preempted_may_end_by_what_it_had_drawn() -> None:
    num_ended = 0
    for num_output in range(2, 12):
        prompt = prompt_that_stops(num_output)
        for num_blocks in range(4, 26):
            if 4 * (num_blocks - 1) < max(len(prompt), 9) + 24:
                continue
            engine = make_engine(num_blocks=num_blocks)
            engine.add(1, PROMPT, max_tokens=24, ignore_eos=True)
            engine.add(2, prompt, max_tokens=24)
            while engine.core.has_work():
                was_running = [it.request_id for it in engine.scheduler.running]
                engine.step()
                num_ended += (
                    2 in was_running
                    and engine.scheduler.total_preemptions > 0
                    and len(engine.of(2).finished) == 1
                    and engine.of(2).finished[0].num_preemptions == 1
                    and len(engine.runner.plans[-1].seqs) == 1
                )
            assert engine.of(1).token_ids == alone(PROMPT, 24, ())
            assert engine.of(2).token_ids == alone(prompt, 24)
            engine.check_at_rest()
    assert num_ended > 0


def test_nobody_is_preempted_for_blocks_that_are_about_to_be_freed() -> None:
    def preemptions(async_scheduling: bool) -> int:
        engine = make_engine(num_blocks=1 + 6, async_scheduling=async_scheduling)
        # The first ends just when the second needs a block more than there is.
        engine.add(1, [3] * 8, max_tokens=5, ignore_eos=True)
        engine.add(2, [4] * 8, max_tokens=12, ignore_eos=True)
        engine.run()
        assert engine.of(1).token_ids == alone([3] * 8, 5, ())
        assert engine.of(2).token_ids == alone([4] * 8, 12, ())
        return engine.scheduler.total_preemptions

    assert preemptions(True) == preemptions(False) == 0


def test_beams_wait_for_their_search_and_nobody_for_them() -> None:
    engine = make_engine()
    beam = SamplingParams(
        max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=8, beam=BeamParams(3, 1)
    )
    engine.add(1, PROMPT, sampling=beam)
    engine.add(2, PROMPT[::-1], max_tokens=16, ignore_eos=True)
    while engine.of(1).finished == []:
        engine.step()
    (other,) = engine.scheduler.running
    with_beams = [any(seq.row != other.row for seq in plan.seqs) for plan in engine.runner.plans]
    assert all(any(seq.row == other.row for seq in plan.seqs) for plan in engine.runner.plans)
    # Every other step, until its last is read.
    assert with_beams == [True, False] * 6
    engine.run()
    assert engine.of(2).token_ids == alone(PROMPT[::-1], 16, ())
    engine.check_at_rest()


def test_blocks_are_known_to_the_cache_once_their_ids_are() -> None:
    engine = make_engine(block_size=1)
    engine.add(1, PROMPT, max_tokens=20, ignore_eos=True)
    for num_steps in range(1, 12):
        engine.step()
        # A step is read with the one after: then the KV of what it computed is there.
        known = 0 if num_steps == 1 else len(PROMPT) + num_steps - 2
        assert engine.kv_manager.pool.num_cached_blocks == known
        (request,) = engine.scheduler.running
        assert request.num_unread == 1
        assert request.num_tokens == len(PROMPT) + num_steps - 1
    engine.run()
    engine.check_at_rest()


def test_steps_are_counted_when_they_are_read() -> None:
    engine = make_engine()
    engine.add(1, PROMPT, max_tokens=3, ignore_eos=True)
    seen = []
    while engine.core.has_work():
        engine.step()
        seen.append((engine.core.step_id, engine.core.stats().num_batched_tokens))
    assert seen == [(0, 0), (1, 9), (2, 1), (3, 1)]
    engine.add(2, PROMPT, max_tokens=1)
    engine.abort(2)
    engine.step()
    assert engine.core.step_id > 3


def test_a_prompt_alone_takes_one_step() -> None:
    engine = make_engine()
    engine.add(1, PROMPT, max_tokens=0)
    engine.run()
    assert len(engine.runner.plans) == 1
    assert engine.of(1).reason is FinishReason.LENGTH
    assert engine.of(1).token_ids == []
    engine.check_at_rest()


def test_what_a_step_raises_comes_through() -> None:
    engine = make_engine()
    engine.add(1, PROMPT, max_tokens=3)
    engine.step()

    def fail(plan: object) -> None:
        raise RuntimeError("the device is gone")

    engine.runner.on_read = fail
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
