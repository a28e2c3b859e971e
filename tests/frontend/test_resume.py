"""Clients that lose their connection, come back, and get the rest."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.messages import Add
from tests.frontend.test_replay import Reader, hashed, prompt, replace, undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Stack

RUN_ON = inference_pb2.ResumeOptions(when_lost="WHEN_LOST_RUN_ON")
PAUSE = inference_pb2.ResumeOptions(when_lost="WHEN_LOST_PAUSE")
TTL = {"resume_ttl": 30.0}


@pytest.fixture
async def kept(make_stack: Callable[..., Stack]) -> Stack:
    """The test says when the engine steps; what is lost is kept for long."""
    return await make_stack(auto=False, next_token=hashed, config=TTL)


def start(stack: Stack, max_tokens: int = 20, *, resumable: Any = RUN_ON, **fields: Any) -> Any:
    return stack.open(
        prompt_token_ids=common_pb2.TokenIds(ids=prompt(0)),
        sampling_params=common_pb2.SamplingParams(
            max_tokens=max_tokens, **fields.pop("params", {})
        ),
        return_token_ids=fields.pop("return_token_ids", True),
        request_id="r",
        resumable=resumable,
        **fields,
    )


def resume(stack: Stack, *sequences: dict[str, int], request_id: str = "r", **fields: Any) -> Any:
    received = [inference_pb2.ReceivedSequence(**sequence) for sequence in sequences]
    point = inference_pb2.ResumePoint(sequences=received)
    return stack.open(request_id=request_id, resume_from=point, **fields)


async def lose(stack: Stack, call: Any) -> None:
    """The connection is gone, and the frontend knows."""
    call.cancel()
    held = stack.frontend.resumables._held["r"]
    await stack.until(lambda: held.reader is None)


async def steps(stack: Stack, count: int) -> None:
    """Whose text has come to the frontend."""
    for _ in range(count):
        stack.engine.step()
    total = sum(len(request.output) for request in stack.engine.running.values())
    live = stack.frontend.dispatcher.engine_side.live
    await stack.until(lambda: sum(state.num_acked for state in live.values()) == total)


async def at_rest(stack: Stack) -> None:
    dispatcher = stack.frontend.dispatcher
    await stack.until(lambda: dispatcher.admission.requests == 0)
    side = dispatcher.engine_side
    await stack.until(lambda: not side.aborted and not stack.engine.running)
    assert (side.live, side.paused, side.replay.waiting) == ({}, {}, {})
    await stack.tokenizer.wait_for(lambda: not stack.tokenizer.sequences)


@pytest.mark.parametrize("resumable", [RUN_ON, PAUSE], ids=["run on", "pause"])
@pytest.mark.parametrize("has", [0, 3], ids=["nothing arrived", "some arrived"])
async def test_the_rest_and_nothing_else(kept: Stack, resumable: Any, has: int) -> None:
    call = start(kept, resumable=resumable)
    (request,) = await kept.engine.wait_running()
    await steps(kept, 3)
    await steps(kept, 2)
    await lose(kept, call)
    if resumable is PAUSE:
        await kept.engine.wait_for(lambda: kept.engine.aborted == [request.id])
        assert kept.engine.running == {}
    else:
        await steps(kept, 4)
    again = Reader(resume(kept, {"num_tokens": has}))
    if resumable is PAUSE:
        (request,) = await kept.engine.wait_running()
        assert request.add.num_output_tokens == 5
    for _ in range(20 - len(request.output)):
        kept.engine.step()
    await again.done
    whole = undisturbed(prompt(0), 20)
    assert again.ids == whole[has:]
    assert again.text == bytes(whole[has:]).decode()
    assert again.final.usage.completion_tokens == 20
    assert again.final.request_id == "r"
    await at_rest(kept)


async def test_characters(kept: Stack) -> None:
    call = start(kept, return_token_ids=False)
    await kept.engine.wait_running()
    await steps(kept, 6)
    await lose(kept, call)
    again = Reader(resume(kept, {"num_chars": 4}))
    for _ in range(14):
        kept.engine.step()
    await again.done
    assert again.text == bytes(undisturbed(prompt(0), 20)[4:]).decode()


async def test_it_ends_while_nobody_is_there(kept: Stack) -> None:
    """What came, the final frame too, is had any number of times until the ttl."""
    call = start(kept, 6)
    await kept.engine.wait_running()
    kept.engine.step()
    await call.read()
    await lose(kept, call)
    for _ in range(5):
        kept.engine.step()
    dispatcher = kept.frontend.dispatcher
    await kept.until(lambda: not dispatcher.engine_side.live)
    assert dispatcher.admission.requests == 1, "it holds its place until it is fetched"
    for has in (1, 0, 6):
        again = Reader(resume(kept, {"num_tokens": has}))
        await again.done
        assert again.ids == undisturbed(prompt(0), 6)[has:]
        assert again.final.outputs[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert dispatcher.admission.requests == 0
    await at_rest(kept)


async def test_several_sequences_with_logprobs(kept: Stack) -> None:
    params = {"n": 2, "logprobs": 1, "prompt_logprobs": 0}
    whole = Reader(start(kept, 8, params=params))
    await kept.engine.wait_running(2)
    for _ in range(8):
        kept.engine.step()
    await whole.done
    frames = []
    call = start(kept, 8, params=params)
    await kept.engine.wait_running(2)
    for _ in range(3):
        kept.engine.step()
    first, _ = kept.engine.running.values()
    kept.engine.emit({first.id: [65, 66]})
    while sum(len(f.delta.token_ids) for f in frames) < 8:
        frames.append(await call.read())
    await lose(kept, call)
    again = resume(kept, {"index": 1, "num_tokens": 3}, {"index": 0, "num_tokens": 0})
    for _ in range(5):
        kept.engine.step()
    rest = await kept.rest(again)
    ids: dict[int, list[int]] = {0: [], 1: []}
    logprobs: dict[int, int] = {0: 0, 1: 0}
    for frame in rest[:-1]:
        ids[frame.delta.index] += frame.delta.token_ids
        logprobs[frame.delta.index] += len(frame.delta.logprobs)
    assert ids[0] == [*undisturbed(prompt(0), 3), 65, 66, *ids[0][5:]]
    assert ids[1] == undisturbed(prompt(0), 8)[3:]
    assert logprobs == {0: 8, 1: 5}
    prompts = [f.delta.prompt_logprobs for f in rest[:-1] if f.delta.HasField("prompt_logprobs")]
    assert [len(it.positions) for it in prompts] == [len(prompt(0))]
    assert rest[-1].final.usage.completion_tokens == 16


async def test_the_second_client_takes_over(kept: Stack) -> None:
    first = Reader(start(kept))
    await kept.engine.wait_running()
    await steps(kept, 1)
    await steps(kept, 2)
    await first.wait_ids(3)
    second = Reader(resume(kept, {"num_tokens": 1}))
    await second.wait_ids(2)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await first.done
    assert raised.value.code() is grpc.StatusCode.CANCELLED
    assert "taken the stream over" in (raised.value.details() or "")
    for _ in range(17):
        kept.engine.step()
    await second.done
    assert first.ids == undisturbed(prompt(0), 3)
    assert second.ids == undisturbed(prompt(0), 20)[1:]
    await at_rest(kept)


async def test_positions_that_cannot_be(kept: Stack) -> None:
    reader = Reader(start(kept))
    await kept.engine.wait_running()
    await steps(kept, 3)
    await reader.wait_ids(3)
    for received, field in (
        ({"num_tokens": 4}, "num_tokens"),
        ({"num_tokens": -1}, "num_tokens"),
        ({"num_chars": 9}, "num_chars"),
        ({"index": 1, "num_tokens": 0}, "index"),
        ({}, "received"),
    ):
        failure = await kept.fails(resume(kept, received))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.fields == [f"resume_from.sequences[0].{field}"]
        assert failure.initial == {}
    for _ in range(17):
        kept.engine.step()
    await reader.done
    assert reader.ids == undisturbed(prompt(0), 20), "the first reader was not disturbed"


async def test_what_is_refused(kept: Stack, make_stack: Callable[..., Stack]) -> None:
    failure = await kept.fails(resume(kept, request_id="other"))
    assert (failure.code, failure.resource) == (grpc.StatusCode.NOT_FOUND, "other")
    failure = await kept.fails(resume(kept, request_id=""))
    assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["request_id"])
    for field, value in (
        ("prompt", "x"),
        ("sampling_params", common_pb2.SamplingParams(max_tokens=1)),
        ("model", "fake"),
        ("resumable", RUN_ON),
        ("report_queue", True),
    ):
        failure = await kept.fails(resume(kept, **{field: value}))
        assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
    options = inference_pb2.ResumeOptions(when_lost=9)  # type: ignore[arg-type]
    failure = await kept.fails(start(kept, resumable=options))
    assert failure.fields == ["resumable.when_lost"]
    plain = await make_stack(auto=False)
    for call, field in ((start(plain), "resumable"), (resume(plain), "resume_from")):
        failure = await plain.fails(call)
        assert failure.code is grpc.StatusCode.FAILED_PRECONDITION
        assert (failure.info.reason, failure.fields) == ("FEATURE_DISABLED", [field])


async def test_one_that_is_not_resumable_ends_with_its_connection(kept: Stack) -> None:
    call = start(kept, resumable=None)
    (request,) = await kept.engine.wait_running()
    kept.engine.step()
    await call.read()
    call.cancel()
    await kept.engine.wait_for(lambda: kept.engine.aborted == [request.id])
    assert (await kept.fails(resume(kept))).code is grpc.StatusCode.NOT_FOUND
    await at_rest(kept)


@pytest.mark.parametrize("resumable", [RUN_ON, PAUSE], ids=["run on", "pause"])
async def test_nobody_comes_back(make_stack: Callable[..., Stack], resumable: Any) -> None:
    stack = await make_stack(auto=False, next_token=hashed, config={"resume_ttl": 0.2})
    call = start(stack, resumable=resumable)
    (request,) = await stack.engine.wait_running()
    stack.engine.step()
    await call.read()
    await lose(stack, call)
    await stack.engine.wait_for(lambda: stack.engine.aborted == [request.id])
    await at_rest(stack)
    assert (await stack.fails(resume(stack))).code is grpc.StatusCode.NOT_FOUND
    done = Reader(start(stack, 1))
    await stack.engine.wait_running()
    stack.engine.step()
    await done.done
    assert stack.frontend.resumables._held
    await stack.until(lambda: not stack.frontend.resumables._held)
    assert not stack.frontend.resumables._kept


async def test_cancel_ends_it_for_good(kept: Stack) -> None:
    cancel = inference_pb2.CancelRequest(request_id="r")
    call = start(kept)
    (request,) = await kept.engine.wait_running()
    kept.engine.step()
    await call.read()
    await lose(kept, call)
    await kept.inference.Cancel(cancel)
    await kept.engine.wait_for(lambda: kept.engine.aborted == [request.id])
    assert (await kept.fails(resume(kept))).code is grpc.StatusCode.NOT_FOUND
    await at_rest(kept)
    # One that is read ends as ever.
    call = start(kept)
    await kept.engine.wait_running()
    await kept.inference.Cancel(cancel)
    assert (await kept.fails(call)).code is grpc.StatusCode.CANCELLED
    assert (await kept.fails(resume(kept))).code is grpc.StatusCode.NOT_FOUND
    await at_rest(kept)


@pytest.mark.parametrize("resumable", [RUN_ON, PAUSE], ids=["run on", "pause"])
async def test_the_deadline_goes_on_counting(kept: Stack, resumable: Any) -> None:
    call = start(kept, resumable=resumable, deadline_s=0.6)
    await kept.engine.wait_running()
    kept.engine.step()
    await call.read()
    await lose(kept, call)
    again = resume(kept, {"num_tokens": 1})
    failure = await kept.fails(again)
    assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await at_rest(kept)
    call = start(kept, resumable=resumable, deadline_s=0.6)
    await kept.engine.wait_running()
    await lose(kept, call)
    await at_rest(kept)
    assert (await kept.fails(resume(kept))).code is grpc.StatusCode.NOT_FOUND


async def test_places_and_names_are_held(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, config=TTL | {"max_requests": 1})
    call = start(stack)
    await stack.engine.wait_running()
    await lose(stack, call)
    failure = await stack.fails(stack.open(prompt="x"))
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    failure = await stack.fails(start(stack))
    assert failure.code is grpc.StatusCode.ALREADY_EXISTS
    reader = Reader(resume(stack))
    for _ in range(20):
        stack.engine.step()
    await reader.done
    for name in ("a", "b", "c"):
        fields = {"sampling_params": common_pb2.SamplingParams(max_tokens=1), "resumable": RUN_ON}
        other = Reader(stack.open(prompt="x", request_id=name, **fields))
        await stack.engine.wait_running()
        stack.engine.step()
        await other.done
    assert list(stack.frontend.resumables._held) == ["c"], "what is kept is bounded too"


async def test_engine_death_while_nobody_is_there(kept: Stack) -> None:
    call = start(kept)
    await kept.engine.wait_running()
    await steps(kept, 3)
    await lose(kept, call)
    await replace(kept, auto=False)
    again = Reader(resume(kept, {"num_tokens": 3}))
    await kept.engine.wait_running()
    for _ in range(17):
        kept.engine.step()
    await again.done
    assert again.ids == undisturbed(prompt(0), 20)[3:]


async def test_a_paused_request_sits_out_an_engines_death(kept: Stack) -> None:
    call = start(kept, resumable=PAUSE)
    await kept.engine.wait_running()
    await steps(kept, 3)
    await lose(kept, call)
    await replace(kept, auto=False)
    again = Reader(resume(kept))
    await kept.engine.wait_running()
    assert len([c for c in kept.engine.commands if isinstance(c, Add)]) == 1
    for _ in range(17):
        kept.engine.step()
    await again.done
    assert again.ids == undisturbed(prompt(0), 20)


async def test_a_failure_waits_for_its_client(kept: Stack) -> None:
    call = start(kept)
    (request,) = await kept.engine.wait_running()
    await steps(kept, 1)
    await steps(kept, 1)
    await lose(kept, call)
    kept.engine.emit(errors={request.id: "out of luck"})
    state = kept.frontend.resumables._held["r"].state
    await kept.until(lambda: state.outbox.ended)
    again = resume(kept, {"num_tokens": 1})
    frame = await again.read()
    assert list(frame.delta.token_ids) == undisturbed(prompt(0), 2)[1:]
    assert (await kept.fails(again)).code is grpc.StatusCode.INTERNAL
    assert (await kept.fails(resume(kept))).code is grpc.StatusCode.NOT_FOUND
    await at_rest(kept)


async def test_a_shutdown_waits_for_nobody(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, config=TTL | {"drain_timeout": 0.1})
    call = start(stack)
    await stack.engine.wait_running()
    await lose(stack, call)
    await asyncio.wait_for(stack.frontend.drain(), 60)
    assert stack.frontend.dispatcher.admission.requests == 0
    assert not stack.frontend.resumables._held


async def test_resuming_while_the_server_drains(kept: Stack) -> None:
    call = start(kept)
    await kept.engine.wait_running()
    await steps(kept, 3)
    await lose(kept, call)
    draining = asyncio.ensure_future(kept.frontend.drain())
    await asyncio.sleep(0)
    again = Reader(resume(kept, {"num_tokens": 3}))
    await again_reads(kept)
    for _ in range(17):
        kept.engine.step()
    await again.done
    await draining
    assert again.ids == undisturbed(prompt(0), 20)[3:]


async def again_reads(stack: Stack) -> None:
    await stack.until(lambda: stack.frontend.resumables._held["r"].reader is not None)
