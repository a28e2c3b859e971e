"""Two engines: one is killed, one is drained, and the streams of both go on."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from pagewire.v1 import admin_pb2, common_pb2, inference_pb2
from tests.support.stack import connect, running_stack
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.stack import Api

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

FLAGS = ("--device=cpu", "--dtype=float32", "--kv-cache-memory=64MiB", "--cpu-threads=1")
NUM_STREAMS = 16
MAX_TOKENS = 800


async def read_ids(api: Api, index: int, first: asyncio.Event | None = None) -> list[int]:
    request = inference_pb2.GenerateStreamRequest(
        prompt=f"Story number {index}: once upon",
        sampling_params=common_pb2.SamplingParams(
            max_tokens=MAX_TOKENS + index, temperature=index % 2, seed=index, ignore_eos=True
        ),
        return_token_ids=True,
    )
    ids: list[int] = []
    ended = False
    async for frame in api.inference.GenerateStream(request):
        assert not ended
        ids += frame.delta.token_ids
        ended = frame.HasField("final")
        if first is not None:
            first.set()
    assert ended
    return ids


def with_engines(stats: admin_pb2.GetStatsResponse) -> list[int]:
    return [engine.num_requests_in_flight for engine in stats.engines]


async def start_streams(
    api: Api,
) -> tuple[list[asyncio.Task[list[int]]], admin_pb2.GetStatsResponse]:
    """All of them, running on both engines."""
    started = [asyncio.Event() for _ in range(NUM_STREAMS)]
    streams = [
        asyncio.create_task(read_ids(api, index, event)) for index, event in enumerate(started)
    ]
    await asyncio.gather(*(asyncio.wait_for(event.wait(), 60) for event in started))
    stats = await api.stats()
    assert all(with_engines(stats)), "both engines have some"
    return streams, stats


def is_new(engine: admin_pb2.EngineStats, old: admin_pb2.EngineStats) -> bool:
    return engine.ready and not engine.draining and engine.epoch != old.epoch


async def test_streams_move_between_engines(tmp_path: Path) -> None:
    model = write_hf(tmp_path, TinySpec(max_positions=1024))
    with running_stack(f"--model={model}", "--num-engines=2", *FLAGS) as stack:
        async with connect(stack) as api:
            await api.eventually(lambda stats: all(engine.ready for engine in stats.engines))
            undisturbed = await asyncio.gather(*[read_ids(api, i) for i in range(NUM_STREAMS)])

            streams, before = await start_streams(api)
            killed = before.engines[0]
            psutil.Process(killed.pid).send_signal(signal.SIGKILL)
            assert await asyncio.wait_for(asyncio.gather(*streams), 120) == undisturbed
            await api.eventually(lambda stats: is_new(stats.engines[0], killed))

            streams, before = await start_streams(api)
            drained = before.engines[1]
            reply = await api.admin.Drain(admin_pb2.DrainRequest(engine=drained.address))
            assert reply.num_unfinished == 0
            after = await api.stats()
            assert after.engines[1].draining
            assert with_engines(after)[1] == 0
            assert after.engines[1].num_free_blocks == after.engines[1].num_blocks
            # What the operator does now; the launcher starts it again.
            psutil.Process(drained.pid).send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(asyncio.gather(*streams), 120) == undisturbed
            await api.eventually(lambda stats: is_new(stats.engines[1], drained))
            await api.at_rest()
