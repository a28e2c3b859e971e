"""A server under mixed load for minutes, with cancels, missed deadlines and restarts.

    python bench/soak.py [--minutes 10] [--clients 8] [--seed 0]

The server, its load and what is checked are those of bench/chaos.py. Of the requests 5% are
cancelled midway and 1% have a deadline that they cannot meet; once a minute a process is
restarted: the engine with SIGTERM, the engine with SIGKILL, tokenizer_svc with SIGTERM, in
turn. Once a minute the load also ends for as long as it takes to see that nothing is held.
Exit status 1 where something was not as it must be.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.chaos import FEW, Held, Victims, main
from tests.support.accounted import Load, make_requests
from tests.support.stack import Api, Stack, connect

if TYPE_CHECKING:
    import argparse

CANCELLED, LATE = 0.05, 0.01
MINUTE_S = 60.0


async def restart(api: Api, victims: Victims, number: int) -> str:
    if number % 3 == 2:
        victim, name, how = victims.tokenizer_svc(), "tokenizer_svc", signal.SIGTERM
    else:
        victim, name = psutil.Process((await api.stats()).engine_pid), "engine_core"
        how = signal.SIGTERM if number % 3 == 0 else signal.SIGKILL
    victim.send_signal(how)
    await asyncio.to_thread(psutil.wait_procs, [victim])
    return f"{name} {how.name}, back after {await victims.wait_back():.1f} s"


async def run(stack: Stack, arguments: argparse.Namespace) -> bool:
    lines = ["", "| minute | restarted | requests so far | at rest: descriptors, MiB |"]
    lines.append("| --- | --- | --- | --- |")
    held: list[Held] = []
    async with connect(stack) as api:
        victims = Victims(stack, api)
        requests = make_requests(arguments.requests, arguments.max_tokens)
        load = Load(api, requests, cancelled=CANCELLED, late=LATE, seed=arguments.seed)
        await victims.wait_back()
        await load.learn()
        for minute in range(arguments.minutes):
            began = time.monotonic()
            load.start(arguments.clients)
            await asyncio.sleep(MINUTE_S / 2)
            what = await restart(api, victims, minute)
            await asyncio.sleep(max(0.0, began + MINUTE_S - time.monotonic()))
            await load.stop()
            held.append(await victims.held())
            total = load.outcomes.total()
            now = held[-1]
            lines.append(f"| {minute + 1} | {what} | {total} | {now.fds}, {now.rss_mib:.0f} |")
            print(lines[-1], flush=True)
            for fault in load.faults:
                print(f"# {fault}", flush=True)
    lines += ["", "| outcome | requests |", "| --- | --- |"]
    lines += [f"| {name} | {count} |" for name, count in sorted(load.outcomes.items())]
    lines += ["", f"{load.num_tokens} tokens streamed; {len(load.faults)} faults."]
    print("\n".join(lines))
    return not load.faults and held[-1].fds <= held[0].fds + FEW


if __name__ == "__main__":
    raise SystemExit(main(__doc__, run, requests=48, max_tokens=600, minutes=10))
