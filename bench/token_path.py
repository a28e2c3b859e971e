"""What a streamed token costs outside the engine: CPU time of frontend and tokenizer_svc.

    python bench/token_path.py [--streams 32] [--steps-per-second 20] [--seconds 10]

The real frontend and tokenizer_svc serve a fake engine, which gives every stream one
token a step; a gRPC client in a process of its own reads the streams. Beside them, in
the same run, a bare grpc.aio server writes as many messages of the same size to the same
client, at the same pace. CPU time is user plus system time of all of a room's processes,
over the tokens that the client received meanwhile. Where tokens/s is less than was asked for,
the paces differ, and the ratio says little.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pagewire.obs.ready import GRPC, read_ready_file
from pagewire.v1 import common_pb2, inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
START_S = 60.0
WARM_UP_S = 1.0
MAX_TOKENS = 8000
"""Of a stream: it must not end while it is measured."""
METHOD = "/pagewire.v1.InferenceService/GenerateStream"


@dataclass(frozen=True)
class Load:
    streams: int
    steps_per_second: float
    seconds: float


@dataclass(frozen=True)
class Measured:
    tokens: int
    messages: int
    seconds: float
    cpu_s: dict[str, float]
    """By room."""

    def us_per_token(self, room: str) -> float:
        return 1e6 * self.cpu_s[room] / self.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument(
        "--steps-per-second", type=float, default=20.0, help="Tokens a second of each stream."
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", choices=("client", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    load = Load(options.streams, options.steps_per_second, options.seconds)
    if options.role is not None:
        import uvloop

        uvloop.run(
            _client(options.address, load) if options.role == "client" else _serve_bare(load)
        )
        return
    results = [(_measure_ours(load), _measure_bare(load)) for _ in range(options.runs)]
    if options.json:
        print(json.dumps([_figures(*pair) for pair in results], indent=2))
        return
    print(f"{load.streams} streams, {load.steps_per_second:g} tokens a second each, CPU us a token")
    print(
        "run  frontend  tokenizer  together  bare grpc.aio  ratio  tokens/message"
        "  tokens/s  bare tokens/s"
    )
    for number, pair in enumerate(results, 1):
        row = _figures(*pair)
        print(
            f"{number:3}  {row['frontend']:8.1f}  {row['tokenizer_svc']:9.1f}"
            f"  {row['together']:8.1f}  {row['bare']:13.1f}  {row['ratio']:5.2f}"
            f"  {row['tokens_per_message']:14.2f}  {row['tokens_per_second']:8.0f}"
            f"  {row['bare_tokens_per_second']:13.0f}"
        )


def _figures(ours: Measured, bare: Measured) -> dict[str, float]:
    together = ours.us_per_token("frontend") + ours.us_per_token("tokenizer_svc")
    return {
        "frontend": ours.us_per_token("frontend"),
        "tokenizer_svc": ours.us_per_token("tokenizer_svc"),
        "together": together,
        "bare": bare.us_per_token("bare"),
        "ratio": together / bare.us_per_token("bare"),
        "tokens_per_message": ours.tokens / ours.messages,
        "tokens_per_second": ours.tokens / ours.seconds,
        "bare_tokens_per_second": bare.tokens / bare.seconds,
    }


# The processes.


def _measure_ours(load: Load) -> Measured:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pw-")))
        engine = f"ipc://{directory}/commands.sock"
        tokenizer = f"unix:{directory}/tokenizer.sock"
        pids = {}
        stack.enter_context(
            _process(
                "-m",
                "tests.support.fake_engine",
                f"--bind={engine}",
                f"--step-s={1 / load.steps_per_second}",
            )
        )
        rooms = {
            "tokenizer_svc": [f"--tokenizer-bind={tokenizer}"],
            "frontend": [
                f"--tokenizer-address={tokenizer}",
                f"--engine-address={engine}",
                f"--outputs-bind=ipc://{directory}/outputs.sock",
                *("--port=0", "--http-port=0", "--admin-port=0"),
            ],
        }
        facts: dict[str, dict[str, Any]] = {}
        for room, flags in rooms.items():
            ready = directory / f"{room}.json"
            process = stack.enter_context(
                _process("-m", room, *flags, f"--ready-file={ready}", "--log-level=warning")
            )
            pids[room] = process.pid
            facts[room] = _wait_ready(process, ready)
        return _measure(facts["frontend"][GRPC], pids, load)


def _measure_bare(load: Load) -> Measured:
    with _process(
        __file__,
        "--role=bare",
        f"--steps-per-second={load.steps_per_second}",
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        return _measure(address, {"bare": process.pid}, load)


def _measure(address: str, pids: dict[str, int], load: Load) -> Measured:
    with _process(
        __file__,
        "--role=client",
        f"--address={address}",
        f"--streams={load.streams}",
        f"--seconds={load.seconds}",
        stdout=subprocess.PIPE,
    ) as client:
        assert client.stdout is not None
        began, before = _read(client), {room: _cpu_s(pid) for room, pid in pids.items()}
        ended, after = _read(client), {room: _cpu_s(pid) for room, pid in pids.items()}
    return Measured(
        tokens=ended["tokens"] - began["tokens"],
        messages=ended["messages"] - began["messages"],
        seconds=ended["at"] - began["at"],
        cpu_s={room: after[room] - before[room] for room in pids},
    )


def _read(client: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert client.stdout is not None
    line = client.stdout.readline()
    if not line:
        raise SystemExit("the client ended before it had measured")
    counts: dict[str, Any] = json.loads(line)
    return counts


@contextlib.contextmanager
def _process(*arguments: str, stdout: int | None = None) -> Any:
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=stdout)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _wait_ready(process: subprocess.Popen[bytes], path: Path) -> dict[str, Any]:
    limit = time.monotonic() + START_S
    while (facts := read_ready_file(path)) is None:
        if process.poll() is not None or time.monotonic() > limit:
            raise SystemExit(f"not ready: {process.args}")
        time.sleep(0.05)
    return facts


def _cpu_s(pid: int) -> float:
    """User and system seconds of a process and its children."""
    parent = psutil.Process(pid)
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return sum(entry.user + entry.system for entry in times)


# The client: counts at the beginning and at the end of the measured time.


async def _client(address: str, load: Load) -> None:
    counts = {"tokens": 0, "messages": 0}
    running = asyncio.Event()
    started = 0

    async def stream(stub: Any, request: Any) -> None:
        nonlocal started
        call, first = stub(request), True
        while (frame := await call.read()) is not grpc.aio.EOF:
            counts["messages"] += 1
            counts["tokens"] += len(frame.delta.token_ids)
            if first:
                first = False
                started += 1
                if started == load.streams:
                    running.set()

    request = inference_pb2.GenerateStreamRequest(
        prompt_token_ids=common_pb2.TokenIds(ids=[*range(64, 128)]),
        sampling_params=common_pb2.SamplingParams(
            max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0
        ),
        return_token_ids=True,
    )
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel).GenerateStream
        tasks = [asyncio.create_task(stream(stub, request)) for _ in range(load.streams)]
        await asyncio.wait_for(running.wait(), START_S)
        await asyncio.sleep(WARM_UP_S)
        print(json.dumps({**counts, "at": time.monotonic()}), flush=True)
        await asyncio.sleep(load.seconds)
        if any(task.done() for task in tasks):
            raise SystemExit(f"a stream ended, at {MAX_TOKENS} tokens or by an error")
        print(json.dumps({**counts, "at": time.monotonic()}), flush=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# The bare server: what grpc.aio itself takes for the same messages.


async def _serve_bare(load: Load) -> None:
    step = asyncio.Event()
    text = "the quick brown fox jumps over the lazy dog. "

    async def generate(_request: Any, context: Any) -> None:
        for number in range(MAX_TOKENS):
            await step.wait()
            index = number % len(text)
            await context.write(
                inference_pb2.GenerateStreamResponse(
                    delta=inference_pb2.Delta(text=text[index], token_ids=[ord(text[index])])
                )
            )

    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(
        generate,
        inference_pb2.GenerateStreamRequest.FromString,
        inference_pb2.GenerateStreamResponse.SerializeToString,
    )
    service, method = METHOD.strip("/").split("/")
    server.add_registered_method_handlers(service, {method: handler})
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    while True:
        await asyncio.sleep(1 / load.steps_per_second)
        step.set()
        step = asyncio.Event()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
