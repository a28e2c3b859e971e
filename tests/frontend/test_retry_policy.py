"""deploy/service_config.json, obeyed by grpc's own client: what was refused is tried again,
and what runs is not started twice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pagewire.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from pagewire.wire.messages import Add
from tests.frontend.conftest import Collected
from tests.frontend.test_metrics import scrape
from tests.support.fake_engine import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Stack

CONFIG = (Path(__file__).parents[2] / "deploy" / "service_config.json").read_text()


def connect(*stacks: Stack) -> grpc.aio.Channel:
    addresses = ",".join(stack.frontend.address for stack in stacks)
    return grpc.aio.insecure_channel(f"ipv4:{addresses}", [("grpc.service_config", CONFIG)])


def generate(channel: grpc.aio.Channel, max_tokens: int) -> Any:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens)
    request = inference_pb2.GenerateStreamRequest(prompt="x", sampling_params=sampling)
    stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
    return stub.GenerateStream(request, timeout=60)


def num_adds(stack: Stack) -> int:
    return sum(isinstance(command, Add) for command in stack.engine.commands)


async def num_rejections(stack: Stack) -> float:
    samples = (await scrape(stack))._samples.items()
    return sum(value for (name, _), value in samples if name == "vllm:admission_rejections_total")


async def test_a_full_server_is_asked_again(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, config={"max_requests": 1})
    first = stack.open(
        prompt="x", sampling_params=common_pb2.SamplingParams(max_tokens=50), deadline_s=60
    )
    await stack.engine.wait_running()
    async with connect(stack) as channel:
        call = generate(channel, 3)
        while not await num_rejections(stack):
            pass
        first.cancel()
        await stack.engine.wait_for(lambda: num_adds(stack) == 2)
        for _ in range(3):
            stack.engine.step()
        assert Collected([frame async for frame in call]).text == TEXT[:3]
    assert num_adds(stack) == 2


async def test_a_server_that_drains_is_left(make_stack: Callable[..., Stack]) -> None:
    draining, other = await make_stack(step_s=0.001), await make_stack(step_s=0.001)
    draining.frontend.dispatcher.drain()
    async with connect(draining, other) as channel:
        for count in range(1, 7):
            frames = [frame async for frame in generate(channel, count)]
            assert Collected(frames).text == TEXT[:count]
    assert (num_adds(draining), num_adds(other)) == (0, 6)


async def test_a_stream_that_broke_is_not_started_again(impatient: Stack) -> None:
    async with connect(impatient) as channel:
        for num_steps in (0, 2):
            # Accepted is enough: the headers are out before the first token.
            call = generate(channel, 50)
            await call.initial_metadata()
            (request,) = await impatient.engine.wait_running()
            for _ in range(num_steps):
                impatient.engine.step()
                await call.read()
            impatient.engine.abort_now(request.id)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    # The client makes its other attempts before it tells of a failure.
    assert num_adds(impatient) == 2
