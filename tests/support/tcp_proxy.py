"""A TCP proxy that does to a connection what networks do: wait, break off, fall silent."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class TcpProxy:
    """target: asked for (host, port) at each new connection."""

    def __init__(self, target: Callable[[], tuple[str, int]]) -> None:
        self._target = target
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        """Before each piece, each way."""
        self.num_connections = 0
        """So far, whose both ends stand, so that drop() meets the latest."""

        self.held = bytearray()
        """What came since cut() and has not gone on."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.drop()
        await self._server.wait_closed()

    def drop(self) -> None:
        """Resets every connection, with what is on its way."""
        for pair in self._pairs:
            for writer in pair:
                writer.transport.abort()
        self._pairs.clear()

    def cut(self) -> None:
        """Nothing arrives from now on, neither data nor an end; new connections are taken
        and hear nothing."""
        self.held.clear()
        self._flowing.clear()

    def heal(self) -> None:
        """What was on its way arrives after all."""
        self._flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await self._flowing.wait()
        try:
            there, back = await asyncio.open_connection(*self._target())
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, back)
        self._pairs.add(pair)
        self.num_connections += 1
        try:
            async with asyncio.TaskGroup() as group:
                for source, target in ((reader, back), (there, writer)):
                    pieces: asyncio.Queue[bytes] = asyncio.Queue(64)
                    group.create_task(self._read(source, pieces))
                    group.create_task(self._write(target, pieces))
        finally:
            self._pairs.discard(pair)
            for end in pair:
                end.transport.abort()

    async def _read(self, reader: asyncio.StreamReader, pieces: asyncio.Queue[bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if not self._flowing.is_set():
                    self.held += data
                await pieces.put(data)
        await pieces.put(b"")

    async def _write(self, writer: asyncio.StreamWriter, pieces: asyncio.Queue[bytes]) -> None:
        try:
            while data := await pieces.get():
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
            await self._flowing.wait()
            writer.close()
        except OSError:
            writer.transport.abort()
