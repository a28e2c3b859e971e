"""Engine and tokenizer that die and come back, health, drain."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2

from frontend import detokenize_stream, engine_client
from pagewire.obs.ready import read_ready_file
from pagewire.v1 import admin_pb2, common_pb2, inference_pb2, model_pb2
from tests.support.fake_engine import TEXT
from tests.support.fake_tokenizer import FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.frontend.conftest import Stack

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
LONG = common_pb2.SamplingParams(max_tokens=1000)


def tokens(count: int) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(max_tokens=count)


async def next_status(watch: Any) -> int:
    return int((await asyncio.wait_for(watch.read(), 60)).status)


# The engine.


async def test_a_last_word_ends_every_request_at_once(impatient: Stack) -> None:
    watch = impatient.health.Watch(health_pb2.HealthCheckRequest())
    assert await next_status(watch) == SERVING
    calls = [impatient.open(prompt="a", sampling_params=LONG) for _ in range(8)]
    await impatient.engine.wait_running(8)
    impatient.engine.step()
    for call in calls:
        await call.read()
    impatient.engine.die()
    for call in calls:
        failure = await impatient.fails(call)
        assert failure.code is grpc.StatusCode.UNAVAILABLE
        assert failure.info.reason == "ENGINE_DEAD"
        assert failure.retry_s
    assert await next_status(watch) == NOT_SERVING
    watch.cancel()
    assert impatient.frontend.dispatcher.admission.requests == 0


async def test_a_killed_engine_is_noticed_and_its_successor_served(
    impatient: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = impatient.open(prompt="a", sampling_params=LONG)
    await impatient.engine.wait_running()
    old_epoch = impatient.engine.epoch
    # Nobody listens at its address any more: that is no silence to wait out.
    impatient.engine_client._engine_timeout = impatient.engine_client._clock() + 1e6
    monkeypatch.setattr(engine_client, "LOST_S", 1e6)
    await impatient.engine.kill()
    failure = await impatient.fails(call)
    assert failure.info.reason == "ENGINE_DEAD"
    assert "process ended" in failure.message
    assert await impatient.check() == NOT_SERVING
    failure = await impatient.fails(impatient.open(prompt="a"))
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert failure.info.reason == "ENGINE_DEAD"
    assert failure.retry_s
    assert int(failure.trailing["grpc-retry-pushback-ms"]) > 0
    assert failure.initial == {}

    await impatient.restart_engine(auto=True)
    await impatient.until(lambda: impatient.frontend.health.serving)
    assert impatient.engine.epoch != old_epoch
    assert (await impatient.stream(prompt="x", sampling_params=tokens(5))).text == TEXT[:5]


async def test_a_new_epoch_ends_the_old_ones_requests(impatient: Stack) -> None:
    """The engine was restarted faster than its silence could be noticed."""
    call = impatient.open(prompt="a", sampling_params=LONG)
    await impatient.engine.wait_running()
    old_epoch = impatient.engine.epoch
    impatient.engine.epoch = old_epoch ^ 1
    impatient.engine._send(impatient.engine.ready())
    failure = await impatient.fails(call)
    assert failure.info.reason == "ENGINE_DEAD"
    assert impatient.frontend.health.serving
    # What the old epoch still says is about requests that are gone, or worse, are not.
    call = impatient.open(prompt="b", sampling_params=tokens(3))
    await impatient.engine.wait_running(2)
    (state,) = impatient.frontend.dispatcher.engine_side.live.values()
    impatient.engine.emit_stale({state.internal_id: list(b"???")}, old_epoch)
    impatient.engine.emit({state.internal_id: list(b"abc")})
    frames = [frame async for frame in call]
    assert "".join(f.delta.text for f in frames) == "abc"


async def test_silence_is_death(make_stack: Callable[..., Stack]) -> None:
    config = {"engine_timeout": 0.8, "engine_restart_timeout": 0}
    stack = await make_stack(auto=False, config=config)
    call = stack.open(prompt="a", sampling_params=LONG)
    await stack.engine.wait_running()
    stack.engine.silent = True
    failure = await stack.fails(call)
    assert failure.info.reason == "ENGINE_DEAD"
    assert await stack.check() == NOT_SERVING
    stack.engine.silent = False
    await stack.until(lambda: stack.frontend.health.serving)


async def test_a_frontend_that_overslept_does_not_blame_its_engine(
    make_stack: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await make_stack(auto=False, config={"engine_timeout": 1000.0, "stall_timeout": 1000.0})
    call = stack.open(prompt="a", sampling_params=tokens(3))
    await stack.engine.wait_running()
    client = stack.engine_client
    real, tick, num_ticks = client._clock, client._tick, 0

    def count() -> None:
        nonlocal num_ticks
        tick()
        num_ticks += 1

    # What it says meanwhile cannot be read in time.
    stack.engine.silent = True
    monkeypatch.setattr(client, "_tick", count)
    monkeypatch.setattr(client, "_clock", lambda: real() + 3600.0)
    await stack.until(lambda: num_ticks >= 3)
    assert stack.frontend.health.serving
    stack.engine.silent = False
    for _ in range(3):
        stack.engine.step()
    assert "".join(frame.delta.text for frame in await stack.rest(call)) == TEXT[:3]


async def test_output_on_its_way_survives_the_engine(manual: Stack) -> None:
    """All ids are here and only their text is missing: that is no loss."""
    manual.tokenizer.reply_gate = asyncio.Event()
    call = manual.open(prompt="a", sampling_params=tokens(4))
    (request,) = await manual.engine.wait_running()
    manual.engine.emit({request.id: list(b"done")})
    await manual.until(
        lambda: all(s.engine_finished for s in manual.frontend.dispatcher.engine_side.live.values())
    )
    manual.engine.die()
    await manual.until(lambda: not manual.frontend.health.serving)
    manual.tokenizer.reply_gate.set()
    frames = [frame async for frame in call]
    assert frames[0].delta.text == "done"
    assert frames[-1].HasField("final")


async def test_a_hang_is_seen_while_the_heart_beats(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, config={"stall_timeout": 0.5})
    watch = stack.health.Watch(health_pb2.HealthCheckRequest())
    assert await next_status(watch) == SERVING
    call = stack.open(prompt="a", sampling_params=LONG)
    await stack.engine.wait_running()
    # Heartbeats go on, with one request running and a step counter that stands.
    assert await next_status(watch) == NOT_SERVING
    stack.engine.step()
    assert await next_status(watch) == SERVING
    watch.cancel()
    call.cancel()


async def test_idle_is_no_hang(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, heartbeat_s=0.05, config={"stall_timeout": 0.3})
    beats = 0
    real = stack.frontend.dispatcher.engine_side.engine_stats
    done = asyncio.Event()

    def count(link: Any, stats: Any) -> None:
        nonlocal beats
        beats += 1
        real(link, stats)
        if beats > 20:
            done.set()

    stack.frontend.dispatcher.engine_side.engine_stats = count  # type: ignore[method-assign]
    await asyncio.wait_for(done.wait(), 60)
    assert stack.frontend.health.serving


async def test_loading(make_stack: Callable[..., Stack]) -> None:
    """Before there is an engine, the ports answer and say so."""
    stack = await make_stack(auto=False, serving=False)
    stack.engine_client.ready = None
    stack.engine_client._ever_ready = False
    for call in (
        stack.open(prompt="x"),
        stack.models.ListModels(model_pb2.ListModelsRequest()),
    ):
        failure = await stack.fails(call)
        assert failure.code is grpc.StatusCode.UNAVAILABLE
        assert failure.info.reason == "LOADING"
        assert failure.retry_s


# The tokenizer.


async def test_a_restarted_tokenizer_costs_a_pause(manual: Stack) -> None:
    calls = [
        manual.open(
            prompt="a", sampling_params=common_pb2.SamplingParams(max_tokens=n, stop=["fox"])
        )
        for n in (12, 40)
    ]
    await manual.engine.wait_running(2)
    for _ in range(6):
        manual.engine.step()
    texts = [(await call.read()).delta.text for call in calls]
    await manual.until(
        lambda: all(s.num_acked == 6 for s in manual.frontend.dispatcher.engine_side.live.values())
    )
    address = manual.tokenizer.address
    await manual.tokenizer.close()
    await manual.until(lambda: not manual.frontend.health.serving)
    # The engine goes on meanwhile; the first request even finishes there.
    for _ in range(6):
        manual.engine.step()
    failure = await manual.fails(manual.open(prompt="b"))
    assert failure.info.reason == "TOKENIZER_DEAD"
    manual.tokenizer = FakeTokenizer(address=address)
    await manual.tokenizer.start()
    await manual.until(lambda: manual.frontend.health.serving)
    for _ in range(9):
        manual.engine.step()
    for index, call in enumerate(calls):
        texts[index] += "".join(f.delta.text for f in await manual.rest(call))
    assert texts == [TEXT[:12], "the quick brown "]


async def test_replays_are_shared_out_among_messages(
    manual: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is answered soon then, and neither worker nor stream is taken for hung."""
    monkeypatch.setattr(detokenize_stream, "MAX_REPLAYED_IDS", 10)
    calls = [manual.open(prompt="a", sampling_params=tokens(12)) for _ in range(5)]
    await manual.engine.wait_running(5)
    for _ in range(6):
        manual.engine.step()
    texts = [(await call.read()).delta.text for call in calls]
    live = manual.frontend.dispatcher.engine_side.live
    await manual.until(lambda: all(state.num_acked == 6 for state in live.values()))
    address = manual.tokenizer.address
    await manual.tokenizer.close()
    await manual.until(lambda: not manual.frontend.health.serving)
    # Some have text to come, beside what is replayed, and one of these its end.
    for _ in range(6):
        manual.engine.step()
    manual.tokenizer = FakeTokenizer(address=address)
    await manual.tokenizer.start()
    for index, call in enumerate(calls):
        texts[index] += "".join(f.delta.text for f in await manual.rest(call))
    assert texts == [TEXT[:12]] * 5
    opened = [
        [len(opening.replay_token_ids) for opening in m.opens] for m in manual.tokenizer.messages
    ]
    # 12 ids each are above the limit: one a message.
    assert [opens for opens in opened if opens] == [[6]] * 5
    rows = [list(message.sequences) for message in manual.tokenizer.messages]
    assert all(len(row) <= 1 for row in rows)


