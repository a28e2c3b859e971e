"""The place in the queue, as those who ask are told it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from frontend.start_queue import StartQueue
from frontend.stream import Outbox, Queued
from pagewire.v1 import common_pb2
from tests.frontend.test_replay_rule import request
from tests.support.fake_tokenizer import FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from frontend.request import RequestState
    from tests.frontend.conftest import Stack


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def watcher(number: int, *, priority: int = 0) -> RequestState:
    state = request(number)
    fields = {name: getattr(state.job, name) for name in state.job.__slots__}
    state.job = type(state.job)(**fields | {"report_queue": True, "priority": priority})
    return state


async def told(state: RequestState) -> tuple[int, float | None]:
    item = await state.outbox.take()
    assert isinstance(item, Queued)
    return item.position, item.wait_s


async def test_positions_and_the_measured_rate() -> None:
    clock = Clock()
    queue = StartQueue(clock=clock)
    others = [request(number) for number in range(4)]
    for state in others:
        queue.join(state)
    last = watcher(4)
    queue.join(last)
    assert await told(last) == (4, None)
    for gap, position, wait in ((0.0, 3, None), (2.0, 2, 6.0), (4.0, 1, 6.0)):
        clock.now += gap
        queue.started(others.pop(0))
        queue._tell()
        assert await told(last) == (position, wait)
    queue._tell()
    assert last.outbox._queued is None, "nothing has changed"
    queue.leave(others.pop())
    queue._tell()
    assert await told(last) == (0, 3.0)
    queue.started(last)
    assert not queue._waiting
    assert not queue._watchers
    # Nobody waited in between: that is no measure.
    clock.now += 1000.0
    state = watcher(5)
    queue.join(state)
    wait = (await told(state))[1]
    assert wait == pytest.approx(sum(queue._gaps) / 3)
    assert wait < 10
    queue.leave(state)
    queue.leave(state)


async def test_priority_goes_ahead() -> None:
    queue = StartQueue(clock=Clock())
    late, first, urgent = watcher(0), watcher(1), watcher(2, priority=-1)
    for state, position in ((late, 0), (first, 1), (urgent, 0)):
        queue.join(state)
        assert (await told(state))[0] == position
    queue._tell()
    assert (await told(late))[0] == 1
    assert (await told(first))[0] == 2


async def test_a_slow_reader_gets_the_last_one_only() -> None:
    outbox = Outbox()
    for position in (3, 2, 1):
        outbox.put_queued(Queued(position, None))
    outbox.put("a")
    assert await outbox.take() == Queued(1, None)
    assert (await outbox.take()).text == "a"  # type: ignore[union-attr]


async def frame(call: Any) -> Any:
    found = await call.read()
    return getattr(found, found.WhichOneof("frame"))


async def test_a_stream_from_the_queue_to_its_end(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, max_num_seqs=1)
    sampling = common_pb2.SamplingParams(max_tokens=2)
    first = stack.open(prompt="a", sampling_params=sampling, report_queue=True)
    queued = await frame(first)
    assert queued.position == 0
    assert not queued.HasField("estimated_wait")
    silent = stack.open(prompt="b", sampling_params=sampling)
    await stack.engine.wait_running(2)
    last = stack.open(prompt="c", sampling_params=sampling, report_queue=True)
    assert (await frame(last)).position == 2
    stack.engine.step()
    assert (await frame(last)).position == 1
    assert (await frame(first)).text == "t"
    for _ in range(3):
        stack.engine.step()
    queued = await frame(last)
    assert queued.position == 0
    assert queued.HasField("estimated_wait")
    assert await frame(silent)
    for _ in range(2):
        stack.engine.step()
    rest = await stack.rest(last)
    assert [found.WhichOneof("frame") for found in rest][-1] == "final"
    assert "".join(found.delta.text for found in rest) == "th"
    assert not stack.frontend.dispatcher.start_queue._waiting


async def test_an_echo_stays_behind_the_queue_where_the_tokenizer_dies(
    make_stack: Callable[..., Stack],
) -> None:
    stack = await make_stack(auto=False, max_num_seqs=1)
    sampling = common_pb2.SamplingParams(max_tokens=2)
    first = stack.open(prompt="a", sampling_params=sampling)
    await stack.engine.wait_running(1)
    last = stack.open(prompt="c", sampling_params=sampling, report_queue=True, echo=True)
    assert (await frame(last)).position == 1
    await stack.engine.wait_running(2)
    stream = stack.frontend.dispatcher.text_stream
    address = stack.tokenizer.address
    await stack.tokenizer.close()
    await stack.until(lambda: not stream.up)
    stack.tokenizer = FakeTokenizer(address=address)
    await stack.tokenizer.start()
    await stack.until(lambda: stream.up)
    stack.engine.step()
    found = await last.read()
    assert found.WhichOneof("frame") == "queued"
    assert found.queued.position == 0
    for _ in range(3):
        stack.engine.step()
    assert (await stack.rest(first))[-1].HasField("final")
    rest = await stack.rest(last)
    assert "".join(found.delta.text for found in rest) == "cth"
    assert rest[-1].HasField("final")


async def test_those_that_leave_the_queue_otherwise(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, max_num_seqs=1)
    calls = []
    for count in (1, 2, 3):
        calls.append(stack.open(prompt="a", report_queue=True))
        await calls[-1].read()
        requests = await stack.engine.wait_running(count)
    calls[0].cancel()
    queue = stack.frontend.dispatcher.start_queue
    await stack.until(lambda: len(queue._waiting) == 2)
    stack.engine.emit(errors={requests[1].id: "no"})
    await stack.until(lambda: len(queue._waiting) == 1)
    calls[2].cancel()
    await stack.until(lambda: not queue._waiting and not queue._watchers)
