"""What surrounds every RPC of ours: ids, the deadline, and errors as statuses.

- x-request-id is taken from the metadata or minted, and returned: in the initial
  metadata of accepted calls, in the trailing metadata always. A rejection sends
  no initial metadata, so that it goes out as Trailers-Only and clients' retry
  policies may retry it (gRFC A6).
- x-tenant-id is the tenant of a request that names none itself.
- traceparent (https://www.w3.org/TR/trace-context/) is carried into the logs.
- A PagewireError becomes its status; anything else INTERNAL with an id that
  finds the traceback in the log.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
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
    from collections.abc import Awaitable, Callable

    from frontend.metrics import Metrics

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-request-id"
TENANT_KEY = "x-tenant-id"
OUR_PREFIX = "/pagewire.v1."
NO_DEADLINE_S = 365 * 86400.0
"""A deadline beyond this is none: event loops cannot hold any float as a timer."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
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
    trace_id: str | None
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
    """Wraps the handlers of pagewire.v1 services; others pass untouched."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(OUR_PREFIX):
            return handler
        assert not handler.request_streaming, "no client streaming in pagewire.v1's public API"
        metadata = dict(handler_call_details.invocation_metadata or ())
        wrap = functools.partial(self._serve, method=method, metadata=metadata)
        decode = functools.partial(deserialize, handler.request_deserializer)
        if handler.response_streaming:
            assert inspect.iscoroutinefunction(handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(
                _coroutine(wrap, handler.unary_stream), decode, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            _coroutine(wrap, handler.unary_unary), decode, handler.response_serializer
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
        fields = {"request_id": call.request_id}
        if call.trace_id is not None:
            fields["trace_id"] = call.trace_id
        with log_context(**fields):
            context.set_trailing_metadata(call.metadata)
            try:
                response = await self._run(behavior, request, context, call)
            except asyncio.CancelledError:
                self._metrics.rpc_handled(method, grpc.StatusCode.CANCELLED.name)
                raise
            except Exception as error:
                status = _status_of(error)
                self._metrics.rpc_handled(method, status.code.name)
                await abort(context, status, (*call.metadata, *status.trailing_metadata))
            self._metrics.rpc_handled(method, grpc.StatusCode.OK.name)
            return response

    async def _run(
        self,
        behavior: Callable[[Any, Context], Awaitable[Any]],
        request: object,
        context: Context,
        call: Call,
    ) -> Any:
        if isinstance(request, Undecodable):
            raise InvalidRequest("", "the body is not a valid request message")
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


def deserialize(deserializer: Callable[[bytes], Any], body: bytes) -> Any:
    """The message, or Undecodable: an exception here would end the call with UNKNOWN and a
    traceback in the log."""
    try:
        return deserializer(body)
    except Exception:
        return Undecodable()


def read_request_id(given: object) -> str:
    """`given`, or one that is made up where that is no request id."""
    if (
        isinstance(given, str)
        and 1 <= len(given) <= MAX_REQUEST_ID_CHARS
        and is_printable_ascii(given)
    ):
        return given
    return secrets.token_hex(16)


def read_trace_id(traceparent: object) -> str | None:
    """Of a W3C traceparent; None where it is none."""
    trace = _TRACEPARENT.fullmatch(traceparent) if isinstance(traceparent, str) else None
    return None if trace is None else trace[1]


def make_call(method: str, metadata: dict[str, Any], context: Context) -> Call:
    """What its metadata says of a call; ids that are no ids are replaced."""
    request_id = read_request_id(metadata.get(REQUEST_ID_KEY, ""))
    trace_id = read_trace_id(metadata.get("traceparent", ""))
    remaining: float | None = context.time_remaining()
    deadline = None
    if remaining is not None and remaining < NO_DEADLINE_S:
        deadline = asyncio.get_running_loop().time() + remaining
    return Call(method, request_id, trace_id, deadline, metadata.get(TENANT_KEY, ""))


def _status_of(error: Exception) -> RichStatus:
    if isinstance(error, InternalError) or not isinstance(error, PagewireError):
        error_id = secrets.token_hex(8)
        logger.error("internal error %s", error_id, exc_info=error)
        if not isinstance(error, InternalError):
            error = InternalError("internal error")
        return rich_status(error, error_id)
    logger.debug("%s: %s", error.code, error.message)
    return rich_status(error)
