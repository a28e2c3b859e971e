"""The single-slot coalescing outbox between the dispatcher and an RPC handler.

What comes faster than the client reads is merged into one delta, so a slow
client costs a longer string and never a longer queue.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagewire.errors import PagewireError
    from pagewire.tools import ToolCall
    from pagewire.types import FinishReason, Timings, Usage
    from pagewire.wire.messages import PositionLogprobs


# Not frozen: there is one a token, and a frozen one takes four times as long to make.
@dataclass(slots=True)
class Delta:
    """New text and, where asked for, new ids and logprobs since the last delta."""

    text: str
    token_ids: list[int]
    logprobs: Sequence[PositionLogprobs] = field(default_factory=list)
    """One a new token, with or without token_ids."""
    prompt_logprobs: Sequence[PositionLogprobs] = ()
    """In the first delta, if asked for."""
    index: int = 0
    """Whose it is, of the request's n sequences."""
    tool_calls: Sequence[ToolCall] = field(default_factory=list)
    """Complete with this delta; their text is not in `text`."""


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits for its turn."""

    position: int
    """Requests ahead of it."""
    wait_s: float | None
    """Until it is likely to start; None where nothing is measured yet."""


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """How one sequence ended."""

    index: int
    """Whose it is: Delta.index."""
    reason: FinishReason
    """STOP or LENGTH."""
    num_tokens: int
    """Of the output, up to the end."""
    stop_string: str | None = None
    stop_token_id: int | None = None
    eos_token_id: int | None = None
    called_tools: bool = False
    beam_score: float | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The outcome of a request that ended well."""

    request_id: str
    model: str
    outputs: tuple[SequenceEnd, ...]
    """Those to be returned: in order of index, or the best ones, best first."""
    usage: Usage
    timings: Timings
    seed: int


class Reader(Protocol):
    """Who is called, instead of one who waits. It must not raise: what calls it is in the
    middle of a step that others have a part in."""

    idle: bool
    """It has taken all there was, and can take more."""

    def give(self, delta: Delta) -> None:
        """Takes a delta past the outbox, while it is idle."""

    def changed(self) -> None:
        """There is something to take_now()."""

    def evicted(self, error: PagewireError) -> None:
        """It is to take no more, and to end with the error."""


class _Pending:
    """A delta in the making."""

    __slots__ = ("ids", "logprobs", "texts", "tool_calls")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.tool_calls: list[ToolCall] = []


class Outbox:
    """At most one Queued, one delta for each sequence, then one end: a Finish or an error.

    One writer, one reader, both in the event loop. The reader waits in take(), or is
    attached and called.
    """

    __slots__ = ("_end", "_error", "_pending", "_prompt_logprobs", "_queued", "_reader", "_waiter")

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        """By index, those with something new, the one that waits longest first."""
        self._prompt_logprobs: Sequence[PositionLogprobs] = ()
        """For whichever delta is taken next."""
        self._queued: Queued | None = None
        self._end: Finish | None = None
        self._error: PagewireError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._reader: Reader | None = None

    @property
    def ended(self) -> bool:
        return self._end is not None or self._error is not None

    def put(
        self,
        text: str,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[PositionLogprobs] = (),
        prompt_logprobs: Sequence[PositionLogprobs] = (),
        index: int = 0,
        tool_calls: Sequence[ToolCall] = (),
    ) -> None:
        """Adds to the sequence's pending delta. Nothing new is no delta."""
        if not (text or token_ids or logprobs or prompt_logprobs or tool_calls):
            return
        reader = self._reader
        if reader is not None and reader.idle:
            ids = token_ids if isinstance(token_ids, list) else list(token_ids)
            reader.give(Delta(text, ids, logprobs, prompt_logprobs, index, tool_calls))
            return
        pending = self._pending.get(index)
        if pending is None:
            pending = self._pending[index] = _Pending()
        if text:
            pending.texts.append(text)
        pending.ids.extend(token_ids)
        pending.logprobs.extend(logprobs)
        pending.tool_calls.extend(tool_calls)
        if prompt_logprobs:
            self._prompt_logprobs = prompt_logprobs
        self._wake()

    def put_queued(self, queued: Queued) -> None:
        """Takes the place of one that was not read yet."""
        self._queued = queued
        self._wake()

    def finish(self, finish: Finish) -> None:
        assert not self.ended
        self._end = finish
        self._wake()

    def fail(self, error: PagewireError) -> None:
        """Ends with an error, after what is pending. The first end stands."""
        if not self.ended:
            self._error = error
            self._wake()

    async def take(self) -> Queued | Delta | Finish:
        """A pending Queued or delta, else the Finish; waits for either. Raises the error."""
        while (item := self.take_now()) is None:
            await self._wait()
        return item

    def take_now(self) -> Queued | Delta | Finish | None:
        """As take(), but None where it would wait."""
        if self._queued is not None:
            queued, self._queued = self._queued, None
            return queued
        if self._pending:
            return self._take_delta(next(iter(self._pending)))
        if self._error is not None:
            raise self._error
        return self._end

    def attach(self, reader: Reader) -> None:
        """Calls it for whatever comes from now on."""
        assert self._reader is None
        self._reader = reader

    def detach(self, reader: Reader) -> None:
        """Idempotent; another one that is attached by now stays."""
        if self._reader is reader:
            self._reader = None

    async def take_all(self) -> tuple[list[Delta], Finish]:
        """The whole output of each of Finish.outputs at once, after the end. Raises the
        error."""
        while not self.ended:
            await self._wait()
        if self._error is not None:
            raise self._error
        assert self._end is not None
        return [self._take_delta(end.index) for end in self._end.outputs], self._end

    def _take_delta(self, index: int) -> Delta:
        pending = self._pending.pop(index, None) or _Pending()
        texts = pending.texts
        text = texts[0] if len(texts) == 1 else "".join(texts)
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, ()
        return Delta(
            text, pending.ids, pending.logprobs, prompt_logprobs, index, pending.tool_calls
        )

    async def _wait(self) -> None:
        assert self._waiter is None
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            if self._waiter is waiter:
                self._waiter = None

    def _wake(self) -> None:
        if self._reader is not None:
            self._reader.changed()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
