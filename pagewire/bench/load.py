"""When to ask: by concurrency (closed loop) or by the clock (open loop)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pagewire.bench.record import UNFINISHED, Record

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

    from pagewire.bench.workload import Ask

clock = time.perf_counter


class Target(Protocol):
    """A server under test."""

    async def send(self, ask: Ask, record: Record) -> None:
        """Sends one request and fills in what comes back, from chunk_times on.

        Raises RequestFailed, or what the transport raises.
        """


class RequestFailed(Exception):
    """The server's own refusal or failure; `code` is for Record.error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Load:
    """Closed loop if `rate` is None: `concurrency` requests are always in flight. Else open
    loop: `rate` requests a second, of which at most `concurrency` are in flight if it is set."""

    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    """Shape of the gamma-distributed gaps between arrivals: 1 is a Poisson process, below 1
    they come in bursts, towards infinity evenly."""
    max_seconds: float = math.inf
    """Nothing is sent after this; what runs may end within grace_s."""
    grace_s: float = 30.0


def arrivals(count: int, rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Seconds from the beginning at which requests arrive; the first at 0."""
    at = 0.0
    for _ in range(count):
        yield at
        if math.isfinite(rate):
            at += rng.gammavariate(burstiness, 1 / (rate * burstiness))


async def run(
    target: Target,
    asks: Sequence[Ask],
    load: Load,
    rng: random.Random,
    on_end: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Sends the requests and returns a record of each that was sent, in that order."""
    records: list[Record] = []
    began = clock()
    tasks: list[asyncio.Task[None]] = []
    if load.rate is None:
        turns = iter(asks)
        workers = min(load.concurrency or len(asks), len(asks))
        tasks += [
            asyncio.create_task(_work(target, turns, records, began + load.max_seconds, on_end))
            for _ in range(workers)
        ]
    else:
        tasks.append(asyncio.create_task(_keep_pace(target, asks, load, rng, records, on_end)))
    limit = None if math.isinf(load.max_seconds) else load.max_seconds + load.grace_s
    try:
        _, late = await asyncio.wait(tasks, timeout=limit)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for task in tasks:
            if task not in late:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return records


async def _work(
    target: Target,
    turns: Iterator[Ask],
    records: list[Record],
    until: float,
    on_end: Callable[[Record], None],
) -> None:
    for ask in turns:
        now = clock()
        if now >= until:
            return
        record = Record(scheduled_at=now)
        records.append(record)
        await _one(target, ask, record, on_end)


async def _keep_pace(
    target: Target,
    asks: Sequence[Ask],
    load: Load,
    rng: random.Random,
    records: list[Record],
    on_end: Callable[[Record], None],
) -> None:
    assert load.rate is not None
    places = asyncio.Semaphore(load.concurrency) if load.concurrency else None
    began = clock()
    running: set[asyncio.Task[None]] = set()

    async def within(ask: Ask, record: Record) -> None:
        async with places or contextlib.nullcontext():
            await _one(target, ask, record, on_end)

    try:
        schedule = arrivals(len(asks), load.rate, load.burstiness, rng)
        for ask, at in zip(
            asks, itertools.takewhile(load.max_seconds.__gt__, schedule), strict=False
        ):
            await asyncio.sleep(max(0.0, began + at - clock()))
            due = began + at
            # Until it has its place: it may wait for one to the end.
            record = Record(scheduled_at=due, sent_at=due, ended_at=due, error=UNFINISHED)
            records.append(record)
            task = asyncio.create_task(within(ask, record))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
    finally:
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _one(target: Target, ask: Ask, record: Record, on_end: Callable[[Record], None]) -> None:
    record.error = None
    record.sent_at = record.ended_at = clock()
    try:
        await target.send(ask, record)
    except asyncio.CancelledError:
        record.error = UNFINISHED
        raise
    except RequestFailed as failure:
        record.error, record.message = failure.code, str(failure)
    except Exception as error:
        # Whatever a transport raises is this request's end, and is counted by its name.
        record.error, record.message = type(error).__name__, str(error)
    finally:
        record.ended_at = clock()
        on_end(record)
