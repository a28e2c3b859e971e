from __future__ import annotations

import pytest

from engine_core.sched.limits import SchedulerLimits
from pagewire.types import FinishReason
from tests.support.fake_model import EOS, FakeEngine, alone


def prompt(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


def running(engine: FakeEngine) -> list[int]:
    return [request.request_id for request in engine.scheduler.running]


def waiting(engine: FakeEngine) -> list[int]:
    return [request.request_id for request in engine.scheduler.waiting]


class TestLimits:
    @pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "vocab_size"])
    def test_zero(self, name: str) -> None:
        values = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "max_model_len": 2,
            "vocab_size": 1,
        }
        SchedulerLimits(**values)
        with pytest.raises(ValueError, match=f"{name} is 0"):
            SchedulerLimits(**(values | {name: 0}))

    def test_context_without_room_for_output(self) -> None:
        with pytest.raises(ValueError, match="max_model_len is 1"):
            SchedulerLimits(1, 1, 1, 1)


def test_fake_model_alone_is_the_engine_alone() -> None:
    engine = FakeEngine(max_num_batched_tokens=512)
    engine.add(1, prompt(40), max_tokens=30)
    engine.run()
    assert engine.of(1).token_ids == alone(prompt(40), 30)


# vllm-project/vllm#3239, #9972: a prompt that is cached in full.
@pytest.mark.parametrize(("num_ids", "cached"), [(16, 0), (32, 16), (48, 32)])
def test_prompt_cached_in_full(num_ids: int, cached: int) -> None:
    engine = FakeEngine()
    for request_id in range(3):
        engine.add(request_id, prompt(num_ids), ignore_eos=True)
        engine.run()
        heard = engine.of(request_id)
        assert heard.token_ids == alone(prompt(num_ids), 8, ())
        assert heard.started[0].num_cached_tokens == (cached if request_id else 0)
    assert engine.kv_manager.num_queried_tokens == 3 * num_ids
    assert engine.kv_manager.num_hit_tokens == 2 * cached
    engine.check_at_rest()


# vllm-project/vllm#17045, #44701: salts keep tenants apart.
def test_salts() -> None:
    engine = FakeEngine()
    cached = []
    for number, salt in enumerate(["tenant-a", "tenant-b", "tenant-a", "", "fake-model"]):
        engine.add(number, prompt(64), cache_salt=salt)
        engine.run()
        assert engine.of(number).token_ids == alone(prompt(64), 8)
        cached.append(engine.of(number).finished[0].num_cached_tokens)
    assert cached == [0, 0, 48, 0, 0]


def test_without_prefix_caching_nothing_is_hit() -> None:
    engine = FakeEngine(enable_prefix_caching=False)
    for request_id in range(2):
        engine.add(request_id, prompt(64))
        engine.run()
        assert engine.of(request_id).started[0].num_cached_tokens == 0


def test_prompt_is_chunked_by_the_budget_and_shares_steps_with_decodes() -> None:
    engine = FakeEngine(max_num_batched_tokens=10)
    engine.add(1, prompt(4), max_tokens=20, ignore_eos=True)
    engine.step()
    engine.add(2, prompt(25, 300), max_tokens=20, ignore_eos=True)
    for _ in range(4):
        engine.step()
    row = {request.request_id: request.row for request in engine.scheduler.running}
    shares = [
        [(seq.row, seq.num_computed_tokens, seq.num_new_tokens, seq.samples) for seq in plan.seqs]
        for plan in engine.runner.plans
    ]
    assert shares == [
        [(row[1], 0, 4, True)],
        [(row[1], 4, 1, True), (row[2], 0, 9, False)],
        [(row[1], 5, 1, True), (row[2], 9, 9, False)],
        [(row[1], 6, 1, True), (row[2], 18, 7, True)],
        [(row[1], 7, 1, True), (row[2], 25, 1, True)],
    ]
    engine.run()
    assert engine.of(1).token_ids == alone(prompt(4), 20, ())
    assert engine.of(2).token_ids == alone(prompt(25, 300), 20, ())


