"""A server that bench/peers.py measures: how the TOML file describes it, and one that runs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import string
import subprocess
import tempfile
import time
import tomllib
import urllib.request
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STOP_S = 20.0
POLL_S = 0.1
ANSWER_S = 60.0
OUTPUT_LINES = 20
OUTPUT_BYTES = 8000


class ServerFailed(Exception):
    """It did not start, or ended. The message says how, without its name; output holds the last
    lines that it wrote."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True, slots=True)
class Floor:
    """What bench/floors.py's ModelReads.of takes."""

    model: str
    weights: str


@dataclass(frozen=True, slots=True)
class Server:
    """One entry of the TOML file."""

    name: str
    command: list[str]
    target: str
    """grpc or openai."""
    address: str
    """host:port."""
    model: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)
    start_timeout: float = 300.0
    """Seconds until it must have answered a request."""
    workload_timeout: float = 3600.0
    """Seconds that a workload may take, its warm-up included."""
    floor: Floor | None = None
    """Of the model that it runs; None: its figures are not set against one."""


def read_servers(path: Path) -> list[Server]:
    """Raises SystemExit that names what is wrong."""
    document = tomllib.loads(path.read_text("utf-8"))
    values = {**os.environ, **document.get("variables", {})}
    servers = []
    for name, entry in document.get("server", {}).items():
        try:
            expanded = _expand(entry, values)
            if "floor" in expanded:
                expanded["floor"] = Floor(**expanded["floor"])
            servers.append(Server(name=name, **expanded))
        except KeyError as missing:
            raise SystemExit(f"{path}: [server.{name}] uses ${missing.args[0]}, not set") from None
        except TypeError as error:
            raise SystemExit(f"{path}: [server.{name}]: {error}") from None
    return servers


def _expand(value: Any, values: dict[str, str]) -> Any:
    if isinstance(value, str):
        return string.Template(value).substitute(values)
    if isinstance(value, list):
        return [_expand(item, values) for item in value]
    if isinstance(value, dict):
        return {key: _expand(item, values) for key, item in value.items()}
    return value


class RunningServer:
    """A server's process and all that it started."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self._process = process
        self._log = log
        self._known: set[psutil.Process] = set()
        self.start_s = 0.0
        """Until it had answered a request."""

    def check(self, when: str = "") -> None:
        """Raises ServerFailed if it has ended."""
        status = self._process.poll()
        if status is not None:
            raise self.failed(f"ended with status {status}{when}")

    def failed(self, message: str) -> ServerFailed:
        # Not read(): the server writes where this file's offset is.
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), OUTPUT_BYTES, max(0, size - OUTPUT_BYTES))
        lines = tail.decode(errors="replace").splitlines()
        return ServerFailed(message, "\n".join(lines[-OUTPUT_LINES:]))

    def cpu_s(self) -> float:
        """User and system seconds of its processes so far."""
        return sum(self._of_each(lambda process: sum(process.cpu_times()[:2])))

    def rss_mib(self) -> float:
        """Of all its processes; a page that several share counts in each."""
        return sum(self._of_each(lambda process: process.memory_info().rss)) / 2**20

    def stop(self) -> None:
        """Returns when none of its processes is left, also of those in groups of their own."""
        self._family()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for process in self._known:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        limit = time.monotonic() + STOP_S
        while any(map(_runs, self._known)) and time.monotonic() < limit:
            time.sleep(POLL_S)

    def _family(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self._process.pid)
            family = [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self._known.update(family)
        return family

    def _of_each(self, figure: Callable[[psutil.Process], float]) -> Iterator[float]:
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                yield figure(process)


def _runs(process: psutil.Process) -> bool:
    """Not those that nobody waits for: their memory and sockets are free."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def running(server: Server) -> Iterator[RunningServer]:
    """The server once it has answered a request; stopped in the end. Raises ServerFailed."""
    if _listens(server.address):
        raise ServerFailed(f"not started: something listens at {server.address} already")
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        try:
            process = subprocess.Popen(
                server.command,
                env={**os.environ, **server.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerFailed(f"cannot be started: {error}") from None
        started = RunningServer(process, log)
        try:
            _wait(server, process, started, began)
            started.start_s = time.monotonic() - began
            yield started
        finally:
            started.stop()


def _wait(
    server: Server, process: subprocess.Popen[bytes], started: RunningServer, began: float
) -> None:
    limit = began + server.start_timeout
    while not _answers(server, min(ANSWER_S, max(POLL_S, limit - time.monotonic()))):
        waited = time.monotonic() - began
        if (status := process.poll()) is not None:
            raise started.failed(f"did not start: ended with status {status} after {waited:.1f} s")
        if waited > server.start_timeout:
            raise started.failed(f"did not start: no answer within {waited:.1f} s")
        time.sleep(POLL_S)
    started.check()


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def _answers(server: Server, timeout: float) -> bool:
    if server.target == "grpc":
        return _answers_grpc(server, timeout)
    body = {"prompt": [200, 504], "max_tokens": 1, "model": server.model} | server.extra_body
    request = urllib.request.Request(
        f"http://{server.address}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def _answers_grpc(server: Server, timeout: float) -> bool:
    import grpc

    from pagewire.v1 import common_pb2, inference_pb2, inference_pb2_grpc

    request = inference_pb2.GenerateRequest(
        prompt_token_ids=common_pb2.TokenIds(ids=[200, 504]),
        sampling_params=common_pb2.SamplingParams(max_tokens=1),
    )
    with grpc.insecure_channel(server.address) as channel:
        try:
            inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=timeout)
        except grpc.RpcError:
            return False
    return True
