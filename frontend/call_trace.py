"""The trace that a call is part of: whose it is, and the call's own span if spans are made.

Where no receiver is set, all that is done is to read the caller's traceparent, if it sent
one: for the logs, for exemplars, and to pass it on.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc

from pagewire.obs.traces import TRACEPARENT, read_traceparent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagewire.obs.traces import Span, Tracer

_current: ContextVar[CallTrace | None] = ContextVar("frontend_call_trace", default=None)

# https://opentelemetry.io/docs/specs/semconv/rpc/grpc/: what a server's span calls an error.
_OUR_FAULT = frozenset(
    (
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    )
)


def current_trace() -> CallTrace | None:
    """That of the call which is being served in this task."""
    return _current.get()


class CallTrace:
    __slots__ = ("sampled", "span", "trace_id", "traceparent")

    def __init__(
        self, trace_id: str, *, sampled: bool, traceparent: str, span: Span | None = None
    ) -> None:
        self.trace_id = trace_id
        self.sampled = sampled
        self.traceparent = traceparent
        """For calls that are made on the way."""
        self.span = span
        """None where nothing is recorded."""

    def end(self, status: grpc.StatusCode, http_status: int | None = None) -> None:
        """`http_status` is what was answered, where it was asked in HTTP; 0 for nothing."""
        if self.span is None:
            return
        if http_status is None:
            self.span.set({"rpc.response.status_code": status.name})
        elif http_status:
            self.span.set({"http.response.status_code": http_status})
        if status is not grpc.StatusCode.OK:
            self.span.set({"error.type": status.name})
        if is_our_fault(status):
            self.span.fail(status.name)
        self.span.end()


class CallTracing:
    """Begins the trace of each call. `tracer` of None: no spans are made."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer

    def rpc(self, method: str, metadata: Mapping[str, Any]) -> CallTrace | None:
        """Of a gRPC method, "/package.Service/Method"."""
        if self._tracer is None:
            return _enter(_callers(metadata))
        name = method.removeprefix("/")
        attributes = {"rpc.system.name": "grpc", "rpc.method": name}
        return _enter(_served(self._tracer.serve(name, metadata, attributes)))

    def http(self, method: str, route: str, headers: Mapping[str, Any]) -> CallTrace | None:
        if self._tracer is None:
            return _enter(_callers(headers))
        attributes = {"http.request.method": method, "http.route": route, "url.scheme": "http"}
        return _enter(_served(self._tracer.serve(f"{method} {route}", headers, attributes)))


def is_our_fault(status: grpc.StatusCode) -> bool:
    return status in _OUR_FAULT


def _enter(trace: CallTrace | None) -> CallTrace | None:
    _current.set(trace)
    return trace


def _callers(headers: Mapping[str, Any]) -> CallTrace | None:
    header = headers.get(TRACEPARENT)
    if header is None:
        return None
    parent = read_traceparent(header)
    if parent is None:
        return None
    return CallTrace(parent.trace_id, sampled=parent.sampled, traceparent=header)


def _served(span: Span) -> CallTrace:
    return CallTrace(
        span.trace_id,
        sampled=span.sampled,
        traceparent=span.traceparent,
        span=span if span.sampled else None,
    )