async def test_a_tokenizer_that_dies_before_its_first_answer(manual: Stack) -> None:
    address = manual.tokenizer.address
    await manual.tokenizer.close()
    manual.tokenizer = FakeTokenizer(address=address)
    gate = manual.tokenizer.reply_gate = asyncio.Event()
    await manual.tokenizer.start()
    await manual.tokenizer.wait_for(lambda: len(manual.tokenizer.messages) == 1)
    await manual.tokenizer.close()
    gate.set()
    manual.tokenizer = FakeTokenizer(address=address)
    await manual.tokenizer.start()
    await manual.until(lambda: manual.frontend.health.serving)


async def test_a_tokenizer_that_stays_away(manual: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detokenize_stream, "GRACE_S", 0.2)
    call = manual.open(prompt="a", sampling_params=LONG)
    (request,) = await manual.engine.wait_running()
    manual.engine.step()
    await call.read()
    await manual.tokenizer.close()
    failure = await manual.fails(call)
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert failure.info.reason == "TOKENIZER_DEAD"
    await manual.engine.wait_for(lambda: manual.engine.aborted == [request.id])


class Always(set[int]):
    """Sequences that are lost each time."""

    def discard(self, element: int) -> None:
        pass


async def test_a_lost_sequence_is_opened_again(manual: Stack) -> None:
    call = manual.open(prompt="a", sampling_params=tokens(20))
    (request,) = await manual.engine.wait_running()
    manual.engine.step()
    text = (await call.read()).delta.text
    for count in range(1, 6):
        manual.tokenizer.lose.add(request.id)
        manual.engine.step()
        text += (await call.read()).delta.text
        assert text == TEXT[: count + 1]
        (reopened,) = manual.tokenizer.messages[-1].opens
        replayed = bytes(reopened.replay_token_ids).decode()
        assert (replayed, reopened.replay_emitted_chars) == (TEXT[:count], count)
    num_opens = sum(len(message.opens) for message in manual.tokenizer.messages)
    manual.tokenizer.lose = Always({request.id})
    manual.engine.step()
    failure = await manual.fails(call)
    assert failure.info.reason == "TOKENIZER_DEAD"
    reopens = sum(len(message.opens) for message in manual.tokenizer.messages) - num_opens
    assert reopens == detokenize_stream.MAX_REOPENS
    await manual.engine.wait_for(lambda: manual.engine.aborted == [request.id])


