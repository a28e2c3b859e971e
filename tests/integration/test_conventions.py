"""What every gRPC client expects of a server, asked of a real one.

More of the same is in tests/frontend/test_protocol.py (reflection, metadata, Trailers-Only
refusals, pings, slow readers), test_lifecycle.py (health, drain) and test_errors.py, over a
fake engine.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf import json_format
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from pagewire.v1 import common_pb2, inference_pb2

if TYPE_CHECKING:
    from tests.support.stack import Api, Stack

pytestmark = pytest.mark.timeout(300)

SERVING = 1
BAD_REQUESTS = json.loads((Path(__file__).parents[1] / "support/bad_requests.json").read_text())
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GARBAGE = {
    "http/1.1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "noise": random.Random(7).randbytes(4096),
    "a frame too long": PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(64),
    "headers that are none": PREFACE + b"\x00\x00\x04\x01\x05\x00\x00\x00\x01\xff\xff\xff\xff",
    "a preface and nothing": PREFACE,
}


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_bad_requests_say_what_is_wrong(api: Api, method: str) -> None:
    for case in BAD_REQUESTS:
        cls = getattr(inference_pb2, f"{method}Request")
        request = json_format.ParseDict(case["request"], cls())
        call: Any = getattr(api.inference, method)(request, timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await (call if method == "Generate" else call.read())
        error: Any = raised.value
        assert error.code().name == case["code"], case["name"]
        assert "Traceback" not in error.details()
        status: Any = rpc_status.from_call(error)
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        unpacked = [(detail.Unpack(info), detail.Unpack(bad)) for detail in status.details]
        assert any(is_info for is_info, _ in unpacked), case["name"]
        assert info.reason
        assert info.domain
        fields = [violation.field for violation in bad.field_violations]
        assert fields == [case["field"]], case["name"]
    await api.at_rest()


async def test_a_message_of_8_mib_leaves_the_connection_alone(api: Api, stack: Stack) -> None:
    states = []
    options = [("grpc.max_send_message_length", 64 << 20)]
    async with grpc.aio.insecure_channel(stack.address, options) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest())
        method: Any = channel.unary_unary(
            "/pagewire.v1.InferenceService/Generate",
            inference_pb2.GenerateRequest.SerializeToString,
            inference_pb2.GenerateResponse.FromString,
        )
        ids = common_pb2.TokenIds(ids=[40_000] * (3 << 20))
        request = inference_pb2.GenerateRequest(prompt_token_ids=ids)
        assert request.ByteSize() > 8 << 20
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await method(request, timeout=120)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        states.append(channel.get_state())
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING
    assert states == [grpc.ChannelConnectivity.READY]
    await api.at_rest()


async def test_garbage_on_the_port_harms_nobody(api: Api, stack: Stack) -> None:
    host, _, port = stack.address.rpartition(":")
    async with grpc.aio.insecure_channel(stack.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest())
        for name, sent in GARBAGE.items():
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            await writer.drain()
            if name != "a preface and nothing":
                # It is answered and closed, or reset.
                try:
                    async with asyncio.timeout(60):
                        while await reader.read(65536):
                            pass
                except ConnectionError:
                    pass
            writer.close()
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=30)
            assert answer.status == SERVING, name
        async with grpc.aio.insecure_channel(stack.address) as other:
            fresh = health_pb2_grpc.HealthStub(other)
            assert (await fresh.Check(health_pb2.HealthCheckRequest())).status == SERVING
    assert set(stack.alive_pids()) == set(stack.pids)
    await api.at_rest()
