"""Messages of inference.GRPCInferenceService to and from plain values.

Inputs are named as Triton's vLLM backend names them. What is an input there can also be a
parameter of the request; sampling parameters are JSON in one tensor, or parameters one by
one.
https://github.com/kserve/open-inference-protocol,
https://github.com/triton-inference-server/vllm_backend
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from frontend.kserve.tensors import (
    ASKED_BY,
    EXCLUDE_INPUT,
    FINISH_REASON,
    INPUTS,
    NUM_INPUT_TOKENS,
    NUM_OUTPUT_TOKENS,
    OPTIONS,
    OUTPUTS,
    SAMPLING_PARAMETERS,
    STREAM,
    TEXT_INPUT,
    TEXT_OUTPUT,
    read_raw,
    write_raw,
)
from frontend.openai.calls import completion_calls, field_namer
from frontend.openai.errors import bad_body
from frontend.openai.requests import CompletionBody
from frontend.request import TextPrompt
from pagewire.errors import InvalidRequest, NotFound
from pagewire.kserve import inference_pb2
from pagewire.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from frontend.kserve.tensors import TensorKind
    from frontend.request import GenerateCall
    from frontend.stream import SequenceEnd

MODEL_VERSION = "1"
"""The only one: a server has one model as it was started with."""
SAMPLING_FIELDS = frozenset(
    (
        "n",
        "best_of",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "truncate_prompt_tokens",
        "structured_outputs",
        "use_beam_search",
        "length_penalty",
    )
)
"""Of frontend.openai.requests.CompletionBody, those that say how to sample."""
_PARAMETERS = "parameters"
_FINAL = "triton_final_response"
_WANTS_FINAL = "triton_enable_empty_final_response"
"""Asks for what every stream does here: a last response marked as such."""
_MAX_NAME_CHARS = 128
_REASONS = {FinishReason.STOP: b"stop", FinishReason.LENGTH: b"length"}


@dataclass(frozen=True, slots=True)
class InferCall:
    """One request, nothing checked that frontend/validate.py checks."""

    generate: GenerateCall
    request_id: str
    """The client's own, which only comes back."""
    outputs: frozenset[str]
    """Names of those that are wanted."""
    raw: bool
    """Whether the answer is to have its tensors in raw_output_contents."""
    name_field: Callable[[str], str]
    """From a path of pagewire.v1.GenerateRequest to the input or parameter that it came in."""


@dataclass(frozen=True, slots=True)
class Output:
    """What one answer tells: of all the request's sequences, in order."""

    texts: Sequence[str]
    num_tokens: Sequence[int]
    """New ones."""
    ends: Sequence[SequenceEnd] = ()
    """None before they have ended."""
    final: bool | None = None
    """Whether it is the last one of a stream; None outside of streams."""


def infer_call(request: inference_pb2.ModelInferRequest) -> InferCall:
    """Raises InvalidRequest that names the tensor or the parameter, or NotFound."""
    _check_version(request.model_version)
    values = _inputs(request)
    parameters = _parameters(request)
    sampling, source = _sampling_text(values, parameters)
    for name in OPTIONS:
        if name in parameters:
            if name in values:
                raise InvalidRequest(name, f"{name} is both an input and a parameter")
            values[name] = _flag(name, parameters.pop(name))
    if parameters:
        sampling, source = msgspec.json.encode(parameters).decode(), _PARAMETERS
    if TEXT_INPUT not in values:
        raise InvalidRequest(TEXT_INPUT, f"the input {TEXT_INPUT} is missing")
    body = _sampling_body(sampling, source)
    body.prompt = _text(TEXT_INPUT, values[TEXT_INPUT])
    body.model = request.model_name or None
    body.stream = bool(values.get(STREAM, False))
    # Where it is not said, as Triton's vLLM backend has it.
    body.echo = not values.get(EXCLUDE_INPUT, body.stream)
    name_field = _field_namer(body, source)
    try:
        call = completion_calls(body)[0]
    except InvalidRequest as error:
        raise InvalidRequest(name_field(error.field), error.message) from None
    return InferCall(
        generate=replace(call, return_token_ids=True),
        request_id=request.id,
        outputs=_wanted(request, values),
        raw=bool(request.raw_input_contents),
        name_field=name_field,
    )


