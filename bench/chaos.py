"""Kills Pagewire's processes at random moments under load, and accounts for every request.

    python bench/chaos.py [--kills 200] [--clients 8] [--seed 0]

A real `pagewire serve` over a small random model of the llama architecture, float32 on a
CPU and batch-invariant. Clients ask one request after the other (mixed lengths, greedy and
drawn, n, stop, log probabilities) while, one at a time, the engine, a tokenizer worker or
tokenizer_svc as a whole gets SIGKILL; the next is killed at a random moment after all are
back. Each accepted request must have exactly one outcome, and each stream the text, ids and finish
reasons of an undisturbed run. After every ROUND kills the load ends, and what is held must
be what was held before: requests, blocks, open descriptors of the frontend and launcher.
Exit status 1 where something was not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pagewire.v1 import tokenizer_pb2
from tests.support.accounted import Load, make_requests
from tests.support.stack import Api, Stack, connect, running_stack
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# Batches change when an engine comes back: what is drawn must not depend on them.
FLAGS = (
    *("--device=cpu", "--dtype=float32", "--batch-invariant"),
    *("--kv-cache-memory=64MiB", "--cpu-threads=1"),
)
ENGINE, WORKER, SERVICE = "engine_core", "tokenizer worker", "tokenizer_svc"
WEIGHTS = {ENGINE: 0.5, WORKER: 0.3, SERVICE: 0.2}
ROUND = 20
NUM_WORKERS = 2
BACK_S = 120.0
FEW = 3
"""Descriptors that a channel may hold more or less at a moment; a leak is one a kill."""
MAX_PAUSE_S = 1.0
"""Between all being back and the next kill, at most."""


@dataclass(frozen=True)
class Held:
    """By the frontend and the launcher, which are not killed, at rest."""

    fds: int
    rss_mib: float


class Victims:
    def __init__(self, stack: Stack, api: Api) -> None:
        self._launcher = psutil.Process(stack.process.pid)
        self._frontend = psutil.Process(stack.pids["frontend"])
        self._api = api

    def tokenizer_svc(self) -> psutil.Process:
        for child in self._launcher.children():
            if "tokenizer_svc" in child.cmdline():
                return child
        raise psutil.NoSuchProcess(0)

    async def kill(self, name: str, rng: random.Random) -> None:
        if name == ENGINE:
            victim = psutil.Process((await self._api.stats()).engine_pid)
        elif name == SERVICE:
            victim = self.tokenizer_svc()
        else:
            victim = rng.choice(self.tokenizer_svc().children())
        victim.send_signal(signal.SIGKILL)
        await asyncio.to_thread(psutil.wait_procs, [victim])

    async def wait_back(self) -> float:
        """Until all processes serve; the seconds it took."""
        began = time.monotonic()
        while not await self._all_serve():
            if time.monotonic() - began > BACK_S:
                raise TimeoutError("the processes did not come back")
            await asyncio.sleep(0.02)
        return time.monotonic() - began

    async def _all_serve(self) -> bool:
        stats = await self._api.stats()
        try:
            workers = self.tokenizer_svc().children()
            # One that has loaded its tokenizer has started its encode lanes.
            if len([worker for worker in workers if worker.num_threads() > 2]) < NUM_WORKERS:
                return False
        except psutil.NoSuchProcess:
            return False
        if not stats.engine_pid or not psutil.pid_exists(stats.engine_pid):
            return False
        try:
            await self._api.tokens.Tokenize(tokenizer_pb2.TokenizeRequest(text="x"), timeout=5)
        except grpc.aio.AioRpcError:
            return False
        return True

    async def held(self) -> Held:
        await self._api.at_rest(60)
        mine = (self._launcher, self._frontend)
        return Held(
            sum(process.num_fds() for process in mine),
            sum(process.memory_info().rss for process in mine) / 2**20,
        )


async def run(stack: Stack, arguments: argparse.Namespace) -> bool:
    rng = random.Random(arguments.seed)
    killed: Counter[str] = Counter()
    backs: dict[str, list[float]] = {name: [] for name in WEIGHTS}
    held: list[Held] = []
    async with connect(stack) as api:
        victims = Victims(stack, api)
        load = Load(api, make_requests(arguments.requests, arguments.max_tokens), seed=1)
        await victims.wait_back()
        await load.learn()
        held.append(await victims.held())
        while killed.total() < arguments.kills:
            load.start(arguments.clients)
            for _ in range(min(ROUND, arguments.kills - killed.total())):
                await asyncio.sleep(rng.uniform(0, MAX_PAUSE_S))
                (name,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
                await victims.kill(name, rng)
                killed[name] += 1
                backs[name].append(await victims.wait_back())
            await load.stop()
            held.append(await victims.held())
            print(f"# {killed.total()} kills, {dict(load.outcomes)}, {held[-1]}", flush=True)
            for fault in load.faults:
                print(f"# {fault}", flush=True)
    _report(killed, backs, load, held)
    return not load.faults and held[-1].fds <= held[1].fds + FEW


def _report(
    killed: Counter[str], backs: dict[str, list[float]], load: Load, held: list[Held]
) -> None:
    lines = ["", "| killed | times | back after (median, most) |", "| --- | --- | --- |"]
    for name, times in backs.items():
        if times:
            median = sorted(times)[len(times) // 2]
            lines.append(f"| {name} | {killed[name]} | {median:.1f} s, {max(times):.1f} s |")
    lines += ["", "| outcome | requests |", "| --- | --- |"]
    lines += [f"| {name} | {count} |" for name, count in sorted(load.outcomes.items())]
    first, last = held[1], held[-1]
    print(
        *lines,
        f"\n{load.num_tokens} tokens streamed; frontend and launcher at rest after {ROUND} kills "
        f"and at the end: {first.fds} and {last.fds} descriptors, {first.rss_mib:.0f} and "
        f"{last.rss_mib:.0f} MiB; {len(load.faults)} faults.",
        sep="\n",
    )


def main(
    doc: str | None, run: Callable[[Stack, argparse.Namespace], Awaitable[bool]], **flags: int
) -> int:
    """Reads the command line, of which flags are names and defaults, and runs against a server;
    the exit status, 0 where run says that all was well."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name, default in {"clients": 8, "seed": 0, **flags}.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=default, help="[%(default)s]")
    arguments = parser.parse_args()

    async def at(stack: Stack) -> bool:
        return await run(stack, arguments)

    with tempfile.TemporaryDirectory() as directory:
        model = write_hf(Path(directory), TinySpec(max_positions=2048))
        workers = f"--tokenizer-workers={NUM_WORKERS}"
        with running_stack(f"--model={model}", workers, *FLAGS) as stack:
            return 0 if asyncio.run(at(stack)) else 1


if __name__ == "__main__":
    raise SystemExit(main(__doc__, run, requests=32, max_tokens=400, kills=200))
