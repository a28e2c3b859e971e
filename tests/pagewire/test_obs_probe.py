from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagewire.obs.probe import main
from pagewire.obs.ready import write_ready_file

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_grpc_follows_the_servers_health(capfd: pytest.CaptureFixture[str]) -> None:
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    assert main(["grpc", address]) == 0
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert main(["grpc", address]) == 1
    assert capfd.readouterr().err == f"{address}: NOT_SERVING\n"
    server.stop(None).wait(10)


def test_grpc_without_a_server(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["grpc", address]) == 1
    assert capfd.readouterr().err.startswith(f"{address}: UNAVAILABLE")


def test_ready_file_needs_a_living_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ready.json"
    assert main(["ready-file", str(path)]) == 1
    write_ready_file(str(path), {})
    assert main(["ready-file", str(path)]) == 0
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    path.write_text(f'{{"pid": {gone.pid}}}')
    assert main(["ready-file", str(path)]) == 1
    assert capfd.readouterr().err.splitlines()[1] == f"{path}: process {gone.pid} is gone"


def test_wrong_usage(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["grpc"]) == 2
    assert "python -m pagewire.obs.probe" in capfd.readouterr().err
