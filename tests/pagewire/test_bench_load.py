"""Closed and open loops over a target that the test controls."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pagewire.bench.load import Load, RequestFailed, arrivals, clock, run
from pagewire.bench.workload import Ask

if TYPE_CHECKING:
    from pagewire.bench.record import Record

ASKS = [Ask(number) for number in range(1, 21)]


class FakeTarget:
    """Holds requests until `together` of them have come."""

    def __init__(self, together: int = 0) -> None:
        self.running: set[int] = set()
        self.most_running = 0
        self.started: list[int] = []
        self._together = together
        self._may_end = asyncio.Event()

    async def send(self, ask: Ask, record: Record) -> None:
        number = ask.max_tokens
        self.running.add(number)
        self.started.append(number)
        self.most_running = max(self.most_running, len(self.running))
        if len(self.running) >= self._together:
            self._may_end.set()
        try:
            await self._may_end.wait()
            if number == 3:
                raise RequestFailed("RESOURCE_EXHAUSTED", "full")
            if number == 4:
                raise OSError("broken")
            record.chunk_times.append(clock())
            record.output_tokens = 1
        finally:
            self.running.discard(number)


async def test_a_closed_loop_keeps_its_concurrency() -> None:
    target, ended = FakeTarget(together=4), []
    records = await run(target, ASKS, Load(concurrency=4), random.Random(1), ended.append)
    assert (target.most_running, target.started) == (4, list(range(1, 21)))
    assert len(records) == len(ended) == 20
    assert [r.error for r in records[:5]] == [None, None, "RESOURCE_EXHAUSTED", "OSError", None]
    assert records[3].message == "broken"
    assert all(record.scheduled_at <= record.sent_at <= record.ended_at for record in records)


async def test_an_open_loop_sends_at_once_what_comes_at_once() -> None:
    target = FakeTarget(together=20)
    records = await run(target, ASKS, Load(rate=float("inf")), random.Random(1))
    assert (target.most_running, len(records)) == (20, 20)


async def test_an_open_loop_follows_its_schedule() -> None:
    load = Load(rate=500.0, burstiness=2.0)
    records = await run(FakeTarget(), ASKS, load, random.Random(7))
    planned = list(arrivals(20, 500.0, 2.0, random.Random(7)))
    offsets = [record.scheduled_at - records[0].scheduled_at for record in records]
    assert offsets == pytest.approx(planned)
    assert all(record.sent_at >= record.scheduled_at for record in records)


async def test_an_open_loop_may_be_bounded() -> None:
    target = FakeTarget(together=3)
    load = Load(rate=float("inf"), concurrency=3)
    assert len(await run(target, ASKS, load, random.Random(1))) == 20
    assert target.most_running == 3


@pytest.mark.parametrize("rate", [None, float("inf")])
async def test_what_does_not_end_in_time_is_unfinished(rate: float | None) -> None:
    target = FakeTarget(together=99)
    load = Load(concurrency=4, rate=rate, max_seconds=0.05, grace_s=0.05)
    records = await run(target, ASKS, load, random.Random(1))
    assert len(target.started) == 4
    assert not target.running
    assert len(records) == (4 if rate is None else 20)
    assert {record.error for record in records} == {"UNFINISHED"}


async def test_nothing_is_sent_after_the_time() -> None:
    load = Load(rate=10.0, max_seconds=0.15)
    records = await run(FakeTarget(), ASKS, load, random.Random(1))
    planned = [at for at in arrivals(20, 10.0, 1.0, random.Random(1)) if at < 0.15]
    assert len(records) == len(planned) < 20


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_gaps_between_arrivals_are_gamma_distributed(burstiness: float) -> None:
    rate, count = 5.0, 20_000
    times = np.array(list(arrivals(count, rate, burstiness, random.Random(3))))
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.05)
    # Coefficient of variation of a gamma distribution: 1 / sqrt(shape).
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    ours = np.quantile(gaps, [0.25, 0.5, 0.75])
    theirs = np.random.default_rng(1).gamma(burstiness, 1 / (rate * burstiness), count)
    assert ours == pytest.approx(np.quantile(theirs, [0.25, 0.5, 0.75]), rel=0.1)


def test_an_infinite_rate_has_no_gaps() -> None:
    assert list(arrivals(3, float("inf"), 1.0, random.Random(1))) == [0.0, 0.0, 0.0]
