"""The one stream on which output ids become text, kept open for life.

One message goes out for each engine step, with every row of that step. While
the stream is behind, the rows of several steps merge into the next message.
When the stream breaks, every live sequence is opened again on a new one, with
the ids whose text is already out as replay: clients see a pause. Replays are
shared out among messages, so that each is answered soon: a worker or a stream that
owes an answer for long is taken for hung, and would be replaced again and again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import grpc

from frontend.convert import tokenizer
from pagewire.errors import PagewireError, Unavailable
from pagewire.obs.complaints import Complaints

if TYPE_CHECKING:
    from collections.abc import Callable

    from frontend.convert.tokenizer import DetokenizeReply, TokenizerInfo
    from frontend.request import RequestState
    from frontend.tokenizer_client import TokenizerClient

logger = logging.getLogger(__name__)

GRACE_S = 60.0
"""How long live requests wait for a lost tokenizer to come back."""
REPLY_TIMEOUT_S = 10.0
"""No answer for this long, while one is owed, is a hung tokenizer."""
MAX_REPLAYED_IDS = 1 << 18
"""Of the sequences that one message opens, unless it is one alone. With stop strings a
worker takes half a second of CPU for them."""
MAX_BACKOFF_S = 1.0
MAX_REOPENS = 3
"""How often a sequence is lost without a new token in between before it is given up."""


class TextEvents(Protocol):
    """What the stream tells its owner, in the event loop."""

    def tokenizer_up(self, info: TokenizerInfo) -> None: ...

    def tokenizer_down(self) -> None: ...

    def text(self, state: RequestState, text: str, num_tokens: int) -> None:
        """New text (perhaps none) for output up to num_tokens."""

    def stopped(self, state: RequestState, stop_index: int, num_tokens: int) -> None:
        """A stop string was completed by token num_tokens; its text came before."""

    def flushed(self, state: RequestState) -> None:
        """All of a finished request's text is out."""

    def text_lost(self, state: RequestState, error: PagewireError) -> None: ...

    def batch_answered(self, num_rows: int, seconds: float) -> None: ...


@dataclass(slots=True)
class Batch:
    """One message, in plain values. Row i takes the output of states[i] up to
    num_tokens[i], with counts[i] of token_ids."""

    number: int
    opens: list[RequestState]
    closes: list[int]
    states: list[RequestState] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)
    sent_at: float = 0.0


class ProtocolError(Exception):
    """The other side broke the rules of the stream."""


