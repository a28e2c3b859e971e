"""Streams that survive their engine: nothing lost, repeated or blamed on the wrong one."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.messages import Abort, Add
from tests.frontend.test_metrics import scrape

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Stack
    from tests.support.fake_engine import FakeRequest

POISON = ord("!")
NOT_SERVING = 2


def hashed(request: FakeRequest) -> int:
    """A letter that depends on every id before it, as a model's token does."""
    return letter([*request.prompt_ids, *request.output])


def letter(ids: list[int]) -> int:
    return ord("a") + zlib.crc32(bytes(i % 256 for i in ids)) % 26


def undisturbed(prompt_ids: list[int], count: int) -> list[int]:
    ids = list(prompt_ids)
    for _ in range(count):
        ids.append(letter(ids))
    return ids[len(prompt_ids) :]


def prompt(index: int) -> list[int]:
    return [65 + index // 16, 65 + index % 16, 66]


def open_stream(stack: Stack, prompt_ids: list[int], max_tokens: int, **fields: Any) -> Any:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, stop=fields.pop("stop", ()))
    return stack.open(
        prompt_token_ids=common_pb2.TokenIds(ids=prompt_ids),
        sampling_params=sampling,
        return_token_ids=True,
        **fields,
    )


class Reader:
    """Reads a stream in a task of its own, so that its ids can be waited for."""

    def __init__(self, call: Any) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.final: Any = None
        self._more = asyncio.Event()
        self.done = asyncio.ensure_future(self._read(call))

    async def _read(self, call: Any) -> None:
        async for frame in call:
            assert self.final is None
            if frame.HasField("final"):
                self.final = frame.final
            self.ids += frame.delta.token_ids
            self.text += frame.delta.text
            self._more.set()

    async def wait_ids(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.ids) < count:
                self._more.clear()
                await self._more.wait()


async def lose_engine(stack: Stack) -> None:
    """A last word, and the end of the process."""
    stack.engine.die()
    await stack.until(lambda: not stack.frontend.health.serving)
    await stack.engine.kill()


async def replace(stack: Stack, *, word: bool = True, **options: Any) -> None:
    """The engine's death, and another in its place."""
    if word:
        await lose_engine(stack)
    await stack.engine.kill()
    await stack.restart_engine(next_token=hashed, **options)
    await stack.until(lambda: stack.engine_client.epoch == stack.engine.epoch)


@pytest.mark.parametrize("num_deaths", [1, 2])
@pytest.mark.parametrize("word", [True, False], ids=["dead", "killed"])
async def test_sixty_four_streams_outlive_their_engine(
    make_stack: Callable[..., Stack], num_deaths: int, word: bool
) -> None:
    stack = await make_stack(auto=False, next_token=hashed)
    readers = [Reader(open_stream(stack, prompt(i), 60 + i)) for i in range(64)]
    for death in range(num_deaths):
        await stack.engine.wait_running(64)
        for _ in range(20):
            stack.engine.step()
        # In mid-stream: some of these ids are with the clients, others still on their way.
        for reader in readers:
            await reader.wait_ids(20 * death + 1)
        await replace(stack, word=word, auto=death == num_deaths - 1)
    for i, reader in enumerate(readers):
        await reader.done
        assert reader.ids == undisturbed(prompt(i), 60 + i)
        assert reader.text == bytes(reader.ids).decode()
        assert reader.final.outputs[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert reader.final.usage.completion_tokens == 60 + i
    got = await scrape(stack)
    assert got._samples["pagewire_engine_restarts_total", ()] == num_deaths
    assert got._samples["pagewire_requests_replayed_total", ()] == 64 * num_deaths
    assert got.value("vllm:request_success_total", finished_reason="length") == 64
    dispatcher = stack.frontend.dispatcher
    assert (dispatcher.engine_side.live, dispatcher.engine_side.replay.waiting) == ({}, {})
    await stack.tokenizer.wait_for(lambda: not stack.tokenizer.sequences)


async def test_what_is_replayed(make_stack: Callable[..., Stack]) -> None:
    """Prompt and output, the same sampling, a new id, what is left of the deadline; the
    tokenizer hears nothing of it, and usage is the first life's."""
    stack = await make_stack(auto=False, next_token=hashed)
    reader = Reader(open_stream(stack, prompt(0), 6, deadline_s=60.0))
    (first,) = await stack.engine.wait_running()
    for _ in range(3):
        stack.engine.step()
    await reader.wait_ids(3)
    num_opens = sum(len(m.opens) for m in stack.tokenizer.messages)
    await replace(stack, auto=False)
    (second,) = await stack.engine.wait_running()
    assert second.id != first.id
    assert second.add.sampling == first.add.sampling
    assert second.add.num_output_tokens == 3
    assert second.prompt_ids == first.prompt_ids
    assert second.output == undisturbed(prompt(0), 3)
    assert first.add.deadline_ms is not None
    assert second.add.deadline_ms is not None
    assert 0 < second.add.deadline_ms < first.add.deadline_ms
    for _ in range(3):
        stack.engine.step()
    await reader.done
    assert reader.ids == undisturbed(prompt(0), 6)
    assert sum(len(m.opens) for m in stack.tokenizer.messages) == num_opens
    assert reader.final.usage.cached_tokens == 1
    assert reader.final.timings.queue.ToMilliseconds() == 250


async def test_death_in_prefill_and_in_the_queue(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, next_token=hashed, max_num_seqs=2)
    readers = [Reader(open_stream(stack, prompt(i), 4)) for i in range(6)]
    await stack.engine.wait_running(6)
    await replace(stack, step_s=0.002)
    for i, reader in enumerate(readers):
        await reader.done
        assert reader.ids == undisturbed(prompt(i), 4)


async def test_an_engine_that_stays_away(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, config={"engine_restart_timeout": 0.3})
    calls = [open_stream(stack, prompt(i), 9) for i in range(3)]
    await stack.engine.wait_running(3)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await lose_engine(stack)
    for call in calls:
        failure = await stack.fails(call)
        assert failure.code is grpc.StatusCode.UNAVAILABLE
        assert failure.info.reason == "ENGINE_DEAD"
        assert failure.retry_s
    assert loop.time() - began > 0.25
    assert await stack.check() == NOT_SERVING
    assert stack.frontend.dispatcher.engine_side.replay.waiting == {}


async def test_cancel_and_deadline_during_the_outage(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, next_token=hashed)
    kept = Reader(open_stream(stack, prompt(0), 5))
    cancelled = open_stream(stack, prompt(1), 5, request_id="cancelled")
    left = open_stream(stack, prompt(2), 5)
    late = open_stream(stack, prompt(3), 5, deadline_s=3.0)
    await stack.engine.wait_running(4)
    stack.engine.step()
    for call in (cancelled, left, late):
        await call.read()
    await lose_engine(stack)
    await stack.inference.Cancel(inference_pb2.CancelRequest(request_id="cancelled"))
    assert (await stack.fails(cancelled)).code is grpc.StatusCode.CANCELLED
    left.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stack.rest(late)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    refused = await stack.fails(open_stream(stack, prompt(4), 5))
    assert (refused.info.reason, refused.initial) == ("ENGINE_DEAD", {})
    await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 1)
    await replace(stack, word=False, step_s=0.002)
    await kept.done
    assert kept.ids == undisturbed(prompt(0), 5)
    assert len([c for c in stack.engine.commands if isinstance(c, Add)]) == 1


