"""Measures tokenizer_svc: text out of ids and ids out of text.

    python bench/tokenizer.py [--batch 64] [--steps 3000] [--workers 1] [--json FILE]

In process: the decoders alone, on one core. Over gRPC: a real `python -m
tokenizer_svc`, fed as a frontend feeds it, one message per engine step with one token
for each sequence. "pipelined" keeps several steps in flight and shows the ceiling;
"one at a time" shows what a step adds to a token's way. Besides wall time, tokens are
counted per CPU second of the worker and of the server process, which a busy machine
does not distort.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import uvloop

from pagewire.config import EMBEDDED_MODEL
from pagewire.model_source import resolve_model
from pagewire.v1 import detokenizer_pb2_grpc, tokenizer_pb2_grpc
from pagewire.v1.detokenizer_pb2 import DetokenizeStreamRequest, OpenSequence
from pagewire.v1.tokenizer_pb2 import TokenizeRequest
from tokenizer_svc.detokenize import Detokenizer, StreamDecoder
from tokenizer_svc.encode import encode_batch
from tokenizer_svc.loader import LoadedTokenizer, load_tokenizer
from tokenizer_svc.messages import Open
from tokenizer_svc.sequence import OutputSequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

TEXT = Path(argparse.__file__).read_text()
"""Code and prose, at hand everywhere."""
STOPS = ["\nObservation:", "</answer>", "\n\nUser:"]
IN_FLIGHT = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    loaded = load_tokenizer(resolve_model(arguments.model).path)
    ids = text_ids(loaded, arguments.batch, arguments.steps)
    rows = in_process(loaded, ids)
    with tempfile.TemporaryDirectory() as directory:
        rows += with_server(arguments, Path(directory), ids)
    print_table(rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def text_ids(loaded: LoadedTokenizer, batch: int, steps: int) -> list[list[int]]:
    """One list of ids for each sequence: running text, each from another place."""
    ids = loaded.tokenizer.encode(TEXT, add_special_tokens=False).ids
    whole = ids * (steps // len(ids) + 2)
    rng = random.Random(1)
    return [whole[start : start + steps] for start in rng.choices(range(len(ids)), k=batch)]


# In process


def in_process(loaded: LoadedTokenizer, ids: list[list[int]]) -> list[dict[str, Any]]:
    detokenizer = Detokenizer(loaded.tokenizer)

    def opening(stop: list[str]) -> OutputSequence:
        return OutputSequence(detokenizer, Open(0, [1, 2, 3], True, stop, False, [], 0))

    steps = min(1000, len(ids[0]))
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("decode", lambda: opening([])),
        ("decode, 3 stop strings", lambda: opening(STOPS)),
        ("decode by DecodeStream", lambda: StreamDecoder(loaded.tokenizer, [1, 2, 3], True)),
    ]
    rows = []
    for name, make in cases:
        sequences = [make() for _ in ids]
        start = time.process_time()
        for step in range(steps):
            for sequence, sequence_ids in zip(sequences, ids, strict=True):
                sequence.feed(sequence_ids[step : step + 1])
        spent = time.process_time() - start
        rows.append({"what": f"in process: {name}", "tok/s": steps * len(ids) / spent})
    texts = [TEXT[start : start + 1000] for start in range(0, 64 * 50, 50)]
    start_wall, start = time.perf_counter(), time.process_time()
    count = sum(
        len(encoded)
        for _ in range(5)
        for encoded in encode_batch(loaded.tokenizer, texts, add_special_tokens=True)
    )
    wall, spent = time.perf_counter() - start_wall, time.process_time() - start
    rows.append(
        {"what": "in process: encode 64 x 1000 chars", "tok/s": count / wall, "core": count / spent}
    )
    return rows


# Over gRPC


def with_server(
    arguments: argparse.Namespace, directory: Path, ids: list[list[int]]
) -> list[dict[str, Any]]:
    ready = directory / "ready.json"
    start = time.perf_counter()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tokenizer_svc", "--model", arguments.model),
            *("--tokenizer-bind", f"unix:{directory}/t.sock", "--ready-file", str(ready)),
            *("--tokenizer-workers", str(arguments.workers), "--log-level", "warning"),
        ]
    )
    try:
        while not ready.exists():
            if process.poll() is not None:
                raise SystemExit("tokenizer_svc ended before it was ready")
            time.sleep(0.01)
        print(f"ready after {time.perf_counter() - start:.2f} s")
        address = json.loads(ready.read_text())["grpc"]
        rows = uvloop.run(over_grpc(address, psutil.Process(process.pid), ids))
        print_memory(psutil.Process(process.pid))
        return rows
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def over_grpc(
    address: str, server: psutil.Process, ids: list[list[int]]
) -> list[dict[str, Any]]:
    async with grpc.aio.insecure_channel(address) as channel:
        return [
            await stream(channel, server, ids, [], IN_FLIGHT, "pipelined"),
            await stream(channel, server, ids, STOPS, IN_FLIGHT, "pipelined, 3 stops"),
            await stream(channel, server, ids, [], 1, "one at a time"),
            await encode(channel, server),
        ]


async def stream(
    channel: grpc.aio.Channel,
    server: psutil.Process,
    ids: list[list[int]],
    stop: list[str],
    in_flight: int,
    name: str,
) -> dict[str, Any]:
    """One stream; as many tokens in a step as there are sequences."""
    batch, steps = len(ids), len(ids[0])
    requests = step_requests(ids, stop)
    call = detokenizer_pb2_grpc.DetokenizerServiceStub(channel).DetokenizeStream()
    window = asyncio.Semaphore(in_flight)
    sent: list[float] = []
    latencies: list[float] = []
    before = cpu_seconds(server)
    start = time.perf_counter()

    async def write() -> None:
        for request in requests:
            await window.acquire()
            sent.append(time.perf_counter())
            await call.write(request)
        await call.done_writing()

    writer = asyncio.create_task(write())
    for _ in requests:
        response = await call.read()
        assert not response.errors and not response.stops, response
        latencies.append(time.perf_counter() - sent[len(latencies)])
        window.release()
    wall = time.perf_counter() - start
    await writer
    return {
        "what": f"stream, batch {batch}: {name}",
        "tok/s": batch * steps / wall,
        **per_cpu_second(before, cpu_seconds(server), batch * steps),
        **percentiles(latencies),
    }


def step_requests(ids: list[list[int]], stop: list[str]) -> list[Message]:
    batch, steps = len(ids), len(ids[0])
    opens = [
        OpenSequence(sequence=n, prompt_tail=[1, 2, 3], skip_special_tokens=True, stop=stop)
        for n in range(batch)
    ]
    return [
        DetokenizeStreamRequest(
            step=step,
            opens=opens if step == 0 else (),
            sequences=range(batch),
            counts=[1] * batch,
            token_ids=[sequence[step] for sequence in ids],
            finished=[step == steps - 1] * batch,
        )
        for step in range(steps)
    ]


async def encode(channel: grpc.aio.Channel, server: psutil.Process) -> dict[str, Any]:
    """Unary calls, 64 in flight, 1000 characters each."""
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    calls, latencies, count = iter(range(1500)), [], 0

    async def client() -> None:
        nonlocal count
        for number in calls:
            position = number * 7 % (len(TEXT) - 1000)
            start = time.perf_counter()
            reply = await stub.Tokenize(TokenizeRequest(text=TEXT[position : position + 1000]))
            latencies.append(time.perf_counter() - start)
            count += len(reply.token_ids)

    before, start = cpu_seconds(server), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(64)))
    wall = time.perf_counter() - start
    return {
        "what": "Tokenize, 64 in flight, 1000 chars",
        "tok/s": count / wall,
        "calls/s": len(latencies) / wall,
        **per_cpu_second(before, cpu_seconds(server), count),
        **percentiles(latencies),
    }


def cpu_seconds(server: psutil.Process) -> tuple[float, float]:
    """Of the server process and of all its workers."""
    workers = [child.cpu_times() for child in server.children()]
    own = server.cpu_times()
    return own.user + own.system, sum(times.user + times.system for times in workers)


def per_cpu_second(
    before: tuple[float, float], after: tuple[float, float], tokens: int
) -> dict[str, float]:
    return {
        "server": tokens / max(after[0] - before[0], 0.01),
        "core": tokens / max(after[1] - before[1], 0.01),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50 ms": cuts[49] * 1000, "p99 ms": cuts[98] * 1000}


def print_memory(server: psutil.Process) -> None:
    sizes = [process.memory_info().rss >> 20 for process in (server, *server.children())]
    print(f"resident: server {sizes[0]} MiB, workers {sizes[1:]} MiB")


def print_table(rows: list[dict[str, Any]]) -> None:
    titles = {
        "tok/s": "tok/s",
        "core": "tok per worker CPU s",
        "server": "tok per server CPU s",
        "calls/s": "calls/s",
        "p50 ms": "p50 ms",
        "p99 ms": "p99 ms",
    }
    print(f"{'':42}" + "".join(f"{title:>22}" for title in titles.values()))
    for row in rows:
        cells = [
            f"{row[key]:,.{2 if key.endswith('ms') else 0}f}" if key in row else ""
            for key in titles
        ]
        print(f"{row['what']:42}" + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
