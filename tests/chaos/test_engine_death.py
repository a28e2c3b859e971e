"""The engine is killed while streams run: their clients see a pause and nothing else."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from pagewire.v1 import common_pb2, inference_pb2
from tests.support.stack import Api, Streamed, connect, read_stream, running_stack
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

FLAGS = ("--device=cpu", "--dtype=float32", "--kv-cache-memory=64MiB", "--cpu-threads=1")
NUM_STREAMS = 8
MAX_TOKENS = 600


def streams(api: Api, started: list[asyncio.Event]) -> list[asyncio.Task[Streamed]]:
    return [
        asyncio.create_task(
            read_stream(
                api.inference.GenerateStream(
                    inference_pb2.GenerateStreamRequest(
                        prompt=f"Story number {index}: once upon",
                        sampling_params=common_pb2.SamplingParams(
                            max_tokens=MAX_TOKENS + index,
                            temperature=index % 2,  # every other is greedy
                            seed=index,
                            ignore_eos=True,
                        ),
                    )
                ),
                started[index],
            )
        )
        for index in range(NUM_STREAMS)
    ]


# vllm-project/vllm#19881, #24897: health and streams of a server whose engine was killed.
async def test_streams_outlive_a_killed_engine(tmp_path: Path) -> None:
    model = write_hf(tmp_path, TinySpec(max_positions=2048))
    with running_stack(f"--model={model}", *FLAGS) as stack:
        async with connect(stack) as api:
            undisturbed = await asyncio.gather(
                *streams(api, [asyncio.Event() for _ in range(NUM_STREAMS)])
            )
            # The second signal is what an upgrade sends: the engine gives its requests back.
            for number in (signal.SIGKILL, signal.SIGTERM):
                started = [asyncio.Event() for _ in range(NUM_STREAMS)]
                tasks = streams(api, started)
                await asyncio.gather(*(asyncio.wait_for(event.wait(), 60) for event in started))
                before = await api.stats()
                psutil.Process(before.engine_pid).send_signal(number)
                assert not any(task.done() for task in tasks)
                finished = await asyncio.wait_for(asyncio.gather(*tasks), 120)
                after = await api.stats()
                assert after.engine_epoch != before.engine_epoch
                for index, (one, other) in enumerate(zip(finished, undisturbed, strict=True)):
                    assert one.text == other.text
                    assert one.final.usage.completion_tokens == MAX_TOKENS + index
                    assert one.final.outputs == other.final.outputs
                await api.at_rest()
