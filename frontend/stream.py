"""The single-slot coalescing outbox between the dispatcher and an RPC handler.

What comes faster than the client reads is merged into one delta, so a slow
client costs a longer string and never a longer queue.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagewire.errors import PagewireError
    from pagewire.types import FinishReason, Timings, Usage


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and, where asked for, new ids since the last delta."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Finish:
    """The outcome of a request that ended well."""

    request_id: str
    model: str
    reason: FinishReason
    """STOP or LENGTH."""
    usage: Usage
    timings: Timings
    seed: int
    stop_string: str | None = None
    stop_token_id: int | None = None
    eos_token_id: int | None = None


class Outbox:
    """At most one delta, then one end: a Finish or an error.

    One writer, one reader, both in the event loop.
    """

    __slots__ = ("_end", "_error", "_ids", "_texts", "_waiter")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._end: Finish | None = None
        self._error: PagewireError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        return self._end is not None or self._error is not None

    def put(self, text: str, token_ids: Sequence[int] = ()) -> None:
        """Adds to the pending delta. Nothing new is no delta."""
        if text:
            self._texts.append(text)
        elif not token_ids:
            return
        self._ids.extend(token_ids)
        self._wake()

    def finish(self, finish: Finish) -> None:
        assert not self.ended
        self._end = finish
        self._wake()

    def fail(self, error: PagewireError) -> None:
        """Ends with an error, after the delta that is pending. The first end stands."""
        if not self.ended:
            self._error = error
            self._wake()

    async def take(self) -> Delta | Finish:
        """The pending delta, else the Finish; waits for either. Raises the error."""
        while not (self._texts or self._ids or self.ended):
            await self._wait()
        if self._texts or self._ids:
            return self._take_delta()
        if self._error is not None:
            raise self._error
        assert self._end is not None
        return self._end

    async def take_all(self) -> tuple[Delta, Finish]:
        """The whole output at once, after the end. Raises the error."""
        while not self.ended:
            await self._wait()
        if self._error is not None:
            raise self._error
        assert self._end is not None
        return self._take_delta(), self._end

    def _take_delta(self) -> Delta:
        texts = self._texts
        delta = Delta(texts[0] if len(texts) == 1 else "".join(texts), self._ids)
        self._texts, self._ids = [], []
        return delta

    async def _wait(self) -> None:
        assert self._waiter is None
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