def test_a_prompt_whose_last_token_is_left_counts_as_a_decode() -> None:
    engine = FakeEngine(max_num_batched_tokens=16)
    engine.add(1, prompt(17), max_tokens=1)
    engine.run()
    engine.add(2, prompt(9, 300), max_tokens=3)
    engine.add(3, prompt(17), max_tokens=3)
    engine.step()
    shares = [(seq.num_computed_tokens, seq.num_new_tokens) for seq in engine.runner.plans[-1].seqs]
    assert shares == [(16, 1), (0, 9)]
    engine.run()
    assert engine.of(3).token_ids == alone(prompt(17), 3)


def test_max_num_seqs() -> None:
    engine = FakeEngine(max_num_seqs=3)
    for request_id in range(5):
        engine.add(request_id, prompt(4), max_tokens=3 + request_id, ignore_eos=True)
    engine.step()
    assert running(engine) == [0, 1, 2]
    assert waiting(engine) == [3, 4]
    engine.run()
    # Row 0's successor comes into the row that has just been given up.
    assert max(len(plan.seqs) for plan in engine.runner.plans) == 3
    assert all(len(engine.of(i).token_ids) == 3 + i for i in range(5))


def test_a_budget_below_max_num_seqs_still_lets_everybody_decode() -> None:
    engine = FakeEngine(max_num_seqs=8, max_num_batched_tokens=3)
    for request_id in range(6):
        engine.add(request_id, prompt(2), max_tokens=10, ignore_eos=True)
    while engine.scheduler.running or engine.num_steps == 0:
        before = {r.request_id: r.num_computed_tokens for r in engine.scheduler.running}
        engine.step()
        assert len(engine.scheduler.running) <= 3
        for request in engine.scheduler.running:
            if request.request_id in before:
                assert request.num_computed_tokens > before[request.request_id]
    engine.run()
    engine.check_at_rest()


def test_waiting_requests_are_admitted_in_order_of_arrival() -> None:
    engine = FakeEngine(max_num_seqs=2, max_num_batched_tokens=16)
    for request_id in range(9):
        engine.add(request_id, prompt(5 + request_id % 3), max_tokens=4, ignore_eos=True)
    engine.run()
    started = [(engine.of(i).started[0].queue_s, i) for i in range(9)]
    assert started == sorted(started)


def test_priority_goes_first_but_does_not_evict() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.add(0, prompt(4), max_tokens=3, priority=5, ignore_eos=True)
    engine.step()
    engine.add(1, prompt(4), max_tokens=3, priority=1, ignore_eos=True)
    engine.add(2, prompt(4), max_tokens=3, priority=-1, ignore_eos=True)
    engine.add(3, prompt(4), max_tokens=3, priority=1, ignore_eos=True)
    assert running(engine) == [0]
    assert waiting(engine) == [2, 1, 3]
    order = []
    while engine.core.has_work():
        engine.step()
        order += [i for i in running(engine) if i not in order]
    assert order == [0, 2, 1, 3]
    assert engine.scheduler.total_preemptions == 0


def test_nobody_overtakes_one_that_does_not_fit() -> None:
    engine = FakeEngine(num_blocks=9, block_size=4)
    engine.add(0, prompt(12), max_tokens=12, ignore_eos=True)
    engine.step()
    engine.add(1, prompt(24, 200), max_tokens=8, ignore_eos=True)
    engine.add(2, prompt(2, 300), max_tokens=2, ignore_eos=True)
    engine.step()
    assert running(engine) == [0]
    assert waiting(engine) == [1, 2]
    engine.run()
    assert engine.of(1).started[0].queue_s <= engine.of(2).started[0].queue_s
    assert engine.of(1).token_ids == alone(prompt(24, 200), 8, ())


# vllm-project/vllm#16832: the output of a preempted request was incomplete.
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_requests_keep_their_output(enable_prefix_caching: bool) -> None:
    engine = FakeEngine(num_blocks=17, enable_prefix_caching=enable_prefix_caching)
    for number in range(4):
        engine.add(number, prompt(32, 100 * number), max_tokens=96, ignore_eos=True)
    engine.run()
    assert engine.scheduler.total_preemptions >= 1
    for number in range(4):
        heard = engine.of(number)
        assert heard.token_ids == alone(prompt(32, 100 * number), 96, ())
        assert heard.reason is FinishReason.LENGTH
        assert heard.finished[0].num_cached_tokens == 0
        assert len(heard.started) == 1
    assert engine.of(0).finished[0].num_preemptions == 0
    total = sum(engine.of(number).finished[0].num_preemptions for number in range(4))
    assert total == engine.scheduler.total_preemptions
    assert engine.scheduler.total_prompt_tokens == 4 * 32
    assert engine.scheduler.total_output_tokens == 4 * 96
    engine.check_at_rest()


