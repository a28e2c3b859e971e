"""bench/token_path.py and bench/client_ceiling.py: they measure nothing that ended or failed."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from bench import client_ceiling, token_path
from pagewire.v1 import inference_pb2, inference_pb2_grpc


class Streams(inference_pb2_grpc.InferenceServiceServicer):
    """Of one token, then open until released."""

    def __init__(self, *, end: bool) -> None:
        self._release = asyncio.Event()
        if end:
            self._release.set()

    async def GenerateStream(self, request: Any, context: Any) -> None:
        delta = inference_pb2.Delta(text="a", token_ids=[97])
        await context.write(inference_pb2.GenerateStreamResponse(delta=delta))
        await self._release.wait()


async def measure(*, end: bool) -> None:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Streams(end=end), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        load = token_path.Load(streams=2, steps_per_second=1.0, seconds=0.1)
        await token_path._client(f"127.0.0.1:{port}", load)
    finally:
        await server.stop(None)


def test_counts_come_before_and_after(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(token_path, "WARM_UP_S", 0.0)
    asyncio.run(measure(end=False))
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_streams_that_end_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(token_path, "WARM_UP_S", 0.0)
    with pytest.raises(SystemExit, match="a stream ended"):
        asyncio.run(measure(end=True))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_pace_of_both_is_told() -> None:
    ours = token_path.Measured(6000, 3000, 10.0, {"frontend": 0.3, "tokenizer_svc": 0.06})
    bare = token_path.Measured(1000, 1000, 5.0, {"bare": 0.04})
    assert token_path._figures(ours, bare) == pytest.approx(
        {
            "frontend": 50.0,
            "tokenizer_svc": 10.0,
            "together": 60.0,
            "bare": 40.0,
            "ratio": 1.5,
            "tokens_per_message": 2.0,
            "tokens_per_second": 600.0,
            "bare_tokens_per_second": 200.0,
        }
    )


def test_a_client_whose_requests_failed_has_no_ceiling() -> None:
    summary = {"successful": 3, "requests": 4, "first_error": "gone", "output_tokens_per_s": 100.0}
    with pytest.raises(SystemExit, match="3 of 4 requests were answered: gone"):
        client_ceiling.describe({"summary": summary, "client_cpu": 0.5})
    told = client_ceiling.describe({"summary": summary | {"successful": 4}, "client_cpu": 0.5})
    assert told.endswith("client  50% of a core: 5000.0 us a token, 200 tokens/s on a whole core")