def infer_response(
    call: InferCall, model: str, output: Output, num_input_tokens: int
) -> inference_pb2.ModelInferResponse:
    response = inference_pb2.ModelInferResponse(
        model_name=model, model_version=MODEL_VERSION, id=call.request_id
    )
    if output.final is not None:
        response.parameters[_FINAL].bool_param = output.final
    # A stream tells the reason once; before that it has none.
    reasons = [_REASONS[end.reason] for end in output.ends] or [b""] * len(output.texts)
    values: dict[str, Sequence[Any]] = {
        TEXT_OUTPUT: [text.encode() for text in output.texts],
        FINISH_REASON: reasons,
        NUM_INPUT_TOKENS: [num_input_tokens],
        NUM_OUTPUT_TOKENS: list(output.num_tokens),
    }
    for name, elements in values.items():
        if name in call.outputs:
            _add_output(response, OUTPUTS[name], elements, raw=call.raw)
    return response


def stream_response(
    answer: inference_pb2.ModelInferResponse,
) -> inference_pb2.ModelStreamInferResponse:
    return inference_pb2.ModelStreamInferResponse(infer_response=answer)


def stream_failure(request_id: str, message: str) -> inference_pb2.ModelStreamInferResponse:
    """Of the request with that id, the last one for it."""
    failure = inference_pb2.ModelStreamInferResponse(error_message=message)
    failure.infer_response.id = request_id
    failure.infer_response.parameters[_FINAL].bool_param = True
    return failure


def request_id(request: inference_pb2.ModelInferRequest) -> str:
    found: str = request.id
    return found


def model_name(
    request: inference_pb2.ModelReadyRequest | inference_pb2.ModelMetadataRequest,
) -> str:
    """Raises NotFound for another version than there is."""
    _check_version(request.version)
    name: str = request.name
    return name


def server_live() -> inference_pb2.ServerLiveResponse:
    return inference_pb2.ServerLiveResponse(live=True)


def server_ready(*, ready: bool) -> inference_pb2.ServerReadyResponse:
    return inference_pb2.ServerReadyResponse(ready=ready)


def model_ready(*, ready: bool) -> inference_pb2.ModelReadyResponse:
    return inference_pb2.ModelReadyResponse(ready=ready)


def server_metadata(version: str) -> inference_pb2.ServerMetadataResponse:
    return inference_pb2.ServerMetadataResponse(name="pagewire", version=version)


def model_metadata(name: str) -> inference_pb2.ModelMetadataResponse:
    return inference_pb2.ModelMetadataResponse(
        name=name,
        versions=[MODEL_VERSION],
        platform="pagewire",
        inputs=_tensor_metadata(INPUTS.values()),
        outputs=_tensor_metadata(OUTPUTS.values()),
    )


def _tensor_metadata(kinds: Iterable[TensorKind]) -> list[Any]:
    return [
        inference_pb2.ModelMetadataResponse.TensorMetadata(
            name=kind.name, datatype=kind.datatype, shape=kind.shape
        )
        for kind in kinds
    ]


def _check_version(version: str) -> None:
    if version not in ("", MODEL_VERSION):
        raise NotFound("model version", version[:_MAX_NAME_CHARS], field="model_version")