def test_victim_is_the_lowest_priority_then_the_last_come() -> None:
    engine = FakeEngine(num_blocks=13, block_size=4)
    # Each takes 2 blocks, and a third with its second token: 8 of 12 are taken.
    for number, priority in enumerate([0, 7, 0, 7]):
        engine.add(
            number, prompt(8, 100 * number), max_tokens=9, priority=priority, ignore_eos=True
        )
    victims = []
    while engine.core.has_work():
        engine.step()
        for number in waiting(engine):
            if engine.of(number).started and number not in victims:
                victims.append(number)
    assert victims[:1] == [3]
    assert 0 not in victims
    assert 2 not in victims
    for number in range(4):
        assert engine.of(number).token_ids == alone(prompt(8, 100 * number), 9, ())


@pytest.fixture
def senior_in_prefill() -> FakeEngine:
    """A junior decodes, a block a token, while a senior's prompt is computed in
    small chunks, until the junior has taken what the senior still needs."""
    engine = FakeEngine(num_blocks=31, block_size=1, max_num_batched_tokens=3)
    engine.add(0, prompt(2, 300), max_tokens=26, priority=9, ignore_eos=True)
    engine.step()
    engine.add(1, prompt(22), max_tokens=4, ignore_eos=True)
    while not engine.scheduler.total_preemptions:
        engine.step()
    return engine


def test_a_victim_already_in_the_plan_is_taken_out_of_it(senior_in_prefill: FakeEngine) -> None:
    engine = senior_in_prefill
    assert (running(engine), waiting(engine)) == ([1], [0])
    plan = engine.runner.plans[-1]
    assert [seq.row for seq in plan.seqs] == [engine.scheduler.running[0].row]
    assert len(plan.freed_rows) == 1
    # 2 of 3: the victim had been given its share before the senior asked for room.
    assert engine.scheduler.num_batched_tokens == plan.num_tokens == 2
    engine.run()
    assert engine.of(0).finished[0].num_preemptions == 1
    assert engine.of(1).finished[0].num_preemptions == 0
    assert engine.of(0).token_ids == alone(prompt(2, 300), 26, ())
    assert engine.of(1).token_ids == alone(prompt(22), 4, ())


def test_withdrawal_takes_only_the_victims_share() -> None:
    # As above, with a second senior that decodes: it stays in the plan.
    engine = FakeEngine(num_blocks=40, block_size=1, max_num_batched_tokens=4)
    engine.add(0, prompt(2, 300), max_tokens=34, priority=9, ignore_eos=True)
    engine.add(1, prompt(2, 400), max_tokens=12, priority=-1, ignore_eos=True)
    engine.step()
    engine.add(2, prompt(22), max_tokens=4, ignore_eos=True)
    while not engine.scheduler.total_preemptions:
        engine.step()
    assert running(engine) == [1, 2]
    assert [seq.samples for seq in engine.runner.plans[-1].seqs] == [True, False]
    engine.run()
    for number, (tokens, length) in enumerate(
        [(prompt(2, 300), 34), (prompt(2, 400), 12), (prompt(22), 4)]
    ):
        assert engine.of(number).token_ids == alone(tokens, length, ())


def test_an_admission_leaves_the_watermark_free() -> None:
    engine = FakeEngine(num_blocks=7, block_size=4)
    engine.add(0, prompt(16), max_tokens=8, ignore_eos=True)
    engine.step()
    # A block for the prompt is there, but it is the one that 0 will want soon.
    engine.add(1, prompt(3, 300), max_tokens=2, ignore_eos=True)
    engine.step()
    assert engine.kv_manager.num_free_blocks == 1
    assert running(engine) == [0]
    engine.run()
    assert engine.scheduler.total_preemptions == 0