async def test_a_request_admitted_before_the_outage(make_stack: Callable[..., Stack]) -> None:
    """It was being tokenized when the engine died, and is sent once there is another."""
    stack = await make_stack(auto=False)
    stack.tokenizer.gate = asyncio.Event()
    reader = Reader(
        stack.open(prompt="abc", sampling_params=common_pb2.SamplingParams(max_tokens=3))
    )
    await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 1)
    await lose_engine(stack)
    stack.tokenizer.gate.set()
    await stack.until(lambda: len(stack.frontend.dispatcher.engine_side.replay.waiting) == 1)
    await replace(stack, word=False, step_s=0.002)
    await reader.done
    assert reader.text == bytes(undisturbed(list(b"abc"), 3)).decode()
    samples = (await scrape(stack))._samples
    assert samples["pagewire_requests_replayed_total", ()] == 0


async def test_a_stop_string_across_the_death(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, next_token=hashed)
    whole = bytes(undisturbed(prompt(0), 12)).decode()
    reader = Reader(open_stream(stack, prompt(0), 12, stop=[whole[4:8]]))
    await stack.engine.wait_running()
    for _ in range(6):
        stack.engine.step()
    await stack.until(
        lambda: all(s.num_acked == 6 for s in stack.frontend.dispatcher.engine_side.live.values())
    )
    await replace(stack, step_s=0.002)
    await reader.done
    assert reader.text == whole[: whole.index(whole[4:8])]


@pytest.mark.parametrize("options", [{"model_name": "other"}, {"max_model_len": 100}])
async def test_another_engine_than_before(
    make_stack: Callable[..., Stack], options: dict[str, Any]
) -> None:
    stack = await make_stack(auto=False, next_token=hashed)
    long = open_stream(stack, prompt(0), 200)
    short = open_stream(stack, prompt(1), 20)
    await stack.engine.wait_running(2)
    stack.engine.step()
    await replace(stack, step_s=0.002, **options)
    failure = await stack.fails(long)
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert failure.info.reason == "ENGINE_DEAD"
    assert failure.message.startswith("the request was lost: ")
    if "model_name" in options:
        assert (await stack.fails(short)).message == failure.message
    else:
        frames = await stack.rest(short)
        assert [i for f in frames for i in f.delta.token_ids] == undisturbed(prompt(1), 20)


