"""Cancel, disconnect and deadline: one path, that reaches the engine at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.messages import Abort, Add

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Stack

LONG = common_pb2.SamplingParams(max_tokens=1000)


async def aborted_once(stack: Stack, internal_id: int) -> None:
    await stack.engine.wait_for(lambda: internal_id in stack.engine.aborted)
    assert stack.engine.aborted == [internal_id]
    await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 0)
    assert stack.frontend.dispatcher.admission.queued_tokens == 0
    assert stack.frontend.dispatcher.engine_side.live == {}
    assert len([c for c in stack.engine.commands if isinstance(c, Abort)]) == 1


async def test_cancel_while_queued_in_the_engine(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, max_num_seqs=1)
    first = stack.open(prompt="a", sampling_params=LONG)
    await stack.engine.wait_running(1)
    second = stack.open(prompt="b", sampling_params=LONG)
    await stack.engine.wait_for(lambda: len(stack.engine.waiting) == 1)
    (queued,) = stack.engine.waiting.values()
    second.cancel()
    await stack.engine.wait_for(lambda: stack.engine.aborted == [queued.id])
    assert not stack.engine.waiting
    assert len(stack.engine.running) == 1
    first.cancel()


async def test_cancel_before_the_first_token(manual: Stack) -> None:
    call = manual.open(prompt="a", sampling_params=LONG)
    (request,) = await manual.engine.wait_running()
    call.cancel()
    await aborted_once(manual, request.id)


async def test_cancel_in_decode(manual: Stack) -> None:
    call = manual.open(prompt="a", sampling_params=LONG)
    (request,) = await manual.engine.wait_running()
    manual.engine.step()
    await call.read()
    call.cancel()
    await aborted_once(manual, request.id)


async def test_cancel_of_a_unary_call(manual: Stack) -> None:
    call = manual.inference.Generate(
        inference_pb2.GenerateRequest(prompt="a", sampling_params=LONG)
    )
    (request,) = await manual.engine.wait_running()
    manual.engine.step()
    call.cancel()
    await aborted_once(manual, request.id)


async def test_disconnect(manual: Stack) -> None:
    channel = grpc.aio.insecure_channel(manual.frontend.address)
    raw = channel.unary_stream("/pagewire.v1.InferenceService/GenerateStream")
    call = raw(
        inference_pb2.GenerateStreamRequest(prompt="a", sampling_params=LONG).SerializeToString()
    )
    (request,) = await manual.engine.wait_running()
    manual.engine.step()
    await call.read()
    await channel.close(None)
    await aborted_once(manual, request.id)


async def test_cancel_while_a_write_is_blocked(manual: Stack) -> None:
    """The client reads nothing; the handler sits in a write when the cancel comes."""
    call = manual.open(prompt="a", sampling_params=LONG)
    (request,) = await manual.engine.wait_running()
    big = list(b"x" * 60_000)
    for _ in range(16):
        manual.engine.running[request.id].output.clear()
        manual.engine.emit({request.id: big[:900]})
    call.cancel()
    await aborted_once(manual, request.id)


async def test_the_abort_leaves_in_the_handlers_own_turn(
    manual: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No turn of the loop between the handler's exit and the Abort on the wire."""
    call = manual.open(prompt="a", sampling_params=LONG)
    (request,) = await manual.engine.wait_running()
    turns: list[str] = []
    dispatcher = manual.frontend.dispatcher
    real_end, real_send = dispatcher.end, dispatcher.engine_side.pool.links[0].client._send

    def end(*arguments: Any) -> None:
        asyncio.get_running_loop().call_soon(turns.append, "next turn")
        turns.append("exit")
        real_end(*arguments)

    def send(command: Any) -> bool:
        if isinstance(command, Abort):
            turns.append("abort")
        return real_send(command)

    monkeypatch.setattr(dispatcher, "end", end)
    monkeypatch.setattr(dispatcher.engine_side.pool.links[0].client, "_send", send)
    call.cancel()
    await aborted_once(manual, request.id)
    assert turns[:3] == ["exit", "abort", "next turn"]


