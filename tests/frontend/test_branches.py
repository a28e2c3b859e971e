"""n sequences for one request: one stream, one outcome, one usage."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from frontend.stream import Delta, Finish, Outbox, SequenceEnd
from pagewire.types import FinishReason, Timings, Usage
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.codec import unpack_request_ids
from pagewire.wire.messages import Abort, Add
from tests.frontend.test_metrics import scrape
from tests.support.fake_engine import EOS, TEXT, FakeRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Collected, Stack

LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP


def sampling(**fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**fields)


def shifted(request: FakeRequest) -> int:
    """Sequence i begins at letter i."""
    return ord(TEXT[(len(request.output) + request.add.sample_index) % len(TEXT)])


def texts(got: Collected, n: int) -> list[str]:
    return ["".join(d.text for d in got.deltas if d.index == index) for index in range(n)]


def adds(stack: Stack) -> list[Add]:
    return [command for command in stack.engine.commands if isinstance(command, Add)]


async def running(stack: Stack, n: int) -> list[FakeRequest]:
    """In order of index."""
    requests = await stack.engine.wait_running(n)
    return sorted(requests, key=lambda request: request.add.sample_index)


# sgl-project/sglang#8417: one choice alone got a finish reason, or got it twice.
async def test_each_sequence_finishes_once_and_usage_comes_once(
    make_stack: Callable[..., Stack],
) -> None:
    stack = await make_stack(step_s=0.002, next_token=shifted)
    params = sampling(n=3, temperature=1, seed=9, max_tokens=4, ignore_eos=True)
    got = await stack.stream(prompt="hello", sampling_params=params, return_token_ids=True)
    one = await stack.unary(prompt="hello", sampling_params=params, return_token_ids=True)
    assert [(o.index, o.finish_reason) for o in got.final.outputs] == [
        (0, LENGTH),
        (1, LENGTH),
        (2, LENGTH),
    ]
    assert {delta.index for delta in got.deltas} == {0, 1, 2}
    assert texts(got, 3) == [TEXT[index : index + 4] for index in range(3)]
    assert [o.text for o in one.outputs] == texts(got, 3)
    for output in one.outputs:
        ids = [t for d in got.deltas if d.index == output.index for t in d.token_ids]
        assert list(output.token_ids) == ids
        assert output.finish_reason == LENGTH
    assert [o.index for o in one.outputs] == [0, 1, 2]
    assert one.usage == got.final.usage
    assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (5, 12)
    assert one.seed == got.final.seed == 9
    page = await scrape(stack)
    assert page.value("vllm:request_success_total", finished_reason="length") == 2
    assert page.value("vllm:request_generation_tokens_sum") == 24
    assert page.value("vllm:request_prompt_tokens_sum") == 10
    assert page.value("vllm:prompt_tokens_total") == 10
    assert page.value("vllm:time_to_first_token_seconds_count") == 2


async def test_what_the_engine_gets(stack: Stack) -> None:
    params = sampling(n=3, seed=5, max_tokens=2, prompt_logprobs=1, logprobs=0)
    await stack.unary(prompt="hello", sampling_params=params, tenant="t", priority=2)
    first, *others = adds(stack)
    assert [first.sample_index, *(add.sample_index for add in others)] == [0, 1, 2]
    assert [first.leader_id, *(add.leader_id for add in others)] == [
        None,
        first.request_id,
        first.request_id,
    ]
    assert first.sampling.prompt_logprobs == 1
    for add in others:
        assert add.sampling.prompt_logprobs is None
        assert add.sampling.seed == first.sampling.seed == 5
        assert (add.token_ids, add.tenant, add.priority) == (first.token_ids, "t", 2)
    await stack.unary(prompt="hello", sampling_params=sampling(max_tokens=1))
    assert (adds(stack)[3].sample_index, adds(stack)[3].leader_id) == (0, None)


async def test_prompt_logprobs_come_once_and_each_has_its_own(stack: Stack) -> None:
    params = sampling(n=2, max_tokens=3, prompt_logprobs=0, logprobs=0)
    got = await stack.stream(prompt="hello", sampling_params=params, return_token_ids=True)
    told = [delta for delta in got.deltas if delta.HasField("prompt_logprobs")]
    assert len(told) == 1
    assert got.deltas[0].HasField("prompt_logprobs")
    for index in range(2):
        mine = [delta for delta in got.deltas if delta.index == index]
        ids = [t for delta in mine for t in delta.token_ids]
        assert [p.token.token_id for d in mine for p in d.logprobs] == ids
        assert len(ids) == 3
    one = await stack.unary(prompt="hello", sampling_params=params)
    assert [len(output.logprobs) for output in one.outputs] == [3, 3]
    assert len(one.prompt_logprobs.positions) == 5


async def test_a_stop_string_ends_its_own_sequence_alone(manual: Stack) -> None:
    call = manual.open(prompt="x", sampling_params=sampling(n=3, max_tokens=6, stop=["ick"]))
    first, second, third = await running(manual, 3)
    manual.engine.emit({first.id: b"a", second.id: b"quick", third.id: b"c"})
    await manual.engine.wait_for(lambda: manual.engine.aborted == [second.id])
    assert set(manual.engine.running) == {first.id, third.id}
    manual.engine.emit({first.id: b"bcdef", third.id: b"defgh"})
    frames = [frame async for frame in call]
    final = frames[-1].final
    joined = {i: "".join(f.delta.text for f in frames[:-1] if f.delta.index == i) for i in range(3)}
    assert joined == {0: "abcdef", 1: "qu", 2: "cdefgh"}
    assert [o.finish_reason for o in final.outputs] == [LENGTH, STOP, LENGTH]
    assert [o.stop_match.stop_string for o in final.outputs] == ["", "ick", ""]
    assert final.usage.completion_tokens == 6 + 5 + 6
    assert manual.engine.aborted == [second.id]


async def test_cancel_ends_all_in_one_command(manual: Stack) -> None:
    call = manual.open(request_id="r", prompt="x", sampling_params=sampling(n=4, max_tokens=9))
    requests = await running(manual, 4)
    manual.engine.emit({requests[1].id: b"ab"})
    await manual.inference.Cancel(inference_pb2.CancelRequest(request_id="r"))
    failure = await manual.fails(call)
    assert failure.code is grpc.StatusCode.CANCELLED
    await manual.engine.wait_for(lambda: not manual.engine.running)
    (abort,) = (c for c in manual.engine.commands if isinstance(c, Abort))
    assert unpack_request_ids(abort.request_ids) == [request.id for request in requests]
    dispatcher = manual.frontend.dispatcher
    await manual.until(lambda: dispatcher.admission.requests == 0)
    assert not dispatcher.engine_side.live
    assert not dispatcher.text_stream._live


async def test_a_client_that_hangs_up_ends_all(manual: Stack) -> None:
    request = inference_pb2.GenerateRequest(prompt="x", sampling_params=sampling(n=3, max_tokens=9))
    call = manual.inference.Generate(request)
    requests = await running(manual, 3)
    call.cancel()
    await manual.engine.wait_for(lambda: len(manual.engine.aborted) == 3)
    assert manual.engine.aborted == [request.id for request in requests]


async def test_a_failed_sequence_fails_the_request(manual: Stack) -> None:
    call = manual.open(prompt="x", sampling_params=sampling(n=3, max_tokens=9))
    first, second, third = await running(manual, 3)
    manual.engine.emit({first.id: b"ab"}, errors={second.id: "out of luck"})
    failure = await manual.fails(call)
    assert failure.code is grpc.StatusCode.INTERNAL
    await manual.engine.wait_for(lambda: not manual.engine.running)
    assert sorted(manual.engine.aborted) == sorted([first.id, third.id])


async def test_only_unfinished_sequences_go_to_the_next_engine(manual: Stack) -> None:
    call = manual.open(
        prompt="x", sampling_params=sampling(n=3, max_tokens=4, seed=1), return_token_ids=True
    )
    first, second, third = await running(manual, 3)
    manual.engine.emit({first.id: b"abcd", second.id: b"ef"})
    frames = [await call.read()]
    while sum(len(frame.delta.token_ids) for frame in frames) < 6:
        frames.append(await call.read())
    await manual.engine.kill()
    await manual.restart_engine(auto=False)
    again = await running(manual, 2)
    assert [request.add.sample_index for request in again] == [1, 2]
    assert [request.add.num_output_tokens for request in again] == [2, 0]
    # The first is not there any more, so nobody waits for it.
    assert {request.add.leader_id for request in again} == {first.id}
    manual.engine.emit({again[0].id: b"gh", again[1].id: b"ijkl"})
    frames += await manual.rest(call)
    joined = ["".join(f.delta.text for f in frames if f.delta.index == i) for i in range(3)]
    assert joined == ["abcd", "efgh", "ijkl"]
    assert frames[-1].final.usage.completion_tokens == 12
    assert third.id not in manual.engine.running


async def test_a_deadline_ends_all(manual: Stack) -> None:
    call = manual.open(prompt="x", sampling_params=sampling(n=2, max_tokens=9), deadline_s=30)
    first, _ = await running(manual, 2)
    manual.engine.miss_deadline(first.id)
    failure = await manual.fails(call)
    assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await manual.engine.wait_for(lambda: not manual.engine.running)


@pytest.mark.parametrize("n", [0, -1, 65, 2**31 - 1])
async def test_how_many_there_may_be(stack: Stack, n: int) -> None:
    failure = await stack.fails(stack.unary(prompt="x", sampling_params=sampling(n=n)))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.fields == ["sampling_params.n"]
    assert str(n) in failure.message
    assert adds(stack) == []
    got = await stack.unary(prompt="x", sampling_params=sampling(n=64, max_tokens=1))
    assert len(got.outputs) == 64


async def test_outbox_keeps_sequences_apart_and_serves_them_in_turn() -> None:
    outbox = Outbox()
    for index, text in ((0, "a"), (1, "x"), (0, "b")):
        outbox.put(text, index=index)
    assert await outbox.take() == Delta("ab", [])
    outbox.put("c")
    assert await outbox.take() == Delta("x", [], index=1)
    assert await outbox.take() == Delta("c", [])
    reader = asyncio.ensure_future(outbox.take_all())
    await asyncio.sleep(0)
    outbox.put("z", [1], index=1)
    ends = tuple(SequenceEnd(index, FinishReason.STOP, 1) for index in range(2))
    finish = Finish("r", "m", ends, Usage(1, 2, 0), Timings(0, 0, 0), 0)
    outbox.finish(finish)
    assert await reader == ([Delta("", []), Delta("z", [1], index=1)], finish)


def ends_after(counts: list[int]) -> Callable[[FakeRequest], int]:
    """Sequence i ends with its counts[i]-th token; the longer, the less likely a token."""

    def next_token(request: FakeRequest) -> int:
        index = request.add.sample_index
        return EOS if len(request.output) + 1 == counts[index] else ord("a") + index

    return next_token


async def test_best_of_returns_the_likeliest(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(next_token=ends_after([4, 1, 3, 2]))
    params = sampling(n=2, best_of=4, max_tokens=9, prompt_logprobs=0)
    got = await stack.unary(prompt="hello", sampling_params=params, return_token_ids=True)
    assert [(o.index, list(o.token_ids)) for o in got.outputs] == [
        (0, [EOS]),
        (1, [ord("d"), EOS]),
    ]
    # All that was drawn was paid for.
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (5, 4 + 1 + 3 + 2)
    assert len(got.prompt_logprobs.positions) == 5
    assert [len(output.logprobs) for output in got.outputs] == [0, 0]
    assert [add.sampling.logprobs for add in adds(stack)] == [0] * 4


async def test_best_of_reports_logprobs_where_they_are_wanted(
    make_stack: Callable[..., Stack],
) -> None:
    stack = await make_stack(next_token=ends_after([2, 1]))
    params = sampling(best_of=2, max_tokens=9, logprobs=1)
    got = await stack.unary(prompt="hello", sampling_params=params)
    assert [len(output.logprobs) for output in got.outputs] == [1]
    assert [add.sampling.logprobs for add in adds(stack)] == [1, 1]


@pytest.mark.parametrize("fields", [{"n": 3, "best_of": 2}, {"best_of": 65}, {"best_of": 0}])
async def test_how_many_best_of_may_draw(stack: Stack, fields: dict[str, int]) -> None:
    failure = await stack.fails(stack.unary(prompt="x", sampling_params=sampling(**fields)))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.fields == ["sampling_params.best_of"]
    assert f"best_of is {fields['best_of']}" in failure.message


async def test_best_of_is_not_for_streams(stack: Stack) -> None:
    params = sampling(n=2, best_of=3, max_tokens=1)
    failure = await stack.fails(stack.open(prompt="x", sampling_params=params))
    assert failure.fields == ["sampling_params.best_of"]
    assert adds(stack) == []
    params = sampling(n=2, best_of=2, max_tokens=1)
    assert len((await stack.stream(prompt="x", sampling_params=params)).final.outputs) == 2
