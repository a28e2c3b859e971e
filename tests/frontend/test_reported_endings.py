"""Public bug reports on how requests end: the engine's failures, its death, clients that
hang up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pagewire.launch import ORPHANED
from pagewire.obs.ready import read_ready_file
from pagewire.v1 import common_pb2, inference_pb2
from tests.frontend.test_lifecycle import start_process
from tests.frontend.test_metrics import scrape
from tests.support.fake_engine import NUM_BLOCKS, TEXT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.frontend.conftest import Stack

NOT_SERVING = 2
UNARY = "/pagewire.v1.InferenceService/Generate"
LONG = common_pb2.SamplingParams(max_tokens=1000)
NUM_STREAMS = 8


async def at_rest(stack: Stack) -> None:
    """Nothing is left of any request, here or in the engine."""
    dispatcher = stack.frontend.dispatcher
    await stack.until(lambda: dispatcher.admission.requests == 0)
    await stack.until(lambda: not dispatcher.engine_side.aborted)
    assert dispatcher.engine_side.live == {}
    assert dispatcher.admission.queued_tokens == 0
    assert (stack.engine.running, stack.engine.waiting) == ({}, {})
    stack.engine.heartbeat()
    await stack.until(
        lambda: (
            (stats := dispatcher.engine_side.stats) is not None
            and (stats.num_running, stats.num_waiting) == (0, 0)
            and stats.num_free_blocks == NUM_BLOCKS
        )
    )


# vllm-project/vllm#56405: a failed generation ended with OK and the reason "aborted".
@pytest.mark.parametrize("streams", [True, False])
async def test_a_failure_in_the_engine_is_never_ok(manual: Stack, streams: bool) -> None:
    def ask(prompt: str, sampling: common_pb2.SamplingParams) -> Any:
        if streams:
            return manual.open(prompt=prompt, sampling_params=sampling)
        return manual.inference.Generate(
            inference_pb2.GenerateRequest(prompt=prompt, sampling_params=sampling), timeout=10
        )

    bad = ask("bad", LONG)
    await manual.engine.wait_running(1)
    cancelled = ask("cancelled", LONG)
    await manual.engine.wait_running(2)
    good = ask("good", common_pb2.SamplingParams(max_tokens=6))
    first, _, third = await manual.engine.wait_running(3)
    for _ in range(4):
        manual.engine.step()
    cancelled.cancel()
    await manual.engine.wait_for(lambda: len(manual.engine.aborted) == 1)
    # The fifth step fails for one request.
    manual.engine.emit({third.id: TEXT[4:5].encode()}, errors={first.id: "the step failed"})
    manual.engine.step()
    if streams:
        text = ""
        while len(text) < 4:
            text += (await bad.read()).delta.text
        assert text == TEXT[:4]
        whole = "".join(frame.delta.text for frame in await manual.rest(good))
    else:
        whole = (await good).outputs[0].text
    failure = await manual.fails(bad)
    assert failure.code is grpc.StatusCode.INTERNAL
    assert failure.message.startswith("the step failed (error id ")
    assert len(failure.message) < 200
    assert whole == TEXT[:6]
    assert await cancelled.code() is grpc.StatusCode.CANCELLED
    await at_rest(manual)


# vllm-project/vllm#19881, #24897: health stayed OK and streams hung.
async def test_a_killed_engine_ends_every_stream_where_none_is_waited_for(
    impatient: Stack,
) -> None:
    calls = [impatient.open(prompt=f"p{i}", sampling_params=LONG) for i in range(NUM_STREAMS)]
    await impatient.engine.wait_running(NUM_STREAMS)
    impatient.engine.step()
    for call in calls:
        await call.read()
    # Nothing but the broken connection says so.
    impatient.engine_client._engine_timeout = impatient.engine_client._clock() + 1e6
    await impatient.engine.kill()
    # Its successor has the address already, and loads its model.
    await impatient.restart_engine(auto=True)
    impatient.engine.silent = True
    failures = [await impatient.fails(call) for call in calls]
    assert {failure.code for failure in failures} == {grpc.StatusCode.UNAVAILABLE}
    assert {failure.info.reason for failure in failures} == {"ENGINE_DEAD"}
    assert await impatient.check() == NOT_SERVING
    failure = await impatient.fails(impatient.open(prompt="new"))
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    impatient.engine.silent = False
    await impatient.until(lambda: impatient.frontend.health.serving)
    short = common_pb2.SamplingParams(max_tokens=3)
    assert (await impatient.stream(prompt="x", sampling_params=short)).text == TEXT[:3]
    await at_rest(impatient)


# vllm-project/vllm#7222: the next server must find the ports free.
async def test_a_frontend_whose_launcher_was_killed_does_not_drain(
    make_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    stack = await make_stack(auto=False, serving=False)
    await stack.frontend.close()
    process = await start_process(stack, tmp_path / "ready.json", "--drain-timeout", "60")
    facts = read_ready_file(tmp_path / "ready.json")
    assert facts is not None
    async with grpc.aio.insecure_channel(facts["grpc"]) as channel:
        raw = channel.unary_stream("/pagewire.v1.InferenceService/GenerateStream")
        request = inference_pb2.GenerateStreamRequest(prompt="a", sampling_params=LONG)
        call = raw(request.SerializeToString(), timeout=60)
        await stack.engine.wait_running()
        process.send_signal(ORPHANED)
        failure = await stack.fails(call)
        assert failure.code is grpc.StatusCode.UNAVAILABLE
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors
    assert b"the launcher was killed" in errors


# ROCm/ATOM#1562: only streaming handlers noticed that the client had gone.
@pytest.mark.parametrize("hangs_up", [False, True])
async def test_unary_clients_that_go_leave_nothing(
    make_stack: Callable[..., Stack], hangs_up: bool
) -> None:
    stack = await make_stack(step_s=0.002)
    request = inference_pb2.GenerateRequest(prompt="a", sampling_params=LONG)
    for number in range(1, 31):
        channel = grpc.aio.insecure_channel(
            stack.frontend.address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        raw = channel.unary_unary(UNARY)
        call = asyncio.ensure_future(raw(request.SerializeToString(), timeout=60))
        await stack.engine.wait_running()
        if hangs_up:
            await channel.close(None)
        else:
            call.cancel()
        await stack.engine.wait_for(
            lambda number=number: len(stack.engine.aborted) == number  # type: ignore[misc]
        )
        await asyncio.gather(call, return_exceptions=True)
        await channel.close()
    await at_rest(stack)
    got = await scrape(stack)
    assert got.value("vllm:request_success_total", finished_reason="abort") == 30
    assert got.value("vllm:e2e_request_latency_seconds_count") == 30
    assert got.value("pagewire_rpcs_handled_total", method=UNARY, code="CANCELLED") == 30
