from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from google.protobuf import descriptor_pool

from pagewire.v1 import (  # noqa: F401  (loads them into the pool)
    admin_pb2,
    detokenizer_pb2,
    inference_pb2,
    model_pb2,
    tokenizer_pb2,
)

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor

ROOT = Path(__file__).resolve().parents[2]
SERVICES = (
    "InferenceService",
    "TokenizerService",
    "ModelService",
    "AdminService",
    "DetokenizerService",
)


def test_committed_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gen_protos", ROOT / "scripts/gen_protos.py")
    assert spec is not None
    assert spec.loader is not None
    gen_protos = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gen_protos)
    gen_protos.generate(tmp_path)
    packages = ("pagewire/v1", "pagewire/kserve")
    fresh = {
        f"{package}/{path.name}": path.read_text()
        for package in packages
        for path in (tmp_path / package).iterdir()
    }
    committed = {
        f"{package}/{path.name}": path.read_text()
        for package in packages
        for path in (ROOT / package).glob("*_pb2*.py*")
        if path.suffix in {".py", ".pyi"}
    }
    assert fresh.keys() == committed.keys()
    stale = [name for name, text in fresh.items() if text != committed[name]]
    assert not stale, "run `make protos`"


@pytest.mark.parametrize("service", SERVICES)
def test_unary_requests_and_responses_carry_their_method_name(service: str) -> None:
    descriptor: ServiceDescriptor = descriptor_pool.Default().FindServiceByName(
        f"pagewire.v1.{service}"
    )
    for method in descriptor.methods:
        assert method.input_type.name == f"{method.name}Request"
        assert method.output_type.name == f"{method.name}Response"


def test_the_streaming_request_has_the_fields_of_the_unary_one() -> None:
    """And three of its own, which the proto calls so."""
    unary = inference_pb2.GenerateRequest.DESCRIPTOR.fields
    stream = inference_pb2.GenerateStreamRequest.DESCRIPTOR.fields
    assert [(f.name, f.number, f.type, f.has_presence) for f in unary] == [
        (f.name, f.number, f.type, f.has_presence) for f in stream[: len(unary)]
    ]
    only_streams = ["resumable", "resume_from", "report_queue"]
    assert [f.name for f in stream[len(unary) :]] == only_streams


def test_sampling_scalars_tell_zero_from_unset() -> None:
    for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name[
        "sampling_params"
    ].message_type.fields:
        assert field.is_repeated or field.has_presence, field.name


def test_generated_code_does_not_outrun_the_declared_runtimes() -> None:
    """Generated modules refuse a runtime older than their generator."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    protobuf = re.search(r"# Protobuf Python Version: (\d+)\.(\d+)", _first("*_pb2.py"))
    grpc = re.search(r"GRPC_GENERATED_VERSION = '(\d+)\.(\d+)\.(\d+)'", _first("*_pb2_grpc.py"))
    assert protobuf is not None
    assert grpc is not None
    assert f'"protobuf>={protobuf[1]}.{protobuf[2]}' in pyproject
    assert f'"grpcio>={grpc[1]}.{grpc[2]}.{grpc[3]}' in pyproject


def _first(pattern: str) -> str:
    return min((ROOT / "pagewire/v1").glob(pattern)).read_text()
