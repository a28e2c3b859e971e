"""What surrounds every RPC of ours: ids, the deadline, and errors as statuses.

- x-request-id is taken from the metadata or minted, and returned: in the initial
  metadata of accepted calls, in the trailing metadata always. A rejection sends
  no initial metadata, so that it goes out as Trailers-Only and clients' retry
  policies may retry it (gRFC A6).
- x-tenant-id is the tenant of a request that names none itself.
- traceparent is carried into the logs, and is the parent of the call's span
  (frontend/call_trace.py).
- A PagewireError becomes its status; anything else INTERNAL with an id that
  finds the traceback in the log.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import secrets
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from frontend.status import RichStatus, rich_status
from frontend.validate import MAX_REQUEST_ID_CHARS, is_printable_ascii
from pagewire.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PagewireError,
)
from pagewire.obs.logging import log_context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from frontend.call_trace import CallTrace, CallTracing
    from frontend.metrics import Metrics

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-request-id"
TENANT_KEY = "x-tenant-id"
SERVED_PREFIXES = (
    "/pagewire.v1.",
    "/inference.GRPCInferenceService/",
    "/vllm.grpc.engine.VllmEngine/",
)
"""Of the methods that servicers of this room answer."""
NO_DEADLINE_S = 365 * 86400.0
"""A deadline beyond this is none: event loops cannot hold any float as a timer."""

_call: ContextVar[Call] = ContextVar("frontend_call")

# Generic in the stubs only.
if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    Context = grpc.aio.ServicerContext
    Interceptor = grpc.aio.ServerInterceptor


@dataclass(frozen=True, slots=True)
class Call:
    """The RPC that is being served in this task."""

    method: str
    request_id: str
    """x-request-id."""
    deadline: float | None
    """On the event loop's clock."""
    tenant: str = ""
    """x-tenant-id, as it came."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((REQUEST_ID_KEY, self.request_id),)


def current_call() -> Call:
    return _call.get()


class Undecodable:
    """Stands for a request whose body is no message, until the handler refuses it."""


class Edge(Interceptor):
    """Wraps the handlers of our own servicers; others pass untouched."""

    def __init__(self, metrics: Metrics, tracing: CallTracing) -> None:
        self._metrics = metrics
        self._tracing = tracing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(SERVED_PREFIXES):
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        wrap = functools.partial(self._serve, method=method, metadata=metadata)
        decode = functools.partial(deserialize, handler.request_deserializer)
        encode = _serializer(handler.response_serializer)
        if handler.request_streaming:
            assert inspect.iscoroutinefunction(handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(
                _coroutine(wrap, _decoded(handler.stream_stream)),
                decode,
                encode,
            )
        if handler.response_streaming:
            assert inspect.iscoroutinefunction(handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(
                _coroutine(wrap, handler.unary_stream), decode, encode
            )
        return grpc.unary_unary_rpc_method_handler(
            _coroutine(wrap, handler.unary_unary), decode, encode
        )

    async def _serve(
        self,
        behavior: Callable[[Any, Context], Awaitable[Any]],
        request: object,
        context: Context,
        *,
        method: str,
        metadata: dict[str, Any],
    ) -> Any:
        call = make_call(method, metadata, context)
        _call.set(call)
        trace = self._tracing.rpc(method, metadata)
        fields = {"request_id": call.request_id}
        if trace is not None:
            fields["trace_id"] = trace.trace_id
        with log_context(**fields):
            context.set_trailing_metadata(call.metadata)
            try:
                response = await self._run(behavior, request, context, call)
            except asyncio.CancelledError:
                self._handled(method, grpc.StatusCode.CANCELLED, trace)
                raise
            except Exception as error:
                status = status_of(error)
                self._handled(method, status.code, trace)
                await abort(context, status, (*call.metadata, *status.trailing_metadata))
            self._handled(method, grpc.StatusCode.OK, trace)
            return response

    def _handled(self, method: str, code: grpc.StatusCode, trace: CallTrace | None) -> None:
        self._metrics.rpc_handled(method, code.name)
        if trace is not None:
            trace.end(code)

    async def _run(
        self,
        behavior: Callable[[Any, Context], Awaitable[Any]],
        request: object,
        context: Context,
        call: Call,
    ) -> Any:
        refuse_undecodable(request)
        try:
            async with asyncio.timeout_at(call.deadline) as timer:
                return await behavior(request, context)
        except TimeoutError:
            if not timer.expired():
                raise
            raise DeadlineExceeded("the deadline passed") from None


async def send(operation: Awaitable[None]) -> None:
    """Awaits a write to the client. Raises Cancelled if the client is gone.

    grpc.aio may learn that from the failing write before it cancels the handler.
    """
    try:
        await operation
    except grpc.aio.InternalError:
        raise Cancelled("the client is gone") from None


async def abort(
    context: Context, status: RichStatus, trailing: tuple[tuple[str, str | bytes], ...]
) -> None:
    """Ends the call with that status; never returns."""
    try:
        await context.abort(status.code, status.message, trailing)
    except grpc.aio.InternalError:
        # Nobody is there to be told; grpc.aio ends a cancelled handler in silence.
        raise asyncio.CancelledError from None


def _coroutine(
    wrap: Callable[..., Awaitable[Any]], behavior: Callable[..., Awaitable[Any]]
) -> Callable[[Any, Context], Awaitable[Any]]:
    # grpc.aio looks for coroutine functions, which a partial object is not.
    async def handle(request: Any, context: Context) -> Any:
        return await wrap(behavior, request, context)

    return handle


def _decoded(
    behavior: Callable[[AsyncIterator[Any], Context], Awaitable[Any]],
) -> Callable[[AsyncIterator[Any], Context], Awaitable[Any]]:
    async def checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            refuse_undecodable(request)
            yield request

    async def handle(requests: AsyncIterator[Any], context: Context) -> Any:
        return await behavior(checked(requests), context)

    return handle


def refuse_undecodable(request: object) -> None:
    """Raises InvalidRequest for what stands for no message."""
    if isinstance(request, Undecodable):
        raise InvalidRequest("", "the body is not a valid request message")


def deserialize(deserializer: Callable[[bytes], Any], body: bytes) -> Any:
    """The message, or Undecodable: an exception here would end the call with UNKNOWN and a
    traceback in the log."""
    try:
        return deserializer(body)
    except Exception:
        return Undecodable()


def _serializer(serializer: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Lets handlers answer with messages that are encoded already."""

    def serialize(message: Any) -> bytes:
        return message if type(message) is bytes else serializer(message)

    return serialize


def read_request_id(given: object) -> str:
    """`given`, or one that is made up where that is no request id."""
    if (
        isinstance(given, str)
        and 1 <= len(given) <= MAX_REQUEST_ID_CHARS
        and is_printable_ascii(given)
    ):
        return given
    return secrets.token_hex(16)


def make_call(method: str, metadata: dict[str, Any], context: Context) -> Call:
    """What its metadata says of a call; ids that are no ids are replaced."""
    request_id = read_request_id(metadata.get(REQUEST_ID_KEY, ""))
    remaining: float | None = context.time_remaining()
    deadline = None
    if remaining is not None and remaining < NO_DEADLINE_S:
        deadline = asyncio.get_running_loop().time() + remaining
    return Call(method, request_id, deadline, metadata.get(TENANT_KEY, ""))


def status_of(error: Exception) -> RichStatus:
    """What a caller is told; what is our own fault goes to the log."""
    if isinstance(error, InternalError) or not isinstance(error, PagewireError):
        error_id = secrets.token_hex(8)
        logger.error("internal error %s", error_id, exc_info=error)
        if not isinstance(error, InternalError):
            error = InternalError("internal error")
        return rich_status(error, error_id)
    logger.debug("%s: %s", error.code, error.message)
    return rich_status(error)