class DetokenizeStream:
    def __init__(
        self, client: TokenizerClient, events: TextEvents, *, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._events = events
        self._clock = clock
        self._live: dict[int, RequestState] = {}
        self._opens: dict[int, RequestState] = {}
        self._dirty: dict[int, RequestState] = {}
        self._closes: list[int] = []
        self._in_flight: deque[Batch] = deque()
        self._answered_at = 0.0
        self._number = 0
        self._work = asyncio.Event()
        self._down_since = clock()
        self._complaints = Complaints(logger, clock=clock)
        """A worker that dies loses hundreds of sequences at once."""
        self.up = False

    @property
    def num_waiting(self) -> int:
        """Messages that wait for their answer."""
        return len(self._in_flight)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="detokenize-stream")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def open(self, state: RequestState) -> None:
        """Begins a sequence; its OPEN goes out with the next message."""
        self._live[state.internal_id] = state
        self._opens[state.internal_id] = state

    def push(self, state: RequestState) -> None:
        """The request has new output or has finished; flush() sends it."""
        if state.internal_id in self._live:
            self._dirty[state.internal_id] = state

    def flush(self) -> None:
        if self.up and (self._dirty or self._closes):
            self._work.set()

    def forget(self, state: RequestState) -> None:
        """The request needs no more text. Idempotent."""
        if self._live.pop(state.internal_id, None) is None:
            return
        self._dirty.pop(state.internal_id, None)
        if self._opens.pop(state.internal_id, None) is None:
            self._closes.append(state.internal_id)
            self.flush()

    async def _run(self) -> None:
        backoff = 0.05
        while True:
            try:
                await self._session()
            except (grpc.RpcError, ProtocolError, TimeoutError) as error:
                if self.up:
                    logger.warning("the detokenize stream broke: %s", _short(error))
            except Exception:
                # A bug of ours costs a pause, not every stream from now on.
                logger.exception("the detokenize stream failed")
            if self.up:
                backoff = 0.05
                self._go_down()
            self._fail_after_grace()
            await asyncio.sleep(backoff)
            backoff = min(MAX_BACKOFF_S, backoff * 2)

    def _go_down(self) -> None:
        self.up = False
        self._down_since = self._clock()
        self._in_flight.clear()
        self._dirty.clear()
        self._closes.clear()
        self._work.clear()
        self._events.tokenizer_down()

    def _fail_after_grace(self) -> None:
        if self._live and self._clock() - self._down_since > GRACE_S:
            error = Unavailable("tokenizer_dead", "the tokenizer is gone", retry_after=GRACE_S)
            for state in list(self._live.values()):
                self._events.text_lost(state, error)

    async def _session(self) -> None:
        try:
            info = await self._client.info()
        except grpc.aio.AioRpcError:
            return
        call = self._client.detokenizer.DetokenizeStream()
        try:
            # The first message opens what is live; its answer shows that the stream stands.
            # What an attempt that broke before its answer left behind is void.
            self._in_flight.clear()
            self._closes.clear()
            for state in self._live.values():
                self._reopen(state)
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await self._send(call, self._next_batch())
                self._receive(await _read(call))
            self.up = True
            self._events.tokenizer_up(info)
            self.flush()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write(call))
                group.create_task(self._read(call))
                group.create_task(self._watch())
        except* (grpc.RpcError, ProtocolError, TimeoutError) as group_error:
            first = group_error.exceptions[0]
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None
        finally:
            call.cancel()

    async def _write(self, call: grpc.aio.StreamStreamCall[object, object]) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            await self._send(call, self._next_batch())
            if self._opens:
                self.flush()

    async def _read(self, call: grpc.aio.StreamStreamCall[object, object]) -> None:
        while True:
            self._receive(await _read(call))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(REPLY_TIMEOUT_S / 4)
            if not self._in_flight:
                continue
            waits_since = max(self._in_flight[0].sent_at, self._answered_at)
            if self._clock() - waits_since > REPLY_TIMEOUT_S:
                raise ProtocolError(f"no answer for {REPLY_TIMEOUT_S:g} s")

    async def _send(self, call: grpc.aio.StreamStreamCall[object, object], batch: Batch) -> None:
        batch.sent_at = self._clock()
        self._in_flight.append(batch)
        try:
            await call.write(tokenizer.detokenize_request(batch))
        except asyncio.InvalidStateError:
            raise ProtocolError("tokenizer_svc ended the stream") from None

    def _reopen(self, state: RequestState) -> None:
        """Begins a live sequence again, from the text that is already out."""
        state.num_sent = state.num_acked
        self._opens[state.internal_id] = state
        # Where nothing was written yet, nothing is new: an echo would come ahead of the queue.
        if state.output_ids or state.engine_finished:
            self._dirty[state.internal_id] = state

    def _next_batch(self) -> Batch:
        batch = Batch(self._number, self._take_opens(), self._closes)
        self._number += 1
        # Rows of what is not open yet wait with it.
        later = {id_: self._dirty.pop(id_) for id_ in self._opens if id_ in self._dirty}
        for state in batch.opens:
            state.opened_in = batch.number
        for state in self._dirty.values():
            ids, sent = state.output_ids, state.num_sent
            num_tokens = len(ids)
            batch.num_tokens.append(num_tokens)
            batch.counts.append(num_tokens - sent)
            batch.token_ids += ids[sent:]
            batch.finished.append(state.engine_finished)
            state.num_sent = num_tokens
        batch.states += self._dirty.values()
        self._dirty, self._closes = later, []
        return batch

    def _take_opens(self) -> list[RequestState]:
        """As many as one message may open, the rest later."""
        num_ids = 0
        taken: list[RequestState] = []
        for state in self._opens.values():
            num_ids += len(state.output_ids)
            if taken and num_ids > MAX_REPLAYED_IDS:
                break
            taken.append(state)
        for state in taken:
            del self._opens[state.internal_id]
        return taken

    def _receive(self, message: object) -> None:
        try:
            reply = tokenizer.detokenize_reply(message)
        except (ValueError, IndexError) as error:
            raise ProtocolError(f"malformed answer: {error}") from None
        if not self._in_flight or self._in_flight[0].number != reply.number:
            raise ProtocolError(f"answer {reply.number} is out of order")
        batch = self._in_flight.popleft()
        self._answered_at = self._clock()
        for sequence, message_text in reply.errors:
            self._receive_error(batch, sequence, message_text)
        live, number = self._live, batch.number
        for state, num_tokens, finished in zip(
            batch.states, batch.num_tokens, batch.finished, strict=True
        ):
            # Opened again since: what this old message yields is void.
            if state.internal_id in live and state.opened_in <= number:
                self._receive_row(state, num_tokens, finished, reply)
        self._events.batch_answered(len(batch.states), self._clock() - batch.sent_at)
        self.flush()

    def _receive_row(
        self, state: RequestState, num_tokens: int, finished: bool, reply: DetokenizeReply
    ) -> None:
        text = reply.texts.get(state.internal_id, "")
        stop = reply.stops.get(state.internal_id) if reply.stops else None
        state.emitted_chars += len(text)
        self._events.text(state, text, num_tokens if stop is None else stop.num_tokens)
        if num_tokens > state.num_acked:
            state.num_reopens = 0
        state.num_acked = num_tokens
        if stop is not None:
            self._events.stopped(state, stop.stop_index, stop.num_tokens)
        elif finished:
            self._live.pop(state.internal_id, None)
            self._events.flushed(state)

    def _receive_error(self, batch: Batch, sequence: int, message: str) -> None:
        state = self._live.get(sequence)
        if state is None or state.opened_in > batch.number:
            return
        self._complaints.add("tokenizer_svc lost a sequence: %s", message)
        if state.num_reopens >= MAX_REOPENS:
            self._events.text_lost(
                state, Unavailable("tokenizer_dead", "the tokenizer lost this request's text")
            )
            return
        state.num_reopens += 1
        # Ahead of any number in flight, so that their rows are void from now on.
        state.opened_in = self._number
        self._reopen(state)


async def _read(call: grpc.aio.StreamStreamCall[object, object]) -> object:
    try:
        message = await call.read()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # grpc.aio reports a call that was cancelled elsewhere like a cancel of ours.
        raise ProtocolError("the stream was cancelled") from None
    if message is grpc.aio.EOF:  # type: ignore[attr-defined]
        raise ProtocolError("tokenizer_svc ended the stream")
    return message


def _short(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return str(error) or type(error).__name__