async def test_a_lost_sequence_with_steps_in_flight(manual: Stack) -> None:
    """Rows sent before the loss was known are void, and nothing comes twice."""
    gate = manual.tokenizer.reply_gate = asyncio.Event()
    call = manual.open(prompt="a", sampling_params=tokens(9))
    (request,) = await manual.engine.wait_running()
    manual.engine.step()
    await manual.tokenizer.wait_for(lambda: len(manual.tokenizer.messages) == 2)
    manual.tokenizer.lose.add(request.id)
    for _ in range(8):
        manual.engine.step()
        count = len(manual.engine.running)
        await manual.until(lambda: manual.frontend.dispatcher.text_stream.num_waiting >= 2)
        assert count in (0, 1)
    gate.set()
    frames = [frame async for frame in call]
    assert "".join(f.delta.text for f in frames) == TEXT[:9]


# Health.


async def test_health(stack: Stack) -> None:
    for service in ("", "pagewire.v1.InferenceService", "pagewire.v1.ModelService"):
        assert await stack.check(service) == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stack.check("no.such.Service")
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stack.health.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
    assert await next_status(watch) == SERVICE_UNKNOWN
    again = asyncio.ensure_future(watch.read())
    await stack.check()
    assert not again.done()
    watch.cancel()
    await asyncio.gather(again, return_exceptions=True)


