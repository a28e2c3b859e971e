"""A server on a local Ray cluster of two nodes, one of whose engines is killed under load."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.balanced import free_port
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("ray", reason="no ray here: pip install 'pagewire[ray]'")

from tests.support.ray_cluster import kill_an_engine, read_rooms, start, two_nodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # Ray's own, in its client to the cluster.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

NUM_STREAMS = 8


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    with two_nodes() as address:
        yield address


async def test_an_engine_actor_that_is_killed_costs_no_stream(head: str, tmp_path: Path) -> None:
    model = write_hf(tmp_path, TinySpec(max_positions=1024))
    process = start(head, model, "--engines=2", f"--engine-port={free_port()}")
    try:
        rooms = await asyncio.to_thread(read_rooms, process)
        nodes = {name: room["node"] for name, room in rooms.items()}
        assert nodes["engine-0"] != nodes["engine-1"]
        assert nodes["tokenizer-0"] == nodes["frontend-0"]
        killed = await kill_an_engine(head, rooms, NUM_STREAMS)
        assert killed.disturbed == killed.undisturbed
        # The same port, though it is another process.
        (commands,) = re.findall(r"commands ([\w.:/]+)", rooms["engine-0"]["where"])
        assert killed.state["facts"]["commands"] == commands
        process.terminate()
        assert await asyncio.to_thread(process.wait, 90) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        sys.stderr.write(process.stdout.read())
        process.stdout.close()


async def test_a_cluster_that_is_too_small_is_said_so(head: str, tmp_path: Path) -> None:
    model = write_hf(tmp_path, TinySpec())
    process = start(head, model, "--engine-gpus=1", "--placement-timeout=1")
    output, _ = await asyncio.to_thread(process.communicate, None, 90)
    assert process.returncode == 2
    assert "no room for 1 times 1 CPU, 1 GPU" in output