def test_one_that_fits_at_all_is_admitted_when_nothing_else_runs() -> None:
    engine = FakeEngine(num_blocks=5, block_size=4)
    engine.add(0, prompt(15), max_tokens=2, ignore_eos=True)
    engine.run(max_steps=5)
    assert engine.of(0).token_ids == alone(prompt(15), 2, ())
    # To the last slot: the 17th token needs no KV.
    assert engine.kv_manager.max_tokens == 16


def test_two_prompts_in_chunks_do_not_count_on_the_same_blocks() -> None:
    engine = FakeEngine(num_blocks=13, block_size=4, max_num_batched_tokens=8)
    engine.add(0, prompt(40), max_tokens=2, ignore_eos=True)
    engine.step()
    engine.add(1, prompt(16, 300), max_tokens=2, ignore_eos=True)
    engine.step()
    assert engine.kv_manager.num_free_blocks >= 4
    assert running(engine) == [0]
    engine.run()
    assert engine.scheduler.total_preemptions == 0


def test_no_starvation_behind_a_stream_of_small_requests() -> None:
    engine = FakeEngine(num_blocks=17, block_size=4, max_num_seqs=4)
    for number in range(4):
        engine.add(number, prompt(4, 50 * number), max_tokens=6 + number, ignore_eos=True)
    engine.step()
    engine.add(99, prompt(40, 700), max_tokens=8, ignore_eos=True)
    for number in range(100, 140):
        engine.add(number, prompt(4, number), max_tokens=6, ignore_eos=True)
        engine.step()
    assert engine.of(99).finished
    engine.run()
    assert engine.of(99).token_ids == alone(prompt(40, 700), 8, ())


def test_freed_rows_wait_for_a_plan_that_is_launched() -> None:
    engine = FakeEngine(max_num_seqs=2)
    engine.add(0, prompt(4), max_tokens=1)
    engine.run()
    engine.step()
    assert len(engine.runner.plans) == 1
    engine.add(1, prompt(4), max_tokens=2, ignore_eos=True)
    engine.step()
    last = engine.runner.plans[-1]
    assert last.freed_rows == (0,)
    assert [seq.row for seq in last.new_seqs] == [0]
    engine.run()
    assert engine.of(1).token_ids == alone(prompt(4), 2, ())


def test_a_step_that_samples_nothing_tells_nothing_but_starts() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    engine.add(0, prompt(20), max_tokens=1)
    outputs = engine.step()
    assert outputs[1].request_ids == b""
    assert [started.request_id for started in outputs[1].started] == [0]
    assert engine.step() == {}
    assert engine.core.has_work()
    engine.run()
    assert len(engine.of(0).token_ids) == 1


def test_kv_of_a_cancelled_chunk_is_never_hit() -> None:
    engine = FakeEngine(max_num_batched_tokens=16, block_size=4)
    engine.add(0, prompt(40), max_tokens=4)
    engine.step()
    engine.step(poll=lambda: engine.abort(0))
    assert engine.kv_manager.pool.num_cached_blocks == 4
    engine.add(1, prompt(40), max_tokens=4, ignore_eos=True)
    engine.run()
    assert engine.of(1).started[0].num_cached_tokens == 16
    assert engine.of(1).token_ids == alone(prompt(40), 4, ())


def test_stop_token_is_the_last_of_the_output() -> None:
    whole = alone(prompt(6), 40, ())
    stop = next(token for token in whole if whole.index(token) >= 3 and token != EOS)
    expected = whole[: whole.index(stop) + 1]
    engine = FakeEngine()
    engine.add(0, prompt(6), max_tokens=40, stop_token_ids=(stop,), ignore_eos=True)
    engine.run()
    assert engine.of(0).token_ids == expected
    assert engine.of(0).reason is FinishReason.STOP
    assert engine.of(0).finished[0].stop_token_id == stop


def test_context_length_ends_with_length() -> None:
    engine = FakeEngine(max_model_len=20)
    engine.add(0, prompt(16), max_tokens=500, ignore_eos=True)
    engine.run()
    assert engine.of(0).token_ids == alone(prompt(16), 4, ())
    assert engine.of(0).reason is FinishReason.LENGTH
