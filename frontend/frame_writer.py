"""Writes the frames of one stream, without a task of its own being woken for each.

    outbox --changed--> FrameWriter --write--> gRPC      in the turn in which the text came
                            ^          |
                            +- written +                 then what has come meanwhile

A handler that awaits each delta and each write is scheduled twice a token, through every
coroutine that it stands in. Here the handler sleeps until the stream has ended. There is
one write at a time, so a slow client still costs one merged delta and no queue.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from frontend.stream import Finish
from pagewire.errors import Cancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from frontend.stream import Delta, Outbox, Queued
    from pagewire.errors import PagewireError


class FrameWriter:
    """`write` is ServicerContext.write; `encode` makes what it takes, or None for an item
    that has no frame."""

    def __init__(
        self,
        write: Callable[[Any], Coroutine[Any, Any, None]],
        encode: Callable[[Delta | Queued], Any],
    ) -> None:
        self._write = write
        self._encode = encode

    async def pour(self, outbox: Outbox) -> Finish:
        """Writes all that comes, until its end. Raises the error that ended it, Cancelled
        if the client is gone, and what evicted() was given."""
        self._outbox = outbox
        self._writing: Coroutine[Any, Any, None] | None = None
        self._written: asyncio.Future[None] | None = None
        self._eviction: PagewireError | None = None
        self._done: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        self.idle = False
        outbox.attach(self)
        self._advance()
        try:
            return await self._done
        finally:
            outbox.detach(self)
            self._abandon()

    # Of Reader.

    def give(self, delta: Delta) -> None:
        try:
            self._write_out(delta)
        except Exception as error:
            self._fail(error)

    def changed(self) -> None:
        if self.idle:
            self._advance()

    def evicted(self, error: PagewireError) -> None:
        # What is being written is whole: the next reader goes on behind it.
        self._eviction = error
        if self._writing is None:
            self._fail(error)

    # Writing.

    def _advance(self) -> None:
        """Writes what there is, up to where gRPC has to be waited for."""
        try:
            while not self._done.done():
                item = self._outbox.take_now()
                self.idle = item is None
                if item is None:
                    return
                if isinstance(item, Finish):
                    self._done.set_result(item)
                elif not self._write_out(item):
                    return
        except Exception as error:
            self._fail(error)

    def _write_out(self, item: Delta | Queued) -> bool:
        """Begins to write an item. Whether that is done."""
        frame = self._encode(item)
        if frame is None:
            return True
        self._writing = self._write(frame)
        return self._run()

    def _run(self) -> bool:
        """Takes the write as far as it goes, as a task would. Whether it is done."""
        assert self._writing is not None
        try:
            self._written = self._writing.send(None)
        except StopIteration:
            self._writing = self._written = None
            return True
        except BaseException:
            self._writing = self._written = None
            raise
        self.idle = False
        self._written.add_done_callback(self._go_on)
        return False

    def _go_on(self, _written: asyncio.Future[None]) -> None:
        try:
            if not self._run():
                return
        except Exception as error:
            self._fail(error)
            return
        if self._eviction is not None:
            self._fail(self._eviction)
        else:
            self._advance()

    def _abandon(self) -> None:
        """The handler is leaving: gRPC's answer to a write is of no interest any more."""
        if self._writing is not None:
            assert self._written is not None
            self._written.remove_done_callback(self._go_on)
            self._written.cancel()
            self._writing.close()
            self._writing = self._written = None

    def _fail(self, error: Exception) -> None:
        self.idle = False
        if self._done.done():
            return
        if isinstance(error, grpc.aio.InternalError):
            # grpc.aio may learn it from the failing write before it cancels the handler.
            error = Cancelled("the client is gone")
        self._done.set_exception(error)
