"""The parts of pagewire.client that do no I/O."""

from __future__ import annotations

import inspect
from typing import Any

import grpc
import pytest

from frontend.status import rich_status
from pagewire import client as library
from pagewire import errors
from pagewire.client import CallFailed
from pagewire.client import errors as failures
from pagewire.client.convert import resumable_request, stream_request
from pagewire.client.errors import AlreadyExists, NotFound, Unavailable, Unreachable, failure_of
from pagewire.client.received import Received, Resumption
from pagewire.v1 import inference_pb2

LOST = Unreachable("UNAVAILABLE", "Socket closed", reached=False)
MEANT = Unavailable("UNAVAILABLE", "it drains", reason="DRAINING")


class Ended:
    """A call as grpc shows it once it has failed."""

    def __init__(self, error: errors.PagewireError) -> None:
        self._status = rich_status(error, "e-1" if error.code == "internal" else None)

    def code(self) -> Any:
        return self._status.code

    def details(self) -> str:
        return self._status.message

    def trailing_metadata(self) -> Any:
        return self._status.trailing_metadata


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (errors.InvalidRequest("a.b", "is bad"), "InvalidArgument", {"field": "a.b"}),
        (errors.NotFound("model", "m", field="model"), "NotFound", {"field": "model"}),
        (errors.AlreadyExists("is there"), "AlreadyExists", {"field": "request_id"}),
        (
            errors.QueueFull("full", retry_after=1.5, queue_depth=3, queued_tokens=40),
            "QueueFull",
            {"retry_after": 1.5, "queue_depth": 3, "queued_tokens": 40},
        ),
        (
            errors.QuotaExceeded("over", tenant="t", quota="tokens", retry_after=0.25),
            "QuotaExceeded",
            {"retry_after": 0.25, "quota": "tokens"},
        ),
        (errors.Unauthenticated("who"), "Unauthenticated", {}),
        (errors.PermissionDenied("no"), "PermissionDenied", {}),
        (errors.MessageTooLarge("big"), "ResourceExhausted", {}),
        (errors.NoRoom("all taken"), "ResourceExhausted", {}),
        (errors.FeatureDisabled("off", field="resumable"), "FailedPrecondition", {}),
        (errors.FailedPrecondition("not now"), "FailedPrecondition", {}),
        (errors.Unimplemented("none"), "Unimplemented", {}),
        (errors.DeadlineExceeded("late"), "DeadlineExceeded", {}),
        (errors.Cancelled("ended"), "Cancelled", {}),
        (
            errors.Unavailable("loading", "wait", retry_after=2.0),
            "Unavailable",
            {"reason": "LOADING", "retry_after": 2.0},
        ),
        (errors.InternalError("bug"), "InternalError", {"error_id": "e-1"}),
    ],
)
def test_each_error_of_the_server_has_a_type(
    error: errors.PagewireError, kind: str, says: dict[str, Any]
) -> None:
    failure = failure_of(Ended(error))
    assert type(failure) is getattr(library, kind)
    assert (failure.reached, failure.lost) == (True, False)
    assert {name: getattr(failure, name) for name in says} == says
    assert failure.message.startswith(error.message)


def test_every_error_of_the_server_is_among_them() -> None:
    (mark,) = (m for m in test_each_error_of_the_server_has_a_type.pytestmark)  # type: ignore[attr-defined]
    tested = {type(row[0]) for row in mark.args[1]}
    groups = {errors.PagewireError, errors.ClientError, errors.ServerError}
    ours = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.PagewireError)
    }
    assert ours - groups == tested


def test_every_failure_is_exported() -> None:
    kinds = {
        name
        for name, kind in inspect.getmembers(failures, inspect.isclass)
        if issubclass(kind, CallFailed)
    }
    assert kinds - set(library.__all__) == set()


