"""Every RPC against random messages built from its descriptor."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf import message_factory
from smg_grpc_proto import vllm_engine_pb2

from pagewire.kserve import inference_pb2 as kserve_pb2
from pagewire.v1 import admin_pb2, inference_pb2, model_pb2, tokenizer_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Stack

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

ROUNDS = 60
VLLM_ENGINE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-40, 1e38, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "fake", "user", "\x00", "é" * 40, "\u2060", "\U0001f9a4" * 3, "x" * 5000)
INTEGERS = (0, 1, 2, 7, 255, 2**31 - 1)
# Drain would end the test's server; the public API has the rest.
METHODS = [
    (service, method)
    for file, names in (
        (inference_pb2, ("InferenceService",)),
        (model_pb2, ("ModelService",)),
        (tokenizer_pb2, ("TokenizerService",)),
        (admin_pb2, ("AdminService",)),
        (kserve_pb2, ("GRPCInferenceService",)),
        (vllm_engine_pb2, ("VllmEngine",)),
    )
    for service in (file.DESCRIPTOR.services_by_name[name] for name in names)
    for method in service.methods
    if method.name != "Drain"
]


def scalar(field: FieldDescriptor, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if kind == field.CPPTYPE_STRING:
        text = rng.choice(TEXTS)
        return text.encode() if field.type == field.TYPE_BYTES else text
    if kind == field.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == field.CPPTYPE_ENUM:
        return rng.choice([v.number for v in field.enum_type.values])
    if kind in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
        return rng.choice((*INTEGERS, 2**32 - 1))
    return rng.choice((*INTEGERS, -1, -(2**31)))


def build(descriptor: Descriptor, rng: random.Random, depth: int = 0) -> Any:
    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if rng.random() < 0.5 or depth > 4:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = build(field.message_type, rng, depth + 1)
            values = getattr(message, field.name)
            if field.message_type.fields_by_name["value"].message_type is None:
                values[entry.key] = entry.value
            else:
                values[entry.key].CopyFrom(entry.value)
        elif field.is_repeated:
            values = getattr(message, field.name)
            for _ in range(rng.choice((0, 1, 3, 20))):
                if field.message_type is not None:
                    values.add().CopyFrom(build(field.message_type, rng, depth + 1))
                else:
                    values.append(scalar(field, rng))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(build(field.message_type, rng, depth + 1))
        else:
            setattr(message, field.name, scalar(field, rng))
    return message


async def one(stack: Stack, service: Any, method: Any, body: bytes) -> grpc.StatusCode:
    channel = stack.admin_channel if service.name == "AdminService" else stack.channel
    path = f"/{service.full_name}/{method.name}"
    try:
        if method.client_streaming:
            async for _ in channel.stream_stream(path)(iter([body]), timeout=60):
                pass
        elif method.server_streaming:
            async for _ in channel.unary_stream(path)(body, timeout=60):
                pass
        else:
            await channel.unary_unary(path)(body, timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("service", "method"), METHODS, ids=[f"{s.name}.{m.name}" for s, m in METHODS]
)
async def test_random_messages_get_a_considered_answer(
    make_stack: Callable[..., Stack], service: Any, method: Any
) -> None:
    stack = await make_stack(max_model_len=128, config={"resume_ttl": 5.0, "vllm_protocol": True})
    rng = random.Random(f"{service.name}.{method.name}")
    allowed = {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
    }
    if service is VLLM_ENGINE:
        allowed.add(grpc.StatusCode.UNIMPLEMENTED)
    if method.name in ("LoadAdapter", "UnloadAdapter"):
        # This server has no directory for them.
        allowed.add(grpc.StatusCode.FAILED_PRECONDITION)
    seen = set()
    for _ in range(ROUNDS // 10):
        bodies = [build(method.input_type, rng).SerializeToString() for _ in range(10)]
        codes = await asyncio.gather(*(one(stack, service, method, b) for b in bodies))
        seen |= set(codes)
    assert seen <= allowed
    # Damaged bodies: never a hang, never the server's fault.
    for _ in range(10):
        body = bytearray(build(method.input_type, rng).SerializeToString() or b"\x00")
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        assert await one(stack, service, method, bytes(body)) in allowed
    assert await stack.check() == 1
    assert stack.frontend.dispatcher.admission.requests == 0
