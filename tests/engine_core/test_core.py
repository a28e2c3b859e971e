from __future__ import annotations

import math
from array import array

import pytest

from engine_core.kv.manager import IntegrityError
from engine_core.sched.plan import StepPlan, StepResult
from pagewire.types import FinishReason, SamplingParams
from pagewire.wire.codec import decode_output, encode
from pagewire.wire.messages import Add
from tests.support.fake_model import EPOCH, FakeEngine, alone


def prompt(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(num_blocks=33, max_model_len=400)


def assert_serves(engine: FakeEngine) -> None:
    """Whatever was refused, the next request is served and nothing is held."""
    engine.add(999, prompt(20), max_tokens=5, ignore_eos=True)
    engine.run()
    assert engine.of(999).token_ids == alone(prompt(20), 5, ())
    engine.check_at_rest()


class TestRefusal:
    def refused(self, engine: FakeEngine, request_id: int = 0) -> str:
        assert engine.core.has_work()
        engine.step()
        heard = engine.of(request_id)
        assert heard.reason is FinishReason.ERROR
        assert not heard.started
        assert not heard.token_ids
        assert engine.runner.plans == []
        assert_serves(engine)
        return heard.finished[0].error

    def test_wrong_epoch(self, engine: FakeEngine) -> None:
        engine.add(0, prompt(4), epoch=5)
        assert self.refused(engine) == f"meant for engine epoch 5, this is {EPOCH}"

    # vllm-project/vllm#7632, #7283: an empty prompt killed the engine.
    def test_no_ids(self, engine: FakeEngine) -> None:
        engine.add(0, [])
        assert self.refused(engine) == "token_ids is empty"

    @pytest.mark.parametrize(("bad", "shown"), [(1000, 1000), (-1, -1), (2**31 - 1, 2**31 - 1)])
    def test_id_outside_the_vocabulary(self, engine: FakeEngine, bad: int, shown: int) -> None:
        engine.add(0, [5, bad, 6])
        assert self.refused(engine) == f"token_ids holds {shown}, outside the vocabulary of 1000"

    def test_ragged_ids(self, engine: FakeEngine) -> None:
        add = Add(0, EPOCH, b"\1\2\3\4\5", 0, SamplingParams(max_tokens=1))
        engine.core.add(1, add, 0.0)
        assert "5 bytes" in self.refused(engine)

    def test_no_room_for_output(self, engine: FakeEngine) -> None:
        engine.add(0, [7] * 400)
        assert self.refused(engine) == (
            "token_ids has 400 ids, which leaves no room for output in max_model_len 400"
        )

    def test_longest_prompt_is_served(self, engine: FakeEngine) -> None:
        engine.add(0, [7] * 399, max_tokens=1)
        engine.run()
        assert engine.of(0).token_ids == alone([7] * 399, 1)

    def test_larger_than_the_kv_cache(self) -> None:
        engine = FakeEngine(num_blocks=5, block_size=16)
        engine.add(0, prompt(40), max_tokens=26)
        assert self.refused(engine) == (
            "40 prompt tokens with max_tokens 26 need KV for 65 tokens, "
            "but the whole KV cache holds 64 (4 blocks of 16)"
        )

    def test_just_as_large_as_the_kv_cache(self) -> None:
        engine = FakeEngine(num_blocks=5, block_size=16)
        engine.add(0, prompt(40), max_tokens=25, ignore_eos=True)
        engine.run()
        assert engine.of(0).token_ids == alone(prompt(40), 25, ())

    @pytest.mark.parametrize("num_output_tokens", [-1, 4, 5])
    def test_output_count_that_cannot_be(self, engine: FakeEngine, num_output_tokens: int) -> None:
        engine.add(0, prompt(4), num_output_tokens=num_output_tokens)
        assert self.refused(engine).startswith(f"num_output_tokens is {num_output_tokens}, but")

    def test_nothing_left_to_generate(self, engine: FakeEngine) -> None:
        engine.add(0, prompt(9), num_output_tokens=8, max_tokens=8)
        assert self.refused(engine) == (
            "num_output_tokens is 8, so max_tokens 8 has been reached already"
        )

    @pytest.mark.parametrize(
        ("sampling", "field"),
        [
            (SamplingParams(max_tokens=-1), "max_tokens is -1"),
            (SamplingParams(max_tokens=-3), "max_tokens is -3"),
            (SamplingParams(max_tokens=1, temperature=math.nan), "temperature is nan"),
            (SamplingParams(max_tokens=1, temperature=math.inf), "temperature is inf"),
            (SamplingParams(max_tokens=1, temperature=-0.5), "temperature is -0.5"),
            (SamplingParams(max_tokens=1, top_p=0.0), "top_p is 0.0"),
            (SamplingParams(max_tokens=1, top_p=1.5), "top_p is 1.5"),
            (SamplingParams(max_tokens=1, top_p=math.nan), "top_p is nan"),
            (SamplingParams(max_tokens=1, top_k=-1), "top_k is -1"),
            (SamplingParams(max_tokens=1, min_p=math.nan), "min_p is nan"),
            (SamplingParams(max_tokens=1, min_p=2.0), "min_p is 2.0"),
            (SamplingParams(max_tokens=1, seed=-1), "seed is -1"),
            (SamplingParams(max_tokens=1, stop_token_ids=(2**40,)), "stop_token_ids holds"),
        ],
        ids=str,
    )
    def test_sampling(self, engine: FakeEngine, sampling: SamplingParams, field: str) -> None:
        engine.add(0, prompt(4), sampling=sampling)
        assert self.refused(engine).startswith(field)

    def test_tenant_too_long(self, engine: FakeEngine) -> None:
        engine.add(0, prompt(4), tenant="t" * 129)
        assert self.refused(engine) == "tenant has 129 characters, at most 128 are allowed"

    def test_deadline_that_is_no_number(self, engine: FakeEngine) -> None:
        engine.add(0, prompt(4), deadline_ms=math.nan)
        assert self.refused(engine) == "deadline_ms is not a number"

    def test_id_in_use_ends_both_with_one_finish(self, engine: FakeEngine) -> None:
        engine.add(0, prompt(4), max_tokens=50, ignore_eos=True)
        engine.step()
        engine.add(0, prompt(4), max_tokens=50)
        engine.run()
        heard = engine.of(0)
        assert heard.reason is FinishReason.ERROR
        assert heard.finished[0].error == "request_id is in use, both requests were ended"
        assert len(heard.token_ids) == 1
        assert_serves(engine)

    def test_id_in_use_by_another_frontend(self, engine: FakeEngine) -> None:
        engine.add(0, prompt(4), frontend_id=1, ignore_eos=True)
        engine.add(0, prompt(9), frontend_id=2, ignore_eos=True)
        engine.run()
        assert engine.of(0, 1).token_ids == alone(prompt(4), 8, ())
        assert engine.of(0, 2).token_ids == alone(prompt(9), 8, ())

    def test_stale_epoch_does_not_touch_a_live_request(self, engine: FakeEngine) -> None:
        engine.add(0, prompt(4), ignore_eos=True)
        engine.step()
        engine.add(0, prompt(4), epoch=EPOCH + 1)
        engine.run()
        assert engine.of(0).reason is FinishReason.LENGTH
        assert engine.of(0).token_ids == alone(prompt(4), 8, ())


class TestAbort:
    def test_in_the_queue(self) -> None:
        engine = FakeEngine(max_num_seqs=1)
        engine.add(0, prompt(4), max_tokens=50, ignore_eos=True)
        engine.add(1, prompt(4), max_tokens=50)
        engine.step()
        engine.clock.now += 3.0
        engine.abort(1)
        engine.step()
        heard = engine.of(1)
        assert heard.reason is FinishReason.ABORT
        assert not heard.started
        assert heard.finished[0].queue_s == 4.0
        assert (heard.finished[0].prefill_s, heard.finished[0].decode_s) == (0.0, 0.0)
        assert engine.scheduler.total_prompt_tokens == 4
        engine.abort(0)
        engine.run()
        assert_serves(engine)

    def test_in_prefill(self) -> None:
        engine = FakeEngine(max_num_batched_tokens=16)
        engine.add(0, prompt(100), max_tokens=50)
        engine.step()
        engine.step()
        assert engine.kv_manager.num_free_blocks == engine.kv_manager.num_usable_blocks - 2
        engine.step(poll=lambda: engine.abort(0))
        assert engine.of(0).reason is FinishReason.ABORT
        assert engine.of(0).token_ids == []
        engine.check_at_rest()
        assert_serves(engine)

    def test_in_the_step_that_would_start_it(self) -> None:
        engine = FakeEngine()
        engine.add(0, prompt(20))
        engine.step(poll=lambda: engine.abort(0))
        heard = engine.of(0)
        assert heard.reason is FinishReason.ABORT
        assert heard.started == []
        assert heard.token_ids == []
        assert_serves(engine)

    def test_in_decode_while_the_step_runs(self) -> None:
        engine = FakeEngine()
        engine.add(0, prompt(20), max_tokens=50, ignore_eos=True)
        engine.add(1, prompt(30), max_tokens=9, ignore_eos=True)
        for _ in range(4):
            engine.step()

        def poll() -> None:
            engine.abort(0)
            assert engine.scheduler.running[0].request_id == 1

        outputs = engine.step(poll)
        heard = engine.of(0)
        assert heard.token_ids == alone(prompt(20), 4, ())
        assert heard.reason is FinishReason.ABORT
        assert heard.finished[0].decode_s == 3.0
        assert outputs[1].stats.num_running == 1
        engine.run()
        assert engine.of(1).token_ids == alone(prompt(30), 9, ())
        assert_serves(engine)

    def test_row_and_blocks_of_an_aborted_request_are_used_at_once(self) -> None:
        engine = FakeEngine(num_blocks=5, block_size=4, max_num_seqs=1)
        engine.add(0, prompt(8), max_tokens=8, ignore_eos=True)
        engine.step()
        engine.add(1, prompt(9, 300), max_tokens=6, ignore_eos=True)
        engine.step(poll=lambda: engine.abort(0))
        engine.run()
        assert engine.of(1).token_ids == alone(prompt(9, 300), 6, ())

    def test_preempted(self) -> None:
        engine = FakeEngine(num_blocks=9, block_size=4)
        engine.add(0, prompt(8), max_tokens=16, ignore_eos=True)
        engine.add(1, prompt(8, 300), max_tokens=16, ignore_eos=True)
        while not engine.scheduler.total_preemptions:
            engine.step()
        engine.abort(1)
        engine.run()
        heard = engine.of(1)
        assert heard.reason is FinishReason.ABORT
        assert heard.finished[0].num_preemptions == 1
        assert heard.token_ids == alone(prompt(8, 300), len(heard.token_ids), ())
        assert engine.of(0).token_ids == alone(prompt(8), 16, ())

    def test_is_idempotent_and_always_answered(self, engine: FakeEngine) -> None:
        engine.add(0, prompt(4), ignore_eos=True)
        engine.abort(0, 0, 55)
        engine.abort(0, frontend_id=2)
        assert engine.core.has_work()
        engine.step()
        assert engine.of(0).reason is FinishReason.ABORT
        assert engine.unknown_aborts == [(1, 0), (1, 55), (2, 0)]
        assert not engine.core.has_work()
        assert_serves(engine)

    def test_of_a_finished_request(self, engine: FakeEngine) -> None:
        engine.add(0, prompt(4), max_tokens=1)
        engine.run()
        engine.abort(0)
        engine.step()
        assert engine.unknown_aborts == [(1, 0)]
        assert engine.of(0).reason is FinishReason.LENGTH

    def test_time_to_free_goes_to_who_asked(self, engine: FakeEngine) -> None:
        for frontend_id in (1, 2):
            engine.add(0, prompt(4), max_tokens=50, frontend_id=frontend_id, ignore_eos=True)
        engine.step()
        received_at = engine.clock.now
        engine.clock.now += 0.25
        engine.core.abort(1, [0], received_at)
        assert engine.core.stats().abort_to_free_s == ()
        outputs = engine.step()
        assert outputs[1].stats.abort_to_free_s == (0.25,)
        assert outputs[2].stats.abort_to_free_s == ()
        assert engine.step()[2].stats.abort_to_free_s == ()


class TestDeadline:
    def test_in_the_queue_it_is_never_prefilled(self) -> None:
        engine = FakeEngine(max_num_seqs=1)
        engine.add(0, prompt(4), max_tokens=9, ignore_eos=True)
        engine.step()
        engine.add(1, prompt(4), deadline_ms=2500.0)
        engine.run()
        heard = engine.of(1)
        assert heard.reason is FinishReason.ABORT
        assert not heard.started
        assert heard.finished[0].queue_s == 3.0
        assert engine.scheduler.total_prompt_tokens == 4
        assert_serves(engine)

    def test_while_running(self, engine: FakeEngine) -> None:
        engine.add(0, prompt(4), max_tokens=100, deadline_ms=5000.0, ignore_eos=True)
        engine.add(1, prompt(4), max_tokens=8, deadline_ms=50000.0, ignore_eos=True)
        engine.run()
        assert engine.of(0).reason is FinishReason.ABORT
        assert engine.of(0).token_ids == alone(prompt(4), 5, ())
        assert engine.of(1).reason is FinishReason.LENGTH
        assert len(engine.core._deadlines) == 0

    def test_passed_before_it_came(self, engine: FakeEngine) -> None:
        engine.add(0, prompt(4), deadline_ms=0.0)
        engine.step()
        assert engine.of(0).reason is FinishReason.ABORT
        assert engine.runner.plans == []


class TestFrontends:
    def test_each_hears_of_its_own(self, engine: FakeEngine) -> None:
        engine.add(7, prompt(4), frontend_id=1, max_tokens=3, ignore_eos=True)
        engine.add(8, prompt(5), frontend_id=2, max_tokens=5, ignore_eos=True)
        assert set(engine.step()) == {1, 2}
        engine.run()
        assert set(engine.heard) == {(1, 7), (2, 8)}
        assert engine.of(8, 2).token_ids == alone(prompt(5), 5, ())

    def test_dropped(self, engine: FakeEngine) -> None:
        for frontend_id in (1, 2):
            for request_id in (0, 1):
                engine.add(
                    request_id, prompt(40), frontend_id=frontend_id, max_tokens=6, ignore_eos=True
                )
        engine.step()
        outputs = engine.step(poll=lambda: engine.core.drop_frontend(1))
        assert set(outputs) == {2}
        engine.run()
        assert not engine.of(0, 1).finished
        assert engine.of(1, 2).token_ids == alone(prompt(40), 6, ())
        engine.check_at_rest()
        engine.core.drop_frontend(1)
        assert not engine.core.has_work()

    def test_dropped_in_the_step_that_would_start_its_request(self, engine: FakeEngine) -> None:
        engine.add(0, prompt(40))
        assert engine.step(poll=lambda: engine.core.drop_frontend(1)) == {}
        assert_serves(engine)

    def test_dropped_with_an_outcome_unsent(self, engine: FakeEngine) -> None:
        engine.add(0, [])
        engine.core.drop_frontend(1)
        assert not engine.core.has_work()


class TestReplay:
    @pytest.mark.parametrize("emitted", [1, 5, 11])
    def test_goes_on_where_it_was(self, engine: FakeEngine, emitted: int) -> None:
        whole = alone(prompt(20), 12, ())
        engine.add(
            0,
            prompt(20) + whole[:emitted],
            num_output_tokens=emitted,
            max_tokens=12,
            ignore_eos=True,
        )
        engine.run()
        assert engine.of(0).token_ids == whole[emitted:]
        assert engine.of(0).reason is FinishReason.LENGTH
        new = engine.runner.plans[0].new_seqs[0]
        assert (len(new.token_ids), new.num_prompt_tokens) == (20 + emitted, 20)

    def test_cached_tokens_do_not_exceed_the_prompt(self) -> None:
        engine = FakeEngine(block_size=4)
        whole = alone(prompt(6), 12, ())
        engine.add(0, prompt(6), max_tokens=12, ignore_eos=True)
        engine.run()
        engine.add(1, prompt(6) + whole[:11], num_output_tokens=11, max_tokens=12, ignore_eos=True)
        engine.run()
        assert engine.runner.plans[-1].seqs[0].num_computed_tokens == 16
        assert engine.of(1).started[0].num_cached_tokens == 6
        assert engine.of(1).token_ids == whole[11:]


def test_timings() -> None:
    engine = FakeEngine(max_num_seqs=1, max_num_batched_tokens=16)
    engine.add(0, prompt(4), max_tokens=2, ignore_eos=True)
    engine.add(1, prompt(40), max_tokens=4, ignore_eos=True)
    engine.run()
    # One step a second: 2 of waiting, 3 chunks of which the third samples at
    # its own second (the clock stands still within a step), then 3 decodes.
    finished = engine.of(1).finished[0]
    assert (finished.queue_s, finished.prefill_s, finished.decode_s) == (2.0, 2.0, 3.0)
    assert engine.of(1).started[0].queue_s == 2.0


def test_stats(engine: FakeEngine) -> None:
    engine.add(0, prompt(40), max_tokens=3, ignore_eos=True)
    engine.add(1, prompt(40), max_tokens=3, ignore_eos=True)
    outputs = engine.step()
    stats = outputs[1].stats
    # 64 tokens of budget: a whole prompt and the begin of the next.
    assert stats.num_batched_tokens == 64
    assert (stats.num_running, stats.num_waiting) == (2, 0)
    assert (stats.num_blocks, stats.num_free_blocks) == (32, 32 - 3 - 2)
    assert (stats.total_prompt_tokens, stats.total_output_tokens) == (40, 1)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (80, 0)
    engine.run()
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, 32)
    # Of both prompts, which are one and the same, the two whole blocks.
    assert stats.num_free_cached_blocks == 2
    assert (stats.total_prompt_tokens, stats.total_output_tokens) == (80, 6)
    engine.add(2, prompt(40), max_tokens=1)
    engine.run()
    assert engine.core.stats().prefix_cache_hits == 32
    assert engine.core.stats().prefix_cache_queries == 120


