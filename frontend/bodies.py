"""Bodies that are no messages, of services that are not ours: health and reflection.

grpc.aio ends such a call with UNKNOWN and writes a traceback for each into the log.
frontend/interceptors.py sees to our own services.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import grpc

from frontend.interceptors import SERVED_PREFIXES, Interceptor, Undecodable, abort, deserialize
from frontend.status import rich_status
from pagewire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from frontend.interceptors import Context


class Bodies(Interceptor):
    """Answers them with INVALID_ARGUMENT."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(SERVED_PREFIXES):
            return handler
        decode = functools.partial(deserialize, handler.request_deserializer)
        encode = handler.response_serializer
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                _streams(handler.stream_stream), decode, encode
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(_one(handler.unary_stream), decode, encode)
        assert handler.unary_unary is not None, "no service has such a method"
        return grpc.unary_unary_rpc_method_handler(_one(handler.unary_unary), decode, encode)


def _one(behavior: Callable[[Any, Context], Awaitable[Any]]) -> Any:
    async def handle(request: Any, context: Context) -> Any:
        await _check(request, context)
        return await behavior(request, context)

    return handle


def _streams(behavior: Callable[[AsyncIterator[Any], Context], AsyncIterator[Any]]) -> Any:
    async def checked(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for request in requests:
            await _check(request, context)
            yield request

    async def handle(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for response in behavior(checked(requests, context), context):
            yield response

    return handle


async def _check(request: object, context: Context) -> None:
    if isinstance(request, Undecodable):
        status = rich_status(InvalidRequest("", "the body is not a valid request message"))
        await abort(context, status, status.trailing_metadata)
