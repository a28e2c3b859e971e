"""An OTLP receiver: the TraceService of opentelemetry-proto over real gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

if TYPE_CHECKING:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}

    async def start(self) -> None:
        self._server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{port}"
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(None)

    async def Export(self, request: Any, context: Any) -> Any:
        for of_resource in request.resource_spans:
            self.resource = values(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += of_scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        return sorted(
            (span for span in self.spans if span.name == name),
            key=lambda span: span.start_time_unix_nano,
        )

    def one(self, name: str) -> Span:
        (span,) = self.named(name)
        return span


def values(attributes: Any) -> dict[str, Any]:
    """A span's or a resource's attributes as plain values."""
    found: dict[str, Any] = {}
    for pair in attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = (
            [it.string_value for it in value.values] if kind == "array_value" else value
        )
    return found
