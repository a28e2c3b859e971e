"""A bug in a callback costs what it touches, not the loop it happened in."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import grpc

from pagewire.v1 import common_pb2, inference_pb2

if TYPE_CHECKING:
    import pytest

    from tests.frontend.conftest import Stack


def _request() -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt="a", sampling_params=common_pb2.SamplingParams(max_tokens=3)
    )


async def test_the_detokenize_stream_outlives_a_bug(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = stack.frontend.dispatcher
    calls = 0

    def broken(num_rows: int, seconds: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise IndexError("a bug")

    monkeypatch.setattr(dispatcher, "batch_answered", broken)
    with contextlib.suppress(grpc.RpcError):
        await stack.inference.Generate(_request(), timeout=4)
    await stack.until(lambda: stack.frontend.health.serving)
    response = await stack.inference.Generate(_request(), timeout=60)
    assert response.usage.completion_tokens == 3
