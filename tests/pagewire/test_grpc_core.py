from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from pagewire import grpc_core
from pagewire.grpc_core import EXPERIMENTS, patient_threads

CALL = """
import asyncio
from pagewire import grpc_core
grpc_core.configure()
import grpc

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
    await server.stop(None)

asyncio.run(main())
"""


def test_the_core_knows_what_it_is_told() -> None:
    """It complains of an unknown experiment on stderr, and goes on."""
    environment = {name: value for name, value in os.environ.items() if name != EXPERIMENTS}
    done = subprocess.run(
        [sys.executable, "-c", CALL], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("release", "is_known"), [("1.85.3", True), ("1.86.0", False)])
def test_only_releases_that_were_tested_are_told(
    monkeypatch: pytest.MonkeyPatch, release: str, is_known: bool
) -> None:
    monkeypatch.setattr(grpc_core, "version", {"grpcio": release}.__getitem__)
    for name in (EXPERIMENTS, "GRPC_VERBOSITY"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    grpc_core.configure()
    assert (EXPERIMENTS in os.environ) is is_known


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ((EXPERIMENTS, "tcp_rcv_lowat"), ("GRPC_VERBOSITY", "DEBUG")):
        monkeypatch.setenv(name, value)
    grpc_core.configure()
    assert os.environ[EXPERIMENTS] == "tcp_rcv_lowat"
    assert os.environ["GRPC_VERBOSITY"] == "DEBUG"


@pytest.mark.parametrize("room", ["frontend", "tokenizer_svc"])
def test_a_room_has_not_imported_grpc_before_it_is_told(room: str) -> None:
    code = f"import sys, {room}.__main__; raise SystemExit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
def test_threads_are_patient_that_are_started_inside() -> None:
    seen: list[int] = []

    def look() -> None:
        seen.append(os.sched_getscheduler(0))

    with patient_threads():
        threads = [threading.Thread(target=look)]
        threads[0].start()
    threads.append(threading.Thread(target=look))
    threads[1].start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [os.SCHED_OTHER, os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
