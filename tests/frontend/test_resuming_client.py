"""pagewire.client over a network that breaks: a real connection, cut in the middle."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from pagewire.client import Ask, CallFailed, Client
from tests.support.fake_engine import TEXT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.frontend.conftest import Stack

LENGTH = 120


class Network:
    """Forwards bytes to the server until it is cut."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.num_connections = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        there, back = await asyncio.open_connection(self._host, int(self._port))
        self._writers |= {writer, back}
        for source, target in ((reader, back), (there, writer)):
            self._pumps.add(asyncio.ensure_future(_pump(source, target)))


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    target.transport.abort()


@pytest.fixture
async def broken(make_stack: Callable[..., Stack]) -> AsyncIterator[tuple[Stack, Network]]:
    stack = await make_stack(step_s=0.01, config={"resume_ttl": 30.0})
    network = Network(stack.frontend.address)
    await network.start()
    yield stack, network
    await network.close()


async def test_a_text_over_three_connections(broken: tuple[Stack, Network]) -> None:
    stack, network = broken
    loop = asyncio.get_running_loop()
    cuts = [30, 70]

    def read(client: Client) -> str:
        ask = Ask(prompt="x", sampling={"max_tokens": LENGTH})
        stream = client.resumable_stream(ask, timeout=60)
        text = ""
        for piece in stream:
            text += piece
            if cuts and len(text) > cuts[0]:
                cuts.pop(0)
                loop.call_soon_threadsafe(network.cut)
        assert stream.final is not None
        assert stream.final["usage"]["completion_tokens"] == LENGTH
        return text

    with Client(network.address) as client:
        text = await asyncio.to_thread(read, client)
    assert text == (TEXT * 3)[:LENGTH]
    assert network.num_connections == 3
    await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 0)


async def test_cancel_is_meant(broken: tuple[Stack, Network]) -> None:
    stack, network = broken

    def read_and_cancel(client: Client) -> None:
        stream = client.resumable_stream(Ask(prompt="x", sampling={"max_tokens": 3000}))
        with pytest.raises(CallFailed) as raised:
            for _ in stream:
                stream.cancel()
        assert raised.value.code == "CANCELLED"

    with Client(network.address) as client:
        await asyncio.to_thread(read_and_cancel, client)
    await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 0)
    assert not stack.frontend.resumables._held


async def test_a_server_that_keeps_nothing(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack()

    def read(client: Client) -> CallFailed:
        with pytest.raises(CallFailed) as raised:
            list(client.resumable_stream(Ask(prompt="x")))
        return raised.value

    with Client(stack.frontend.address) as client:
        failure = await asyncio.to_thread(read, client)
    assert (failure.code, failure.field) == ("FAILED_PRECONDITION", "resumable")
