"""A rank of an engine in two is killed while streams run, and then rank 0: clients see a pause
and nothing else, and no process is left."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from pagewire.v1 import common_pb2, inference_pb2
from tests.parity.harness import Engine, load
from tests.support.stack import connect, running_stack
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.stack import Api

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

FLAGS = (
    *("--device=cpu", "--dtype=float32", "--kv-cache-memory=64MiB", "--cpu-threads=2"),
    "--tensor-parallel-size=2",
)
PROMPTS = [[2 + index, 40, 41, *range(60, 60 + 9 * index)] for index in range(6)]
MAX_TOKENS = 250
HEAD_DIM = 32
"""That kernels of GPUs have too."""


async def generate(api: Api, prompt: list[int], started: asyncio.Event) -> list[int]:
    """The ids of a stream, to its end; `started` is set at the first."""
    request = inference_pb2.GenerateStreamRequest(
        prompt_token_ids=common_pb2.TokenIds(ids=prompt),
        sampling_params=common_pb2.SamplingParams(
            max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True
        ),
        return_token_ids=True,
    )
    ids: list[int] = []
    has_ended = False
    async for response in api.inference.GenerateStream(request):
        assert not has_ended, "a frame after the final one"
        has_ended = response.WhichOneof("frame") == "final"
        ids += response.delta.token_ids
        started.set()
    assert has_ended, "no final frame"
    return ids


def ranks_of(engine_pid: int) -> list[psutil.Process]:
    children = psutil.Process(engine_pid).children()
    return [it for it in children if "engine_core.parallel.worker" in it.cmdline()]


async def test_streams_outlive_a_killed_rank(tmp_path: Path) -> None:
    await streams_outlive_killed_ranks(tmp_path, FLAGS)


async def streams_outlive_killed_ranks(directory: Path, flags: tuple[str, ...]) -> None:
    """Of an engine of two, with these flags. What is expected is computed by one rank, here."""
    model = write_hf(
        directory, TinySpec(max_positions=1024, num_heads=8, num_kv_heads=4, head_dim=HEAD_DIM)
    )
    expected = Engine(load(str(model), "cpu", 1024)).generate(PROMPTS, MAX_TOKENS)
    with running_stack(f"--model={model}", *flags) as stack:
        async with connect(stack) as api:
            seen: list[psutil.Process] = []
            for victim in ("none", "rank 1", "rank 0"):
                started = [asyncio.Event() for _ in PROMPTS]
                tasks = [
                    asyncio.create_task(generate(api, prompt, event))
                    for prompt, event in zip(PROMPTS, started, strict=True)
                ]
                await asyncio.gather(*(asyncio.wait_for(event.wait(), 60) for event in started))
                before = await api.stats()
                (worker,) = ranks_of(before.engine_pid)
                seen.append(worker)
                if victim != "none":
                    killed = worker if victim == "rank 1" else psutil.Process(before.engine_pid)
                    killed.send_signal(signal.SIGKILL)
                    assert not any(task.done() for task in tasks)
                assert await asyncio.wait_for(asyncio.gather(*tasks), 120) == expected, victim
                after = await api.stats()
                assert (after.engine_epoch == before.engine_epoch) == (victim == "none")
                await api.at_rest()
            seen += ranks_of((await api.stats()).engine_pid)
    gone, alive = psutil.wait_procs(seen, timeout=30)
    assert len({process.pid for process in gone}) == 3
    assert not alive
