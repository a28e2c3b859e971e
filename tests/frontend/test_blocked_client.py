"""A client that reads nothing: its handler sleeps in the middle of a write, whatever comes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from pagewire.v1 import common_pb2, inference_pb2
from tests.frontend.http2 import Connection
from tests.frontend.test_protocol import STREAM

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from frontend.request import RequestState
    from tests.frontend.conftest import Stack

RUN_ON = inference_pb2.ResumeOptions(when_lost="WHEN_LOST_RUN_ON")
NUM_TOKENS = 200


class Blocked(NamedTuple):
    connection: Connection
    call: int
    state: RequestState


async def block(stack: Stack, **fields: Any) -> Blocked:
    """A stream of NUM_TOKENS, of which the client has no window for half."""
    connection = Connection(window=16)
    await connection.open(stack.frontend.address)
    request = inference_pb2.GenerateStreamRequest(
        prompt="x", sampling_params=common_pb2.SamplingParams(max_tokens=NUM_TOKENS), **fields
    )
    call = connection.call(STREAM, request.SerializeToString())
    await stack.engine.wait_running()
    (state,) = stack.frontend.dispatcher.engine_side.live.values()
    for count in range(1, NUM_TOKENS // 2):
        stack.engine.step()
        await stack.until(lambda count=count: state.num_acked == count)  # type: ignore[misc]
    assert state.outbox._pending
    return Blocked(connection, call, state)


async def rest_of(stack: Stack, blocked: Blocked) -> str:
    blocked.connection.grant(blocked.call, 2**20)
    await blocked.connection.until_end(blocked.call)
    messages = blocked.connection.messages(blocked.call)
    await blocked.connection.close()
    await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 0)
    frames = map(inference_pb2.GenerateStreamResponse.FromString, messages)
    return "".join(frame.delta.text for frame in frames)


async def test_its_connection_ends(manual: Stack, caplog: pytest.LogCaptureFixture) -> None:
    blocked = await block(manual)
    await blocked.connection.close()
    await manual.until(lambda: manual.frontend.dispatcher.admission.requests == 0)
    assert blocked.state.outbox._reader is None
    assert blocked.state.outcome == "abort"
    assert not [record for record in caplog.records if record.exc_info]


async def test_the_server_ends(
    make_stack: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    stack = await make_stack(auto=False, config={"drain_timeout": 0.1})
    blocked = await block(stack)
    await stack.frontend.close()
    assert blocked.state.outbox._reader is None
    assert stack.frontend.dispatcher.admission.requests == 0
    await blocked.connection.close()
    assert not [record for record in caplog.records if record.exc_info]


async def test_the_engine_ends(make_stack: Callable[..., Any]) -> None:
    """What was there before is delivered first."""
    stack = await make_stack(auto=False, config={"engine_restart_timeout": 0})
    blocked = await block(stack)
    await stack.engine.kill()
    await stack.until(lambda: blocked.state.outbox.ended)
    assert len(await rest_of(stack, blocked)) == NUM_TOKENS // 2 - 1


async def test_another_takes_its_stream_over(make_stack: Callable[..., Any]) -> None:
    """And has all of it, while the write of the first one still waits."""
    stack = await make_stack(auto=False, config={"resume_ttl": 30.0})
    blocked = await block(stack, request_id="r", resumable=RUN_ON)
    other = stack.open(request_id="r", resume_from=inference_pb2.ResumePoint())
    reader = asyncio.ensure_future(stack.rest(other))
    while not reader.done():
        stack.engine.step()
        await asyncio.sleep(0.002)
    whole = "".join(frame.delta.text for frame in reader.result())
    assert len(whole) == NUM_TOKENS
    begun = await rest_of(stack, blocked)
    assert len(begun) < NUM_TOKENS // 2
    assert whole.startswith(begun)
