"""Several engines behind one frontend: where requests go, and how they move."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
import pytest

from frontend import engine_client
from frontend.engine_client import EngineClient
from pagewire.v1 import admin_pb2, common_pb2
from pagewire.wire.messages import Abort
from tests.frontend.several_engines import SeveralEngines
from tests.frontend.test_metrics import scrape
from tests.frontend.test_replay import (
    POISON,
    Reader,
    hashed,
    open_stream,
    prompt,
    undisturbed,
)
from tests.support.fake_engine import NUM_BLOCKS, FakeEngine
from tests.support.fake_tokenizer import FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from google.protobuf.duration_pb2 import Duration


@pytest.fixture
async def make_several() -> AsyncIterator[Callable[..., Any]]:
    """make_several(one dict of engine options for each, config=..., serving=...)."""
    stacks: list[SeveralEngines] = []

    async def make(
        *engines: dict[str, Any], config: dict[str, Any] | None = None, serving: bool = True
    ) -> SeveralEngines:
        options = [{"auto": False, "next_token": hashed} | engine for engine in engines]
        fakes = [FakeEngine(**engine) for engine in options]
        stack = SeveralEngines(fakes, FakeTokenizer(), **(config or {}))
        stacks.append(stack)
        await stack.start(serving=serving)
        return stack

    yield make
    for stack in stacks:
        await stack.close()


async def finish(stack: SeveralEngines, *readers: Reader) -> None:
    """Steps until every stream has ended."""
    ended = asyncio.gather(*[reader.done for reader in readers])
    while not ended.done():
        stack.step()
        await asyncio.sleep(0.001)
    await ended


def drain(stack: SeveralEngines, index: int, **fields: Any) -> Any:
    request = admin_pb2.DrainRequest(engine=stack.engines[index].address, **fields)
    return stack.admin.Drain(request, timeout=60)


async def test_requests_spread_and_a_dead_engines_go_on_elsewhere(
    make_several: Callable[..., SeveralEngines],
) -> None:
    """At once: the engine that died is not waited for, and nobody else notices."""
    stack = await make_several({}, {}, {})
    readers = [Reader(open_stream(stack, prompt(i), 20 + i)) for i in range(24)]
    spread = await stack.wait_requests(24)
    assert all(4 <= len(requests) <= 12 for requests in spread)
    for _ in range(6):
        stack.step()
    for reader in readers:
        await reader.wait_ids(6)
    lost = len(spread[1])
    await stack.lose(1)
    moved = await stack.wait_requests(24)
    assert moved[1] == []
    assert stack.frontend.health.serving
    await finish(stack, *readers)
    for i, reader in enumerate(readers):
        assert reader.ids == undisturbed(prompt(i), 20 + i)
        assert reader.text == bytes(reader.ids).decode()
    samples = (await scrape(stack))._samples
    assert samples["pagewire_requests_replayed_total", ()] == lost
    assert samples["pagewire_engine_restarts_total", ()] == 0
    await stack.restart(1, auto=False, next_token=hashed)
    readers = [Reader(open_stream(stack, prompt(i), 3)) for i in range(24)]
    assert all(4 <= len(requests) <= 12 for requests in await stack.wait_requests(24))
    await finish(stack, *readers)


async def test_nobody_waits_for_an_engine_that_may_be_dead(
    make_several: Callable[..., SeveralEngines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the break of a connection and the verdict, which takes as long as it is wanted."""
    monkeypatch.setattr(EngineClient, "_give_up_the_dead", lambda client: None)
    for limit in ("LOST_S", "REPLACED_S"):
        monkeypatch.setattr(engine_client, limit, 1e6)
    stack = await make_several({}, {}, config={"engine_timeout": 1e5})
    await stack.engines[0].kill()
    await stack.until(lambda: stack.links[0].client.lost)
    readers = [Reader(open_stream(stack, prompt(i), 3)) for i in range(8)]
    await stack.until(lambda: len(stack.engines[1].running) == 8)
    assert stack.links[0].usable
    await finish(stack, *readers)


