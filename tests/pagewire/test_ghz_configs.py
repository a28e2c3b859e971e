"""ghz itself is not installed here: its configurations are held against its documented
keys (https://ghz.sh/docs/options) and against our own messages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pool, json_format

from pagewire.v1 import inference_pb2

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "bench/ghz").glob("*.json"))
KEYS = {
    "name",
    "host",
    "insecure",
    "call",
    "data",
    "total",
    "concurrency",
    "connections",
    "connect-timeout",
    "timeout",
    "count-errors",
    "async",
    "rps",
    "duration",
    "duration-stop",
}
TEMPLATES = {
    r"\{\{newUUID\}\}": "9a1c24a1-3b1f-4a55-8b5e-6f4d1f1a1b2c",
    r"\{\{randomInt (\d+) \d+\}\}": r"\1",
    r"\{\{randomString \d+\}\}": "qwerty",
    r"\{\{\.RequestNumber\}\}": "1",
}


def load(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def test_there_is_one_of_each_kind() -> None:
    assert [path.stem for path in CONFIGS] == ["open-loop", "stream", "unary"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config(path: Path) -> None:
    config = load(path)
    assert config.keys() - KEYS == set()
    assert {"timeout", "connections", "concurrency"} <= config.keys()
    service, _, method_name = config["call"].rpartition(".")
    method = descriptor_pool.Default().FindServiceByName(service).methods_by_name[method_name]
    assert method.server_streaming == (path.stem != "unary")
    data = json.dumps(config["data"])
    assert "{{newUUID}}" in data, "every prompt must be different"
    for pattern, value in TEMPLATES.items():
        data = re.sub(pattern, value, data)
    assert "{{" not in data
    request = getattr(inference_pb2, method.input_type.name)()
    json_format.Parse(data, request)
    assert request.WhichOneof("input") is not None
    assert request.sampling_params.max_tokens > 0


def test_the_open_loop_does_not_wait_for_answers() -> None:
    config = load(next(path for path in CONFIGS if path.stem == "open-loop"))
    assert config["async"] is True
    assert config["rps"] > 0
    assert config["duration-stop"] == "wait"
