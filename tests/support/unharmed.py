"""What every refused or broken call must leave behind: nothing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from pagewire.v1 import common_pb2, inference_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.stack import Api


@contextlib.asynccontextmanager
async def unharmed(api: Api) -> AsyncIterator[None]:
    """After what happens inside, the same engine is at rest with all its blocks free, and
    serves an ordinary request."""
    before = await api.at_rest()
    yield
    await _check(api, before.engine_pid)
    response = await api.inference.Generate(
        inference_pb2.GenerateRequest(
            prompt="Hello",
            sampling_params=common_pb2.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
        ),
        timeout=60,
    )
    assert response.usage.completion_tokens == 2
    await _check(api, before.engine_pid)


async def _check(api: Api, pid: int) -> None:
    after = await api.at_rest()
    assert after.engine_pid == pid
    assert (after.num_requests_running, after.num_requests_waiting) == (0, 0)
    assert after.num_free_blocks == after.num_blocks
