"""A network that misbehaves between the frontend and a living engine, over tcp."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from frontend.engine_client import PING_EVERY_S
from pagewire.v1 import common_pb2
from pagewire.wire.codec import pack_ids, pack_request_ids
from pagewire.wire.sockets import bound_endpoint
from tests.frontend.conftest import Stack
from tests.support.engine_process import ThreadedEngine
from tests.support.fake_model import alone
from tests.support.fake_tokenizer import FakeTokenizer
from tests.support.tcp_proxy import TcpProxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

pytestmark = pytest.mark.timeout(120)

NUM_STREAMS = 8
MAX_TOKENS = 60
ENGINE_TIMEOUT_S = 1.5
FRONTEND_TIMEOUT_S = 2 * PING_EVERY_S + 0.5


class ByHand:
    """The real engine process over the fake model, in a thread; it steps when told to."""

    def __init__(self) -> None:
        self._engine = ThreadedEngine(frontend_timeout=FRONTEND_TIMEOUT_S)
        self._engine.runner.gate.clear()
        self.address = self._engine.endpoint
        self.core = self._engine.core
        self._num_granted = 0

    async def start(self) -> None:
        self._engine.__enter__()

    async def kill(self) -> None:
        await asyncio.to_thread(self._engine.__exit__, None, None, None)

    def step(self, count: int = 1) -> None:
        self._num_granted += count
        self._engine.runner.permits.release(count)

    def step_again(self) -> None:
        """One step more, unless one that was granted is still to be made."""
        if len(self._engine.runner._inner.plans) >= self._num_granted:
            self.step()

    def run_freely(self) -> None:
        self._engine.runner.gate.set()

    def num_unread(self) -> int:
        """Commands that came while a step is under way."""
        return self._engine.process._events.qsize()

    def has_no_frontend(self) -> bool:
        """Whether the loop hears so, at the latest with its next step."""
        outbox = self._engine.process._outbox
        # The inbox forgets it first. Under this lock the session ends and the loop is told.
        with outbox._lock:
            return not outbox._sessions


class Wired(Stack):
    """A frontend whose two connections with its engine lead through a proxy each."""

    async def start(self, *, serving: bool = True) -> None:
        def outputs() -> tuple[str, int]:
            endpoint = bound_endpoint(self.engine_client._outputs)
            return "127.0.0.1", int(endpoint.rpartition(":")[2])

        port = int(self.engine.address.rpartition(":")[2])
        self.commands = TcpProxy(lambda: ("127.0.0.1", port))
        self.outputs = TcpProxy(outputs)
        for proxy in (self.commands, self.outputs):
            await proxy.start()
        self._config |= {
            "engine_address": self.commands.endpoint,
            "outputs_advertise": self.outputs.endpoint,
        }
        await super().start(serving=serving)

    async def close(self) -> None:
        for proxy in (self.commands, self.outputs):
            proxy.heal()
        await super().close()
        for proxy in (self.commands, self.outputs):
            await proxy.close()


@pytest.fixture
async def make_wired() -> AsyncIterator[Callable[..., Awaitable[Wired]]]:
    stacks = []

    async def make(**config: Any) -> Wired:
        engine: Any = ByHand()
        config = {"engine_timeout": ENGINE_TIMEOUT_S, **config}
        stack = Wired(engine, FakeTokenizer(), **config)
        stacks.append(stack)
        await stack.start()
        return stack

    yield make
    for stack in stacks:
        await stack.close()


class Streams:
    def __init__(self, stack: Wired) -> None:
        self.stack = stack
        self.engine: Any = stack.engine
        self.calls = [
            stack.open(
                prompt_token_ids=common_pb2.TokenIds(ids=self._prompt(index)),
                sampling_params=common_pb2.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
                return_token_ids=True,
                deadline_s=90,
            )
            for index in range(NUM_STREAMS)
        ]
        self.ids: list[list[int]] = [[] for _ in self.calls]
        self._more = asyncio.Event()
        self.tasks = [
            asyncio.ensure_future(self._read(call, ids))
            for call, ids in zip(self.calls, self.ids, strict=True)
        ]

    @staticmethod
    def _prompt(index: int) -> list[int]:
        return [3 + index, 4, 5]

    async def _read(self, call: Any, ids: list[int]) -> None:
        async for frame in call:
            ids += frame.delta.token_ids
            self._more.set()

    async def step_until(self, count: int) -> None:
        """Until every client has so many ids."""
        async with asyncio.timeout(60):
            while any(len(ids) < count for ids in self.ids):
                self._more.clear()
                self.engine.step_again()
                # What this step says may be lost on the way.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._more.wait(), 0.05)

    async def end(self, first: int = 0) -> None:
        """The rest of them, and nothing is left anywhere. first: the index of the first."""
        self.engine.run_freely()
        await asyncio.wait_for(asyncio.gather(*self.tasks), 60)
        for index, ids in enumerate(self.ids, first):
            assert ids == alone(self._prompt(index), MAX_TOKENS, ())
        core = self.engine.core
        await self.stack.until(lambda: not core.has_work())
        stats = core.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert self.stack.frontend.dispatcher.admission.requests == 0


async def test_a_slow_network(make_wired: Callable[..., Awaitable[Wired]]) -> None:
    stack = await make_wired()
    for proxy in (stack.commands, stack.outputs):
        proxy.delay_s = 0.05
    streams = Streams(stack)
    await streams.step_until(3)
    await streams.end()


@pytest.mark.parametrize("broken", ["commands", "outputs", "both"])
async def test_connections_that_break(
    make_wired: Callable[..., Awaitable[Wired]], broken: str
) -> None:
    stack = await make_wired()
    proxies = [stack.commands, stack.outputs] if broken == "both" else [getattr(stack, broken)]
    streams = Streams(stack)
    for round_number in range(1, 4):
        await streams.step_until(5 * round_number)
        before = [proxy.num_connections for proxy in proxies]
        # In mid-step, so that what is under way is lost.
        streams.engine.step(2)
        for proxy in proxies:
            proxy.drop()
        await stack.until(
            lambda: all(
                proxy.num_connections > count
                for proxy, count in zip(proxies, before, strict=True)  # noqa: B023
            )
        )
    await streams.end()


async def test_commands_on_their_way_when_the_connection_breaks(
    make_wired: Callable[..., Awaitable[Wired]],
) -> None:
    """They are lost, of which the engine, which lives, says nothing."""
    stack = await make_wired(engine_timeout=60)
    streams = Streams(stack)
    await streams.step_until(5)
    stack.commands.cut()
    streams.calls[0].cancel()
    prompt = [40, 41, 42]
    late = stack.open(
        prompt_token_ids=common_pb2.TokenIds(ids=prompt),
        sampling_params=common_pb2.SamplingParams(max_tokens=5, ignore_eos=True),
        return_token_ids=True,
    )
    ids: list[int] = []
    reading = asyncio.ensure_future(streams._read(late, ids))
    side = stack.frontend.dispatcher.engine_side
    await stack.until(lambda: pack_ids(prompt) in stack.commands.held and len(side.aborted) == 1)
    (aborted,) = side.aborted
    await stack.until(lambda: pack_request_ids([aborted]) in stack.commands.held)
    stack.commands.drop()
    stack.commands.heal()
    await stack.until(lambda: not stack.engine_client.lost)
    # The Abort again, one of the late one's former life, and its Add.
    await stack.until(lambda: streams.engine.num_unread() == 3)
    del streams.calls[0], streams.tasks[0], streams.ids[0]
    streams.engine.run_freely()
    await asyncio.wait_for(reading, 60)
    assert ids == alone(prompt, 5, ())
    await streams.end(first=1)
    assert not side.aborted
    # It was ended, and did not just come to its end.
    total = streams.engine.core.stats().total_output_tokens
    assert total < NUM_STREAMS * MAX_TOKENS


@pytest.mark.parametrize("silent", ["commands", "outputs", "both"])
async def test_a_partition_heals(make_wired: Callable[..., Awaitable[Wired]], silent: str) -> None:
    """Half-open connections: nobody is told that the other side hears nothing."""
    stack = await make_wired()
    proxies = [stack.commands, stack.outputs] if silent == "both" else [getattr(stack, silent)]
    streams = Streams(stack)
    await streams.step_until(5)
    for proxy in proxies:
        proxy.cut()
    streams.engine.step(5)
    if silent != "outputs":
        # The engine hears no ping, and lets the frontend's requests go.
        await stack.until(streams.engine.has_no_frontend)
        streams.engine.step()
        await stack.until(lambda: not streams.engine.core.has_work())
    if silent != "commands":
        await stack.until(lambda: not stack.frontend.health.serving)
        refused = await stack.fails(stack.open(prompt="x"))
        assert (refused.code, refused.info.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD")
    for proxy in proxies:
        proxy.heal()
    await stack.until(lambda: stack.frontend.health.serving)
    await streams.end()


async def test_a_partition_that_stays(make_wired: Callable[..., Awaitable[Wired]]) -> None:
    stack = await make_wired(engine_restart_timeout=0.5)
    streams = Streams(stack)
    await streams.step_until(3)
    stack.commands.cut()
    stack.outputs.cut()
    for task in streams.tasks:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(task, 60)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "is not back after 0.5 s" in str(raised.value.details())
    core = streams.engine.core
    await stack.until(streams.engine.has_no_frontend)
    streams.engine.run_freely()
    await stack.until(lambda: not core.has_work())
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_blocks
