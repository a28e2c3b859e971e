"""Where calls are refused before anything else is done for them: at gRPC's door and at HTTP's.

frontend/auth.py decides; here is only how each protocol asks and says no.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from frontend.auth import enter
from frontend.interceptors import Interceptor, abort, make_call
from frontend.openai.errors import http_error
from frontend.status import rich_status
from pagewire.errors import PagewireError, Unauthenticated

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from frontend.auth import Auth
    from frontend.interceptors import Context
    from frontend.metrics import Metrics
    from pagewire.obs.complaints import Complaints

UNKNOWN_METHOD = "unknown"
"""In metrics: names that strangers make up are no label values."""


class Gate(Interceptor):
    """The first interceptor of every gRPC server: all of its methods pass here."""

    def __init__(self, auth: Auth, metrics: Metrics, complaints: Complaints) -> None:
        self._auth = auth
        self._metrics = metrics
        self._complaints = complaints

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details = handler_call_details
        metadata = tuple(details.invocation_metadata or ())
        try:
            values = [value for key, value in metadata if key == "authorization"]
            enter(self._auth.authorize(details.method, values))
        except PagewireError as error:
            self._complaints.add("refused a gRPC call: %s", error.message)
            known = await continuation(details) is not None
            label = details.method if known else UNKNOWN_METHOD
            return self._refusal(error, details.method, dict(metadata), label)
        return await continuation(details)

    def _refusal(
        self, error: PagewireError, method: str, metadata: dict[str, Any], label: str
    ) -> Any:
        # A handler of streams whatever the method is: it does not wait for a message.
        async def refuse(_requests: AsyncIterator[bytes], context: Context) -> None:
            call = make_call(method, metadata, context)
            status = rich_status(error)
            self._metrics.rpc_handled(label, status.code.name)
            await abort(context, status, (*call.metadata, *status.trailing_metadata))

        return grpc.stream_stream_rpc_method_handler(refuse)


class HttpGate:
    """Wraps an ASGI application: all of its routes pass here, known or not."""

    def __init__(self, app: ASGIApp, auth: Auth, complaints: Complaints) -> None:
        self._app = app
        self._auth = auth
        self._complaints = complaints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server has neither lifespan nor websockets"
        values = [value for key, value in scope["headers"] if key == b"authorization"]
        try:
            enter(self._auth.authorize(scope["path"], values))
        except PagewireError as error:
            self._complaints.add("refused an HTTP request: %s", error.message)
            await _refuse(error, send)
            return
        await self._app(scope, receive, send)


async def _refuse(error: PagewireError, send: Send) -> None:
    answer = http_error(error)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(answer.body)),
        *answer.headers,
    ]
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
