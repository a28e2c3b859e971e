"""`pagewire serve` from start to end, with servers of its own."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import grpc
import psutil
import pytest

from pagewire.v1 import common_pb2, inference_pb2
from tests.support.stack import Stack, connect, launch, read_stream, running_stack
from tests.support.tiny_model import TinySpec, write_hf

pytestmark = pytest.mark.timeout(300)

TINY_FLAGS = ("--device=cpu", "--dtype=float32", "--kv-cache-memory=64MiB", "--cpu-threads=1")


@pytest.mark.parametrize("kind", ["missing", "not a model", "broken", "broken config"])
def test_a_model_that_cannot_be_served_is_named_within_seconds(tmp_path: Path, kind: str) -> None:
    model = tmp_path / "model"
    if kind == "not a model":
        model.mkdir()
    elif kind == "broken":
        model.write_bytes(b"PK\x03\x04 this is an archive")
    elif kind == "broken config":
        model.mkdir()
        (model / "config.json").write_text('{"architectures": ')
    began = time.monotonic()
    process = launch(f"--model={model}", log=tmp_path / "log")
    process.communicate(timeout=120)
    log = (tmp_path / "log").read_text()
    assert process.returncode == 3, log
    assert str(model) in log
    assert ("config.json: not readable as JSON" in log) == (kind == "broken config")
    assert "ended with status 3 (the model cannot be loaded) before the server was ready" in log
    assert "Traceback" not in log
    # Imports take most of it, and are slow on a busy host.
    assert time.monotonic() - began < 60


# sgl-project/sglang-omni#768, LMCache/LMCache#3530
async def test_two_servers_on_one_host_under_a_long_tmpdir(stack: Stack, tmp_path: Path) -> None:
    tiny_model = write_hf(tmp_path / ("m" * 200), TinySpec(max_positions=4096))
    long = tmp_path / ("x" * 120)
    long.mkdir()
    environment = {"TMPDIR": str(long), "XDG_RUNTIME_DIR": str(long)}
    model = f"--model={tiny_model}"
    with running_stack(model, *TINY_FLAGS, environment=environment) as other:
        assert other.address != stack.address
        request = inference_pb2.GenerateRequest(
            prompt="x", sampling_params=common_pb2.SamplingParams(max_tokens=3, ignore_eos=True)
        )
        async with connect(stack) as here, connect(other) as there:
            one, two = await asyncio.gather(
                here.inference.Generate(request), there.inference.Generate(request)
            )
        assert (one.model, two.model) == (stack.model, other.model)
        assert one.model != two.model


# vllm-project/vllm#34730, #24885, #36964
@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
@pytest.mark.parametrize("room", ["frontend", "tokenizer_svc"])
def test_the_event_loop_is_not_preempted_by_what_polls_for_it(stack: Stack, room: str) -> None:
    pid = stack.pids[room]
    threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    policies = {thread: os.sched_getscheduler(thread) for thread in threads}
    assert policies.pop(pid) == os.SCHED_OTHER
    assert os.SCHED_BATCH in policies.values()


async def test_sigterm_lets_running_streams_finish_and_exits_0(tiny_model: Path) -> None:
    with running_stack(f"--model={tiny_model}", *TINY_FLAGS, "--drain-timeout=200") as stack:
        async with connect(stack) as api:
            started = [asyncio.Event() for _ in range(4)]
            sampling = common_pb2.SamplingParams(max_tokens=1000, ignore_eos=True)
            request = inference_pb2.GenerateStreamRequest(prompt="x", sampling_params=sampling)
            streams = [
                asyncio.create_task(read_stream(api.inference.GenerateStream(request), event))
                for event in started
            ]
            await asyncio.gather(*(asyncio.wait_for(event.wait(), 60) for event in started))
            stack.process.terminate()
            await api.eventually(lambda stats: stats.draining)
            assert not any(task.done() for task in streams)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await api.inference.Generate(
                    inference_pb2.GenerateRequest(prompt="x", sampling_params=sampling)
                )
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            finished = await asyncio.gather(*streams)
        assert [stream.final.usage.completion_tokens for stream in finished] == [1000] * 4
        assert await asyncio.to_thread(stack.process.wait, 60) == 0
        assert stack.alive_pids() == {}


def test_no_process_outlives_a_killed_launcher(tiny_model: Path) -> None:
    with running_stack(f"--model={tiny_model}", *TINY_FLAGS) as stack:
        rooms = [psutil.Process(pid) for pid in stack.pids.values()]
        family = [*rooms, *(child for room in rooms for child in room.children(recursive=True))]
        assert len(family) >= 4, "three rooms and a tokenizer worker"
        stack.process.kill()
        _gone, alive = psutil.wait_procs(family, timeout=60)
        assert alive == []


async def test_a_killed_engine_comes_back(tiny_model: Path) -> None:
    with running_stack(f"--model={tiny_model}", *TINY_FLAGS) as stack:
        async with connect(stack) as api:
            before = await api.stats()
            psutil.Process(stack.pids["engine_core"]).kill()
            after = await api.eventually(
                lambda stats: stats.engine_ready and stats.engine_epoch != before.engine_epoch, 120
            )
            assert after.engine_pid != before.engine_pid
            response = await api.inference.Generate(
                inference_pb2.GenerateRequest(
                    prompt="x",
                    sampling_params=common_pb2.SamplingParams(max_tokens=3, ignore_eos=True),
                ),
                wait_for_ready=True,
            )
            assert response.usage.completion_tokens == 3
