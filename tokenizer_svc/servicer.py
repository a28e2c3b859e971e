"""The RPCs of TokenizerService and DetokenizerService."""

from __future__ import annotations

import asyncio
import logging
import traceback
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc

from pagewire.errors import InternalError, PagewireError, Unavailable
from pagewire.obs.traces import TRACEPARENT, read_traceparent
from pagewire.v1 import detokenizer_pb2_grpc, tokenizer_pb2_grpc
from tokenizer_svc import convert
from tokenizer_svc.stream import DetokenizeSession, PendingStep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tokenizer_svc.pool import WorkerPool

log = logging.getLogger(__name__)

WINDOW = 16
"""Steps of one stream that the workers may have at a time; then gRPC's flow control
makes the frontend wait."""


class Work:
    """Counts what a graceful stop waits for: calls being served and open sequences."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._sessions: set[DetokenizeSession] = set()
        self._changed = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        return not self._num_calls and not any(
            session.num_sequences or session.num_pending for session in self._sessions
        )

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self.changed()

    @asynccontextmanager
    async def session(self, session: DetokenizeSession) -> AsyncIterator[None]:
        self._sessions.add(session)
        try:
            yield
        finally:
            self._sessions.discard(session)
            session.close()
            self.changed()

    def changed(self) -> None:
        self._changed.set()

    async def wait_idle(self) -> None:
        while not self.is_idle:
            self._changed.clear()
            await self._changed.wait()


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    def __init__(self, pool: WorkerPool, work: Work) -> None:
        self._pool = pool
        self._work = work

    async def Tokenize(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Text that becomes no ids at all is an empty answer, not an error."""
        async with self._work.call(), as_status(context):
            make = convert.encode_request(request)
            return convert.encode_response(await self._pool.call(make, request.ByteSize()))

    async def Detokenize(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with self._work.call(), as_status(context):
            make = convert.decode_request(request)
            return convert.decode_response(await self._pool.call(make, request.ByteSize()))

    async def ApplyChatTemplate(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        async with self._work.call(), as_status(context):
            make = convert.chat_request(request)
            return convert.chat_response(await self._pool.call(make, request.ByteSize()))


class DetokenizerServicer(detokenizer_pb2_grpc.DetokenizerServiceServicer):
    def __init__(self, pool: WorkerPool, work: Work) -> None:
        self._pool = pool
        self._work = work

    async def GetTokenizerInfo(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        async with as_status(context):
            if self._pool.facts is None:
                raise Unavailable("loading", "the tokenizer is loading", retry_after=1.0)
            return convert.info_response(self._pool.facts, self._pool.num_workers)

    async def GetTokenBytes(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with self._work.call(), as_status(context):
            make = convert.spell_request(request)
            return convert.spell_response(await self._pool.call(make, request.ByteSize()))

    async def DetokenizeStream(
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        session = DetokenizeSession(self._pool)
        steps: _Steps = asyncio.Queue(WINDOW)
        async with self._work.session(session), as_status(context):
            reader = asyncio.create_task(_read(request_iterator, session, steps))
            try:
                while (step := await steps.get()) is not None:
                    if isinstance(step, Exception):
                        raise step
                    response = await session.result(step)
                    await context.write(convert.step_response(response))
                    self._work.changed()
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)


_Steps = asyncio.Queue[PendingStep | Exception | None]


async def _read(request_iterator: Any, session: DetokenizeSession, steps: _Steps) -> None:
    """Hands steps to the workers ahead of the answers, so that neither side waits. Ends
    with None, or with the exception that ends the stream after the answers before it."""
    try:
        async for request in request_iterator:
            await steps.put(await session.submit(convert.step_request(request)))
    except grpc.aio.BaseError:
        # The client or this server is gone, and nobody waits for an answer.
        await steps.put(None)
    except Exception as error:
        await steps.put(error)
    else:
        await steps.put(None)


@asynccontextmanager
async def as_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Ends the call with the status of whatever is raised inside."""
    try:
        yield
    except PagewireError as error:
        await _abort(context, error)
    except Exception as error:
        incident = uuid.uuid4().hex[:12]
        where = "".join(traceback.format_tb(error.__traceback__))
        trace = _trace(context)
        log.error("incident %s: %s\n%s", incident, type(error).__name__, where, extra=trace)
        await _abort(context, InternalError(f"tokenizer_svc failed; incident {incident}"))


def _trace(context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
    """For the log: the trace that the caller's call is part of, if it is of one."""
    parent = read_traceparent(dict(context.invocation_metadata() or ()).get(TRACEPARENT))
    return {} if parent is None else {"trace_id": parent.trace_id}


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: PagewireError) -> None:
    code, status = convert.status_of(error)
    await context.abort(
        code,
        status.message,
        trailing_metadata=(("grpc-status-details-bin", status.SerializeToString()),),
    )
