"""Bad input: the code, the field, the details, and that nothing was started."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf import struct_pb2

from pagewire.v1 import admin_pb2, common_pb2, inference_pb2, model_pb2
from pagewire.wire.messages import Add
from tests.support.fake_tokenizer import ZERO

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Stack

CONTEXT = 64


def with_sampling(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "sampling_params": common_pb2.SamplingParams(**fields)}


def with_ids(*ids: int) -> dict[str, Any]:
    return {"prompt_token_ids": common_pb2.TokenIds(ids=ids)}


def with_chat(*roles: str, **fields: Any) -> dict[str, Any]:
    messages = [common_pb2.ChatMessage(role=role, content="hi") for role in roles]
    return {"chat": common_pb2.ChatInput(messages=messages, **fields)}


def not_json() -> struct_pb2.Struct:
    return struct_pb2.Struct(fields={"x": struct_pb2.Value(number_value=math.inf)})


INVALID = {
    "no input": ({}, "input"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "no tokens": ({"prompt": ZERO}, "prompt"),
    "prompt fills the context": ({"prompt": "x" * CONTEXT}, "prompt"),
    "prompt over the context": ({"prompt": "x" * (CONTEXT + 1)}, "prompt"),
    "prompt far over the context": ({"prompt": "x" * (CONTEXT * 513)}, "prompt"),
    "no ids": (with_ids(), "prompt_token_ids"),
    "ids fill the context": (with_ids(*range(CONTEXT)), "prompt_token_ids"),
    "id over the vocabulary": (with_ids(1, 300), "prompt_token_ids"),
    "id under the vocabulary": (with_ids(1, -1), "prompt_token_ids"),
    "no messages": (with_chat(), "chat.messages"),
    "empty role": (with_chat("user", ""), "chat.messages[1].role"),
    "role the template refuses": (with_chat("user", "pope"), "chat.messages[1].role"),
    "chat over the context": (with_chat(*["user"] * 9), "chat"),
    "both chat endings": (
        with_chat("user", add_generation_prompt=True, continue_final_message=True),
        "chat.continue_final_message",
    ),
    "kwargs not JSON": (
        with_chat("user", template_kwargs=not_json()),
        "chat.template_kwargs",
    ),
    "temperature nan": (with_sampling(temperature=math.nan), "sampling_params.temperature"),
    "temperature inf": (with_sampling(temperature=math.inf), "sampling_params.temperature"),
    "temperature negative": (with_sampling(temperature=-0.1), "sampling_params.temperature"),
    "top_p 0": (with_sampling(top_p=0), "sampling_params.top_p"),
    "top_p above 1": (with_sampling(top_p=1.01), "sampling_params.top_p"),
    "top_p nan": (with_sampling(top_p=math.nan), "sampling_params.top_p"),
    "top_k under -1": (with_sampling(top_k=-2), "sampling_params.top_k"),
    "min_p negative": (with_sampling(min_p=-0.1), "sampling_params.min_p"),
    "min_p above 1": (with_sampling(min_p=1.5), "sampling_params.min_p"),
    "min_p nan": (with_sampling(min_p=math.nan), "sampling_params.min_p"),
    "max_tokens 0": (with_sampling(max_tokens=0), "sampling_params.max_tokens"),
    "max_tokens negative": (with_sampling(max_tokens=-5), "sampling_params.max_tokens"),
    "max_tokens over the context": (
        with_sampling(max_tokens=CONTEXT),
        "sampling_params.max_tokens",
    ),
    "logprobs negative": (with_sampling(logprobs=-1), "sampling_params.logprobs"),
    "logprobs over the limit": (with_sampling(logprobs=21), "sampling_params.logprobs"),
    "prompt_logprobs negative": (
        with_sampling(prompt_logprobs=-1),
        "sampling_params.prompt_logprobs",
    ),
    "prompt_logprobs over the limit": (
        with_sampling(prompt_logprobs=21),
        "sampling_params.prompt_logprobs",
    ),
    "empty stop": (with_sampling(stop=["a", ""]), "sampling_params.stop[1]"),
    "long stop": (with_sampling(stop=["a" * 1025]), "sampling_params.stop[0]"),
    "many stops": (with_sampling(stop=["a"] * 17), "sampling_params.stop"),
    "stop id over the vocabulary": (
        with_sampling(stop_token_ids=[1, 300]),
        "sampling_params.stop_token_ids",
    ),
    "stop id negative": (
        with_sampling(stop_token_ids=[-1]),
        "sampling_params.stop_token_ids",
    ),
    "many stop ids": (
        with_sampling(stop_token_ids=[1] * 1025),
        "sampling_params.stop_token_ids",
    ),
    "empty request id": ({"prompt": "x", "request_id": ""}, "request_id"),
    "long request id": ({"prompt": "x", "request_id": "a" * 129}, "request_id"),
    "request id with a space": ({"prompt": "x", "request_id": "a b"}, "request_id"),
    "request id not ASCII": ({"prompt": "x", "request_id": "é"}, "request_id"),
    "long salt": ({"prompt": "x", "cache_salt": "a" * 257}, "cache_salt"),
}


@pytest.fixture
async def small(make_stack: Callable[..., Stack]) -> Stack:
    return await make_stack(max_model_len=CONTEXT)


def check_rejection(failure: Any, code: str, field: str) -> None:
    assert failure.code.name == code
    assert failure.fields == [field]
    assert failure.info.domain == "pagewire"
    assert failure.info.reason
    assert failure.message
    # Trailers-Only: the client may retry, and x-request-id comes in the trailers.
    assert failure.initial == {}
    assert failure.trailing["x-request-id"]


async def test_invalid_fields_are_named(small: Stack) -> None:
    for name, (fields, field) in INVALID.items():
        for method, message in (
            (small.inference.Generate, inference_pb2.GenerateRequest),
            (small.inference.GenerateStream, inference_pb2.GenerateStreamRequest),
        ):
            failure = await small.fails(method(message(**fields), timeout=60))
            assert failure.code is grpc.StatusCode.INVALID_ARGUMENT, name
            assert failure.fields == [field], name
            check_rejection(failure, "INVALID_ARGUMENT", field)
            assert failure.info.reason == "INVALID_REQUEST"
    assert not [c for c in small.engine.commands if isinstance(c, Add)]
    assert small.frontend.dispatcher.admission.requests == 0
    assert small.frontend.dispatcher.admission.queued_tokens == 0
    assert (await small.stream(prompt="x")).text


async def test_the_bad_id_is_told(small: Stack) -> None:
    failure = await small.fails(small.open(**with_ids(1, 2, 12345)))
    assert "12345" in failure.message
    assert "position 2" in failure.message


async def test_too_many_tokens_names_the_three_figures(small: Stack) -> None:
    failure = await small.fails(
        small.open(
            prompt="x" * 30, sampling_params=common_pb2.SamplingParams(max_tokens=CONTEXT - 29)
        )
    )
    assert failure.fields == ["sampling_params.max_tokens"]
    for figure in (CONTEXT, 30, CONTEXT - 29):
        assert str(figure) in failure.message
    got = await small.stream(
        prompt="x" * 30, sampling_params=common_pb2.SamplingParams(max_tokens=CONTEXT - 30)
    )
    assert got.final.usage.completion_tokens == CONTEXT - 30


async def test_unknown_model(stack: Stack) -> None:
    failure = await stack.fails(stack.open(prompt="x", model="gpt-17"))
    check_rejection(failure, "NOT_FOUND", "model")
    assert failure.resource == "gpt-17"
    for name, code in (("gpt-17", "NOT_FOUND"), ("", "INVALID_ARGUMENT")):
        failure = await stack.fails(stack.models.GetModel(model_pb2.GetModelRequest(name=name)))
        check_rejection(failure, code, "name")


async def test_duplicate_request_id(manual: Stack) -> None:
    first = manual.open(prompt="x", request_id="same")
    await manual.engine.wait_running()
    failure = await manual.fails(manual.open(prompt="x", request_id="same"))
    check_rejection(failure, "ALREADY_EXISTS", "request_id")
    first.cancel()
    await manual.until(lambda: manual.frontend.dispatcher.admission.requests == 0)
    again = manual.open(prompt="x", request_id="same")
    await manual.engine.wait_running()
    again.cancel()


async def test_chat_without_a_template(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(tokenizer_options={"has_chat_template": False})
    failure = await stack.fails(stack.open(**with_chat("user")))
    check_rejection(failure, "INVALID_ARGUMENT", "chat")


async def test_oversized_message_leaves_the_connection_alone(
    make_stack: Callable[..., Stack],
) -> None:
    stack = await make_stack(config={"max_message_mib": 1})
    call = stack.open(prompt="x" * (2 * 2**20))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await stack.check() == 1


async def test_body_that_is_no_message(stack: Stack) -> None:
    for path in ("GenerateStream", "Generate", "Cancel"):
        raw = stack.channel.unary_unary(f"/pagewire.v1.InferenceService/{path}")
        failure = await stack.fails(raw(b"\xff" * 64))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.fields == []


async def test_unexpected_exception_is_internal_with_an_id_in_the_log(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("secret prompt text")

    monkeypatch.setattr(stack.frontend.dispatcher, "admit", explode)
    failure = await stack.fails(stack.open(prompt="x"))
    assert failure.code is grpc.StatusCode.INTERNAL
    assert failure.info.reason == "INTERNAL"
    assert "secret" not in failure.message
    error_id = failure.info.metadata["error_id"]
    assert error_id in failure.message
    (record,) = [r for r in caplog.records if error_id in r.getMessage()]
    assert record.exc_info is not None
    assert "secret prompt text" in str(record.exc_info[1])


async def test_engine_error_ends_one_request_after_its_text(manual: Stack) -> None:
    bad = manual.open(prompt="bad", sampling_params=common_pb2.SamplingParams(max_tokens=9))
    await manual.engine.wait_running(1)
    good = manual.open(prompt="good", sampling_params=common_pb2.SamplingParams(max_tokens=2))
    first, second = await manual.engine.wait_running(2)
    manual.engine.emit({first.id: list(b"abc"), second.id: list(b"x")}, errors={first.id: "oh no"})
    delta = (await bad.read()).delta
    assert delta.text == "abc"
    failure = await manual.fails(bad)
    assert failure.code is grpc.StatusCode.INTERNAL
    assert failure.message.startswith("oh no (error id ")
    manual.engine.emit({second.id: list(b"y")})
    frames = [frame async for frame in good]
    assert "".join(f.delta.text for f in frames) == "xy"


async def test_negative_drain_timeout(stack: Stack) -> None:
    request = admin_pb2.DrainRequest()
    request.timeout.FromSeconds(-1)
    check_rejection(await stack.fails(stack.admin.Drain(request)), "INVALID_ARGUMENT", "timeout")
    assert await stack.check() == 1
