"""The engine process over real sockets and the fake model."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
import zmq

from pagewire.types import FinishReason, SamplingParams
from pagewire.wire.codec import pack_request_ids, unpack_request_ids
from pagewire.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Dead,
    Finished,
    Heartbeat,
    Hello,
    Output,
    Ready,
    StepOutput,
)
from pagewire.wire.sockets import bound_endpoint
from tests.support.engine_process import NUM_BLOCKS, ThreadedEngine
from tests.support.fake_model import alone
from tests.support.wire_client import WireClient

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = [5, 9, 13, 5, 7]


@pytest.fixture
def engine() -> ThreadedEngine:
    return ThreadedEngine()


def at_rest(output: Output) -> bool:
    """A heartbeat of an engine that does nothing and holds no block."""
    return (
        isinstance(output, Heartbeat)
        and (output.stats.num_running, output.stats.num_waiting) == (0, 0)
        and output.stats.num_free_blocks == output.stats.num_blocks
    )


def step_until_seen(engine: ThreadedEngine, client: WireClient, num_requests: int) -> None:
    """With a closed gate: lets single steps pass until all requests have come in."""
    while True:
        beat = client.wait_for(lambda output: isinstance(output, Heartbeat))
        assert isinstance(beat, Heartbeat)
        if beat.stats.num_running + beat.stats.num_waiting == num_requests:
            return
        engine.runner.permits.release()


def step_until_at_rest(engine: ThreadedEngine, client: WireClient) -> None:
    while not at_rest(client.wait_for(lambda output: isinstance(output, Heartbeat))):
        engine.runner.permits.release()


def test_hello_is_answered_with_what_the_engine_has() -> None:
    with ThreadedEngine() as engine, WireClient(engine.endpoint) as client:
        ready = client.hello()
        assert ready.epoch == engine.core.epoch
        assert ready.protocol == PROTOCOL_VERSION
        assert ready.num_blocks == NUM_BLOCKS
        # Another Hello does not disturb the session.
        client.add(1, PROMPT)
        assert client.hello() == ready
        assert client.collect(1)[1].token_ids == alone(PROMPT, 8, ())


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_what_is_added_comes_out(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tcp = "tcp://127.0.0.1:0"
    endpoint, outputs = (tcp, tcp) if kind == "tcp" else ("ipc://engine", "ipc://outputs")
    with ThreadedEngine(endpoint) as engine, WireClient(engine.endpoint, outputs=outputs) as client:
        client.hello()
        prompts = {number: [number % 50, *PROMPT] * (number % 7 + 1) for number in range(1, 31)}
        for number, prompt in prompts.items():
            client.add(number, prompt, max_tokens=5 + number % 9)
        outcomes = client.collect(*prompts)
        for number, outcome in outcomes.items():
            assert outcome.token_ids == alone(prompts[number], 5 + number % 9, ())
            assert outcome.reason is FinishReason.LENGTH
            assert len(outcome.started) == 1
        client.wait_for(at_rest)
    assert not (tmp_path / "engine").exists(), "the socket file was left behind"


def test_outputs_are_one_message_a_step() -> None:
    with ThreadedEngine() as engine, WireClient(engine.endpoint) as client:
        client.hello()
        engine.runner.gate.clear()
        for number in range(1, 5):
            client.add(number, PROMPT, max_tokens=60)
        step_until_seen(engine, client, 4)
        engine.runner.gate.set()
        client.collect(1, 2, 3, 4)
        steps = [output for output in client.outputs if isinstance(output, StepOutput)]
        numbers = [output.step for output in steps]
        assert numbers == sorted(set(numbers))
        assert max(len(unpack_request_ids(output.request_ids)) for output in steps) == 4


def test_an_interrupted_request_goes_on_where_it_was() -> None:
    whole = alone(PROMPT, 12, ())
    with ThreadedEngine() as engine, WireClient(engine.endpoint) as client:
        client.hello()
        client.add(1, [*PROMPT, *whole[:5]], num_output_tokens=5, max_tokens=12)
        assert client.collect(1)[1].token_ids == whole[5:]


def test_a_bad_request_gets_one_error_finish() -> None:
    with ThreadedEngine() as engine, WireClient(engine.endpoint) as client:
        client.hello()
        client.add(1, [])
        client.add(2, [10**6])
        client.add(3, PROMPT, sampling=SamplingParams(max_tokens=1, temperature=float("nan")))
        client.add(4, PROMPT, epoch=engine.core.epoch ^ 1)
        client.add(5, PROMPT, num_output_tokens=-1)
        client.add(6, PROMPT)
        outcomes = client.collect(1, 2, 3, 4, 5, 6)
        for number in range(1, 6):
            assert outcomes[number].reason is FinishReason.ERROR
            assert outcomes[number].finished[0].error
        assert "epoch" in outcomes[4].finished[0].error
        assert outcomes[6].reason is FinishReason.LENGTH
        client.wait_for(at_rest)


def test_abort_in_the_queue() -> None:
    with ThreadedEngine(max_num_seqs=1) as engine, WireClient(engine.endpoint) as client:
        client.hello()
        engine.runner.gate.clear()
        client.add(1, PROMPT, max_tokens=300)
        client.add(2, PROMPT, max_tokens=300)
        step_until_seen(engine, client, 2)
        client.abort(2)
        client.send(Abort(pack_request_ids([77])))
        while not client.outcome(2).finished or not client.unknown_aborts:
            engine.runner.permits.release()
            client.receive(0.05)
        assert client.outcome(2).reason is FinishReason.ABORT
        assert not client.outcome(2).token_ids
        assert not client.outcome(2).started
        engine.runner.gate.set()
        assert client.collect(1)[1].token_ids == alone(PROMPT, 300, ())
        client.wait_for(at_rest)
        assert client.unknown_aborts == [77]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_abort_while_running(phase: str) -> None:
    prompt = PROMPT * 100 if phase == "prefill" else PROMPT
    with ThreadedEngine() as engine, WireClient(engine.endpoint) as client:
        client.hello()
        engine.runner.gate.clear()
        client.add(1, prompt, max_tokens=1000)
        while not (
            client.outcome(1).started if phase == "prefill" else client.outcome(1).token_ids
        ):
            engine.runner.permits.release()
            client.receive(0.05)
        client.abort(1)
        client.abort(1)
        while not client.outcome(1).finished:
            engine.runner.permits.release()
            client.receive(0.05)
        engine.runner.gate.set()
        client.wait_for(at_rest)
        assert client.outcome(1).reason is FinishReason.ABORT
        freed = [
            seconds
            for output in client.outputs
            if isinstance(output, StepOutput)
            for seconds in output.stats.abort_to_free_s
        ]
        assert len(freed) == 1
        if phase == "prefill":
            assert not client.outcome(1).token_ids


def test_each_frontend_hears_of_its_own_only() -> None:
    prompts = ([5, 6, 7], [8, 9, 10, 11])
    with (
        ThreadedEngine() as engine,
        WireClient(engine.endpoint) as first,
        WireClient(engine.endpoint) as second,
    ):
        for client, prompt in zip((first, second), prompts, strict=True):
            client.hello()
            for number in range(1, 9):  # the same ids on both
                client.add(number, [*prompt, number], max_tokens=9)
        second.abort(8)
        for client, prompt in zip((first, second), prompts, strict=True):
            outcomes = client.collect(*range(1, 9))
            assert set(client.outcomes) == set(range(1, 9))
            for number in range(1, 8):
                assert outcomes[number].token_ids == alone([*prompt, number], 9, ())
        assert first.outcome(8).reason is FinishReason.LENGTH


def test_reset_prefix_cache_is_answered() -> None:
    with ThreadedEngine() as engine, WireClient(engine.endpoint) as client:
        client.hello()
        client.add(1, PROMPT * 10)
        client.collect(1)
        assert client.reset_prefix_cache(5) > 0
        assert client.reset_prefix_cache(6) == 0


def test_a_restarted_engine_has_another_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    endpoint = "ipc://engine"
    engine = ThreadedEngine(endpoint)
    with WireClient(endpoint) as client:
        with engine:
            former = client.hello().epoch
            client.wait_for(lambda output: isinstance(output, Heartbeat))
        dead = client.wait_for(lambda output: isinstance(output, Dead))
        assert dead == Dead(former, "shutdown")
        with ThreadedEngine(endpoint) as successor:
            # A command of the engine's last life, from a frontend without a session.
            client.add(1, PROMPT)
            ready = client.hello()
            assert ready.epoch == successor.core.epoch != former
            client.add(2, PROMPT, epoch=former)
            client.add(3, PROMPT)
            outcomes = client.collect(2, 3)
            assert outcomes[2].reason is FinishReason.ERROR
            assert outcomes[3].token_ids == alone(PROMPT, 8, ())
            assert 1 not in client.outcomes


def test_a_silent_frontend_loses_its_requests_and_is_told_when_it_returns() -> None:
    with (
        ThreadedEngine(frontend_timeout=2.0) as engine,
        WireClient(engine.endpoint) as silent,
        WireClient(engine.endpoint) as other,
    ):
        other.hello()
        silent.hello()
        engine.runner.gate.clear()
        silent.add(1, PROMPT, max_tokens=1000)
        step_until_seen(engine, other, 1)
        # Nobody waits through `silent`, so it does not ping. A step is under way,
        # which must end before the loop hears of it.
        step_until_at_rest(engine, other)
        silent.hello()
        assert silent.outcome(1).reason is FinishReason.ABORT
        ready_at = max(
            index for index, output in enumerate(silent.outputs) if isinstance(output, Ready)
        )
        told_at = [
            index
            for index, output in enumerate(silent.outputs)
            if isinstance(output, StepOutput) and output.finished
        ]
        assert told_at[0] < ready_at, "told after Ready, when the id may be in use again"
        engine.runner.gate.set()
        silent.add(1, PROMPT)
        silent.wait_for(lambda output: isinstance(output, StepOutput) and bool(output.finished))
        assert [finished.reason for finished in silent.outcome(1).finished] == [3, 2]


def test_a_killed_frontend_loses_its_requests_at_once() -> None:
    with ThreadedEngine() as engine, WireClient(engine.endpoint) as other:
        other.hello()
        with WireClient(engine.endpoint) as killed:
            killed.hello()
            engine.runner.gate.clear()
            killed.add(1, PROMPT, max_tokens=1000)
            step_until_seen(engine, other, 1)
        # Far sooner than frontend_timeout, which is a minute.
        began_at = time.monotonic()
        step_until_at_rest(engine, other)
        assert time.monotonic() - began_at < 30


def test_a_frontend_that_takes_an_address_over_gets_nothing_of_its_former_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadedEngine() as engine:
        with WireClient(engine.endpoint, outputs="ipc://outputs") as former:
            former.hello()
            engine.runner.gate.clear()
            former.add(1, PROMPT, max_tokens=100)
            step_until_seen(engine, former, 1)
        with WireClient(engine.endpoint, outputs="ipc://outputs") as successor:
            successor.hello()
            engine.runner.gate.set()
            successor.add(1, [8, 8, 8], max_tokens=5)
            assert successor.collect(1)[1].token_ids == alone([8, 8, 8], 5, ())
            successor.wait_for(at_rest)
            assert set(successor.outcomes) == {1}


def test_a_frontend_that_does_not_read_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine_core.session.MAX_BACKLOG_BYTES", 1 << 20)
    unknown = Abort(pack_request_ids(range(10**12, 10**12 + 20_000)))
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as ear,
        ThreadedEngine() as engine,
        WireClient(engine.endpoint) as deaf,
        WireClient(engine.endpoint) as other,
    ):
        ear.setsockopt(zmq.RCVHWM, 1)
        ear.bind("tcp://127.0.0.1:0")
        deaf.send(Hello(PROTOCOL_VERSION, deaf.frontend_id, bound_endpoint(ear)))
        other.hello()
        engine.runner.gate.clear()
        assert ear.poll(10_000)
        deaf.add(1, PROMPT, max_tokens=1000, epoch=engine.core.epoch)
        step_until_seen(engine, other, 1)
        # Each is answered with 20000 ids in 180 kB: 54 MB in all, more than the
        # high-water marks and the kernel's buffers hold.
        dropped = re.compile(r"1 requests dropped: it does not read: [1-9]\d* MiB wait for it")
        for _ in range(300):
            engine.runner.entered.clear()
            deaf.send(unknown)
            engine.runner.permits.release()
            # Without its request there is no further step.
            while not engine.runner.entered.wait(0.02) and not dropped.search(caplog.text):
                pass
            if dropped.search(caplog.text):
                break
        step_until_at_rest(engine, other)
        assert dropped.search(caplog.text)
        engine.runner.gate.set()
        other.add(1, PROMPT)
        assert other.collect(1)[1].token_ids == alone(PROMPT, 8, ())


def test_garbage_is_ignored_and_seldom_logged(caplog: pytest.LogCaptureFixture) -> None:
    with ThreadedEngine() as engine, WireClient(engine.endpoint) as client:
        client.hello()
        host, port = engine.endpoint.removeprefix("tcp://").split(":")
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40, b"\xff" + bytes(63)):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(garbage)
        for frames in (
            [b"\xee", b""],
            [b"\x02", b"junk"],
            [b""],
            [b"a", b"b", b"c"],
            [b"\x82", b""],
        ):
            for _ in range(50):
                client.send_frames(frames)
        client.send_frames([b"\x02", b"\x95\x01\x02\xc4\x03abc\x00\x91\x01"])
        client.add(1, PROMPT)
        assert client.collect(1)[1].token_ids == alone(PROMPT, 8, ())
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 1 <= len(warnings) <= 4, [record.getMessage() for record in warnings]


def test_a_hello_that_cannot_be_answered_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with (
        ThreadedEngine() as engine,
        WireClient(engine.endpoint, protocol=PROTOCOL_VERSION + 1) as stranger,
        WireClient(engine.endpoint) as client,
    ):
        with pytest.raises(TimeoutError, match="no Ready"):
            stranger.hello(timeout=0.6)
        assert f"speaks protocol {PROTOCOL_VERSION + 1}" in caplog.text
        client.send(Hello(PROTOCOL_VERSION, 4711, "http://nowhere"))
        client.send(Hello(PROTOCOL_VERSION, 4711, "tcp://127.0.0.1:1"))
        client.hello()
        assert "http://nowhere" in caplog.text
        client.add(1, PROMPT)
        assert client.collect(1)[1].token_ids == alone(PROMPT, 8, ())


def test_a_crash_from_outside_is_told_and_ends_it() -> None:
    engine = ThreadedEngine()
    with WireClient(engine.endpoint) as client, pytest.raises(ValueError, match="over"), engine:
        client.hello()
        engine.process.crash("rank 1 of 2 ended with SIGKILL, see its log")
        dead = client.wait_for(lambda output: isinstance(output, Dead))
        assert isinstance(dead, Dead)
        assert dead.reason == "rank 1 of 2 ended with SIGKILL, see its log"
        assert engine.join() == 1
        raise ValueError("over")


def test_heartbeats_go_on_while_a_step_hangs() -> None:
    with ThreadedEngine() as engine, WireClient(engine.endpoint) as client:
        client.hello()
        client.add(1, PROMPT)
        client.collect(1)
        engine.runner.gate.clear()
        engine.runner.entered.clear()
        client.add(2, PROMPT)
        assert engine.runner.entered.wait(20)
        step_until_seen(engine, client, 1)
        beats = [client.wait_for(lambda output: isinstance(output, Heartbeat)) for _ in range(4)]
        steps = {beat.step for beat in beats if isinstance(beat, Heartbeat)}
        assert steps == {engine.core.step_id}
        sent = [beat.sent_ns for beat in beats if isinstance(beat, Heartbeat)]
        assert sent == sorted(set(sent))
        engine.runner.gate.set()
        assert client.collect(2)[2].token_ids == alone(PROMPT, 8, ())
        client.wait_for(lambda output: isinstance(output, Heartbeat) and output.step not in steps)


def test_an_idle_loop_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ThreadedEngine()
    has_work, asked = engine.core.has_work, threading.Semaphore(0)
    monkeypatch.setattr(engine.core, "has_work", lambda: (asked.release(), has_work())[1])
    with engine, WireClient(engine.endpoint) as client:
        client.hello()
        client.add(1, PROMPT)
        client.collect(1)
        client.wait_for(at_rest)
        while asked.acquire(blocking=False):
            pass
        for _ in range(5):
            client.wait_for(lambda output: isinstance(output, Heartbeat))
        assert not asked.acquire(blocking=False)


def test_stopping_aborts_what_runs_and_says_so() -> None:
    engine = ThreadedEngine(max_num_seqs=2)
    with WireClient(engine.endpoint) as client:
        with engine:
            client.hello()
            engine.runner.gate.clear()
            for number in (1, 2, 3, 4):
                client.add(number, PROMPT, max_tokens=1000)
            step_until_seen(engine, client, 4)
        client.wait_for(lambda output: isinstance(output, Dead))
        assert client.outputs[-1] == Dead(engine.core.epoch, "shutdown")
        for number in (1, 2, 3, 4):
            assert client.outcome(number).reason is FinishReason.ABORT
        assert engine.status == 0


def test_a_failing_runner_ends_the_engine_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    engine = ThreadedEngine()
    with WireClient(engine.endpoint) as client, pytest.raises(ValueError, match="over"), engine:
        client.hello()
        engine.runner.error = RuntimeError("the device is on fire")
        client.add(1, PROMPT)
        dead = client.wait_for(lambda output: isinstance(output, Dead))
        assert isinstance(dead, Dead)
        assert "RuntimeError" in dead.reason
        # Replaying it elsewhere, or not, is the frontend's to decide.
        assert not client.outcome(1).finished
        assert engine.join() == 1
        assert "the device is on fire" in caplog.text
        raise ValueError("over")


def test_a_dead_thread_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    engine = ThreadedEngine()
    monkeypatch.setattr("engine_core.inbox.decode_command", fail)
    with WireClient(engine.endpoint) as client, pytest.raises(ValueError, match="over"), engine:
        client.ping()
        assert engine.join() == 1
        assert "the input thread died" in caplog.text
        raise ValueError("over")


def test_a_finish_that_was_lost_on_the_way_is_told_again() -> None:
    """The engine cannot know what a frontend read before its connection broke."""
    with ThreadedEngine() as engine:
        with WireClient(engine.endpoint) as former:
            former.hello()
            former.add(1, PROMPT)
            former.collect(1)
        with WireClient(engine.endpoint, frontend_id=former.frontend_id) as again:
            again.hello()
            finished: list[Finished] = again.outcome(1).finished
            assert [FinishReason(one.reason) for one in finished] == [FinishReason.ABORT]
