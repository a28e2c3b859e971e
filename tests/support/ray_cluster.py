"""A local Ray cluster of two nodes, and `python -m deploy.ray` on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio
import ray
from ray.cluster_utils import Cluster

from pagewire.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.balanced import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_TOKENS = 700
_NODE = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 * 2**20}


@contextlib.contextmanager
def two_nodes() -> Iterator[str]:
    """The address of their head."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = Cluster(initialize_head=True, head_node_args={**_NODE, "include_dashboard": False})
    try:
        nodes.add_node(**_NODE)
        nodes.wait_for_nodes()
        yield nodes.address
    finally:
        ray.shutdown()
        nodes.shutdown()


def start(address: str, model: Path, *own: str) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "deploy.ray", f"--address={address}", *own),
        *("--", "--allow-remote-engine", f"--model={model}", "--device=cpu", "--dtype=float32"),
        *("--kv-cache-memory=64MiB", "--port=0", "--http-port=0", "--admin-port=0"),
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def read_rooms(process: subprocess.Popen[str]) -> dict[str, dict[str, str]]:
    """What it prints once it is ready: node, pid and gRPC address by actor."""
    line = re.compile(r"(\w+-\d)\s+node (\w+)\s+pid (\d+)\s+(.*)")
    rooms, said = {}, []
    assert process.stdout is not None
    for text in process.stdout:
        said.append(text)
        if found := line.match(text):
            rooms[found[1]] = {"node": found[2], "pid": found[3], "where": found[4]}
        if text.startswith("ready"):
            return rooms
    raise AssertionError("".join(said))


@dataclass(frozen=True)
class Killed:
    """What came of streams one of whose engines' actors was killed."""

    undisturbed: list[list[int]]
    """The ids of each stream, before."""
    disturbed: list[list[int]]
    state: dict[str, Any]
    """Of the engine's actor, once its engine serves again."""


async def kill_an_engine(head: str, rooms: dict[str, dict[str, str]], num_streams: int) -> Killed:
    """Kills the actor engine-0 once each stream has begun."""
    (address,) = re.findall(r"grpc ([\w.:]+)", rooms["frontend-0"]["where"])
    ray.init(address=head, namespace="pagewire", log_to_driver=False)
    engine = ray.get_actor("engine-0")
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        undisturbed = await asyncio.gather(*[_read_ids(stub, i) for i in range(num_streams)])
        started = [asyncio.Event() for _ in range(num_streams)]
        streams = [
            asyncio.create_task(_read_ids(stub, i, event)) for i, event in enumerate(started)
        ]
        await asyncio.gather(*(event.wait() for event in started))
        ray.kill(engine, no_restart=False)
        disturbed = await asyncio.gather(*streams)
    return Killed(undisturbed, disturbed, await _back(engine, int(rooms["engine-0"]["pid"])))


async def _read_ids(stub: Any, index: int, first: asyncio.Event | None = None) -> list[int]:
    request = inference_pb2.GenerateStreamRequest(
        prompt=f"Story number {index}: once upon",
        sampling_params=common_pb2.SamplingParams(
            max_tokens=MAX_TOKENS + index, temperature=index % 2, seed=index, ignore_eos=True
        ),
        return_token_ids=True,
    )
    ids: list[int] = []
    async for frame in stub.GenerateStream(request):
        ids += frame.delta.token_ids
        if first is not None:
            first.set()
    return ids


async def _back(engine: Any, old: int) -> dict[str, Any]:
    async with asyncio.timeout(120):
        while True:
            state: dict[str, Any] = await engine.state.remote()
            if state["facts"] is not None and state["facts"]["pid"] != old:
                return state
            await asyncio.sleep(0.2)
