"""Every example, run as a reader would, against a whole server with the embedded model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.stack import running_stack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.stack import Stack

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def server() -> Iterator[Stack]:
    with running_stack("--device=cpu", "--kv-cache-memory=256MiB", "--resume-ttl=60") as stack:
        yield stack


def run(server: Stack, *command: str | Path, timeout: float = 90) -> str:
    """What it prints, once it has ended well."""
    result = subprocess.run(
        [str(part) for part in command],
        env={
            **os.environ,
            "PAGEWIRE_ADDRESS": server.address,
            "PAGEWIRE_URL": f"http://{server.http_address}/v1",
            "PYTHONPATH": str(EXAMPLES.parent),
        },
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def python(server: Stack, name: str) -> str:
    return run(server, sys.executable, "-W", "error", EXAMPLES / "python" / name)


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: this example was NOT run")
    return path


def test_the_client(server: Stack) -> None:
    said = python(server, "client.py")
    assert server.model in said
    assert re.search(r"^assistant: \S", said, re.M)
    assert re.search(r"^tokens: \d+$", said, re.M)
    assert "refused: sampling_params.top_p: " in said


def test_a_stream_that_can_be_resumed(server: Stack) -> None:
    assert len(python(server, "resume.py").split()) > 10


def test_many_at_once(server: Stack) -> None:
    said = python(server, "many_requests.py")
    assert len(re.findall(r"^\w+:['\"].+['\"]$", said, re.M)) == 8
    assert "ended by its deadline" in said


def test_the_stubs(server: Stack) -> None:
    said = python(server, "stubs.py")
    assert re.search(r"^FINISH_REASON_(STOP|LENGTH)$", said, re.M)
    assert "INVALID_ARGUMENT, reason INVALID_REQUEST: " in said


def test_openai(server: Stack) -> None:
    said = python(server, "openai_chat.py")
    assert re.search(r"city '.*', sunny (True|False)$", said)


def test_node(server: Stack) -> None:
    node, modules = tool("node"), EXAMPLES / "node" / "node_modules"
    if not modules.exists():
        pytest.skip("npm install was not run in examples/node: this example was NOT run")
    said = run(server, node, EXAMPLES / "node" / "stream.js")
    assert re.search(r"^FINISH_REASON_(STOP|LENGTH)$", said, re.M)
    assert "INVALID_ARGUMENT: " in said
    assert said.endswith("CANCELLED\n")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_go(server: Stack, tmp_path: Path) -> None:
    for name in ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"):
        tool(name)
    if not Path("/usr/share/gocode/src/google.golang.org/grpc").exists():
        pytest.skip("golang-google-grpc-dev is not installed: this example was NOT run")
    # The first build of gRPC takes half a minute of CPU; later ones find it in Go's cache.
    run(server, EXAMPLES / "go" / "build.sh", tmp_path, timeout=300)
    said = run(server, tmp_path / "generate")
    assert re.search(r"^FINISH_REASON_(STOP|LENGTH)$", said, re.M)
    assert "InvalidArgument: sampling_params.top_p: " in said


def test_grpcurl(server: Stack) -> None:
    tool("grpcurl")
    said = run(server, EXAMPLES / "grpcurl" / "requests.sh")
    assert "pagewire.v1.InferenceService\n" in said
    assert re.search(r'"finish_?[rR]eason": "FINISH_REASON_(STOP|LENGTH)"', said)
    assert '"status": "SERVING"' in said


def test_what_grpcurl_sends_fits_the_services() -> None:
    """Without grpcurl: its JSON is ours, and so are its methods."""
    from google.protobuf import descriptor_pool, json_format, message_factory

    from pagewire.v1 import inference_pb2, model_pb2

    assert inference_pb2.DESCRIPTOR
    assert model_pb2.DESCRIPTOR
    script = (EXAMPLES / "grpcurl" / "requests.sh").read_text().replace("\\\n", " ")
    calls = re.findall(r"(?:-d '([^']*)')?\s+\"\$address\" ([\w.]+)/(\w+)", script)
    assert len(calls) == 4
    for body, service, method in calls:
        if service == "grpc.health.v1.Health":
            continue
        found = descriptor_pool.Default().FindServiceByName(service).methods_by_name[method]
        message = message_factory.GetMessageClass(found.input_type)()
        json_format.ParseDict(json.loads(body or "{}"), message)


def test_every_example_is_in_the_table() -> None:
    table = (EXAMPLES / "README.md").read_text()
    ignored = {"README.md", "package.json", "package-lock.json", "main.go"}
    for path in EXAMPLES.rglob("*"):
        if {"node_modules", "build", "__pycache__"} & set(path.parts) or path.is_dir():
            continue
        if path.name not in ignored:
            assert str(path.relative_to(EXAMPLES)) in table, path