def test_outputs_pass_the_wire(engine: FakeEngine) -> None:
    engine.add(2**64 - 1, prompt(40), max_tokens=2, ignore_eos=True)
    engine.add(1, [])
    engine.abort(5)
    while engine.core.has_work():
        for output in engine.step().values():
            assert decode_output(encode(output)) == output
    assert engine.of(2**64 - 1).token_ids == alone(prompt(40), 2, ())


def test_step_counter_moves_with_every_step(engine: FakeEngine) -> None:
    assert engine.core.step_id == 0
    engine.add(0, prompt(4), max_tokens=3, ignore_eos=True)
    seen = []
    while engine.core.has_work():
        engine.step(poll=lambda: seen.append(engine.core.step_id))
        seen.append(engine.core.step_id)
    assert seen == [0, 1, 1, 2, 2, 3]


def test_poll_comes_after_the_launch_and_also_without_one(engine: FakeEngine) -> None:
    launched: list[int] = []
    engine.add(0, prompt(4), max_tokens=1)
    engine.step(poll=lambda: launched.append(len(engine.runner.plans)))
    engine.add(1, [])
    engine.step(poll=lambda: launched.append(len(engine.runner.plans)))
    assert launched == [1, 1]


def test_requests_can_come_in_by_poll(engine: FakeEngine) -> None:
    engine.add(0, prompt(4), max_tokens=4, ignore_eos=True)
    engine.step(poll=lambda: engine.add(1, prompt(5), max_tokens=2, ignore_eos=True))
    engine.run()
    assert engine.of(1).token_ids == alone(prompt(5), 2, ())