async def test_the_busy_engine_gets_less(make_several: Callable[..., SeveralEngines]) -> None:
    """Also where it is another frontend that keeps it busy."""
    stack = await make_several({"heartbeat_s": 60.0}, {"heartbeat_s": 60.0})
    stack.engines[0].heartbeat(num_running=200, num_free_blocks=NUM_BLOCKS // 4)
    await stack.until(lambda: stack.links[0].stats is not None)
    readers = [Reader(open_stream(stack, prompt(i), 3)) for i in range(20)]
    assert [len(requests) for requests in await stack.wait_requests(20)] == [0, 20]
    await finish(stack, *readers)


async def test_one_prefix_one_engine(make_several: Callable[..., SeveralEngines]) -> None:
    stack = await make_several({}, {})
    prefix = [65] * 64
    readers = [Reader(open_stream(stack, [*prefix, i], 3)) for i in range(10)]
    counts = sorted(len(requests) for requests in await stack.wait_requests(10))
    assert counts == [0, 10]
    other = Reader(open_stream(stack, [*prefix, 99], 3, skip_prefix_cache=True))
    counts = sorted(len(requests) for requests in await stack.wait_requests(11))
    assert counts == [1, 10], "one that does not read the cache has no reason to wait there"
    await finish(stack, *readers, other)


async def test_branches_stay_together(make_several: Callable[..., SeveralEngines]) -> None:
    stack = await make_several({}, {})
    sampling = common_pb2.SamplingParams(max_tokens=6, n=4)
    calls = [stack.open(prompt=f"{i:02}", sampling_params=sampling) for i in range(6)]
    for requests in await stack.wait_requests(24):
        prompts = [bytes(request.prompt_ids) for request in requests]
        assert all(prompts.count(it) == 4 for it in prompts)
    stack.step()
    moved = len(stack.requests()[0])
    assert 0 < moved < 24
    await stack.lose(0)
    await stack.until(lambda: len(stack.requests()[1]) == 24)
    readers = [Reader(call) for call in calls]
    await finish(stack, *readers)
    assert all(len(reader.final.outputs) == 4 for reader in readers)
    assert all(len(reader.text) == 24 for reader in readers)


@pytest.mark.parametrize(
    "options",
    [{"model_name": "other"}, {"max_model_len": 100}],
    ids=["another model", "another length"],
)
async def test_an_engine_that_serves_something_else(
    make_several: Callable[..., SeveralEngines],
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    stack = await make_several({}, {})
    await stack.restart(1, auto=False, next_token=hashed, **options)
    assert not stack.links[1].usable
    assert any("is not used: its " in record.getMessage() for record in caplog.records)
    readers = [Reader(open_stream(stack, prompt(i), 3)) for i in range(6)]
    assert [len(requests) for requests in await stack.wait_requests(6)] == [6, 0]
    await stack.lose(0)
    await stack.restart(0, auto=False, next_token=hashed)
    await finish(stack, *readers)
    stats = await stack.admin.GetStats(admin_pb2.GetStatsRequest())
    assert [engine.ready for engine in stats.engines] == [True, False]
    assert stats.num_blocks == NUM_BLOCKS


async def test_the_other_model_takes_over_when_nobody_waits(
    make_several: Callable[..., SeveralEngines],
) -> None:
    stack = await make_several({}, {}, config={"engine_restart_timeout": 0.2})
    await stack.restart(1, auto=False, next_token=hashed, model_name="other")
    call = open_stream(stack, prompt(0), 5)
    await stack.engines[0].wait_running()
    await stack.lose(0)
    assert (await stack.fails(call)).code is grpc.StatusCode.UNAVAILABLE
    await stack.until(lambda: stack.frontend.health.serving)
    reader = Reader(open_stream(stack, prompt(1), 3, model="other"))
    await stack.engines[1].wait_running()
    await finish(stack, reader)


async def test_all_are_lost_and_one_comes_back(
    make_several: Callable[..., SeveralEngines],
) -> None:
    stack = await make_several({}, {})
    readers = [Reader(open_stream(stack, prompt(i), 9)) for i in range(8)]
    await stack.wait_requests(8)
    stack.step()
    await stack.lose(0)
    await stack.until(lambda: len(stack.requests()[1]) == 8)
    for _ in range(2):  # nobody is a suspect then
        stack.step()
    for reader in readers:
        await reader.wait_ids(3)
    await stack.lose(1)
    assert not stack.frontend.health.serving
    assert len(stack.frontend.dispatcher.engine_side.replay.waiting) == 8
    await stack.restart(1, auto=False, next_token=hashed)
    await stack.until(lambda: len(stack.requests()[1]) == 8)
    await finish(stack, *readers)
    assert [r.ids for r in readers] == [undisturbed(prompt(i), 9) for i in range(8)]


async def test_a_poison_request_among_several_engines(
    make_several: Callable[..., SeveralEngines],
) -> None:
    stack = await make_several({}, {})
    readers = [Reader(open_stream(stack, prompt(i), 30)) for i in range(8)]
    await stack.wait_requests(8)
    stack.step()
    poison = asyncio.ensure_future(stack.fails(open_stream(stack, [POISON], 20)))
    ended = asyncio.gather(poison, *[reader.done for reader in readers])
    deaths = 0
    while not ended.done():
        for index, engine in enumerate(stack.engines):
            if any(POISON in request.prompt_ids for request in engine.running.values()):
                deaths += 1
                await stack.lose(index)
                await stack.restart(index, auto=False, next_token=hashed)
        stack.step()
        await asyncio.sleep(0.001)
    await ended
    assert (await poison).code is grpc.StatusCode.INTERNAL
    assert deaths == 3
    for i, reader in enumerate(readers):
        assert reader.ids == undisturbed(prompt(i), 30)
    assert not stack.frontend.dispatcher.engine_side.replay.trying


async def test_an_engine_out_of_reach_is_told_to_forget(
    make_several: Callable[..., SeveralEngines],
) -> None:
    """It lives and works on what has long gone elsewhere."""
    stack = await make_several({}, {}, config={"engine_timeout": 0.8})
    readers = [Reader(open_stream(stack, prompt(i), 6)) for i in range(8)]
    left = (await stack.wait_requests(8))[0]
    stack.step()
    engine = stack.engines[0]
    engine.silent = True
    await stack.until(lambda: stack.links[0].ready is None)
    await stack.until(lambda: len(stack.requests()[1]) == 8)
    for _ in range(3):
        engine.step()  # dropped: these belong to nobody
    engine.silent = False
    await engine.wait_for(lambda: len(engine.aborted) == len(left))
    assert sorted(engine.aborted) == sorted(request.id for request in left)
    await finish(stack, *readers)
    assert [r.ids for r in readers] == [undisturbed(prompt(i), 6) for i in range(8)]


async def test_what_an_engine_gives_back_goes_to_another(
    make_several: Callable[..., SeveralEngines],
) -> None:
    """As when it is stopped for an upgrade, also where nobody would wait for it."""
    stack = await make_several({}, {}, config={"engine_restart_timeout": 0})
    readers = [Reader(open_stream(stack, prompt(i), 6)) for i in range(6)]
    given = (await stack.wait_requests(6))[0]
    stack.step()
    for request in given:
        stack.engines[0].abort_now(request.id)
    await stack.until(lambda: len(stack.requests()[1]) == 6)
    late = Reader(open_stream(stack, prompt(6), 6))
    assert [len(requests) for requests in await stack.wait_requests(7)] == [0, 7]
    await finish(stack, *readers, late)
    assert [r.ids for r in readers] == [undisturbed(prompt(i), 6) for i in range(6)]


async def test_a_stalled_engine_gets_nothing_new(
    make_several: Callable[..., SeveralEngines],
) -> None:
    stack = await make_several({}, {"heartbeat_s": 0.05}, config={"stall_timeout": 1.0})
    readers = [Reader(open_stream(stack, prompt(i), 6)) for i in range(8)]
    await stack.wait_requests(8)
    while not stack.links[0].stalled:
        stack.engines[1].step()
        await asyncio.sleep(0.01)
    assert stack.frontend.health.serving
    stuck = len(stack.requests()[0])
    late = [Reader(open_stream(stack, prompt(i), 6)) for i in range(8, 16)]
    await stack.until(lambda: len(stack.engines[1].running) == 8)
    assert len(stack.requests()[0]) == stuck
    await finish(stack, *readers, *late)


async def test_drain_moves_everything(make_several: Callable[..., SeveralEngines]) -> None:
    stack = await make_several({}, {})
    readers = [Reader(open_stream(stack, prompt(i), 12)) for i in range(16)]
    before = await stack.wait_requests(16)
    for _ in range(3):
        stack.step()
    for reader in readers:
        await reader.wait_ids(3)
    assert (await drain(stack, 0)).num_unfinished == 0
    # Drain answers for the frontend: what it told the engines is on its way to them.
    await stack.until(lambda: [len(those) for those in stack.requests()] == [0, 16])
    assert sorted(stack.engines[0].aborted) == sorted(request.id for request in before[0])
    stats = await stack.admin.GetStats(admin_pb2.GetStatsRequest())
    assert [(e.ready, e.draining) for e in stats.engines] == [(True, True), (True, False)]
    assert [e.num_requests_in_flight for e in stats.engines] == [0, 16]
    late = Reader(open_stream(stack, prompt(16), 12))
    await stack.until(lambda: len(stack.requests()[1]) == 17)
    await finish(stack, *readers, late)
    for i, reader in enumerate([*readers, late]):
        assert reader.ids == undisturbed(prompt(i), 12)
        assert reader.text == bytes(reader.ids).decode()
    # The new version of it takes part again, and nobody is suspected of anything.
    await stack.restart(0, auto=False, next_token=hashed)
    readers = [Reader(open_stream(stack, prompt(i), 3)) for i in range(8)]
    assert all(await stack.wait_requests(8))
    assert (await drain(stack, 1)).num_unfinished == 0
    await finish(stack, *readers)


async def test_drain_where_it_cannot_be(make_several: Callable[..., SeveralEngines]) -> None:
    stack = await make_several({}, {})
    unknown = admin_pb2.DrainRequest(engine="tcp://10.0.0.1:1")
    failure = await stack.fails(stack.admin.Drain(unknown))
    assert (failure.code, failure.fields) == (grpc.StatusCode.NOT_FOUND, ["engine"])
    await drain(stack, 0)
    failure = await stack.fails(drain(stack, 1))
    assert failure.code is grpc.StatusCode.FAILED_PRECONDITION
    assert failure.info.reason == "FAILED_PRECONDITION"
    assert stack.links[1].usable
    assert (await drain(stack, 0)).num_unfinished == 0, "again, while it is empty"


async def test_drain_keeps_what_fits_nowhere_else(
    make_several: Callable[..., SeveralEngines],
) -> None:
    stack = await make_several({}, {})
    ready = stack.links[1].client.ready
    assert ready is not None
    stack.links[1].client.ready = msgspec.structs.replace(ready, num_blocks=2)
    long = Reader(open_stream(stack, prompt(0), 200))
    short = Reader(open_stream(stack, prompt(1), 4))
    await stack.wait_requests(2)
    timeout: Duration = admin_pb2.DrainRequest().timeout
    timeout.FromMilliseconds(100)
    assert (await drain(stack, 0, timeout=timeout)).num_unfinished == 1
    assert [len(requests) for requests in stack.requests()] == [1, 1]
    waiting = asyncio.ensure_future(drain(stack, 0))
    await finish(stack, long, short)
    assert long.ids == undisturbed(prompt(0), 200)
    assert (await waiting).num_unfinished == 0


async def test_a_drained_engine_that_dies_with_the_other(
    make_several: Callable[..., SeveralEngines],
) -> None:
    stack = await make_several({}, {})
    reader = Reader(open_stream(stack, prompt(0), 9))
    await stack.wait_requests(1)
    await drain(stack, 0)
    await stack.until(lambda: len(stack.requests()[1]) == 1)
    stack.step()
    await stack.lose(1)
    assert not stack.frontend.health.serving
    await stack.restart(0, auto=False, next_token=hashed)
    await stack.until(lambda: len(stack.requests()[0]) == 1)
    await finish(stack, reader)
    assert reader.ids == undisturbed(prompt(0), 9)


class ByName(SeveralEngines):
    async def start_engines(self) -> str:
        address = await super().start_engines()
        return address.replace("tcp://127.0.0.1", "dns+tcp://localhost")


async def test_an_engine_by_its_name() -> None:
    stack = ByName([FakeEngine(step_s=0.002)], FakeTokenizer())
    try:
        await stack.start()
        await stack.stream(prompt="x", sampling_params=common_pb2.SamplingParams(max_tokens=3))
        stats = await stack.admin.GetStats(admin_pb2.GetStatsRequest())
        assert [engine.address for engine in stats.engines] == [stack.engine.address]
    finally:
        await stack.close()


async def test_stats_are_sums(make_several: Callable[..., SeveralEngines]) -> None:
    stack = await make_several({"heartbeat_s": 0.02}, {"heartbeat_s": 0.02})
    calls = [open_stream(stack, prompt(i), 9) for i in range(5)]
    await stack.wait_requests(5)
    side = stack.frontend.dispatcher.engine_side
    await stack.until(lambda: side.stats is not None and side.stats.num_running == 5)
    stats = await stack.admin.GetStats(admin_pb2.GetStatsRequest())
    assert stats.num_requests_running == 5
    assert stats.num_blocks == 2 * NUM_BLOCKS
    assert stats.num_free_blocks == 2 * NUM_BLOCKS - 5
    assert sum(engine.num_requests_running for engine in stats.engines) == 5
    assert [engine.epoch for engine in stats.engines] == [e.epoch for e in stack.engines]
    got = await scrape(stack)
    assert got.value("vllm:num_requests_running") == 5
    config = {"block_size": "16", "num_gpu_blocks": str(2 * NUM_BLOCKS)}
    assert got.value("vllm:cache_config_info", **config) == 1
    reply = await stack.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
    assert reply.num_blocks_freed == 14
    for call in calls:
        call.cancel()
    await stack.until(lambda: stack.requests() == [[], []])
    for engine in stack.engines:
        assert len([c for c in engine.commands if isinstance(c, Abort)]) > 0
