from __future__ import annotations

import random
from array import array

import pytest

from engine_core.kv.manager import KVManager
from engine_core.request import Request, Status
from engine_core.sched.policy import PriorityPolicy
from engine_core.sched.queue import RequestHeap, WaitingQueue
from pagewire.types import SamplingParams


def make(index: int, priority: int = 0, status: Status = Status.WAITING) -> Request:
    request = Request(
        frontend_id=1,
        request_id=index,
        table=KVManager(8, 4).new_table(array("i", [5])),
        num_prompt_tokens=1,
        sampling=SamplingParams(max_tokens=4),
        max_model_len=100,
        priority=priority,
    )
    request.arrival_index = index
    request.status = status
    return request


def drain(queue: WaitingQueue) -> list[int]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_first_come_first_served() -> None:
    queue = WaitingQueue(PriorityPolicy())
    for index in (2, 0, 1):
        queue.push(make(index))
    assert queue.peek().request_id == 0
    assert drain(queue) == [0, 1, 2]
    assert not queue


def test_smaller_priority_number_first() -> None:
    queue = WaitingQueue(PriorityPolicy())
    for index, priority in ((0, 5), (1, -1), (2, 0), (3, -1)):
        queue.push(make(index, priority))
    assert drain(queue) == [1, 3, 2, 0]


def test_preempted_go_to_the_front_of_their_priority_only() -> None:
    queue = WaitingQueue(PriorityPolicy())
    queue.push(make(0))
    queue.push(make(1, -1))
    queue.push(make(7, 0, Status.PREEMPTED))
    queue.push(make(6, 0, Status.PREEMPTED))
    assert [request.request_id for request in queue] == [1, 6, 7, 0]
    assert drain(queue) == [1, 6, 7, 0]


def test_removal_from_the_middle() -> None:
    queue = WaitingQueue(PriorityPolicy())
    requests = [make(index) for index in range(4)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[0])
    queue.remove(requests[2])
    assert requests[2] not in queue
    assert requests[3] in queue
    with pytest.raises(KeyError):
        queue.remove(requests[2])
    assert drain(queue) == [1, 3]


def test_a_request_can_return() -> None:
    queue = WaitingQueue(PriorityPolicy())
    request = make(0)
    queue.push(request)
    queue.remove(request)
    queue.push(request)
    assert drain(queue) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_heap_agrees_with_sorting(seed: int) -> None:
    rng = random.Random(seed)
    heap = RequestHeap()
    model: dict[Request, tuple[float, ...]] = {}
    for index in range(300):
        action = rng.random()
        if action < 0.5 or not model:
            request, key = make(index), (rng.randint(0, 5), index)
            heap.push(request, key)
            model[request] = key
        elif action < 0.75:
            request = rng.choice(list(model))
            heap.remove(request)
            del model[request]
        else:
            smallest = min(model, key=model.__getitem__)
            assert heap.peek_key() == model[smallest]
            assert heap.pop() is smallest
            del model[smallest]
        assert len(heap) == len(model)
    assert list(heap) == sorted(model, key=model.__getitem__)


def test_removed_entries_do_not_pile_up() -> None:
    heap = RequestHeap()
    heap.push(make(0), (0.0,))
    for index in range(1, 1000):
        request = make(index)
        heap.push(request, (float(index),))
        heap.remove(request)
        assert len(heap._heap) <= 12
    assert len(heap) == 1
