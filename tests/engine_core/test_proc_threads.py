"""The input and output threads' own judgements, with a clock that is told the time."""

from __future__ import annotations

import io
import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from engine_core.doorbell import Doorbell
from engine_core.events import Lost, Opened
from engine_core.inbox import Inbox
from engine_core.outbox import Outbox
from engine_core.progress import report_progress
from engine_core.session import Session
from pagewire.errors import ConfigError
from pagewire.types import FinishReason
from pagewire.wire.codec import decode_output
from pagewire.wire.messages import PROTOCOL_VERSION, Hello, StepOutput
from pagewire.wire.sockets import bind_commands, bind_outputs, bound_endpoint
from tests.support.engine_process import make_core, make_limits, make_ready
from tests.support.wire_client import WireClient

if TYPE_CHECKING:
    from collections.abc import Iterator


WAIT_S = 60.0


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


class Clock:
    """Seconds that pass when told to; knows how often it was asked."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._asked = threading.Semaphore(0)

    def __call__(self) -> float:
        self._asked.release()
        return self.now

    def wait_until_asked(self, times: int) -> None:
        while self._asked.acquire(blocking=False):
            pass
        for _ in range(times):
            assert self._asked.acquire(timeout=WAIT_S)


class OutboxProbe:
    def __init__(self) -> None:
        self.opened: SimpleQueue[int] = SimpleQueue()
        self.closed: SimpleQueue[tuple[int, str]] = SimpleQueue()

    def open(self, frontend_id: int, endpoint: str) -> None:
        self.opened.put(frontend_id)

    def close(self, frontend_id: int, reason: str) -> None:
        self.closed.put((frontend_id, reason))


def test_a_process_that_overslept_does_not_blame_its_frontends(context: zmq.Context[Any]) -> None:
    clock, outbox, events = Clock(), OutboxProbe(), SimpleQueue[Any]()
    router = bind_commands(context, "tcp://127.0.0.1:0")
    endpoint = bound_endpoint(router)
    inbox = Inbox(router, events, outbox, frontend_timeout=0.4, clock=clock)  # type: ignore[arg-type]
    inbox.start()
    with WireClient(endpoint, frontend_id=7) as client:
        client.send(Hello(PROTOCOL_VERSION, 7, "tcp://127.0.0.1:1"))
        assert outbox.opened.get(timeout=WAIT_S) == 7
        clock.wait_until_asked(3)
        clock.now += 3600.0  # suspended for an hour, with a whole round's silence left
        clock.wait_until_asked(3)
        assert outbox.closed.empty()
        clock.now += 0.15
        clock.wait_until_asked(3)
        assert outbox.closed.empty()
        clock.now += 0.15
        assert outbox.closed.get(timeout=WAIT_S) == (7, "silent for 0.5 s")
    inbox.stop()


def test_another_frontend_behind_the_same_socket_replaces_the_former(
    context: zmq.Context[Any],
) -> None:
    outbox, events = OutboxProbe(), SimpleQueue[Any]()
    router = bind_commands(context, "tcp://127.0.0.1:0")
    endpoint = bound_endpoint(router)
    inbox = Inbox(router, events, outbox, frontend_timeout=60.0)  # type: ignore[arg-type]
    inbox.start()
    with WireClient(endpoint) as client:
        for frontend_id in (7, 8):
            client.send(Hello(PROTOCOL_VERSION, frontend_id, "tcp://127.0.0.1:1"))
            assert outbox.opened.get(timeout=WAIT_S) == frontend_id
        assert outbox.closed.get(timeout=WAIT_S) == (7, "another frontend took its place")
    inbox.stop()


def poll(session: Session) -> None:
    """Waits for news of the connection, and takes it."""
    poller = zmq.Poller()
    session.register(poller)
    assert poller.poll(1000 * WAIT_S)
    session.pump()


def test_a_session_knows_when_its_connection_is_gone(context: zmq.Context[Any]) -> None:
    clock = Clock()
    pull = bind_outputs(context, "tcp://127.0.0.1:0")
    endpoint = bound_endpoint(pull)
    session = Session(context, 1, endpoint, clock=clock)
    assert session.answers(endpoint)
    assert not session.answers(endpoint + "0")
    session.send([b"a", b"b"])
    assert pull.poll(1000 * WAIT_S)
    poll(session)
    clock.now += 3600.0
    assert session.answers(endpoint), "it is up, however long ago it began"
    pull.close(0)
    poll(session)
    assert session.broken == "its connection is gone"
    assert not session.answers(endpoint)
    session.close()


def test_what_a_session_owed_is_told_by_the_next_that_lives(context: zmq.Context[Any]) -> None:
    """The one between them broke before anybody had read what it said."""
    core = make_core(make_limits(), runner=None)
    events: SimpleQueue[Any] = SimpleQueue()
    outbox = Outbox(context, events, make_ready(make_limits(), core.epoch), core.stats())
    outbox.start()
    pulls = [bind_outputs(context, "tcp://127.0.0.1:0") for _ in range(3)]
    for pull in pulls:
        outbox.open(7, bound_endpoint(pull))
        assert events.get(timeout=WAIT_S) == Opened(7)
        # Ready, or the finish of what was lost.
        assert pull.poll(1000 * WAIT_S)
        if pull is pulls[0]:
            outbox.expect(7, 1)
        if pull is not pulls[-1]:
            pull.close(0)
            assert events.get(timeout=WAIT_S) == Lost(7)
    told = decode_output(pulls[-1].recv_multipart())
    assert isinstance(told, StepOutput)
    assert [(end.request_id, end.reason) for end in told.finished] == [(1, FinishReason.ABORT)]
    outbox.finish("over", abort_requests=False)
    pulls[-1].close(0)


def test_a_session_that_nobody_answers_is_given_up(context: zmq.Context[Any]) -> None:
    session = Session(context, 1, "tcp://127.0.0.1:1")
    poll(session)
    assert session.broken == "its connection is gone"
    session.close()


def test_an_attempt_that_takes_long_is_replaced_by_the_next_hello(
    context: zmq.Context[Any],
) -> None:
    clock = Clock()
    endpoint = "tcp://192.0.2.1:9"  # TEST-NET-1 of RFC 5737: no answer of any kind, or an error
    session = Session(context, 1, endpoint, clock=clock)
    assert session.answers(endpoint)
    clock.now += 3.0
    assert not session.answers(endpoint)
    session.close()


def test_a_session_needs_an_endpoint(context: zmq.Context[Any]) -> None:
    with pytest.raises(ConfigError):
        Session(context, 1, "http://x")


def test_a_session_keeps_order_when_its_frontend_is_slow(context: zmq.Context[Any]) -> None:
    with context.socket(zmq.PULL) as pull:
        pull.setsockopt(zmq.RCVHWM, 1)
        pull.bind("tcp://127.0.0.1:0")
        session = Session(context, 1, bound_endpoint(pull))
        sent = 0
        while not session.has_backlog or sent % 50:
            session.send([sent.to_bytes(4, "little"), bytes(200_000)])
            sent += 1
            session.pump()
        assert session.broken is None
        for number in range(sent):
            while not pull.poll(50):
                session.pump()
            assert int.from_bytes(pull.recv_multipart()[0], "little") == number
            session.pump()
        assert not session.has_backlog
        session.close()


def test_a_doorbell_rings_once_for_many_rings() -> None:
    doorbell = Doorbell()
    poller = zmq.Poller()
    poller.register(doorbell.fileno(), zmq.POLLIN)
    assert not poller.poll(0)
    for _ in range(100_000):  # more than the socket holds
        doorbell.ring()
    assert poller.poll(0)
    doorbell.silence()
    assert not poller.poll(0)
    doorbell.ring()
    assert poller.poll(0)
    doorbell.close()
    doorbell.ring()


def test_progress_in_a_file_is_a_line_a_quarter(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "engine_core.progress"),
        report_progress("tiny", io.StringIO()) as progress,
    ):
        for done in range(1001):
            progress("weights", done, 1000)
        progress("warm-up", 0, 1)
        progress("warm-up", 1, 1)
        progress("nothing", 0, 0)
    assert [record.getMessage().removeprefix("loading tiny: ") for record in caplog.records] == [
        "weights 0%",
        "weights 25%",
        "weights 50%",
        "weights 75%",
        "weights 100%",
        "warm-up 0%",
        "warm-up 100%",
        "nothing 100%",
    ]


def test_progress_on_a_terminal_is_a_bar(caplog: pytest.LogCaptureFixture) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with (
        caplog.at_level(logging.INFO, "engine_core.progress"),
        report_progress("tiny", terminal) as progress,
    ):
        progress("weights", 0, 1000)
        progress("weights", 1000, 1000)
    assert "tiny: weights" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
    assert not caplog.records
