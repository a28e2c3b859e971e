"""What a gRPC user expects of any server: frames, metadata, reflection, flow control."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from pagewire.v1 import common_pb2, inference_pb2
from tests.frontend.http2 import DATA, HEADERS, Connection
from tests.support.fake_engine import TEXT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.frontend.conftest import Stack

STREAM = "/pagewire.v1.InferenceService/GenerateStream"
UNARY = "/pagewire.v1.InferenceService/Generate"


def tokens(count: int) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(max_tokens=count)


async def test_rejections_are_trailers_only(stack: Stack) -> None:
    """One HEADERS frame that ends the stream: only so may a client's policy retry."""
    connection = Connection(window=2**20)
    await connection.open(stack.frontend.address)
    bad = inference_pb2.GenerateRequest(prompt="").SerializeToString()
    for path in (STREAM, UNARY):
        frames = await connection.until_end(connection.call(path, bad))
        assert [f.kind for f in frames] == [HEADERS], path
    stack.frontend.dispatcher.drain()
    good = inference_pb2.GenerateRequest(prompt="x").SerializeToString()
    for path in (STREAM, UNARY):
        frames = await connection.until_end(connection.call(path, good))
        assert [f.kind for f in frames] == [HEADERS], path
    await connection.close()


async def test_initial_metadata_goes_ahead_of_the_first_message(manual: Stack) -> None:
    connection = Connection(window=2**20)
    await connection.open(manual.frontend.address)
    request = inference_pb2.GenerateStreamRequest(prompt="x", sampling_params=tokens(1))
    stream = connection.call(STREAM, request.SerializeToString())
    while not connection.of(stream):
        await connection._read()
    assert [f.kind for f in connection.of(stream)] == [HEADERS]
    await manual.engine.wait_running()
    manual.engine.step()
    frames = await connection.until_end(stream)
    assert frames[0].kind == HEADERS
    assert {f.kind for f in frames[1:-1]} == {DATA}
    assert frames[-1].kind == HEADERS
    await connection.close()


async def test_a_slow_reader_costs_one_slot(manual: Stack) -> None:
    """A client that grants no window gets merged deltas, and others are not held up."""
    num_tokens = 800
    connection = Connection(window=16)
    await connection.open(manual.frontend.address)
    request = inference_pb2.GenerateStreamRequest(prompt="x", sampling_params=tokens(num_tokens))
    slow = connection.call(STREAM, request.SerializeToString())
    await manual.engine.wait_running()
    (state,) = manual.frontend.dispatcher.engine_side.live.values()
    for count in range(1, num_tokens + 1):
        manual.engine.step()
        await manual.until(lambda count=count: state.num_acked == count)  # type: ignore[misc]
    await manual.until(lambda: state.outbox.ended)
    # The engine is done and nothing is left of the request but one pending delta.
    assert manual.engine.running == {}
    pending = len("".join(state.outbox._pending[0].texts))
    assert 0 < pending <= num_tokens
    quick = manual.open(prompt="y", sampling_params=tokens(5))
    await manual.engine.wait_running()
    for _ in range(5):
        manual.engine.step()
    assert "".join(f.delta.text for f in await manual.rest(quick)) == TEXT[:5]
    connection.grant(slow, 2**20)
    await connection.until_end(slow)
    frames = [inference_pb2.GenerateStreamResponse.FromString(m) for m in connection.messages(slow)]
    assert "".join(f.delta.text for f in frames) == (TEXT * 70)[:num_tokens]
    assert len(frames) < num_tokens / 2
    assert len(frames[-2].delta.text) >= pending
    await connection.close()


# sgl-project/sglang#19986
async def test_a_quiet_client_that_pings_is_not_sent_away(manual: Stack) -> None:
    """Far more pings than C-core's default two strikes allow, while nothing is sent."""
    channel = grpc.aio.insecure_channel(
        manual.frontend.address,
        options=[
            ("grpc.keepalive_time_ms", 100),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )
    # Calls whose prefill takes long, on the same connection.
    raw = channel.unary_stream(STREAM)
    body = inference_pb2.GenerateStreamRequest(prompt="x", sampling_params=tokens(2))
    calls = [raw(body.SerializeToString(), timeout=60) for _ in range(3)]
    await manual.engine.wait_running(3)
    call = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=2.5)
    assert await call.read() == b"\x08\x01"
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    # Ended by its own deadline, not by a GOAWAY.
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    for _ in range(2):
        manual.engine.step()
    for call in calls:
        frames = [inference_pb2.GenerateStreamResponse.FromString(f) async for f in call]
        assert "".join(frame.delta.text for frame in frames) == TEXT[:2]
        assert frames[-1].WhichOneof("frame") == "final"
    await channel.close()