async def test_watch_follows_the_tokenizer(stack: Stack) -> None:
    watch = stack.health.Watch(
        health_pb2.HealthCheckRequest(service="pagewire.v1.InferenceService")
    )
    assert await next_status(watch) == SERVING
    address = stack.tokenizer.address
    await stack.tokenizer.close()
    assert await next_status(watch) == NOT_SERVING
    stack.tokenizer = FakeTokenizer(address=address)
    await stack.tokenizer.start()
    assert await next_status(watch) == SERVING
    watch.cancel()


async def test_http(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=f"http://{stack.frontend.http_address}") as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 200
        stack.frontend.dispatcher.drain()
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/nothing")).status_code == 404


# Admin and drain.


async def test_admin(manual: Stack) -> None:
    call = manual.open(prompt="a", sampling_params=LONG)
    await manual.engine.wait_running()
    manual.engine.step()
    await call.read()
    stats = await manual.admin.GetStats(admin_pb2.GetStatsRequest())
    assert stats.num_requests_in_flight == stats.num_requests_running == 1
    assert stats.engine_epoch == manual.engine.epoch
    assert (stats.engine_ready, stats.draining, stats.engine_pid) == (True, False, os.getpid())
    assert (stats.num_blocks, stats.num_free_blocks) == (1000, 999)
    assert stats.kv_cache_usage == pytest.approx(0.001)
    reset = await manual.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
    assert reset.num_blocks_freed == 7
    request = admin_pb2.DrainRequest()
    request.timeout.FromMilliseconds(100)
    assert (await manual.admin.Drain(request)).num_unfinished == 1
    assert await manual.check() == NOT_SERVING
    failure = await manual.fails(manual.open(prompt="b"))
    assert failure.info.reason == "DRAINING"
    call.cancel()


