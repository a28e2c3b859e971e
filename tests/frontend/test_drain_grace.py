"""The two timers of a drain: one to be seen, one to finish."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from pagewire.v1 import common_pb2
from tests.frontend.test_replay import Reader, hashed, prompt, undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Stack

NOT_SERVING = 2


def ask(stack: Stack, index: int) -> Reader:
    return Reader(
        stack.open(
            prompt_token_ids=common_pb2.TokenIds(ids=prompt(index)),
            sampling_params=common_pb2.SamplingParams(max_tokens=4),
            return_token_ids=True,
        )
    )


async def test_grace_then_refusal_then_the_end(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, next_token=hashed, config={"drain_grace": 2.0})
    running = ask(stack, 0)
    await stack.engine.wait_running()
    draining = asyncio.ensure_future(stack.frontend.drain())
    await stack.until(lambda: not stack.frontend.health.serving)
    assert await stack.check() == NOT_SERVING
    late = ask(stack, 1)
    await stack.engine.wait_running(2)
    await stack.until(lambda: stack.frontend.dispatcher._draining)
    failure = await stack.fails(stack.open(prompt="x"))
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert (failure.info.reason, failure.initial) == ("DRAINING", {})
    assert not draining.done()
    for _ in range(4):
        stack.engine.step()
    for index, reader in enumerate((running, late)):
        await reader.done
        assert reader.ids == undisturbed(prompt(index), 4)
    await draining


async def test_a_second_signal_cuts_the_grace_short(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, config={"drain_grace": 60.0, "drain_timeout": 60.0})
    call = stack.open(prompt="x")
    await stack.engine.wait_running()
    draining = asyncio.ensure_future(stack.frontend.drain())
    await stack.until(lambda: not stack.frontend.health.serving)
    for _ in range(2):
        stack.frontend._on_signal()
    failure = await stack.fails(call)
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(draining, 60)