async def test_request_id_and_trace_are_carried(
    stack: Stack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = (
        ("x-request-id", "abc-1"),
        ("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),
    )
    call = stack.open(prompt="x", sampling_params=tokens(2), metadata=metadata)
    frames = [frame async for frame in call]
    assert dict(await call.initial_metadata())["x-request-id"] == "abc-1"
    assert dict(await call.trailing_metadata())["x-request-id"] == "abc-1"
    assert frames[-1].final.request_id == "abc-1"
    unary = stack.inference.Generate(
        inference_pb2.GenerateRequest(prompt="x", sampling_params=tokens(2)), metadata=metadata
    )
    assert (await unary).request_id == "abc-1"
    assert dict(await unary.initial_metadata())["x-request-id"] == "abc-1"
    failure = await stack.fails(stack.open(prompt="", metadata=metadata))
    assert failure.trailing["x-request-id"] == "abc-1"

    from frontend.call_trace import current_trace
    from frontend.interceptors import current_call

    seen = []
    real = stack.frontend.dispatcher.limits

    def limits() -> Any:
        seen.append((current_call().request_id, getattr(current_trace(), "trace_id", None)))
        return real()

    monkeypatch.setattr(stack.frontend.dispatcher, "limits", limits)
    await stack.stream(prompt="x", sampling_params=tokens(1), metadata=metadata)
    assert seen[0] == ("abc-1", "a" * 32)


async def test_request_ids_of_their_own(manual: Stack) -> None:
    """One x-request-id may cover several calls; a useless one is replaced."""
    metadata = (("x-request-id", "shared"),)
    calls = [
        manual.open(prompt="x", sampling_params=tokens(1), metadata=metadata) for _ in range(3)
    ]
    await manual.engine.wait_running(3)
    manual.engine.step()
    ids = {(await manual.rest(call))[-1].final.request_id for call in calls}
    assert len(ids) == 3
    assert all(i.startswith("shared") for i in ids)
    for useless in ("a" * 200, "a b"):
        call = manual.open(
            prompt="x", sampling_params=tokens(1), metadata=(("x-request-id", useless),)
        )
        (request,) = await manual.engine.wait_running()
        manual.engine.emit({request.id: [65]})
        await manual.rest(call)
        minted = dict(await call.initial_metadata())["x-request-id"]
        assert minted != useless
        assert len(minted) == 32


async def reflect(stack: Stack, version: str, **query: Any) -> Any:
    async def one() -> AsyncIterator[Any]:
        yield reflection_pb2.ServerReflectionRequest(**query)

    method = stack.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    return await method(one(), timeout=60).read()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection(stack: Stack, version: str) -> None:
    listed = (await reflect(stack, version, list_services="")).list_services_response
    names = {service.name for service in listed.service}
    assert "pagewire.v1.InferenceService" in names
    # Everything that is listed can be described, and so can each method (grpc/grpc#34743).
    symbols = {*names, "pagewire.v1.InferenceService.GenerateStream", "pagewire.v1.Usage"}
    for symbol in symbols:
        answer = await reflect(stack, version, file_containing_symbol=symbol)
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(raw)
            for raw in answer.file_descriptor_response.file_descriptor_proto
        ]
        assert files, symbol
        package, _, _ = symbol.rpartition(".")
        assert any(package.startswith(file.package) for file in files), symbol
    for symbol in (
        "pagewire.v1.InferenceService.NoSuch",
        "pagewire.v1.NoSuch",
        "NoSuch",
        "",
    ):
        answer = await reflect(stack, version, file_containing_symbol=symbol)
        assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0], symbol
    by_name = await reflect(stack, version, file_by_filename="pagewire/v1/common.proto")
    assert by_name.HasField("file_descriptor_response")


async def test_reflection_can_be_switched_off(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(config={"reflection": False})
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await reflect(stack, "v1", list_services="")
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_frontend_needs_no_torch() -> None:
    script = (
        "import sys, frontend.__main__, frontend.server;"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'kernels', 'engine_core')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
