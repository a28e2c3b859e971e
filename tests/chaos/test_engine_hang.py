"""An engine that hangs is seen, writes its stacks, ends, and is replaced; its streams go on."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.accounted import Load, make_requests
from tests.support.stack import connect, running_stack
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

SERVING, NOT_SERVING = 1, 2
FLAGS = (
    *("--device=cpu", "--dtype=float32", "--batch-invariant"),
    *("--kv-cache-memory=64MiB", "--cpu-threads=1"),
)
# Python runs it at the start of every process that has it on its path.
HANG_ONCE = """
import os, sys, threading, time

def hang_when_told():
    path = os.environ["HANG_FILE"]
    while not os.path.exists(path):
        time.sleep(0.01)
    os.unlink(path)
    from engine_core.core import EngineCore

    def a_step_that_hangs(self, poll):
        threading.Event().wait()

    EngineCore.step = a_step_that_hangs

if "engine_core" in sys.orig_argv:
    threading.Thread(target=hang_when_told, daemon=True).start()
"""


async def test_streams_outlive_a_hang(tmp_path: Path) -> None:
    model = write_hf(tmp_path, TinySpec(max_positions=2048))
    (tmp_path / "sitecustomize.py").write_text(HANG_ONCE)
    hang = tmp_path / "hang"
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split()]),
        "HANG_FILE": str(hang),
    }
    flags = ("--stall-timeout=1", "--engine-hang-timeout=3")
    with running_stack(f"--model={model}", *flags, *FLAGS, environment=environment) as stack:
        async with connect(stack) as api, grpc.aio.insecure_channel(stack.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            before = await api.stats()
            load = Load(api, make_requests(8, 400))
            await load.learn()
            load.start(6)
            hang.touch()
            assert (await asyncio.wait_for(watch.read(), 60)).status == NOT_SERVING
            assert (await api.stats()).engine_epoch == before.engine_epoch
            after = await api.eventually(
                lambda stats: stats.engine_epoch not in (0, before.engine_epoch), 120
            )
            assert after.engine_pid != before.engine_pid
            await load.stop()
            watch.cancel()
            assert load.faults == []
            assert load.outcomes["ok"] >= 6
            await api.at_rest()
        log = stack.log.read_text()
    assert "a_step_that_hangs" in log
    assert "(--engine-hang-timeout)" in log
    assert "engine_core ended with status 1; starting it again at once" in log
