"""The whole server as its own processes: `pagewire serve` on free ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import psutil

from pagewire.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    model_pb2_grpc,
    tokenizer_pb2_grpc,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

_FREE_PORTS = ("--host=127.0.0.1", "--port=0", "--http-port=0", "--admin-port=0")
_STOP_S = 60.0


@dataclass(frozen=True)
class Stack:
    """A server that is ready."""

    process: subprocess.Popen[str]
    address: str
    admin_address: str
    http_address: str
    model: str
    pids: dict[str, int]
    """By room."""
    log: Path

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.terminate()
        return self.process.wait(_STOP_S)

    def alive_pids(self) -> dict[str, int]:
        return {
            room: pid
            for room, pid in self.pids.items()
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        }


def launch(
    *flags: str,
    log: Path,
    environment: dict[str, str] | None = None,
    ready_file: Path | None = None,
) -> subprocess.Popen[str]:
    """`pagewire serve` on free ports, not yet ready; stderr goes to `log`."""
    ready = [] if ready_file is None else [f"--ready-file={ready_file}"]
    with log.open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "pagewire.cli", "serve", *_FREE_PORTS, *ready, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **(environment or {})},
        )


@contextlib.contextmanager
def running_stack(*flags: str, environment: dict[str, str] | None = None) -> Iterator[Stack]:
    """A ready server, stopped at the end. Its log is printed where the test fails."""
    with tempfile.TemporaryDirectory() as directory:
        log, ready_file = Path(directory) / "log", Path(directory) / "ready.json"
        process = launch(*flags, log=log, environment=environment, ready_file=ready_file)
        assert process.stdout is not None
        try:
            # The launcher gives up by itself (--start-timeout); then this ends.
            for line in process.stdout:
                if line.startswith("Try it"):
                    break
            else:
                raise AssertionError("the server did not start")
            facts = json.loads(ready_file.read_text())
            yield Stack(
                process,
                facts["grpc"],
                facts["admin"],
                facts["http"],
                facts["model"],
                facts["pids"],
                log,
            )
            if process.poll() is None:
                process.terminate()
                assert process.wait(_STOP_S) == 0
        except BaseException:
            print(log.read_text(), file=sys.stderr)
            raise
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


class Api:
    """Asynchronous stubs of one server."""

    def __init__(self, channel: grpc.aio.Channel, admin: grpc.aio.Channel) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.models = model_pb2_grpc.ModelServiceStub(channel)
        self.tokens = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(admin)

    async def stats(self) -> admin_pb2.GetStatsResponse:
        response: admin_pb2.GetStatsResponse = await self.admin.GetStats(
            admin_pb2.GetStatsRequest()
        )
        return response

    async def at_rest(self, within_s: float = 60.0) -> admin_pb2.GetStatsResponse:
        """The stats once nothing is in flight and every block but the null block is free."""

        def idle(stats: admin_pb2.GetStatsResponse) -> bool:
            return (
                stats.num_requests_in_flight == 0
                and stats.num_requests_running == 0
                and stats.num_requests_waiting == 0
                and stats.num_free_blocks == stats.num_blocks
            )

        return await self.eventually(idle, within_s)

    async def eventually(
        self, holds: Callable[[admin_pb2.GetStatsResponse], bool], within_s: float = 60.0
    ) -> admin_pb2.GetStatsResponse:
        """Asks for stats until they hold what is wanted: the API tells of no event."""
        deadline = time.monotonic() + within_s
        while True:
            stats = await self.stats()
            if holds(stats):
                return stats
            assert time.monotonic() < deadline, stats
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def connect(stack: Stack) -> AsyncIterator[Api]:
    async with (
        grpc.aio.insecure_channel(stack.address) as channel,
        grpc.aio.insecure_channel(stack.admin_address) as admin,
    ):
        yield Api(channel, admin)


@dataclass(frozen=True)
class Streamed:
    """What a stream that ended with OK brought."""

    text: str
    final: inference_pb2.Final
    num_deltas: int


async def read_stream(call: Any, started: asyncio.Event | None = None) -> Streamed:
    """Reads to the end; `started` is set at the first delta."""
    pieces: list[str] = []
    final = None
    async for response in call:
        assert final is None, "a frame after the final one"
        if response.WhichOneof("frame") == "final":
            final = response.final
        else:
            pieces.append(response.delta.text)
            if started is not None:
                started.set()
    assert final is not None, "no final frame"
    return Streamed("".join(pieces), final, len(pieces))
