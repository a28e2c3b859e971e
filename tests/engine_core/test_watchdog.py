"""An engine that hangs ends itself, also where its computing thread keeps the interpreter."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_core.watchdog import Watchdog
from tests.support.engine_process import ThreadedEngine
from tests.support.wire_client import WireClient

REPO = Path(__file__).parents[2]


class Timer:
    """Stands in for faulthandler's, which is the test process's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fed: list[float] = []
        monkeypatch.setattr(faulthandler, "dump_traceback_later", self._feed)
        monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", self.fed.clear)

    def _feed(self, timeout: float, *, exit: bool) -> None:
        assert exit
        self.fed.append(timeout)


def test_it_is_fed_while_the_engine_moves_or_rests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timer = Timer(monkeypatch)
    now, turn = 0.0, None
    dog = Watchdog(lambda: turn, 8.0, clock=lambda: now)
    for _ in range(3):
        now += 2
        dog.look()  # rests
    assert timer.fed == [8.0] * 3
    for number in (5, 6):
        now, turn = now + 2, number
        dog.look()
    assert len(timer.fed) == 5
    for _ in range(3):
        now += 2
        dog.look()
    assert len(timer.fed) == 5
    assert caplog.text.count("has not moved for 6.0 s; after 8 s") == 1
    turn = 7
    dog.look()
    assert len(timer.fed) == 6


def test_the_loop_tells_whether_it_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer(monkeypatch)
    engine = ThreadedEngine(hang_timeout=60.0)
    dog: Any = engine.process._watchdog
    with engine, WireClient(engine.endpoint) as client:
        client.hello()
        assert timer.fed
    assert not timer.fed, "the timer outlives the loop"
    assert dog._turn() is not None


@pytest.mark.parametrize("what", ["sleep", "spin", "hold"])
def test_a_hang_ends_the_process_with_its_stacks(what: str) -> None:
    """hold: in C, with the interpreter's lock."""
    code = f"""
import ctypes, sys, time
from engine_core.watchdog import Watchdog

def hang(what):
    if what == "sleep":
        time.sleep(60)
    elif what == "spin":
        while True:
            pass
    else:
        ctypes.PyDLL(None).sleep(60)

dog = Watchdog(lambda: 1, 0.3)
dog.start()
hang({what!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert "Timeout (0:00:00.3" in done.stderr
    assert "in hang" in done.stderr