def test_reset_prefix_cache(engine: FakeEngine) -> None:
    engine.add(0, prompt(40), max_tokens=1)
    engine.run()
    assert engine.core.reset_prefix_cache() == 2
    engine.add(1, prompt(40), max_tokens=1)
    engine.run()
    assert engine.of(1).started[0].num_cached_tokens == 0


def test_reset_while_running(engine: FakeEngine) -> None:
    engine.add(0, prompt(40), max_tokens=20, ignore_eos=True)
    engine.step()
    engine.core.reset_prefix_cache()
    engine.run()
    assert engine.of(0).token_ids == alone(prompt(40), 20, ())
    engine.add(1, prompt(40), max_tokens=1)
    engine.run()
    assert engine.of(1).started[0].num_cached_tokens == 0


class BrokenRunner:
    def launch(self, plan: StepPlan) -> BrokenRunner:
        return self

    def result(self) -> StepResult:
        raise RuntimeError("device lost")


def test_what_the_runner_raises_comes_through(engine: FakeEngine) -> None:
    engine.core._runner = BrokenRunner()
    engine.add(0, prompt(4))
    with pytest.raises(RuntimeError, match="device lost"):
        engine.core.step(lambda: None)


class ShortRunner(BrokenRunner):
    def __init__(self, rows: tuple[int, ...]) -> None:
        self._rows = rows

    def result(self) -> StepResult:
        return StepResult(self._rows, (5,) * len(self._rows))


@pytest.mark.parametrize("rows", [(), (3,), (0, 1)])
def test_a_result_of_other_rows_is_our_bug(engine: FakeEngine, rows: tuple[int, ...]) -> None:
    engine.core._runner = ShortRunner(rows)
    engine.add(0, prompt(4))
    with pytest.raises(AssertionError):
        engine.core.step(lambda: None)


def test_a_leak_is_noticed_at_rest(engine: FakeEngine) -> None:
    table = engine.kv_manager.new_table(array("i", [1, 2, 3]))
    assert engine.kv_manager.admit(table, engine.kv_manager.lookup(table), 3, 0) is not None
    engine.add(0, prompt(4), max_tokens=1)
    with pytest.raises(IntegrityError, match="1 of 32 blocks are held by 1 tables"):
        engine.core.step(lambda: None)


def test_many_at_once() -> None:
    engine = FakeEngine(num_blocks=120, max_num_seqs=32, max_num_batched_tokens=128)
    for number in range(200):
        engine.add(number, prompt(10 + number % 40, number), max_tokens=30, ignore_eos=True)
    engine.run()
    for number in range(200):
        assert engine.of(number).token_ids == alone(prompt(10 + number % 40, number), 30, ())
    engine.check_at_rest()
