"""The admission bounds over real sockets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from pagewire.v1 import common_pb2
from pagewire.wire.messages import Add

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Stack

LONG = common_pb2.SamplingParams(max_tokens=100)


async def test_a_burst_never_overshoots(make_stack: Callable[..., Stack]) -> None:
    """40 calls at once on a bound of 5, all of them held up in the tokenizer."""
    stack = await make_stack(auto=False, config={"max_requests": 5})
    stack.tokenizer.gate = asyncio.Event()
    calls = [stack.open(prompt="a", sampling_params=LONG) for _ in range(40)]
    ends = [asyncio.ensure_future(stack.fails(call)) for call in calls]
    await stack.until(lambda: sum(end.done() for end in ends) == 35)
    refused = [end for end in ends if end.done()]
    assert stack.tokenizer.num_tokenizing == 5
    assert stack.frontend.dispatcher.admission.requests == 5
    for end in refused:
        failure = end.result()
        assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert failure.info.reason == "QUEUE_FULL"
        assert failure.info.metadata["queue_depth"] == "5"
        assert failure.retry_s is not None
        assert failure.retry_s > 0
        assert int(failure.trailing["grpc-retry-pushback-ms"]) > 0
        assert failure.initial == {}
    stack.tokenizer.gate.set()
    await stack.engine.wait_running(5)
    assert len([c for c in stack.engine.commands if isinstance(c, Add)]) == 5
    for call in calls:
        call.cancel()
    await asyncio.gather(*ends, return_exceptions=True)


async def test_queued_tokens_are_bounded_until_first_output(
    make_stack: Callable[..., Stack],
) -> None:
    stack = await make_stack(auto=False, config={"max_queued_tokens": 150})
    first = stack.open(prompt="x" * 100, sampling_params=LONG)
    await stack.engine.wait_running(1)
    # Corrected from the estimate of 26 to the 100 that there are.
    assert stack.frontend.dispatcher.admission.queued_tokens == 100
    failure = await stack.fails(stack.open(prompt="y" * 400, sampling_params=LONG))
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    stack.engine.step()
    await first.read()
    assert stack.frontend.dispatcher.admission.queued_tokens == 0
    second = stack.open(prompt="y" * 400, sampling_params=LONG)
    await stack.engine.wait_running(2)
    for call in (first, second):
        call.cancel()


async def test_a_rejected_prompt_gives_its_place_back(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(max_model_len=64, config={"max_requests": 1})
    for _ in range(3):
        failure = await stack.fails(stack.open(prompt="x" * 64))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    got = await stack.stream(prompt="x", sampling_params=common_pb2.SamplingParams(max_tokens=2))
    assert got.text