def _inputs(request: inference_pb2.ModelInferRequest) -> dict[str, bytes | bool]:
    """The element of each input."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequest(
            "raw_input_contents",
            f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs",
        )
    values: dict[str, bytes | bool] = {}
    for index, tensor in enumerate(request.inputs):
        name = tensor.name[:_MAX_NAME_CHARS]
        kind = INPUTS.get(tensor.name)
        if kind is None:
            known = ", ".join(INPUTS)
            raise InvalidRequest(
                name or f"inputs[{index}].name", f"the input {name!r} is none of {known}"
            )
        if name in values:
            raise InvalidRequest(name, f"the input {name} is there twice")
        if tensor.datatype != kind.datatype:
            given = tensor.datatype[:_MAX_NAME_CHARS]
            raise InvalidRequest(name, f"{name} has datatype {given!r}, must be {kind.datatype}")
        shape = list(tensor.shape)
        # With or without a dimension for the batch, which is one prompt.
        if shape not in ([1], [1, 1]):
            raise InvalidRequest(name, f"{name} has shape {shape[:8]}, must be [1]")
        for parameter in tensor.parameters:
            raise InvalidRequest(
                name, f"{name} has the parameter {parameter[:_MAX_NAME_CHARS]!r}, not a known one"
            )
        if raw:
            values[name] = read_raw(kind, raw[index])
        else:
            values[name] = _typed(kind, tensor)
    return values


def _typed(kind: TensorKind, tensor: Any) -> bytes | bool:
    field = "bool_contents" if kind.datatype == "BOOL" else "bytes_contents"
    elements = list(getattr(tensor.contents, field))
    if len(elements) != 1:
        raise InvalidRequest(
            kind.name, f"{kind.name} has {len(elements)} elements in contents.{field}, must have 1"
        )
    element: bytes | bool = elements[0]
    return element


def _parameters(request: inference_pb2.ModelInferRequest) -> dict[str, Any]:
    """Those that mean something here, each under a name that is known."""
    values: dict[str, Any] = {}
    for name, parameter in request.parameters.items():
        field = f"{_PARAMETERS}.{name[:_MAX_NAME_CHARS]}"
        kind = parameter.WhichOneof("parameter_choice")
        if name == _WANTS_FINAL:
            continue
        if name not in SAMPLING_FIELDS and name not in OPTIONS and name != SAMPLING_PARAMETERS:
            raise InvalidRequest(field, f"the parameter {name[:_MAX_NAME_CHARS]!r} is not known")
        if kind is None:
            raise InvalidRequest(field, f"the parameter {name} has no value")
        value = getattr(parameter, kind)
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(field, f"{name} is {value:g}, must be finite")
        values[name] = value
    return values


def _sampling_text(values: dict[str, bytes | bool], parameters: dict[str, Any]) -> tuple[str, str]:
    """The JSON of sampling_parameters, and where it came from; takes it out of parameters."""
    source = SAMPLING_PARAMETERS
    if SAMPLING_PARAMETERS in values:
        text = _text(source, values[source])
    elif SAMPLING_PARAMETERS in parameters:
        text = parameters.pop(SAMPLING_PARAMETERS)
        if not isinstance(text, str):
            raise InvalidRequest(source, f"{source} must be a string of JSON")
    else:
        return "{}", source
    for name in parameters:
        if name not in OPTIONS:
            raise InvalidRequest(
                f"{_PARAMETERS}.{name}", f"{name} and {source} are both set: put it in there"
            )
    return text, source


def _sampling_body(text: str, source: str) -> CompletionBody:
    try:
        # Triton's own example sends numbers as strings.
        body = msgspec.json.decode(text, type=CompletionBody, strict=False)
        names = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        fault = bad_body(error)
        path = f"{source}.{fault.field}" if fault.field else source
        raise InvalidRequest(path, f"{source}: {fault.message}") from None
    except RecursionError:
        raise InvalidRequest(source, f"{source} is nested too deeply") from None
    for name in names:
        if name not in SAMPLING_FIELDS:
            raise InvalidRequest(
                f"{source}.{name}", f"{source}: {name} is not a sampling parameter"
            )
    return body


def _field_namer(body: CompletionBody, source: str) -> Callable[[str], str]:
    namer = field_namer(body, chat=False)

    def name(path: str) -> str:
        if path == TextPrompt.field:
            return TEXT_INPUT
        if path == "model":
            return "model_name"
        named = namer(path)
        return (
            f"{source}.{named}" if named.split(".")[0].split("[")[0] in SAMPLING_FIELDS else named
        )

    return name


def _text(name: str, value: bytes | bool) -> str:
    assert isinstance(value, bytes), "the data type was checked"
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"{name} is not UTF-8 at byte {error.start}") from None


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{_PARAMETERS}.{name}", f"the parameter {name} must be a bool")
    return value


def _wanted(
    request: inference_pb2.ModelInferRequest, values: dict[str, bytes | bool]
) -> frozenset[str]:
    asked = {output for name, output in ASKED_BY.items() if values.get(name)}
    for index, output in enumerate(request.outputs):
        name = output.name[:_MAX_NAME_CHARS]
        if output.name not in OUTPUTS:
            known = ", ".join(OUTPUTS)
            raise InvalidRequest(
                name or f"outputs[{index}].name", f"the output {name!r} is none of {known}"
            )
        for parameter in output.parameters:
            raise InvalidRequest(
                name,
                f"the output {name} has the parameter {parameter[:_MAX_NAME_CHARS]!r}, "
                "not a known one",
            )
        asked.add(name)
    return frozenset(asked if request.outputs else asked | {TEXT_OUTPUT})


def _add_output(
    response: inference_pb2.ModelInferResponse,
    kind: TensorKind,
    elements: Sequence[Any],
    *,
    raw: bool,
) -> None:
    tensor = response.outputs.add(name=kind.name, datatype=kind.datatype, shape=[len(elements)])
    if raw:
        response.raw_output_contents.append(write_raw(kind.datatype, elements))
    elif kind.datatype == "BYTES":
        tensor.contents.bytes_contents.extend(elements)
    else:
        tensor.contents.uint_contents.extend(elements)
