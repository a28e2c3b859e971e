"""Streams through a server on Ray while the actor of an engine is killed.

    python bench/ray_failover.py [--streams 8]

A local cluster of two nodes; `python -m deploy.ray` starts two engines with a small random
model on a CPU, a tokenizer and a frontend. The streams are held against an undisturbed run.
Exit status 1 where one differs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.balanced import free_port
from tests.support.ray_cluster import kill_an_engine, read_rooms, start, two_nodes
from tests.support.tiny_model import TinySpec, write_hf


def main(num_streams: int) -> int:
    with tempfile.TemporaryDirectory() as directory, two_nodes() as head:
        model = write_hf(Path(directory), TinySpec(max_positions=1024))
        process = start(head, model, "--engines=2", f"--engine-port={free_port()}")
        try:
            rooms = read_rooms(process)
            for name, room in rooms.items():
                print(f"{name:12} node {room['node']}  pid {room['pid']}  {room['where']}")
            killed = asyncio.run(kill_an_engine(head, rooms, num_streams))
        finally:
            process.terminate()
            status = process.wait(90)
    same = sum(a == b for a, b in zip(killed.undisturbed, killed.disturbed, strict=True))
    tokens = sum(map(len, killed.disturbed))
    print(
        f"engine-0's actor killed: {same} of {num_streams} streams, {tokens} tokens, as undisturbed"
    )
    facts = killed.state["facts"]
    print(f"engine-0     node {killed.state['node'][:8]}  pid {facts['pid']}  {facts['commands']}")
    print(f"SIGTERM: status {status}")
    return 0 if same == num_streams and status == 0 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=8)
    sys.exit(main(parser.parse_args().streams))
