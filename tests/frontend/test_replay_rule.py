"""Who goes back to the engine when: frontend/replay.py by itself."""

from __future__ import annotations

from frontend.admission import Admission
from frontend.replay import MAX_RETURNS, Replay
from frontend.request import IdsPrompt, Job, RequestState
from frontend.stream import Outbox
from frontend.tenant_limits import TenantLimits
from pagewire.types import SamplingParams

ADMISSION = Admission(1000, 1000, clock=lambda: 0.0, on_reject=lambda reason: None)
TENANTS = TenantLimits(None, clock=lambda: 0.0)


def request(number: int) -> RequestState:
    job = Job(
        request_id=str(number),
        model="m",
        prompt=IdsPrompt([1]),
        sampling=SamplingParams(max_tokens=9),
        max_tokens=None,
    )
    return RequestState(
        internal_id=number,
        job=job,
        outbox=Outbox(),
        reservation=ADMISSION.reserve(1),
        share=TENANTS.reserve("", 0),
        arrived_at=float(number),
        deadline=None,
    )


def send(replay: Replay) -> list[int]:
    """All that may go now."""
    sent = []
    while (state := replay.next()) is not None:
        state.num_resent = len(state.output_ids)
        replay.sent(state)
        sent.append(state.internal_id)
    return sent


def die(replay: Replay, *states: RequestState, died: bool = True) -> RequestState | None:
    for state in states:
        replay.lose(state)
    return replay.engine_back(died=died)


def test_one_death_makes_no_suspect() -> None:
    replay, states = Replay(), [request(n) for n in range(3)]
    for _ in range(5):
        assert die(replay, *states) is None
        assert not replay.trying
        assert send(replay) == [0, 1, 2]
        for state in states:
            state.output_ids += [7, 7]


def test_suspects_are_tried_alone_and_the_newest_first() -> None:
    replay, states = Replay(), [request(n) for n in range(4)]
    die(replay, *states)
    send(replay)
    states[1].output_ids += [7, 7]
    assert die(replay, *states) is None
    replay.wait(request(9))
    assert (send(replay), replay.trying) == ([3], True)
    states[3].output_ids += [7]
    assert send(replay) == [], "one token is the prefill's, and shows no decode step"
    states[3].output_ids += [7]
    assert send(replay) == [2]
    states[2].engine_finished = True
    assert send(replay) == [0]
    assert replay.trying
    states[0].output_ids += [7, 7]
    assert not replay.trying
    assert send(replay) == [1, 9]


def test_a_death_during_a_trial_absolves_the_others() -> None:
    replay, states = Replay(), [request(n) for n in range(3)]
    die(replay, *states)
    send(replay)
    die(replay, *states)
    assert send(replay) == [2]
    assert die(replay, states[2]) is states[2]
    replay.forget(states[2])
    assert not replay.trying
    assert send(replay) == [0, 1]
    die(replay, *states[:2])
    assert not replay.trying


def test_a_trial_that_is_cancelled_or_disturbed() -> None:
    replay, states = Replay(), [request(n) for n in range(3)]
    die(replay, *states)
    send(replay)
    die(replay, *states)
    assert send(replay) == [2]
    # The connection broke: nobody is to blame, and the same one is tried again.
    assert die(replay, states[2], died=False) is None
    assert send(replay) == [2]
    # The engine shut down in good order, and another came.
    assert replay.take_back(states[2])
    assert replay.next() is states[2]
    assert die(replay) is None
    assert send(replay) == [2]
    assert not replay.forget(states[2])
    assert send(replay) == [1]
    replay.forget(states[1])
    assert replay.forget(states[0])
    assert not replay.trying
    assert send(replay) == []


def test_requests_that_one_engine_gives_back_again_and_again() -> None:
    replay, state = Replay(), request(1)
    for _ in range(MAX_RETURNS):
        assert replay.take_back(state)
        send(replay)
    assert not replay.take_back(state)
    state.output_ids += [7, 7]
    assert replay.take_back(state)


def test_others_go_elsewhere_during_a_trial() -> None:
    replay, states = Replay(), [request(n) for n in range(4)]
    die(replay, *states[:2])
    send(replay)
    die(replay, *states[:2])
    replay.wait(states[2])
    assert send(replay) == [1]
    assert replay.trial is states[1]
    assert replay.next() is None
    assert replay.next(elsewhere=True) is states[2]
    replay.sent(states[2])
    assert replay.next(elsewhere=True) is None, "the other suspect waits for its own trial"
    # Another engine dies meanwhile, with what has nothing to do with the trial.
    assert die(replay, states[2]) is None
    assert replay.trial is states[1]
    assert replay.next(elsewhere=True) is states[2]
    replay.sent(states[2])
    assert die(replay, states[1]) is states[1]


def test_a_trial_that_is_moved_begins_again() -> None:
    replay, states = Replay(), [request(n) for n in range(2)]
    die(replay, *states)
    send(replay)
    die(replay, *states)
    assert send(replay) == [1]
    replay.move(states[1])
    assert replay.trial is None
    assert replay.is_suspect(states[1])
    assert send(replay) == [1]
    assert replay.trial is states[1]
