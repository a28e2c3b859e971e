"""One HTTP request and its answer: body in, JSON or server-sent events out.

An ASGI application of its own for each route, below Starlette's routing, so that a token
costs one encoded chunk and one send. A caller that hangs up cancels the handler in that
turn of the event loop, whether it waits for a stream or for one answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from typing import TYPE_CHECKING, Any

import msgspec
from grpc import StatusCode

from frontend.interceptors import (
    NO_DEADLINE_S,
    REQUEST_ID_KEY,
    TENANT_KEY,
    read_request_id,
)
from frontend.openai.errors import HttpError, bad_body, http_error
from frontend.openai.responses import encode
from frontend.status import STATUS
from pagewire.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    PagewireError,
)
from pagewire.obs.logging import log_context

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import TypeVar

    from starlette.types import Receive, Scope, Send

    from frontend.call_trace import CallTrace, CallTracing
    from frontend.metrics import Metrics

    B = TypeVar("B", bound=msgspec.Struct)

logger = logging.getLogger(__name__)

TIMEOUT_KEY = "x-request-timeout"
"""Seconds, a header of ours: HTTP has no deadline of its own."""
JSON = b"application/json"
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would hold chunks back.
    (b"x-accel-buffering", b"no"),
)


class Gone(Exception):
    """The client hung up while it was sending."""


class Exchange:
    """What a handler has in its hands."""

    def __init__(self, scope: Scope, send: Send, body: bytes) -> None:
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        self.headers: dict[str, str] = headers
        self.params: dict[str, Any] = scope.get("path_params", {})
        self.body = body
        self.request_id = read_request_id(headers.get(REQUEST_ID_KEY, ""))
        self.tenant = headers.get(TENANT_KEY, "")
        self.deadline: float | None = None
        self.name_field: Callable[[str], str] = str
        """Set by the handler: the body's words for a field of pagewire.v1."""
        self._send = send
        self._started = False
        self._streams = False
        self.status = 0
        """What was answered; 0 before."""

    def read(self, kind: type[B]) -> B:
        """The body. Raises InvalidRequest."""
        content_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            # A page of another origin can send forms and plain text unasked.
            raise InvalidRequest("content-type", "the content-type must be application/json")
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise bad_body(error) from None
        except RecursionError:
            raise InvalidRequest("", "the body is nested too deeply") from None

    def read_deadline(self) -> float | None:
        """On the event loop's clock. Raises InvalidRequest."""
        value = self.headers.get(TIMEOUT_KEY)
        if value is None:
            return None
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not seconds > 0:
            raise InvalidRequest(TIMEOUT_KEY, f"{TIMEOUT_KEY} is no positive number of seconds")
        return asyncio.get_running_loop().time() + seconds if seconds < NO_DEADLINE_S else None

    async def answer(self, value: Any) -> None:
        await self.reply(200, encode(value))

    async def reply(
        self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        length = (b"content-length", b"%d" % len(body))
        await self._start(status, ((b"content-type", JSON), length, *headers))
        await self._send({"type": "http.response.body", "body": body})

    async def open_events(self) -> None:
        self._streams = True
        await self._start(200, _EVENTS)

    async def event(self, data: bytes) -> None:
        """`data` is one line."""
        await self._send(
            {
                "type": "http.response.body",
                "body": b"data: " + data + b"\n\n",
                "more_body": True,
            }
        )

    async def close_events(self) -> None:
        """Says that all went well."""
        await self.event(b"[DONE]")
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, error: HttpError) -> None:
        """The answer, or in a stream the last event: nothing follows it, not even [DONE]."""
        if not self._started:
            await self.reply(error.status, error.body, error.headers)
        elif self._streams:
            await self.event(error.body)
            await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._started = True
        self.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, (REQUEST_ID_KEY.encode(), self.request_id.encode())],
            }
        )


class Endpoint:
    """Serves one route by a handler; errors become answers in OpenAI's shape."""

    def __init__(
        self,
        name: str,
        handler: Callable[[Exchange], Awaitable[None]],
        metrics: Metrics,
        tracing: CallTracing,
        *,
        max_body_bytes: int,
    ) -> None:
        self._name = name
        self._handler = handler
        self._metrics = metrics
        self._tracing = tracing
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        try:
            body = await self._read(receive)
            exchange = Exchange(scope, send, body)
            too_large = None
        except Gone:
            return
        except MessageTooLarge as error:
            exchange, too_large = Exchange(scope, send, b""), error
        trace = self._tracing.http(scope["method"], self._name, exchange.headers)
        fields = {"request_id": exchange.request_id}
        if trace is not None:
            fields["trace_id"] = trace.trace_id
        with log_context(**fields):
            work = asyncio.ensure_future(self._serve(exchange, trace, too_large))
            watch = asyncio.ensure_future(_until_gone(receive))
            try:
                await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            finally:
                work.cancel()
                watch.cancel()
                await asyncio.gather(work, watch, return_exceptions=True)

    async def _read(self, receive: Receive) -> bytes:
        pieces, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > self._max_body_bytes:
                raise MessageTooLarge(
                    f"the body is larger than {self._max_body_bytes} bytes, the most this "
                    "server takes"
                )
            if not message.get("more_body", False):
                return b"".join(pieces)

    async def _serve(
        self, exchange: Exchange, trace: CallTrace | None, error: PagewireError | None
    ) -> None:
        try:
            if error is not None:
                raise error
            await self._run(exchange)
        except asyncio.CancelledError:
            self._handled(trace, STATUS["cancelled"], exchange.status)
            raise
        except Exception as failure:
            told, code = _told(failure, exchange.name_field)
            self._handled(trace, STATUS[code], exchange.status or told.status)
            await exchange.refuse(told)
        else:
            self._handled(trace, StatusCode.OK, exchange.status)

    def _handled(self, trace: CallTrace | None, status: StatusCode, http_status: int) -> None:
        self._metrics.rpc_handled(self._name, status.name)
        if trace is not None:
            trace.end(status, http_status)

    async def _run(self, exchange: Exchange) -> None:
        try:
            exchange.deadline = exchange.read_deadline()
            async with asyncio.timeout_at(exchange.deadline) as timer:
                await self._handler(exchange)
        except TimeoutError:
            if not timer.expired():
                raise
            raise DeadlineExceeded("the deadline passed") from None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _told(error: Exception, name_field: Callable[[str], str]) -> tuple[HttpError, str]:
    if isinstance(error, InternalError) or not isinstance(error, PagewireError):
        error_id = secrets.token_hex(8)
        logger.error("internal error %s", error_id, exc_info=error)
        if not isinstance(error, InternalError):
            error = InternalError("internal error")
        return http_error(error, error_id=error_id), error.code
    logger.debug("%s: %s", error.code, error.message)
    return http_error(error, name_field=name_field), error.code
