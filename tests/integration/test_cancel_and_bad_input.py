from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagewire.v1 import common_pb2, inference_pb2
from tests.support.stack import Api, Stack, read_stream

pytestmark = pytest.mark.timeout(300)

LONG = common_pb2.SamplingParams(max_tokens=4000, ignore_eos=True)


def stream(api: Api, **fields: Any) -> Any:
    fields.setdefault("sampling_params", LONG)
    return api.inference.GenerateStream(inference_pb2.GenerateStreamRequest(**fields))


async def first_text(call: Any) -> str:
    """The first text; the stream goes on."""
    while True:
        response = await call.read()
        assert response is not grpc.aio.EOF
        if response.delta.text:
            return response.delta.text


async def test_cancel_in_decode_frees_every_block(api: Api) -> None:
    before = await api.at_rest()
    call = stream(api, prompt="Count for ever: one, two,")
    await first_text(call)
    running = await api.eventually(lambda stats: stats.num_requests_running == 1)
    assert running.num_free_blocks < before.num_free_blocks
    call.cancel()
    await api.at_rest()


async def test_cancel_in_prefill_frees_every_block(api: Api) -> None:
    # Several steps long: cancelled when the engine has begun and no text has come.
    before = await api.at_rest()
    short = common_pb2.SamplingParams(max_tokens=100)
    call = stream(api, prompt="many words " * 3000, sampling_params=short)
    await api.eventually(lambda stats: stats.num_free_blocks < before.num_free_blocks)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    await api.at_rest()


async def test_cancel_by_id_ends_the_call_with_cancelled(api: Api) -> None:
    call = stream(api, prompt="On and on", request_id="to-be-cancelled")
    await first_text(call)
    await api.inference.Cancel(inference_pb2.CancelRequest(request_id="to-be-cancelled"))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        while await call.read() is not grpc.aio.EOF:
            pass
    assert error.value.code() is grpc.StatusCode.CANCELLED
    await api.at_rest()


async def test_a_deadline_frees_every_block(api: Api) -> None:
    call = api.inference.GenerateStream(
        inference_pb2.GenerateStreamRequest(prompt="Too long a story", sampling_params=LONG),
        timeout=2.0,
    )
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read_stream(call)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await api.at_rest()


def sampling(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "sampling_params": common_pb2.SamplingParams(**fields)}


@pytest.mark.parametrize(
    ("request_fields", "code", "field"),
    [
        ({"prompt": ""}, "INVALID_ARGUMENT", "prompt"),
        ({}, "INVALID_ARGUMENT", "input"),
        (
            {"prompt_token_ids": common_pb2.TokenIds(ids=[1, 49152])},
            "INVALID_ARGUMENT",
            "prompt_token_ids",
        ),
        (
            {"prompt_token_ids": common_pb2.TokenIds(ids=[-1])},
            "INVALID_ARGUMENT",
            "prompt_token_ids",
        ),
        ({"prompt": "many words " * 9000}, "INVALID_ARGUMENT", "prompt"),
        (sampling(max_tokens=0), "INVALID_ARGUMENT", "sampling_params.max_tokens"),
        (sampling(max_tokens=1 << 20), "INVALID_ARGUMENT", "sampling_params.max_tokens"),
        (sampling(temperature=float("nan")), "INVALID_ARGUMENT", "sampling_params.temperature"),
        (sampling(temperature=-1), "INVALID_ARGUMENT", "sampling_params.temperature"),
        (sampling(top_p=0), "INVALID_ARGUMENT", "sampling_params.top_p"),
        ({"prompt": "x", "model": "unknown"}, "NOT_FOUND", "model"),
        (
            {"chat": common_pb2.ChatInput(messages=[])},
            "INVALID_ARGUMENT",
            "chat.messages",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_bad_input_names_its_field_and_harms_nothing(
    api: Api, stack: Stack, request_fields: dict[str, Any], code: str, field: str
) -> None:
    pid = (await api.stats()).engine_pid
    for call in (
        api.inference.Generate(inference_pb2.GenerateRequest(**request_fields)),
        read_stream(
            api.inference.GenerateStream(inference_pb2.GenerateStreamRequest(**request_fields))
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code().name == code
        assert violated_fields(error.value) == [field]
    after = await api.at_rest()
    assert after.engine_pid == pid == stack.pids["engine_core"]


async def test_an_id_in_flight_is_taken(api: Api) -> None:
    call = stream(api, prompt="Still running", request_id="twice")
    await first_text(call)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read_stream(stream(api, prompt="The second", request_id="twice"))
    assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
    await first_text(call)
    call.cancel()
    await api.at_rest()


def violated_fields(error: grpc.aio.AioRpcError) -> list[str]:
    status = rpc_status.from_call(error)
    assert status is not None
    fields = []
    for detail in status.details:
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request):
            fields += [violation.field for violation in bad_request.field_violations]
    return fields