async def test_cancel_during_tokenization(manual: Stack) -> None:
    manual.tokenizer.gate = asyncio.Event()
    call = manual.open(prompt="a")
    await manual.tokenizer.wait_for(lambda: manual.tokenizer.num_tokenizing == 1)
    call.cancel()
    await manual.tokenizer.wait_for(lambda: manual.tokenizer.num_tokenizing == 0)
    await manual.until(lambda: manual.frontend.dispatcher.admission.requests == 0)
    assert not [c for c in manual.engine.commands if isinstance(c, Add | Abort)]


async def test_cancel_rpc_ends_the_call_with_cancelled(manual: Stack) -> None:
    call = manual.open(prompt="a", request_id="it", sampling_params=LONG)
    (request,) = await manual.engine.wait_running()
    manual.engine.step()
    await call.read()
    await manual.inference.Cancel(inference_pb2.CancelRequest(request_id="it"))
    failure = await manual.fails(call)
    assert failure.code is grpc.StatusCode.CANCELLED
    assert failure.info.reason == "CANCELLED"
    await aborted_once(manual, request.id)
    failure = await manual.fails(
        manual.inference.Cancel(inference_pb2.CancelRequest(request_id="it"))
    )
    assert failure.code is grpc.StatusCode.NOT_FOUND
    assert failure.resource == "it"


async def test_cancel_rpc_during_tokenization(manual: Stack) -> None:
    manual.tokenizer.gate = asyncio.Event()
    call = manual.open(prompt="a", request_id="it")
    await manual.tokenizer.wait_for(lambda: manual.tokenizer.num_tokenizing == 1)
    await manual.inference.Cancel(inference_pb2.CancelRequest(request_id="it"))
    failure = await manual.fails(call)
    assert failure.code is grpc.StatusCode.CANCELLED
    assert failure.initial == {}
    await manual.until(lambda: manual.frontend.dispatcher.admission.requests == 0)


async def test_deadline_while_running(manual: Stack) -> None:
    call = manual.open(prompt="a", sampling_params=LONG, deadline_s=0.3)
    (request,) = await manual.engine.wait_running()
    manual.engine.step()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in call:
            pass
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await aborted_once(manual, request.id)


async def test_the_servers_own_deadline(manual: Stack) -> None:
    """A client that only sends grpc-timeout and keeps the stream open."""
    call = manual.open(
        prompt="a", sampling_params=LONG, deadline_s=30, metadata=(("x-request-id", "d"),)
    )
    (request,) = await manual.engine.wait_running()
    (state,) = manual.frontend.dispatcher.engine_side.live.values()
    # The engine sees the deadline first; it is the same deadline.
    state.deadline = manual.frontend.dispatcher._clock()
    manual.engine.abort_now(request.id)
    failure = await manual.fails(call)
    assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert failure.info.reason == "DEADLINE_EXCEEDED"
    assert failure.trailing["x-request-id"] == "d"


async def test_an_abort_by_the_engine_is_never_ok(impatient: Stack) -> None:
    call = impatient.open(prompt="a", sampling_params=LONG)
    (request,) = await impatient.engine.wait_running()
    impatient.engine.step()
    impatient.engine.abort_now(request.id)
    failure = await impatient.fails(call)
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert failure.info.reason == "ENGINE_DEAD"


async def test_deadline_during_tokenization(manual: Stack) -> None:
    manual.tokenizer.gate = asyncio.Event()
    call = manual.open(prompt="a", deadline_s=0.2)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await manual.until(lambda: manual.frontend.dispatcher.admission.requests == 0)
    assert not [c for c in manual.engine.commands if isinstance(c, Add)]


async def test_many_cancels_leave_nothing(stack: Stack) -> None:
    calls = [stack.open(prompt=f"p{i}", sampling_params=LONG) for i in range(50)]
    for call in calls:
        await call.read()
    for call in calls:
        call.cancel()
    await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 0)
    await stack.engine.wait_for(lambda: len(stack.engine.aborted) == 50)
    await stack.until(lambda: not stack.frontend.dispatcher.engine_side.aborted)
    assert stack.frontend.dispatcher.engine_side.live == {}
    assert stack.frontend.dispatcher.text_stream._live == {}
    await stack.tokenizer.wait_for(lambda: not stack.tokenizer.sequences)
    assert (
        await stack.stream(prompt="x", sampling_params=common_pb2.SamplingParams(max_tokens=3))
    ).text