def test_statuses_that_grpc_makes_itself() -> None:
    class Refused(Ended):
        def __init__(self, code: grpc.StatusCode) -> None:
            self._code = code

        def code(self) -> Any:
            return self._code

        def details(self) -> str:
            return "of its own"

        def trailing_metadata(self) -> Any:
            return None

    seen = {
        code.name: (type(f).__name__, f.reached, f.lost)
        for code in grpc.StatusCode
        if code is not grpc.StatusCode.OK
        for f in [failure_of(Refused(code))]
    }
    assert seen["UNAVAILABLE"] == ("Unreachable", False, True)
    assert seen["UNKNOWN"] == ("CallFailed", True, True)
    assert seen["INTERNAL"] == ("InternalError", True, True)
    assert seen["RESOURCE_EXHAUSTED"] == ("ResourceExhausted", True, False)
    assert [name for name, (_, _, lost) in seen.items() if lost] == [
        "UNKNOWN", "INTERNAL", "UNAVAILABLE",
    ]  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def resumption(
    attempts: int = 3, timeout: float | None = None, *, id_is_ours: bool = True
) -> tuple[Resumption, Received, Clock]:
    request, _ = resumable_request("x")
    received, clock = Received(), Clock()
    made = Resumption(request, received, timeout, attempts, id_is_ours=id_is_ours, clock=clock)
    return made, received, clock


def delta(text: str) -> inference_pb2.GenerateStreamResponse:
    return inference_pb2.GenerateStreamResponse(delta=inference_pb2.Delta(text=text))


def test_it_goes_on_after_what_it_has() -> None:
    going, received, _ = resumption()
    assert going.next.HasField("resumable")
    received.take(delta("aé🦜"))
    going.heard()
    assert going.after(LOST) == 0
    assert not going.next.HasField("resumable")
    assert going.next.request_id == going.request_id
    (sequence,) = going.next.resume_from.sequences
    assert (sequence.index, sequence.num_chars) == (0, 3)


def test_pauses_grow_and_frames_end_the_row() -> None:
    going, _, _ = resumption(attempts=8)
    pauses = [going.after(LOST) for _ in range(8)]
    assert pauses[0] == 0
    assert all(0.1 * 2**i / 2 <= pauses[i] <= min(2.0, 0.1 * 2**i) for i in range(1, 5))
    assert max(pauses) <= 2.0
    with pytest.raises(Unreachable):
        going.after(LOST)
    going.heard()
    assert going.after(LOST) == 0


def test_what_the_server_means_is_raised() -> None:
    going, _, _ = resumption()
    with pytest.raises(Unavailable) as raised:
        going.after(MEANT)
    assert raised.value is MEANT


def test_a_request_that_never_arrived_is_sent_again() -> None:
    going, _, _ = resumption()
    first = going.next
    going.after(LOST)
    missing = NotFound("NOT_FOUND", "no such request", reason="NOT_FOUND")
    going.after(missing)
    assert going.next is first
    going.after(LOST)
    # Once there was text it is not begun anew.
    going.heard()
    with pytest.raises(NotFound):
        going.after(missing)


def test_a_request_that_arrived_unheard_is_resumed_if_it_is_ours() -> None:
    there = AlreadyExists("ALREADY_EXISTS", "in flight", reason="ALREADY_EXISTS")
    going, _, _ = resumption()
    going.after(there)
    assert going.next.HasField("resume_from")
    with pytest.raises(AlreadyExists):
        going.after(there)
    chosen, _, _ = resumption(id_is_ours=False)
    with pytest.raises(AlreadyExists):
        chosen.after(there)


def test_one_timeout_for_all_calls() -> None:
    going, _, clock = resumption(timeout=5.0)
    assert going.timeout() == 5.0
    clock.now += 7
    assert going.timeout() == -2.0
    assert resumption()[0].timeout() is None


def test_the_id_is_made_up_unless_it_is_chosen() -> None:
    made, ours = resumable_request("x")
    assert len(made.request_id) == 32
    assert ours
    from pagewire.client import Ask

    chosen, ours = resumable_request(Ask(prompt="x", options={"request_id": "mine"}))
    assert (chosen.request_id, ours) == ("mine", False)
    assert not stream_request("x").request_id