async def test_drain_finishes_what_runs_and_refuses_the_rest(manual: Stack) -> None:
    watch = manual.health.Watch(health_pb2.HealthCheckRequest())
    assert await next_status(watch) == SERVING
    call = manual.open(prompt="a", sampling_params=tokens(3))
    await manual.engine.wait_running()
    draining = asyncio.ensure_future(manual.frontend.drain())
    assert await next_status(watch) == NOT_SERVING
    failure = await manual.fails(manual.open(prompt="b"))
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert failure.info.reason == "DRAINING"
    assert failure.initial == {}
    for _ in range(3):
        assert not draining.done()
        manual.engine.step()
    frames = [frame async for frame in call]
    assert "".join(f.delta.text for f in frames) == TEXT[:3]
    watch.cancel()
    await asyncio.wait_for(draining, 60)


async def test_drain_ends_what_does_not_finish(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, config={"drain_timeout": 0.2})
    call = stack.open(prompt="a", sampling_params=LONG)
    (request,) = await stack.engine.wait_running()
    draining = asyncio.ensure_future(stack.frontend.drain())
    failure = await stack.fails(call)
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert failure.info.reason == "DRAINING"
    await asyncio.wait_for(draining, 60)
    await stack.engine.wait_for(lambda: stack.engine.aborted == [request.id])


async def start_process(stack: Stack, ready: Path, *flags: str) -> asyncio.subprocess.Process:
    """A frontend of its own beside the stack's; waits for its ready file."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "frontend", "--port", "0", "--http-port", "0"),
        *("--admin-port", "0", "--outputs-bind", "tcp://127.0.0.1:0"),
        *("--tokenizer-address", stack.tokenizer.address),
        *("--engine-address", stack.engine.address),
        *("--ready-file", str(ready), *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    await stack.until(ready.exists)
    return process


@pytest.mark.parametrize("num_signals", [1, 2])
async def test_signals(make_stack: Callable[..., Stack], tmp_path: Path, num_signals: int) -> None:
    """SIGTERM drains and exits 0; a second one does not wait for the drain."""
    stack = await make_stack(auto=False, serving=False)
    await stack.frontend.close()
    process = await start_process(stack, tmp_path / "ready.json", "--drain-timeout", "60")
    facts = read_ready_file(tmp_path / "ready.json")
    assert facts is not None
    assert facts["pid"] == process.pid
    assert facts["model"] == "fake"
    async with grpc.aio.insecure_channel(facts["grpc"]) as channel:
        raw = channel.unary_stream("/pagewire.v1.InferenceService/GenerateStream")
        body = inference_pb2.GenerateStreamRequest(
            prompt="a", sampling_params=tokens(5)
        ).SerializeToString()
        call = raw(body, timeout=60)
        await stack.engine.wait_running()
        process.send_signal(signal.SIGTERM)
        health = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        status = await health.read()
        while status != b"\x08\x02":
            status = await health.read()
        if num_signals == 1:
            while stack.engine.running:
                stack.engine.step()
            assert [frame async for frame in call]
        else:
            process.send_signal(signal.SIGTERM)
            failure = await stack.fails(call)
            assert failure.info.reason == "DRAINING"
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors
    assert b"Traceback" not in errors


async def test_a_port_in_use_is_one_clear_line(stack: Stack) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "frontend", "--http-port", "0", "--admin-port", "0"),
        *("--port", stack.frontend.address.rpartition(":")[2]),
        *("--outputs-bind", "tcp://127.0.0.1:0"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert b"Traceback" not in errors
    assert f"port: cannot bind {stack.frontend.address}" in errors.decode()
