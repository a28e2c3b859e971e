from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.stack import Api, Stack, connect, running_stack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The embedded model in float32, for all tests that do not end their server."""
    with running_stack("--dtype=float32", "--device=cpu", "--kv-cache-memory=512MiB") as stack:
        yield stack


@pytest.fixture
async def api(stack: Stack) -> AsyncIterator[Api]:
    async with connect(stack) as api:
        yield api


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model so small that servers of it start and stop quickly."""
    from tests.support.tiny_model import TinySpec, write_hf

    return write_hf(tmp_path_factory.mktemp("tiny"), TinySpec(max_positions=4096))
