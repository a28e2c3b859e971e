"""Structured output: what is refused at the door, and what goes to the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frontend.convert.calls import generate_call
from frontend.request import GenerateCall, IdsPrompt, SamplingCall, StructuredOutputCall
from frontend.validate import Limits, validate
from pagewire.errors import InvalidRequest
from pagewire.types import MAX_CONSTRAINT_CHARS, StructuredOutput
from pagewire.v1 import common_pb2, inference_pb2


def limits(eos_token_ids: tuple[int, ...] = (2,)) -> Limits:
    return Limits(
        model="m",
        max_model_len=100,
        vocab_size=50,
        eos_token_ids=eos_token_ids,
        default_sampling={},
        has_chat_template=False,
    )


def job_of(sampling: SamplingCall, eos_token_ids: tuple[int, ...] = (2,)) -> Any:
    call = GenerateCall(prompt=IdsPrompt([5]), sampling=sampling)
    return validate(call, limits(eos_token_ids), "r1")


def wire(**constraint: Any) -> SamplingCall:
    """What the conversion makes of the message."""
    params = common_pb2.SamplingParams(structured_output=common_pb2.StructuredOutput(**constraint))
    request = inference_pb2.GenerateRequest(prompt="x", sampling_params=params)
    return generate_call(request).sampling


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ({"json_schema": "{}"}, StructuredOutput("json_schema", "{}")),
        ({"regex": "a+"}, StructuredOutput("regex", "a+")),
        ({"grammar": 'start: "a"'}, StructuredOutput("grammar", 'start: "a"')),
        ({"json_object": True}, StructuredOutput("json_object", "")),
    ],
)
def test_each_kind_goes_on(constraint: dict[str, Any], expected: StructuredOutput) -> None:
    assert job_of(wire(**constraint)).sampling.structured_output == expected


def test_choices_go_on_as_json() -> None:
    texts = ["🦜", 'a "b"\n']
    wanted = job_of(wire(choice=common_pb2.StructuredOutput.Choices(texts=texts)))
    assert wanted.sampling.structured_output.kind == "choice"
    assert json.loads(wanted.sampling.structured_output.text) == texts


def test_nothing_asked_is_nothing() -> None:
    assert job_of(SamplingCall()).sampling.structured_output is None
    request = inference_pb2.GenerateRequest(prompt="x")
    assert generate_call(request).sampling.structured_output is None


@pytest.mark.parametrize(
    ("asked", "field", "message"),
    [
        (StructuredOutputCall(None), "", "set one of json_schema, regex"),
        (StructuredOutputCall("json_schema"), ".json_schema", "json_schema is empty"),
        (StructuredOutputCall("regex"), ".regex", "regex is empty"),
        (StructuredOutputCall("grammar"), ".grammar", "grammar is empty"),
        (StructuredOutputCall("json_object"), ".json_object", "can only be true"),
        (StructuredOutputCall("choice"), ".choice", "choice is empty"),
        (StructuredOutputCall("choice", choices=("a", "")), ".choice[1]", "a choice is empty"),
        (StructuredOutputCall("choice", choices=("a",) * 1025), ".choice", "at most 1024"),
        (StructuredOutputCall("choice", choices=("a" * 65_600,)), ".choice", "at most 65536"),
        *(
            (StructuredOutputCall(kind, "a" * (limit + 1)), f".{kind}", f"at most {limit}")
            for kind, limit in MAX_CONSTRAINT_CHARS.items()
            if kind in ("json_schema", "regex", "grammar")
        ),
    ],
)
def test_what_is_refused(asked: StructuredOutputCall, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        job_of(SamplingCall(structured_output=asked))
    assert raised.value.field == f"sampling_params.structured_output{field}"


def test_an_unset_constraint_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="set one of"):
        job_of(wire())


def test_there_must_be_an_end() -> None:
    asked = StructuredOutputCall("regex", "a")
    with pytest.raises(InvalidRequest, match="excludes structured_output") as raised:
        job_of(SamplingCall(structured_output=asked, ignore_eos=True))
    assert raised.value.field == "sampling_params.ignore_eos"
    with pytest.raises(InvalidRequest, match="no end of sequence") as raised:
        job_of(SamplingCall(structured_output=asked), ())
    assert raised.value.field == "sampling_params.structured_output"
