"""NVIDIA's client for the Open Inference Protocol, as it comes, against a frontend."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pagewire.kserve import inference_pb2
from tests.support.fake_engine import TEXT

if TYPE_CHECKING:
    from tests.frontend.conftest import Stack

PROGRAM = Path(__file__).with_name("triton_calls.py")


async def calls(address: str, model: str) -> dict[str, Any]:
    program = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), address, model, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await program.communicate()
    assert program.returncode == 0
    found: dict[str, Any] = json.loads(output)
    return found


async def test_unary_stream_metadata_and_readiness(stack: Stack) -> None:
    pytest.importorskip("tritonclient", reason="tritonclient is not installed")
    got = await calls(stack.frontend.address, "fake")
    assert got["live"] and got["ready"] and got["model_ready"] and got["version_ready"]
    assert not got["other_ready"] and not got["other_version_ready"]
    assert got["server"]["name"] == "pagewire"
    assert (got["model"]["name"], got["model"]["versions"]) == ("fake", ["1"])
    inputs = {it["name"]: it["datatype"] for it in got["model"]["inputs"]}
    assert (inputs["text_input"], inputs["stream"]) == ("BYTES", "BOOL")
    assert "text_output" in {it["name"] for it in got["model"]["outputs"]}

    assert got["id"] == "r-1"
    assert got["whole"] == ["hello " + TEXT[:12]]
    assert got["reason"] == ["length"]
    assert (got["num_input_tokens"], got["num_output_tokens"]) == ([6], [12])
    assert got["by_parameters"] == [TEXT[:5]]
    assert got["only"] == ["num_output_tokens"]
    status, message = got["error"]
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert "'text_output'" in message

    for request_id in ("a", "b"):
        assert "".join(got["parts"][request_id]) == TEXT[:20]
        assert len(got["parts"][request_id]) > 2
        assert got["counts"][request_id] == 20
    assert got["reasons"] == {"a": ["length"], "b": ["length"]}
    assert got["errors"] == ["INVALID_ARGUMENT: the input text_input is missing"]

    # The protocol's numbers and types are the client's.
    pending = list(inference_pb2.DESCRIPTOR.message_types_by_name.values())
    assert len(pending) > 10
    while pending:
        message = pending.pop()
        pending += message.nested_types
        theirs = got["numbers"][message.full_name]
        for field in message.fields:
            assert [field.number, field.type, field.is_repeated] == theirs[field.name], field