async def test_a_lost_connection_to_a_living_engine(make_stack: Callable[..., Stack]) -> None:
    """The engine may still run the old life: that is aborted before the new one is sent."""
    stack = await make_stack(auto=False, next_token=hashed, config={"engine_timeout": 0.8})
    reader = Reader(open_stream(stack, prompt(0), 6))
    gone = open_stream(stack, prompt(1), 6)
    first, other = await stack.engine.wait_running(2)
    stack.engine.step()
    await reader.wait_ids(1)
    await gone.read()
    stack.engine.silent = True
    await stack.until(lambda: not stack.frontend.health.serving)
    stack.engine.step()  # dropped: nobody listens to this epoch now
    gone.cancel()
    await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 1)
    stack.engine.commands.clear()
    stack.engine.silent = False
    await stack.engine.wait_for(lambda: any(isinstance(c, Add) for c in stack.engine.commands))
    commands = [c for c in stack.engine.commands if isinstance(c, Abort | Add)]
    assert isinstance(commands[0], Abort)
    assert isinstance(commands[1], Add)
    assert sorted(stack.engine.aborted) == [first.id, other.id]
    (second,) = stack.engine.running.values()
    assert second.id != first.id
    for _ in range(5):
        stack.engine.step()
    await reader.done
    assert reader.ids == undisturbed(prompt(0), 6)
    assert (await scrape(stack))._samples["pagewire_engine_restarts_total", ()] == 0


async def test_what_the_engine_gives_back_is_sent_again(make_stack: Callable[..., Stack]) -> None:
    """An engine that shuts down, or that had lost the session, ends requests unasked."""
    stack = await make_stack(auto=False, next_token=hashed)
    reader = Reader(open_stream(stack, prompt(0), 6))
    (request,) = await stack.engine.wait_running()
    for _ in range(2):
        stack.engine.step()
        stack.engine.abort_now(request.id)
        await stack.engine.wait_for(lambda: bool(stack.engine.running))
        (request,) = stack.engine.running.values()
    stack.engine.step()
    stack.engine.abort_now(request.id)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await reader.done
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reader.ids == undisturbed(prompt(0), 3)


async def test_a_finish_that_comes_twice(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, next_token=hashed)
    gate = stack.tokenizer.reply_gate = asyncio.Event()
    reader = Reader(open_stream(stack, prompt(0), 1))
    (request,) = await stack.engine.wait_running()
    stack.engine.step()
    stack.engine.abort_now(request.id)
    await stack.until(lambda: stack.engine_client.last_step == 2)
    gate.set()
    await reader.done
    assert reader.ids == undisturbed(prompt(0), 1)


async def step_with_poison(stack: Stack, calls: list[asyncio.Future[Any]]) -> int:
    """Steps until every call has ended; whatever computes the poison dies of it, before
    anybody has a token of that step. Returns the number of deaths."""
    deaths = 0
    ended = asyncio.gather(*calls, return_exceptions=True)
    while not ended.done():
        engine = stack.engine
        work = asyncio.ensure_future(
            engine.wait_for(lambda e=engine: bool(e.running or e.waiting), limit_s=60)
        )
        await asyncio.wait({ended, work}, return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        if any(POISON in request.prompt_ids for request in engine.running.values()):
            deaths += 1
            await replace(stack, auto=False)
        elif engine.running:
            engine.step()
        await asyncio.sleep(0)
    return deaths


async def test_a_poison_request_ends_alone(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, next_token=hashed)
    readers = [Reader(open_stream(stack, prompt(i), 20)) for i in range(5)]
    await stack.engine.wait_running(5)
    for _ in range(3):
        stack.engine.step()
    for reader in readers:
        await reader.wait_ids(3)
    poison = asyncio.ensure_future(stack.fails(open_stream(stack, [POISON], 20)))
    await stack.engine.wait_running(6)
    late = Reader(open_stream(stack, prompt(7), 20))
    await stack.engine.wait_running(7)
    everybody = [poison, late.done, *(reader.done for reader in readers)]
    # The running engine, the replay of all, then alone; `late` came after the poison and is
    # tried before it.
    assert await step_with_poison(stack, everybody) == 3
    failure = await poison
    assert failure.code is grpc.StatusCode.INTERNAL
    for i, reader in enumerate(readers):
        assert reader.ids == undisturbed(prompt(i), 20)
    assert late.ids == undisturbed(prompt(7), 20)
    assert stack.frontend.dispatcher.engine_side.replay.trying is False


async def test_a_poison_request_by_itself(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, next_token=hashed)
    poison = asyncio.ensure_future(stack.fails(open_stream(stack, [POISON], 20)))
    assert await step_with_poison(stack, [poison]) == 3
    assert (await poison).code is grpc.StatusCode.INTERNAL


async def test_prompt_logprobs_are_asked_for_until_they_are_there(
    make_stack: Callable[..., Stack],
) -> None:
    stack = await make_stack(auto=False, next_token=hashed)
    sampling = common_pb2.SamplingParams(max_tokens=3, prompt_logprobs=1)
    ids = common_pb2.TokenIds(ids=prompt(0))
    call = stack.open(prompt_token_ids=ids, sampling_params=sampling)
    for num_steps, asked in ((0, 1), (1, 1), (1, None)):
        (request,) = await stack.engine.wait_running()
        assert request.add.sampling.prompt_logprobs == asked
        for _ in range(num_steps):
            stack.engine.step()
            await call.read()
        await replace(stack, auto=False)
    call.cancel()
