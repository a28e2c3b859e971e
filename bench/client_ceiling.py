"""How many tokens a second `pagewire bench serve` itself can take.

    python bench/client_ceiling.py [--streams 32] [--tokens 2000]

Fake servers in a process of their own write one message a token, as fast as they can:
one in grpc.aio, one in plain asyncio that speaks server-sent events. Where the client's
share of a core stays below 100%, it was the fake that set the pace.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pagewire.v1 import inference_pb2, inference_pb2_grpc

PACE_EVERY = 16
"""Messages after which an SSE stream lets the others write."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000, help="Of each stream.")
    parser.add_argument("--serve", choices=("grpc", "openai"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        import uvloop

        uvloop.run(_serve_grpc() if options.serve == "grpc" else _serve_openai())
        return
    for target in ("grpc", "openai"):
        report = _measure(target, options.streams, options.tokens)
        print(f"{target:6}  {describe(report)}")


def describe(report: dict[str, Any]) -> str:
    """Raises SystemExit if a request failed: its tokens cost time and are not counted."""
    summary, share = report["summary"], report["client_cpu"]
    if summary["successful"] < summary["requests"]:
        raise SystemExit(
            f"{summary['successful']} of {summary['requests']} requests were answered: "
            f"{summary['first_error']}"
        )
    rate = summary["output_tokens_per_s"]
    return (
        f"{rate:8.0f} tokens/s, client {100 * share:3.0f}% of a core: "
        f"{1e6 * share / rate:.1f} us a token, {rate / share:.0f} tokens/s on a whole core"
    )


def _measure(target: str, streams: int, tokens: int) -> dict[str, Any]:
    server = subprocess.Popen(
        [sys.executable, __file__, f"--serve={target}"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        address = server.stdout.readline().strip()
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "report.json"
            subprocess.run(
                [
                    *(sys.executable, "-m", "pagewire.cli", "bench", "serve"),
                    *(f"--target={target}", f"--address={address}", f"--url=http://{address}"),
                    *(f"--num-requests={streams}", f"--concurrency={streams}", "--warm-up=1"),
                    *("--vocab-size=1000", "--input-len=8", f"--output-len={tokens}"),
                    *(f"--json={path}", "--no-progress"),
                ],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            report: dict[str, Any] = json.loads(path.read_text())
            return report
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


async def _serve_grpc() -> None:
    class Servicer(inference_pb2_grpc.InferenceServiceServicer):
        async def GenerateStream(self, request: Any, context: Any) -> None:
            count = request.sampling_params.max_tokens
            frame = inference_pb2.GenerateStreamResponse()
            frame.delta.text = "token"
            frame.delta.token_ids.append(7)
            for _ in range(count):
                await context.write(frame)
            final = inference_pb2.GenerateStreamResponse()
            final.final.usage.prompt_tokens = len(request.prompt_token_ids.ids)
            final.final.usage.completion_tokens = count
            await context.write(final)

    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


async def _serve_openai() -> None:
    event = b'data: {"id":"c","choices":[{"index":0,"text":"token","finish_reason":null}]}\n\n'
    chunk = b"%x\r\n%b\r\n" % (len(event), event)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (
            contextlib.suppress(asyncio.IncompleteReadError, ConnectionError),
            contextlib.closing(writer),
        ):
            await answer(reader, writer)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(
                int(line.partition(b":")[2])
                for line in head.splitlines()
                if line.lower().startswith(b"content-length:")
            )
            body = json.loads(await reader.readexactly(length))
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            for number in range(body["max_tokens"]):
                writer.write(chunk)
                if number % PACE_EVERY == 0:
                    await writer.drain()
                    await asyncio.sleep(0)
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            last = (
                b"data: %b\n\ndata: [DONE]\n\n"
                % json.dumps({"choices": [], "usage": usage}).encode()
            )
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))
            await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    print(f"{host}:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    main()
