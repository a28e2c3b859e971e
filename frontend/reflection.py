"""grpc.reflection v1 and v1alpha over one pool.

Two things that grpcio-reflection does not bring: the v1 name (same messages,
other package), and symbols that name a METHOD, which Python's descriptor pool
does not resolve (grpc/grpc#34743) and which ghz asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"


class MethodAwarePool:
    """A descriptor pool in which a method's full name finds its service's file.

    It also holds the v1 reflection service, derived from v1alpha's file, so that
    a client which describes every listed service finds that one too.
    """

    def __init__(self) -> None:
        self._pools = (descriptor_pool.Default(), _v1_pool())

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        """Raises KeyError for an unknown symbol."""
        try:
            return self._find("FindFileContainingSymbol", symbol)
        except KeyError:
            service_name, _, method = symbol.rpartition(".")
            service = self._find("FindServiceByName", service_name)
            if method not in service.methods_by_name:
                raise KeyError(symbol) from None
            return service.file

    def FindFileByName(self, name: str) -> Any:
        return self._find("FindFileByName", name)

    def FindMessageTypeByName(self, name: str) -> Any:
        return self._find("FindMessageTypeByName", name)

    def FindExtensionByNumber(self, message: Any, number: int) -> Any:
        return self._pools[0].FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Any) -> Any:
        return self._pools[0].FindAllExtensions(message)

    def _find(self, finder: str, name: str) -> Any:
        for pool in self._pools[:-1]:
            try:
                return getattr(pool, finder)(name)
            except KeyError:
                continue
        return getattr(self._pools[-1], finder)(name)


def add_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Serves reflection for `services` and for itself, under both names."""
    names = (*services, V1, V1ALPHA)
    servicer = reflection.aio.ReflectionServicer(names, pool=MethodAwarePool())  # type: ignore[attr-defined]
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
            for name in (V1, V1ALPHA)
        )
    )


def _v1_pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = "grpc.reflection.v1"
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = _to_v1(field.type_name)
    for service in file.service:
        for method in service.method:
            method.input_type = _to_v1(method.input_type)
            method.output_type = _to_v1(method.output_type)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _to_v1(type_name: str) -> str:
    return type_name.replace(".grpc.reflection.v1alpha.", ".grpc.reflection.v1.")
