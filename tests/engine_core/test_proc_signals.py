"""The engine as a process of its own: signals, exit statuses, what it leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pagewire.obs.ready import COMMANDS, read_ready_file
from pagewire.types import FinishReason
from pagewire.wire.messages import Dead, StepOutput
from tests.support.wire_client import WireClient

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = Path(__file__).parents[2]
TIMEOUT_S = 60.0


def start(*argv: str, cwd: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *argv],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """An engine over the fake model on ipc://engine, which serves."""
    monkeypatch.chdir(tmp_path)
    process = start("tests.support.engine_process", "ipc://engine", "ready.json", cwd=tmp_path)
    deadline = time.monotonic() + TIMEOUT_S
    while read_ready_file(tmp_path / "ready.json") is None:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        with WireClient("ipc://engine") as client:
            client.hello()  # is answered when the engine serves, just before the file is there
    with process:
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_a_finish_for_everybody(
    engine: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    facts = read_ready_file(tmp_path / "ready.json")
    assert facts is not None
    assert (facts["pid"], facts[COMMANDS]) == (engine.pid, "ipc://engine")
    with WireClient("ipc://engine") as client:
        ready = client.hello()
        for request_id in (1, 2):
            client.add(request_id, [5, 6, 7], max_tokens=2000)
        while not (client.outcome(1).token_ids and client.outcome(2).token_ids):
            client.wait_for(lambda output: isinstance(output, StepOutput))
        engine.send_signal(number)
        client.wait_for(lambda output: isinstance(output, Dead))
        assert client.outputs[-1] == Dead(ready.epoch, "shutdown")
        assert client.outcome(1).reason is client.outcome(2).reason is FinishReason.ABORT
        assert engine.wait(TIMEOUT_S) == 0
    assert engine.stderr is not None
    assert "Traceback" not in engine.stderr.read()
    assert not (tmp_path / "engine").exists(), "the socket file was left behind"


def test_a_signal_ends_an_idle_engine_with_a_vanished_frontend(
    engine: subprocess.Popen[str],
) -> None:
    with WireClient("ipc://engine") as client:
        client.hello()
    engine.terminate()
    assert engine.wait(TIMEOUT_S) == 0


def test_sigusr1_dumps_the_stacks_and_it_goes_on(engine: subprocess.Popen[str]) -> None:
    engine.send_signal(signal.SIGUSR1)
    with WireClient("ipc://engine") as client:
        client.hello()
        client.add(1, [5, 6, 7])
        client.collect(1)
    engine.terminate()
    assert engine.wait(TIMEOUT_S) == 0
    assert engine.stderr is not None
    stacks = engine.stderr.read()
    for function in ("_loop", "inbox.py", "outbox.py"):
        assert function in stacks


def test_a_killed_engine_does_not_stop_its_successor(
    engine: subprocess.Popen[str], tmp_path: Path
) -> None:
    engine.kill()
    engine.wait(TIMEOUT_S)
    assert (tmp_path / "engine").is_socket()
    with start("tests.support.engine_process", "ipc://engine", "again.json", cwd=tmp_path) as again:
        with WireClient("ipc://engine") as client:
            client.hello(TIMEOUT_S)
        again.terminate()
        assert again.wait(TIMEOUT_S) == 0


def test_the_room_says_in_one_line_why_it_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "junk.gguf").write_bytes(b"no model at all")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cases = [
            (1, [f"--engine-bind=tcp://127.0.0.1:{taken.getsockname()[1]}"], "in use"),
            (2, ["--engine-bind=tcp://127.0.0.1"], "expected ipc://PATH or tcp://HOST:PORT"),
            (2, [f"--engine-bind=ipc://{tmp_path}/{'x' * 108}"], "use a shorter directory"),
            (2, ["--max-num-seqs=0"], "max-num-seqs"),
            (3, ["--engine-bind=ipc://e", f"--model={tmp_path}/none"], "no such file or directory"),
            (3, ["--engine-bind=ipc://e2", f"--model={tmp_path}/junk.gguf"], "junk.gguf"),
        ]
        rooms = [start("engine_core", *flags, cwd=tmp_path) for _, flags, _ in cases]
        for room, (status, _, complaint) in zip(rooms, cases, strict=True):
            _, stderr = room.communicate(timeout=TIMEOUT_S)
            assert room.returncode == status, stderr
            assert complaint in stderr.splitlines()[-1]
            assert "Traceback" not in stderr
    assert not (tmp_path / "e").exists()
