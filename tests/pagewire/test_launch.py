"""The launcher over rooms that do nothing but start, report and stop."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pagewire.config import ServeConfig
from pagewire.cores import allowed_cores
from pagewire.launch import _rooms, runtime_directory
from pagewire.obs.ready import read_ready_file

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
ROOMS = ("frontend", "tokenizer_svc", "engine_core")

# Stands in for `python -m <room>`. What it does is chosen by FAKE_<ROOM>; what
# happens to it is sent to the test as datagrams.
FAKE_ROOM = """
import json, os, signal, socket, sys

room = sys.argv[0].split("/")[-2]
mode = os.environ.get("FAKE_" + room.upper(), "serve")
events = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

def say(what):
    line = json.dumps([room, what, os.getpid(), sys.argv[1:], sorted(os.environ)])
    events.sendto(line.encode(), ("127.0.0.1", int(os.environ["FAKE_EVENTS"])))

def stop(number, frame):
    say("stop")
    if mode != "deaf":
        os._exit(0)

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGUSR2, stop)
say("start")
if mode.startswith("exit"):
    sys.stderr.write(f"{room}: fails on purpose\\n")
    sys.exit(int(mode.split()[1]))
if mode != "mute":
    path = next(a.split("=", 1)[1] for a in sys.argv if a.startswith("--ready-file="))
    facts = {"pid": os.getpid(), "model": "m", "grpc": "127.0.0.1:1", "http": "127.0.0.1:2"}
    if room == "tokenizer_svc":
        facts["chat_template"] = mode != "bare"
    with open(path + ".new", "w") as file:
        json.dump({**facts, "admin": "127.0.0.1:3"}, file)
    os.rename(path + ".new", path)
while True:
    signal.pause()
