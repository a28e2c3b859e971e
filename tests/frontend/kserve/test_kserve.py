"""The Open Inference Protocol: what is refused and how, and what its streams promise."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from frontend.kserve import servicer
from frontend.kserve.tensors import INPUTS
from pagewire.kserve import inference_pb2 as pb
from pagewire.kserve import inference_pb2_grpc
from pagewire.wire.messages import Add
from tests.support.fake_engine import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Stack

WAIT_S = 60.0
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def request(
    *,
    raw: bool = False,
    parameters: dict[str, Any] | None = None,
    outputs: tuple[str, ...] = (),
    fields: dict[str, Any] | None = None,
    **inputs: Any,
) -> pb.ModelInferRequest:
    """With `text_input` unless it is given as None."""
    message = pb.ModelInferRequest(**({"model_name": "fake"} | (fields or {})))
    for name, value in ({"text_input": "hello"} | inputs).items():
        if value is None:
            continue
        is_flag = isinstance(value, bool)
        tensor = message.inputs.add(name=name, shape=[1], datatype="BOOL" if is_flag else "BYTES")
        element = value if is_flag else value.encode()
        if raw:
            entry = bytes([value]) if is_flag else len(element).to_bytes(4, "little") + element
            message.raw_input_contents.append(entry)
        elif is_flag:
            tensor.contents.bool_contents.append(value)
        else:
            tensor.contents.bytes_contents.append(element)
    for name, value in (parameters or {}).items():
        kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        setattr(message.parameters[name], kinds[type(value)], value)
    for name in outputs:
        message.outputs.add(name=name)
    return message


def client(stack: Stack) -> Any:
    return inference_pb2_grpc.GRPCInferenceServiceStub(stack.channel)


async def infer(stack: Stack, message: pb.ModelInferRequest) -> Any:
    return await client(stack).ModelInfer(message, timeout=WAIT_S)


def values(response: Any) -> dict[str, list[Any]]:
    return {
        it.name: [*it.contents.bytes_contents, *it.contents.uint_contents]
        for it in response.outputs
    }


def last_add(stack: Stack) -> Add:
    return [command for command in stack.engine.commands if isinstance(command, Add)][-1]


@pytest.mark.parametrize("raw", [False, True])
async def test_the_answer_has_the_requests_own_layout(stack: Stack, raw: bool) -> None:
    message = request(
        raw=raw,
        sampling_parameters='{"max_tokens": 4, "n": 2}',
        exclude_input_in_output=True,
        return_num_output_tokens=True,
        fields={"id": "r-1"},
    )
    response = await infer(stack, message)
    assert (response.id, response.model_name, response.model_version) == ("r-1", "fake", "1")
    assert [(it.name, it.datatype, list(it.shape)) for it in response.outputs] == [
        ("text_output", "BYTES", [2]),
        ("num_output_tokens", "UINT32", [2]),
    ]
    text = TEXT[:4].encode()
    if raw:
        assert list(response.raw_output_contents) == [
            (b"\4\0\0\0" + text) * 2,
            b"\4\0\0\0" * 2,
        ]
    else:
        assert values(response) == {"text_output": [text] * 2, "num_output_tokens": [4, 4]}
        assert not response.raw_output_contents


async def test_sampling_parameters_arrive_from_wherever_they_come(stack: Stack) -> None:
    given = {"max_tokens": 3, "temperature": 0.5, "top_k": 7, "stop": "zz", "ignore_eos": True}
    as_strings = {name: str(value).lower() for name, value in given.items()}
    ways: list[dict[str, Any]] = [
        {"sampling_parameters": json.dumps(given)},
        {"sampling_parameters": json.dumps(as_strings)},
        {"parameters": {"sampling_parameters": json.dumps(given)}},
        {"parameters": given},
    ]
    for way in ways:
        await infer(stack, request(**way))
        sampling = last_add(stack).sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (3, 0.5, 7)
        assert sampling.ignore_eos
    schema = '{"max_tokens": 2, "structured_outputs": {"json": {"type": "object"}}}'
    await infer(stack, request(sampling_parameters=schema))
    constraint = last_add(stack).sampling.structured_output
    assert constraint is not None
    assert constraint.kind == "json_schema"


def changed(**changes: Any) -> pb.ModelInferRequest:
    message = request()
    for name, value in changes.items():
        if name in ("shape", "datatype", "name"):
            if name == "shape":
                message.inputs[0].shape[:] = value
            else:
                setattr(message.inputs[0], name, value)
        elif name == "raw":
            message.inputs[0].ClearField("contents")
            message.raw_input_contents.extend(value)
        elif name == "bytes_contents":
            message.inputs[0].contents.bytes_contents[:] = value
        elif name == "shared":
            message.inputs[0].parameters["shared_memory_region"].string_param = value
    return message


BAD = (
    (request(text_input=None), "text_input"),
    (request(text_input=""), "text_input"),
    (request(image="x"), "image"),
    (request(stream=True), "stream"),
    (changed(name=""), "inputs[0].name"),
    (changed(shape=[2]), "text_input"),
    (changed(shape=[]), "text_input"),
    (changed(datatype="INT32"), "text_input"),
    (changed(bytes_contents=[]), "text_input"),
    (changed(bytes_contents=[b"a", b"b"]), "text_input"),
    (changed(bytes_contents=[b"\xff"]), "text_input"),
    (changed(raw=[b"\3\0\0\0ab"]), "text_input"),
    (changed(raw=[b"\1\0"]), "text_input"),
    (changed(raw=[b"\1\0\0\0a", b"\1"]), "raw_input_contents"),
    (changed(shared="region"), "text_input"),
    (request(sampling_parameters="{"), "sampling_parameters"),
    (request(sampling_parameters="[" * 100_000), "sampling_parameters"),
    (request(sampling_parameters='{"top_p": 2}'), "sampling_parameters.top_p"),
    (request(sampling_parameters='{"top_p": "x"}'), "sampling_parameters.top_p"),
    (request(sampling_parameters='{"bogus": 1}'), "sampling_parameters.bogus"),
    (request(sampling_parameters='{"prompt": "x"}'), "sampling_parameters.prompt"),
    (request(sampling_parameters='{"max_tokens": 9999}'), "sampling_parameters.max_tokens"),
    (request(parameters={"top_p": 2.0}), "parameters.top_p"),
    (request(parameters={"top_p": float("nan")}), "parameters.top_p"),
    (request(parameters={"priority": 1}), "parameters.priority"),
    (request(parameters={"stream": 1}), "parameters.stream"),
    (
        request(sampling_parameters="{}", parameters={"top_p": 0.5}),
        "parameters.top_p",
    ),
    (
        request(exclude_input_in_output=True, parameters={"exclude_input_in_output": True}),
        "exclude_input_in_output",
    ),
    (request(outputs=("logprobs",)), "logprobs"),
)


async def test_a_bad_tensor_or_parameter_is_named(stack: Stack) -> None:
    for message, field in BAD:
        failure = await stack.fails(client(stack).ModelInfer(message, timeout=WAIT_S))
        assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
        assert failure.initial == {}  # Trailers-Only


async def test_a_doubled_input_and_an_unset_parameter_are_named(stack: Stack) -> None:
    message = request()
    message.inputs.add().CopyFrom(message.inputs[0])
    failure = await stack.fails(client(stack).ModelInfer(message, timeout=WAIT_S))
    assert failure.fields == ["text_input"]
    message = request()
    message.parameters["seed"].SetInParent()
    failure = await stack.fails(client(stack).ModelInfer(message, timeout=WAIT_S))
    assert failure.fields == ["parameters.seed"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"model_name": "other"}, "model_name"), ({"model_version": "2"}, "model_version")],
)
async def test_another_model_is_not_found(stack: Stack, fields: dict[str, str], field: str) -> None:
    failure = await stack.fails(client(stack).ModelInfer(request(fields=fields), timeout=WAIT_S))
    assert (failure.code, failure.fields) == (grpc.StatusCode.NOT_FOUND, [field])


async def test_what_is_live_is_ready_while_it_serves(stack: Stack) -> None:
    asked = client(stack)
    assert (await asked.ServerLive(pb.ServerLiveRequest(), timeout=WAIT_S)).live
    assert (await asked.ServerReady(pb.ServerReadyRequest(), timeout=WAIT_S)).ready
    ready = await asked.ModelReady(pb.ModelReadyRequest(name="fake"), timeout=WAIT_S)
    assert ready.ready
    stack.frontend.dispatcher.drain()
    assert (await asked.ServerLive(pb.ServerLiveRequest(), timeout=WAIT_S)).live
    assert not (await asked.ServerReady(pb.ServerReadyRequest(), timeout=WAIT_S)).ready
    ready = await asked.ModelReady(pb.ModelReadyRequest(name="fake"), timeout=WAIT_S)
    assert not ready.ready


async def test_metadata_names_every_input(stack: Stack) -> None:
    asked = client(stack).ModelMetadata(pb.ModelMetadataRequest(name="fake"), timeout=WAIT_S)
    assert [it.name for it in (await asked).inputs] == list(INPUTS)
    other = client(stack).ModelMetadata(pb.ModelMetadataRequest(name="other"), timeout=WAIT_S)
    assert (await stack.fails(other)).code is grpc.StatusCode.NOT_FOUND


async def test_a_stream_ends_each_request_once_whatever_becomes_of_it(
    make_stack: Callable[..., Stack],
) -> None:
    stack = await make_stack(auto=False, config={"max_requests": 1})
    call = client(stack).ModelStreamInfer(timeout=WAIT_S)
    await call.write(request(stream=True, fields={"id": "first"}))
    (running,) = await stack.engine.wait_running()
    await call.write(request(stream=True, fields={"id": "second"}))
    refused = await call.read()
    assert refused.infer_response.id == "second"
    assert refused.error_message.startswith("RESOURCE_EXHAUSTED: ")
    assert refused.infer_response.parameters["triton_final_response"].bool_param
    stack.engine.emit({running.id: list(b"the ")})
    delta = (await call.read()).infer_response
    assert values(delta) == {"text_output": [b"the "]}
    assert not delta.parameters["triton_final_response"].bool_param
    await call.done_writing()
    stack.engine.emit({running.id: list(TEXT[4:16].encode())})
    rest = [response.infer_response for response in await stack.rest(call)]
    assert b"".join(t for it in rest for t in values(it)["text_output"]) == TEXT[4:16].encode()
    finals = [it.parameters["triton_final_response"].bool_param for it in rest]
    assert finals == [False] * (len(rest) - 1) + [True]
    assert await call.code() is grpc.StatusCode.OK


async def test_a_stream_may_ask_for_whole_answers(stack: Stack) -> None:
    call = client(stack).ModelStreamInfer(timeout=WAIT_S)
    await call.write(request(sampling_parameters='{"max_tokens": 3}'))
    await call.done_writing()
    (response,) = await stack.rest(call)
    assert values(response.infer_response) == {"text_output": [b"hello" + TEXT[:3].encode()]}
    assert response.infer_response.parameters["triton_final_response"].bool_param


async def test_a_client_that_leaves_frees_all_its_requests(
    make_stack: Callable[..., Stack],
) -> None:
    stack = await make_stack(auto=False)
    call = client(stack).ModelStreamInfer(timeout=WAIT_S)
    for _ in range(3):
        await call.write(request(stream=True))
    running = await stack.engine.wait_running(3)
    call.cancel()
    ids = sorted(it.id for it in running)
    await stack.engine.wait_for(lambda: sorted(stack.engine.aborted) == ids)
    await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 0)


async def test_a_body_that_is_no_message_ends_the_stream(stack: Stack) -> None:
    raw = stack.channel.stream_stream(STREAM)(iter([b"\xff\xff\xff"]), timeout=WAIT_S)
    failure = await stack.fails(raw)
    assert (failure.code, failure.info.reason) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_REQUEST",
    )


async def test_the_deadline_is_the_streams(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False)
    call = client(stack).ModelStreamInfer(timeout=1.5)
    await call.write(request(stream=True))
    (running,) = await stack.engine.wait_running()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await stack.engine.wait_for(lambda: stack.engine.aborted == [running.id])


async def test_a_stream_is_read_no_faster_than_it_is_worked_on(
    make_stack: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "MAX_STREAM_REQUESTS", 2)
    stack = await make_stack(auto=False)
    call = client(stack).ModelStreamInfer(timeout=WAIT_S)
    for index in range(3):
        await call.write(request(stream=True, fields={"id": str(index)}))
    first, _second = await stack.engine.wait_running(2)
    await asyncio.wait_for(client(stack).ServerLive(pb.ServerLiveRequest()), WAIT_S)
    assert stack.frontend.dispatcher.admission.requests == 2
    stack.engine.emit({first.id: list(TEXT[:16].encode())})
    await stack.engine.wait_for(lambda: len(stack.engine.running) == 2)
    call.cancel()
    await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 0)
