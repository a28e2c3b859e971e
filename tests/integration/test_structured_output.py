"""Structured output over the whole stack on the embedded model, with public bug reports."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagewire.types import MAX_JSON_WHITESPACE
from pagewire.v1 import common_pb2, inference_pb2
from tests.support.stack import read_stream

if TYPE_CHECKING:
    from tests.support.stack import Api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STOP = common_pb2.FINISH_REASON_STOP


def params(constraint: dict[str, Any], **sampling: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        **{"temperature": 0, "max_tokens": 64, "structured_output": constraint, **sampling}
    )


async def ask(api: Api, constraint: dict[str, Any], **sampling: Any) -> Any:
    return await api.inference.Generate(
        inference_pb2.GenerateRequest(
            prompt="Say it:", sampling_params=params(constraint, **sampling)
        )
    )


async def deltas(api: Api, constraint: dict[str, Any], **sampling: Any) -> tuple[list[str], Any]:
    """The pieces of the stream, and its final frame."""
    pieces, final = [], None
    request = inference_pb2.GenerateStreamRequest(
        prompt="Say it:", sampling_params=params(constraint, **sampling)
    )
    async for response in api.inference.GenerateStream(request):
        if response.WhichOneof("frame") == "final":
            final = response.final
        else:
            pieces.append(response.delta.text)
    return pieces, final


def choices(*texts: str) -> dict[str, Any]:
    return {"choice": {"texts": list(texts)}}


# waybarrios/vllm-mlx#109, tenstorrent/tt-inference-server#2594
async def test_a_choice_comes_byte_for_byte(api: Api) -> None:
    text = "🦜 日本語 ไทย"
    unary = await ask(api, choices(text))
    pieces, final = await deltas(api, choices(text))
    assert unary.outputs[0].text == "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert unary.outputs[0].finish_reason == final.outputs[0].finish_reason == STOP


# vllm-project/vllm#2577
async def test_a_stop_string_inside_a_choice(api: Api) -> None:
    constraint = choices("Thought: look it up\nObservation: none")
    unary = await ask(api, constraint, stop=["\nObservation:"])
    pieces, final = await deltas(api, constraint, stop=["\nObservation:"])
    assert unary.outputs[0].text == "".join(pieces) == "Thought: look it up"
    assert not any("\nObs" in piece for piece in pieces)
    for output in (unary.outputs[0], final.outputs[0]):
        assert output.finish_reason == STOP
        assert output.stop_match.stop_string == "\nObservation:"


# vllm-project/vllm#17248, #17623
@pytest.mark.parametrize(
    ("constraint", "kind"),
    [
        ({"json_schema": '{"type":"objec"}'}, "json_schema"),
        ({"json_schema": '{"type":"object","properties":5}'}, "json_schema"),
        ({"json_schema": '{"$ref":"#/nowhere"}'}, "json_schema"),
        ({"regex": "([a-z"}, "regex"),
        ({"choice": {}}, "choice"),
        ({"grammar": "start: nothing"}, "grammar"),
    ],
)
async def test_a_bad_constraint_is_the_caller_s_fault(
    api: Api, constraint: dict[str, Any], kind: str
) -> None:
    pid = (await api.stats()).engine_pid
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask(api, constraint)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_of(raised.value) == f"sampling_params.structured_output.{kind}"
    assert (await ask(api, choices("fine"))).outputs[0].text == "fine"
    assert (await api.at_rest()).engine_pid == pid


def field_of(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)
    assert status is not None
    for detail in status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            return bad.field_violations[0].field
    raise AssertionError("no BadRequest")


# vllm-project/vllm#38696
async def test_json_does_not_run_on_in_white_space(api: Api) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    response = await ask(api, {"json_schema": json.dumps(schema)}, logit_bias={198: 100, 216: 100})
    [output] = response.outputs
    assert output.finish_reason == STOP
    assert set(json.loads(output.text)) == {"a"}
    assert max(len(run) for run in re.findall(r"\s+", output.text)) <= MAX_JSON_WHITESPACE


async def test_constrained_and_free_requests_share_a_batch(api: Api) -> None:
    free = inference_pb2.GenerateRequest(
        prompt="A lamp stood on",
        sampling_params=common_pb2.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    )
    alone = await api.inference.Generate(free)
    date, person, beside = await asyncio.gather(
        ask(api, {"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}),
        ask(api, {"json_object": True}, max_tokens=80),
        api.inference.Generate(free),
    )
    assert re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", date.outputs[0].text)
    assert person.outputs[0].text.lstrip().startswith("{")
    assert beside.outputs[0].text == alone.outputs[0].text


async def test_each_of_n_follows_the_constraint(api: Api) -> None:
    response = await ask(api, {"regex": "[a-z]{2,9}!"}, n=3, temperature=1.0, seed=4)
    texts = [output.text for output in response.outputs]
    assert len(texts) == 3
    assert all(re.fullmatch("[a-z]{2,9}!", text) for text in texts)
    assert len(set(texts)) > 1


async def test_a_bad_constraint_with_n(api: Api) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask(api, {"regex": "([a-z"}, n=3)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_of(raised.value) == "sampling_params.structured_output.regex"
    await api.at_rest()


async def test_a_stream_of_a_choice(api: Api) -> None:
    request = inference_pb2.GenerateStreamRequest(
        prompt="Is the sky blue? ", sampling_params=params(choices("yes", "no"))
    )
    streamed = await read_stream(api.inference.GenerateStream(request))
    assert streamed.text in ("yes", "no")