"""


class Launcher:
    """`pagewire serve` in its own process, and what its rooms report."""

    def __init__(self, directory: Path) -> None:
        self.advice = ""
        """The last line of what start_ready() read."""
        self._directory = directory
        self._events = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._events.bind(("127.0.0.1", 0))
        self._events.settimeout(60)
        self._early: deque[list] = deque()
        self._processes: list[subprocess.Popen[str]] = []
        for room in ROOMS:
            (directory / "rooms" / room).mkdir(parents=True)
            (directory / "rooms" / room / "__init__.py").touch()
            (directory / "rooms" / room / "__main__.py").write_text(FAKE_ROOM)
        (directory / "run").mkdir()

    def start(self, *flags: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pagewire.cli", "serve", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": f"{self._directory / 'rooms'}:{ROOT}",
                "XDG_RUNTIME_DIR": str(self._directory / "run"),
                "FAKE_EVENTS": str(self._events.getsockname()[1]),
                **environment,
            },
        )
        self._processes.append(process)
        return process

    def start_ready(self, *flags: str, **environment: str) -> subprocess.Popen[str]:
        process = self.start(*flags, **environment)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Try it"):
                self.advice = line
                return process
        raise AssertionError(process.communicate())

    def event(self, room: str, what: str) -> list:
        """The next such report: [room, what, pid, argv, environment names]."""
        for seen in list(self._early):
            if seen[:2] == [room, what]:
                self._early.remove(seen)
                return seen
        while True:
            seen = json.loads(self._events.recv(1 << 16))
            if seen[:2] == [room, what]:
                return seen
            self._early.append(seen)

    def order(self, what: str, count: int) -> list[str]:
        """The rooms in the order of their next `count` such reports."""
        seen = []
        while len(seen) < count:
            report = json.loads(self._events.recv(1 << 16))
            if report[1] == what:
                seen.append(report[0])
        return seen

    def runtime_directories(self) -> list[Path]:
        return list((self._directory / "run").glob("pagewire-*"))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._events.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    # tmp_path may be too long for a socket's path.
    with tempfile.TemporaryDirectory(prefix="pw-") as directory:
        launcher = Launcher(Path(directory))
        yield launcher
        launcher.close()


@pytest.mark.parametrize(
    ("mode", "command"), [("serve", "chat"), ("bare", 'generate "Once upon a time"')]
)
def test_what_is_advised_fits_the_model(launcher: Launcher, mode: str, command: str) -> None:
    launcher.start_ready(FAKE_TOKENIZER_SVC=mode)
    assert launcher.advice == f"Try it: pagewire {command} --address 127.0.0.1:1\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_frontend_first_and_all_cleanly(
    launcher: Launcher, tmp_path: Path, number: signal.Signals
) -> None:
    ready = tmp_path / "ready.json"
    process = launcher.start_ready(f"--ready-file={ready}")
    facts = json.loads(ready.read_text())
    assert facts["pid"] == process.pid
    assert (facts["model"], facts["grpc"], facts["admin"]) == ("m", "127.0.0.1:1", "127.0.0.1:3")
    assert sorted(facts["pids"]) == sorted(ROOMS)
    process.send_signal(number)
    assert launcher.order("stop", 3)[0] == "frontend"
    _out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert launcher.runtime_directories() == []


def test_each_room_gets_its_own_flags_and_no_settings_environment(launcher: Launcher) -> None:
    launcher.start_ready("--max-num-seqs=3", "--port=7", PAGEWIRE_MODEL="/some/model")
    flags = {}
    for room in ROOMS:
        _, _, _, flags[room], environment = launcher.event(room, "start")
        assert not [name for name in environment if name.startswith("PAGEWIRE_")]
    assert "--max-num-seqs=3" in flags["engine_core"]
    assert "--port=7" in flags["frontend"]
    assert "--model=/some/model" in flags["engine_core"]
    assert "--model=/some/model" in flags["tokenizer_svc"]
    for room, names in {
        "frontend": ["--model", "--max-num-seqs"],
        "engine_core": ["--port"],
    }.items():
        for name in names:
            assert not [flag for flag in flags[room] if flag.startswith(name + "=")]
    address = next(f for f in flags["frontend"] if f.startswith("--tokenizer-address="))
    bind = next(f for f in flags["tokenizer_svc"] if f.startswith("--tokenizer-bind="))
    assert address.partition("=")[2] == bind.partition("=")[2]


def test_several_engines(launcher: Launcher, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    process = launcher.start_ready("--num-engines=3", f"--ready-file={ready}")
    pids = json.loads(ready.read_text())["pids"]
    assert sorted(pids) == sorted([*ROOMS, "engine_core.1", "engine_core.2"])
    starts = [launcher.event("engine_core", "start") for _ in range(3)]
    assert {start[2] for start in starts} == {pids[name] for name in pids if "engine" in name}
    flags = [dict(flag.partition("=")[::2] for flag in start[3]) for start in starts]
    frontend = dict(flag.partition("=")[::2] for flag in launcher.event("frontend", "start")[3])
    addresses = frontend["--engine-address"].split(",")
    assert sorted(it["--engine-bind"] for it in flags) == sorted(addresses)
    assert len(set(addresses)) == 3
    cores = max(1, allowed_cores() // 3)
    assert {it["--cpu-threads"] for it in flags} == {str(cores)}
    # Each is watched by itself.
    os.kill(pids["engine_core.1"], signal.SIGKILL)
    assert launcher.event("engine_core", "start")[2] not in pids.values()
    process.terminate()
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "engine_core.1 was killed by SIGKILL; starting it again at once" in err


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("status", [1, 2, 3])
def test_a_room_that_cannot_start_ends_the_launcher_with_its_status(
    launcher: Launcher, room: str, status: int
) -> None:
    process = launcher.start(**{f"FAKE_{room.upper()}": f"exit {status}"})
    _out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert f"{room}: fails on purpose" in err
    assert f"{room} ended with status {status}" in err
    assert "before the server was ready" in err
    assert launcher.runtime_directories() == []


def test_start_timeout_names_the_room_that_is_not_ready(launcher: Launcher) -> None:
    process = launcher.start("--start-timeout=6", FAKE_ENGINE_CORE="mute")
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "not ready after 6 s (--start-timeout), still waiting for: engine_core" in err


def test_a_signal_during_start_ends_it_cleanly(launcher: Launcher) -> None:
    process = launcher.start(FAKE_ENGINE_CORE="mute")
    launcher.order("start", 3)
    process.terminate()
    _out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def test_no_room_outlives_a_killed_launcher(launcher: Launcher) -> None:
    process = launcher.start_ready()
    process.kill()
    assert sorted(launcher.order("stop", 3)) == sorted(ROOMS)


def test_what_a_killed_launcher_left_is_removed_by_the_next(launcher: Launcher) -> None:
    first = launcher.start_ready()
    (left,) = launcher.runtime_directories()
    first.kill()
    first.wait(timeout=60)
    launcher.start_ready()
    assert not left.exists()
    assert len(launcher.runtime_directories()) == 1


def test_two_servers_do_not_meet(launcher: Launcher) -> None:
    launcher.start_ready()
    launcher.start_ready()
    assert len(launcher.runtime_directories()) == 2


@pytest.mark.parametrize("room", ["tokenizer_svc", "engine_core"])
def test_a_room_that_dies_later_is_started_again(launcher: Launcher, room: str) -> None:
    process = launcher.start_ready()
    first = launcher.event(room, "start")[2]
    os.kill(first, signal.SIGKILL)
    assert launcher.event(room, "start")[2] != first
    process.terminate()
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"{room} was killed by SIGKILL; starting it again at once" in err


def test_a_room_that_served_does_not_wait_for_its_next_start(launcher: Launcher) -> None:
    process = launcher.start_ready()
    (directory,) = launcher.runtime_directories()
    ready_file = directory / "engine_core.json"
    for served_s in (60, 60, 60, 0, 0):
        pid = launcher.event("engine_core", "start")[2]
        while (read_ready_file(ready_file) or {}).get("pid") != pid:
            pass
        os.utime(ready_file, (0, time.time() - served_s))
        os.kill(pid, signal.SIGKILL)
    launcher.event("engine_core", "start")
    process.terminate()
    _out, err = process.communicate(timeout=60)
    assert re.findall(r"starting it again (.*)", err) == ["at once"] * 3 + ["in 1 s", "in 2 s"]


def test_a_frontend_that_dies_ends_the_server(launcher: Launcher) -> None:
    process = launcher.start_ready()
    os.kill(launcher.event("frontend", "start")[2], signal.SIGKILL)
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "frontend was killed by SIGKILL; stopping the other rooms" in err


def test_a_second_signal_kills(launcher: Launcher) -> None:
    process = launcher.start_ready("--drain-timeout=1000", FAKE_FRONTEND="deaf")
    process.send_signal(signal.SIGINT)
    launcher.event("frontend", "stop")
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "second signal: killing the rooms" in err


def test_socket_addresses_are_the_launchers_own(launcher: Launcher) -> None:
    process = launcher.start("--engine-bind=tcp://127.0.0.1:5557")
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("pagewire: --engine-bind: ")
    assert len(err.splitlines()) == 1


# sgl-project/sglang-omni#768, LMCache/LMCache#3530
@pytest.mark.parametrize("length", range(66, 80))
def test_every_socket_of_many_engines_fits_its_path(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    with tempfile.TemporaryDirectory() as short:
        base = Path(short) / ("x" * (length - len(short) - 1))
        base.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
        with runtime_directory() as directory:
            rooms = _rooms(ServeConfig(num_engines=16), directory)
        flags = " ".join(flag for room in rooms for flag in room.flags)
        paths = set(re.findall(r"(?:ipc://|unix:)([^ ,]+)", flags))
        outputs = next(path for path in paths if path.endswith("outputs.sock"))
        assert len(paths) == 18
        longest = max(map(len, [*paths, f"{outputs}.15"]))
        assert longest <= 107
        assert (directory.parent == base) == (longest > 90), "as long as it may be"


def test_a_long_temporary_directory_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with runtime_directory() as directory:
        assert len(os.fsencode(directory / "tokenizer.sock")) < 108
        assert directory.stat().st_mode & 0o077 == 0
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / "tokenizer.sock"))
    assert not directory.exists()
