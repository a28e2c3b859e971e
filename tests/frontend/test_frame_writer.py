"""FrameWriter against an Outbox, with writes that end when the test says so."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from frontend.frame_writer import FrameWriter
from frontend.stream import Delta, Finish, Outbox, Queued, SequenceEnd
from pagewire.errors import Cancelled, DeadlineExceeded
from pagewire.types import FinishReason, Timings, Usage

FINISH = Finish(
    "r",
    "m",
    (SequenceEnd(0, FinishReason.STOP, 1),),
    Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
    Timings(queue=0.0, prefill=0.0, decode=0.0),
    seed=1,
)


class Wire:
    """A client's side: what was begun to be written, and the writes that wait."""

    def __init__(self) -> None:
        self.frames: list[str] = []
        self.waiting: list[asyncio.Future[None]] = []
        self.blocks = True
        self.num_ended = 0

    async def write(self, frame: str) -> None:
        self.frames.append(frame)
        try:
            if self.blocks:
                self.waiting.append(asyncio.get_running_loop().create_future())
                await self.waiting[-1]
        finally:
            self.num_ended += 1


def text_of(item: Delta | Queued) -> str | None:
    return None if isinstance(item, Queued) else item.text


async def begin(wire: Wire, outbox: Outbox) -> asyncio.Task[Finish]:
    task = asyncio.ensure_future(FrameWriter(wire.write, text_of).pour(outbox))
    await asyncio.sleep(0)
    return task


async def test_a_write_begins_where_the_delta_is_put() -> None:
    wire, outbox = Wire(), Outbox()
    task = await begin(wire, outbox)
    outbox.put("a", [1])
    assert wire.frames == ["a"]
    outbox.put("b", [2])
    outbox.put("c", [3])
    assert wire.frames == ["a"], "one at a time"
    wire.waiting[0].set_result(None)
    await asyncio.sleep(0)
    assert wire.frames == ["a", "bc"], "what came meanwhile is one delta"
    outbox.finish(FINISH)
    await asyncio.sleep(0)
    assert not task.done(), "the last write is not over"
    wire.waiting[1].set_result(None)
    assert await task is FINISH


async def test_what_was_there_before_is_written() -> None:
    wire, outbox = Wire(), Outbox()
    wire.blocks = False
    outbox.put("a")
    outbox.put("b", index=1)
    task = await begin(wire, outbox)
    assert wire.frames == ["a", "b"], "an item a sequence"
    outbox.put("c")
    assert wire.frames == ["a", "b", "c"]
    outbox.finish(FINISH)
    assert await task is FINISH


async def test_an_item_without_a_frame_is_passed_over() -> None:
    wire, outbox = Wire(), Outbox()
    wire.blocks = False
    outbox.put_queued(Queued(1, None))
    task = await begin(wire, outbox)
    outbox.put("a")
    outbox.finish(FINISH)
    await task
    assert wire.frames == ["a"]


async def test_the_error_comes_after_what_is_pending() -> None:
    wire, outbox = Wire(), Outbox()
    task = await begin(wire, outbox)
    outbox.put("a")
    outbox.put("b")
    outbox.fail(DeadlineExceeded("late"))
    wire.waiting[0].set_result(None)
    await asyncio.sleep(0)
    wire.waiting[1].set_result(None)
    with pytest.raises(DeadlineExceeded):
        await task
    assert wire.frames == ["a", "b"]


async def test_a_cancel_ends_the_write_that_waits() -> None:
    wire, outbox = Wire(), Outbox()
    task = await begin(wire, outbox)
    outbox.put("a")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert wire.num_ended == 1
    assert wire.waiting[0].cancelled(), "gRPC asks that before it gives its answer"
    outbox.put("b")
    assert wire.frames == ["a"]


async def test_a_failing_write_is_a_client_that_is_gone() -> None:
    wire, outbox = Wire(), Outbox()
    task = await begin(wire, outbox)
    outbox.put("a")
    wire.waiting[0].set_exception(grpc.aio.InternalError("execute_batch"))
    with pytest.raises(Cancelled):
        await task
    outbox.put("b")
    assert wire.frames == ["a"]


async def test_an_error_of_ours_reaches_the_handler_alone() -> None:
    def broken(item: Delta | Queued) -> str:
        raise ZeroDivisionError

    outbox = Outbox()
    task = asyncio.ensure_future(FrameWriter(Wire().write, broken).pour(outbox))
    await asyncio.sleep(0)
    outbox.put("a")
    with pytest.raises(ZeroDivisionError):
        await task


async def test_an_evicted_writer_ends_behind_its_write() -> None:
    wire, outbox = Wire(), Outbox()
    writer = FrameWriter(wire.write, text_of)
    task = asyncio.ensure_future(writer.pour(outbox))
    await asyncio.sleep(0)
    outbox.put("a")
    outbox.detach(writer)
    writer.evicted(Cancelled("another"))
    outbox.put("b")
    await asyncio.sleep(0)
    assert not task.done()
    wire.waiting[0].set_result(None)
    with pytest.raises(Cancelled, match="another"):
        await task
    assert wire.frames == ["a"]
    assert isinstance(outbox.take_now(), Delta), "the next reader's"
