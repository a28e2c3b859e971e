"""Calls a server with NVIDIA's client as it comes, and prints what it got as JSON.

A program of its own: the client's generated messages have the same names as ours, of which
a process can hold one.
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException


def tensor(name: str, value: str | bool) -> triton.InferInput:
    kind = "BOOL" if isinstance(value, bool) else "BYTES"
    made = triton.InferInput(name, [1], kind)
    made.set_data_from_numpy(
        np.array([value]) if kind == "BOOL" else np.array([value.encode()], dtype=np.object_)  # type: ignore[union-attr]
    )
    return made


def texts(result: Any, name: str = "text_output") -> list[str]:
    return [element.decode() for element in result.as_numpy(name)]


def call(client: Any, model: str) -> dict[str, Any]:
    got: dict[str, Any] = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready(model),
        "version_ready": client.is_model_ready(model, "1"),
        "other_ready": client.is_model_ready("other"),
        "other_version_ready": client.is_model_ready(model, "2"),
        "server": client.get_server_metadata(as_json=True),
        "model": client.get_model_metadata(model, as_json=True),
    }
    sampling = json.dumps({"temperature": "0", "max_tokens": 12})
    inputs = [tensor("text_input", "hello "), tensor("sampling_parameters", sampling)]
    counts = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
    flags = [tensor(name, True) for name in counts]
    whole = client.infer(model, [*inputs, *flags], request_id="r-1")
    got["id"] = whole.get_response().id
    got["whole"] = texts(whole)
    got["reason"] = texts(whole, "finish_reason")
    for name in ("num_input_tokens", "num_output_tokens"):
        got[name] = whole.as_numpy(name).tolist()
    bare = [tensor("text_input", "hello "), tensor("exclude_input_in_output", True)]
    by_parameters = client.infer(model, bare, parameters={"max_tokens": 5, "temperature": 0.0})
    got["by_parameters"] = texts(by_parameters)
    wanted = [triton.InferRequestedOutput("num_output_tokens")]
    only = client.infer(model, inputs, outputs=wanted)
    got["only"] = [output.name for output in only.get_response().outputs]
    try:
        client.infer(model, [tensor("text_output", "x")])
    except InferenceServerException as error:
        got["error"] = [error.status(), error.message()]
    return got


def stream(client: Any, model: str) -> dict[str, Any]:
    """Two prompts that stream and one that is wrong, at the same time."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    parts: dict[str, list[str]] = {"a": [], "b": []}
    counts = {"a": 0, "b": 0}
    for request_id in parts:
        client.async_stream_infer(
            model,
            [
                tensor("text_input", "hello"),
                tensor("stream", True),
                tensor("sampling_parameters", '{"max_tokens": 20}'),
                tensor("return_finish_reason", True),
                tensor("return_num_output_tokens", True),
            ],
            request_id=request_id,
            enable_empty_final_response=True,
        )
    client.async_stream_infer(model, [tensor("stream", True)], request_id="wrong")
    errors, reasons, open_ids = [], {}, set(parts)
    while open_ids or not errors:
        result, error = answers.get(timeout=30)
        if error is not None:
            errors.append(error.message())
            continue
        response = result.get_response()
        parts[response.id] += texts(result)
        counts[response.id] += int(result.as_numpy("num_output_tokens")[0])
        if response.parameters["triton_final_response"].bool_param:
            reasons[response.id] = texts(result, "finish_reason")
            open_ids.remove(response.id)
    client.stop_stream()
    return {"parts": parts, "counts": counts, "reasons": reasons, "errors": errors}


def numbers() -> dict[str, Any]:
    """Every message of the client's: field name -> number, type and whether it is repeated."""
    found = {}
    pending = list(service_pb2.DESCRIPTOR.message_types_by_name.values())
    while pending:
        message = pending.pop()
        pending += message.nested_types
        found[message.full_name] = {
            field.name: [field.number, field.type, field.is_repeated] for field in message.fields
        }
    return found


def main() -> None:
    address, model = sys.argv[1:]
    with triton.InferenceServerClient(address) as client:
        print(json.dumps(call(client, model) | stream(client, model) | {"numbers": numbers()}))


if __name__ == "__main__":
    main()
