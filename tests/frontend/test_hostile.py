"""Clients and peers that mean no good: what they can make this process do is bounded."""

from __future__ import annotations

import asyncio
import logging
import struct
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
import pytest
import zmq

from frontend.engine_pool import EnginePool
from pagewire.config import FrontendConfig
from pagewire.errors import ConfigError
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.messages import PROTOCOL_VERSION
from pagewire.wire.sockets import require_local
from tests.frontend.http2 import END_HEADERS, HEADERS, Connection, Frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Stack

SHORT = common_pb2.SamplingParams(max_tokens=2)
HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1{}.ServerReflection/ServerReflectionInfo"
NO_MESSAGE = b"\xff\xff\xff"
RST_STREAM, GOAWAY = 0x3, 0x7


async def test_bodies_that_are_no_messages_leave_no_trace(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    channel = stack.channel
    calls = [
        channel.unary_unary(HEALTH + "Check")(NO_MESSAGE, timeout=60),
        channel.unary_unary(HEALTH + "List")(NO_MESSAGE, timeout=60),
        channel.unary_stream(HEALTH + "Watch")(NO_MESSAGE, timeout=60),
        channel.stream_stream(REFLECTION.format(""))(iter([NO_MESSAGE]), timeout=60),
        channel.stream_stream(REFLECTION.format("alpha"))(iter([NO_MESSAGE]), timeout=60),
    ]
    for call in calls:
        failure = await stack.fails(call)
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.info.reason == "INVALID_REQUEST"
    assert "Traceback" not in caplog.text
    listed = await channel.unary_unary(HEALTH + "List")(b"", timeout=60)
    assert b"pagewire.v1.InferenceService" in listed


class Opener(Connection):
    """Opens calls and never sends a message; takes no limit for an order."""

    async def flood(self, address: str, path: str, num_calls: int) -> None:
        await self.open(address)
        for _ in range(num_calls):
            stream = self._next_stream
            self._next_stream += 2
            self._send(Frame(HEADERS, END_HEADERS, stream, self.block(path)))
        await self._writer.drain()

    async def num_refused(self) -> int:
        """How many calls the server has reset, once a ping after them all is answered."""
        num_refused = 0
        self._send(Frame(0x6, 0, 0, b"pingpong"))
        while True:
            head = await asyncio.wait_for(self._reader.readexactly(9), 60)
            kind, flags, _stream = struct.unpack(">BBI", head[3:])
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            if kind == RST_STREAM:
                num_refused += 1
            elif kind == 0x6 and flags and payload == b"pingpong":
                return num_refused


async def test_calls_that_are_only_opened_are_shed(make_stack: Callable[..., Any]) -> None:
    stack = await make_stack(step_s=0.002, config={"max_concurrent_streams": 50})
    floods = [Opener(window=65535) for _ in range(4)]
    for flood in floods:
        await flood.flood(stack.frontend.address, "/pagewire.v1.InferenceService/Generate", 500)
    refused = [await flood.num_refused() for flood in floods]
    assert all(450 <= count < 500 for count in refused), refused
    # They hold no place, and others are served.
    assert stack.frontend.dispatcher.admission.requests == 0
    got = await stack.stream(prompt="a", sampling_params=SHORT)
    assert got.text
    for flood in floods:
        await flood.close()


async def test_open_calls_are_bounded_over_all_connections(
    make_stack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.server.MIN_OPEN_CALLS", 0)
    stack = await make_stack(auto=False, config={"max_requests": 5})
    opened = stack.channel.stream_stream("/pagewire.v1.InferenceService/Generate")
    calls = [opened(timeout=60) for _ in range(30)]
    refused = [asyncio.ensure_future(call.code()) for call in calls]
    await stack.until(lambda: sum(it.done() for it in refused) == 10)
    for it in refused:
        if it.done():
            assert it.result() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in calls:
        call.cancel()
    await asyncio.gather(*refused)


async def test_old_connections_are_sent_to_reconnect_and_their_calls_go_on(
    make_stack: Callable[..., Any],
) -> None:
    stack = await make_stack(auto=False, config={"max_connection_age": 0.2})
    connection = Connection(window=65535)
    await connection.open(stack.frontend.address)
    request = inference_pb2.GenerateStreamRequest(prompt="x", sampling_params=SHORT)
    stream = connection.call(
        "/pagewire.v1.InferenceService/GenerateStream", request.SerializeToString()
    )
    await stack.engine.wait_running()
    while connection.goaways == 0:
        await connection._read()
    for _ in range(2):
        stack.engine.step()
    await connection.until_end(stream)
    last = connection.messages(stream)[-1]
    assert inference_pb2.GenerateStreamResponse.FromString(last).HasField("final")
    await connection.close()


async def test_garbage_on_the_outputs_socket_is_told_once(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    context: Any = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.linger = 0
    stranger.connect(stack.engine_client._advertised)
    old = stack.engine_client.ready
    assert old is not None
    for _ in range(200):
        stranger.send_multipart([b"garbage"])
        stranger.send_multipart([b"\xfe", b"\x90"])
        stranger.send_multipart([b"\x01", b"not msgpack", b"and more"])
    marker = "dropped a message on the outputs socket"
    await stack.until(lambda: marker in caplog.text)
    assert (await stack.stream(prompt="a", sampling_params=SHORT)).text
    assert stack.engine_client.ready is old
    assert caplog.text.count(marker) == 1
    stranger.close()
    context.term()


async def test_garbage_on_the_http_port_is_told_once(
    stack: Stack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.http._seldom._next_at", 0.0)
    host, _, port = stack.frontend.http_address.rpartition(":")
    for _ in range(20):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x16\x03\x01 no HTTP\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        await writer.wait_closed()
    assert caplog.text.count("Invalid HTTP request") == 1


async def test_an_engine_of_another_protocol_is_told_once(
    make_stack: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    stack = await make_stack()
    client = stack.engine_client
    other = client.ready
    wrong = msgspec.structs.replace(other, protocol=PROTOCOL_VERSION + 1, epoch=other.epoch + 1)
    for _ in range(5):
        client._receive(wrong)
    assert caplog.text.count(f"the engine speaks protocol {PROTOCOL_VERSION + 1}") == 1
    assert client.ready is other


@pytest.mark.parametrize(
    ("endpoint", "is_local"),
    [
        ("ipc:///tmp/x", True),
        ("tcp://127.0.0.1:5557", True),
        ("tcp://127.9.9.9:5557", True),
        ("tcp://localhost:5557", True),
        ("tcp://[::1]:5557", True),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://[::]:5557", False),
        ("tcp://*:5557", False),
        ("tcp://10.0.0.1:5557", False),
        ("tcp://eth0:5557", False),
    ],
)
def test_the_engine_wire_binds_loopback_unless_told_otherwise(
    endpoint: str, is_local: bool
) -> None:
    require_local(endpoint, "--engine-bind", allow_remote=True)
    if is_local:
        require_local(endpoint, "--engine-bind", allow_remote=False)
        return
    with pytest.raises(ConfigError, match=r"--engine-bind tcp.*--allow-remote-engine"):
        require_local(endpoint, "--engine-bind", allow_remote=False)


def test_the_frontend_refuses_a_wide_outputs_bind() -> None:
    events: Any = None
    config = FrontendConfig(outputs_bind="tcp://0.0.0.0:5558")
    with pytest.raises(ConfigError, match=r"--outputs-bind tcp://0\.0\.0\.0:5558"):
        EnginePool(config, events, clock=lambda: 0.0)


async def test_one_line_a_request_without_its_text(
    make_stack: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "attack at dawn"
    quiet = await make_stack(step_s=0.002)
    await quiet.stream(prompt=secret, request_id="r-1", sampling_params=SHORT, tenant="acme")
    failing = quiet.open(prompt=secret, sampling_params=common_pb2.SamplingParams(bad_words=[""]))
    await quiet.fails(failing)
    lines = [it for it in caplog.records if it.getMessage() == "request ended"]
    (line,) = [vars(it) for it in lines if vars(it)["request_id"] == "r-1"]
    assert line["outcome"] == "length"
    assert (line["prompt_tokens"], line["output_tokens"]) == (len(secret), 2)
    assert line["tenant"] == "acme"
    assert 0 < line["first_token_s"] <= line["total_s"]
    assert "code" not in line
    everything = "".join(f"{it.getMessage()} {vars(it)}" for it in caplog.records)
    assert secret not in everything
    loud = await make_stack(step_s=0.002, config={"log_prompts": True})
    await loud.stream(prompt=secret, sampling_params=SHORT)
    assert [vars(it)["prompt"] for it in caplog.records if "prompt" in vars(it)] == [secret]
