from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest

from engine_core.kv.manager import KVManager
from engine_core.request import Request, Status
from engine_core.sched.stop import end_status
from pagewire.types import FinishReason, SamplingParams, Timings

if TYPE_CHECKING:
    from collections.abc import Sequence


def make(
    token_ids: Sequence[int] = (5, 6, 7),
    *,
    num_prompt: int | None = None,
    max_model_len: int = 100,
    eos: tuple[int, ...] = (2, 3),
    sampling: SamplingParams | None = None,
    arrived_at: float = 10.0,
) -> Request:
    return Request(
        frontend_id=1,
        request_id=4,
        table=KVManager(8, 4).new_table(array("i", token_ids)),
        num_prompt_tokens=len(token_ids) if num_prompt is None else num_prompt,
        sampling=sampling or SamplingParams(max_tokens=4),
        max_model_len=max_model_len,
        eos_token_ids=eos,
        arrived_at=arrived_at,
    )


def take(request: Request, token_id: int) -> Status | None:
    request.append(token_id, 0.0)
    return end_status(request, token_id)


LEGAL = {
    (Status.WAITING, Status.RUNNING),
    (Status.WAITING, Status.ABORTED),
    (Status.WAITING, Status.FAILED),
    (Status.RUNNING, Status.PREEMPTED),
    (Status.RUNNING, Status.STOPPED),
    (Status.RUNNING, Status.LENGTH),
    (Status.RUNNING, Status.ABORTED),
    (Status.RUNNING, Status.FAILED),
    (Status.PREEMPTED, Status.RUNNING),
    (Status.PREEMPTED, Status.STOPPED),
    (Status.PREEMPTED, Status.LENGTH),
    (Status.PREEMPTED, Status.ABORTED),
    (Status.PREEMPTED, Status.FAILED),
}


@pytest.mark.parametrize("before", list(Status))
@pytest.mark.parametrize("after", list(Status))
def test_moves(before: Status, after: Status) -> None:
    request = make()
    request.status = before
    if (before, after) in LEGAL:
        request.move(after)
        assert request.status is after
    else:
        with pytest.raises(AssertionError):
            request.move(after)
        assert request.status is before


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (Status.WAITING, None),
        (Status.RUNNING, None),
        (Status.PREEMPTED, None),
        (Status.STOPPED, FinishReason.STOP),
        (Status.LENGTH, FinishReason.LENGTH),
        (Status.ABORTED, FinishReason.ABORT),
        (Status.FAILED, FinishReason.ERROR),
    ],
)
def test_finish_reason(status: Status, reason: FinishReason | None) -> None:
    request = make()
    request.status = status
    assert request.finish_reason is reason
    assert request.is_finished == (reason is not None)


def test_counts() -> None:
    request = make((5, 6, 7, 8), num_prompt=3)
    assert (request.num_tokens, request.num_output_tokens) == (4, 1)
    request.append(9, 0.0)
    assert (request.num_tokens, request.output_token_ids) == (5, [8, 9])
    assert request.table.num_tokens == 5


def test_timings_of_each_phase() -> None:
    request = make(arrived_at=10.0)
    assert request.timings(12.0) == Timings(queue=2.0, prefill=0.0, decode=0.0)
    request.first_scheduled_at = 13.0
    assert request.timings(14.0) == Timings(queue=3.0, prefill=1.0, decode=0.0)
    request.append(9, 15.0)
    request.append(9, 18.0)
    assert request.timings(99.0) == Timings(queue=3.0, prefill=2.0, decode=3.0)


class TestStop:
    def test_eos(self) -> None:
        assert take(make(), 3) is Status.STOPPED
        assert take(make(), 4) is None

    def test_ignore_eos_keeps_stop_ids(self) -> None:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True, stop_token_ids=(9,))
        assert take(make(sampling=sampling), 2) is None
        assert take(make(sampling=sampling), 9) is Status.STOPPED

    def test_stop_ids_add_to_eos(self) -> None:
        sampling = SamplingParams(max_tokens=4, stop_token_ids=(9,))
        assert take(make(sampling=sampling), 2) is Status.STOPPED

    def test_max_tokens(self) -> None:
        request = make()
        assert [take(request, 8) for _ in range(4)] == [None, None, None, Status.LENGTH]

    def test_max_tokens_counts_output_already_emitted(self) -> None:
        request = make((5, 6, 7, 8), num_prompt=1)
        assert take(request, 8) is Status.LENGTH

    def test_max_model_len(self) -> None:
        request = make(max_model_len=5)
        assert [take(request, 8) for _ in range(2)] == [None, Status.LENGTH]

    def test_stop_wins_over_length(self) -> None:
        sampling = SamplingParams(max_tokens=1)
        assert take(make(sampling=sampling), 2) is Status.STOPPED
