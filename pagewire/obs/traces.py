"""W3C trace context, and spans to an OTLP receiver.

Who calls us may say of which trace the call is (https://www.w3.org/TR/trace-context/);
that much is read without any library. Spans are made by the OpenTelemetry SDK, which is
imported only where they are to be sent, and leave in batches from a thread of the SDK's.
Whether a call is sampled, how large batches are and with which headers they go is the
SDK's to read from OTEL_TRACES_SAMPLER, OTEL_BSP_* and OTEL_EXPORTER_OTLP_*.
"""

from __future__ import annotations

import os
import re
import threading
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from pagewire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry import trace

    Attributes = Mapping[str, str | bool | int | float | list[str]]

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
FLAG = "--otlp-endpoint"
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_CLOSE_S = 2.0
"""How long the last batch may take at the end."""
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


class TraceParent(NamedTuple):
    """What a caller says of the trace that its call is part of."""

    trace_id: str
    span_id: str
    sampled: bool


def read_traceparent(header: object) -> TraceParent | None:
    """None where it is none: malformed, of version ff, or with an id of zeros."""
    match = _TRACEPARENT.fullmatch(header) if isinstance(header, str) else None
    if match is None:
        return None
    version_, trace_id, span_id, flags, rest = match.groups()
    if (rest and version_ == "00") or trace_id == "0" * 32 or span_id == "0" * 16:
        return None
    return TraceParent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def find_endpoint(flag: str | None) -> tuple[str, str] | None:
    """The receiver's URL and the setting that names it; None where there is none."""
    if flag is not None:
        return flag, FLAG
    for variable in ENDPOINT_VARIABLES:
        if endpoint := os.environ.get(variable):
            return endpoint, variable
    return None


class Tracer:
    """Makes spans and sends them to `endpoint`, which the setting of that name gave.

    Raises ConfigError naming the setting: no URL of a gRPC receiver, or no SDK here.
    """

    def __init__(self, endpoint: str, setting: str = FLAG) -> None:
        _check(endpoint, setting)
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import (
                TraceContextTextMapPropagator,
            )
        except ImportError as error:
            raise ConfigError(
                f"{setting}: needs the OpenTelemetry SDK: pip install 'pagewire[otlp]' ({error})"
            ) from None
        resource = Resource.create({"service.version": version("pagewire")})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "pagewire"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("pagewire", version("pagewire"))
        self._propagator = TraceContextTextMapPropagator()
        self._in_context = set_span_in_context
        self._server, self._internal = SpanKind.SERVER, SpanKind.INTERNAL

    def serve(self, name: str, headers: Mapping[str, Any], attributes: Attributes) -> Span:
        """The span of a call that came with `headers`, begun now."""
        carrier = {
            key: value
            for key in (TRACEPARENT, TRACESTATE)
            if isinstance(value := headers.get(key), str)
        }
        made = self._tracer.start_span(
            name, self._propagator.extract(carrier), self._server, attributes
        )
        return Span(self, made)

    def child(self, parent: trace.Span, name: str, start_ns: int, attributes: Attributes) -> Span:
        context = self._in_context(parent)
        made = self._tracer.start_span(
            name, context, self._internal, attributes, start_time=start_ns
        )
        return Span(self, made)

    def flush(self) -> None:
        """Sends what has ended so far. Blocks."""
        self._provider.force_flush()

    def close(self) -> None:
        """Sends the rest. Blocks for two seconds at most."""
        # By itself it waits half a minute for a receiver that is not there.
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(_CLOSE_S)


class Span:
    """One span. Times are in nanoseconds since 1970."""

    __slots__ = ("_span", "_tracer", "sampled", "span_id", "trace_id")

    def __init__(self, tracer: Tracer, span: trace.Span) -> None:
        context = span.get_span_context()
        self._tracer = tracer
        self._span = span
        self.trace_id = f"{context.trace_id:032x}"
        self.span_id = f"{context.span_id:016x}"
        self.sampled = span.is_recording()

    @property
    def traceparent(self) -> str:
        """For calls that are made on the way."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"

    def child(self, name: str, start_ns: int, attributes: Attributes | None = None) -> Span:
        return self._tracer.child(self._span, name, start_ns, attributes or {})

    def note(self, name: str, at_ns: int, attributes: Attributes | None = None) -> None:
        """An event of a moment."""
        self._span.add_event(name, dict(attributes or {}), at_ns)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def fail(self, description: str) -> None:
        """It ended badly, and that is the server's fault."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, description))

    def end(self, at_ns: int | None = None) -> None:
        """Default: now."""
        self._span.end(at_ns)


def _check(endpoint: str, setting: str) -> None:
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ConfigError(
            f"{setting}: {endpoint!r} is no URL such as http://collector:4317 of an OTLP receiver"
        )
    for variable in PROTOCOL_VARIABLES:
        if os.environ.get(variable, "grpc") != "grpc":
            raise ConfigError(
                f"{variable}: {os.environ[variable]!r} is not spoken here, only grpc is"
            )
