from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pagewire.config import EMBEDDED_MODEL
from pagewire.model_source import resolve_model
from tests.tokenizer_svc.service import Service
from tokenizer_svc.loader import LoadedTokenizer, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def embedded_gguf() -> Path:
    return resolve_model(EMBEDDED_MODEL).path


@pytest.fixture(scope="session")
def embedded(embedded_gguf: Path) -> LoadedTokenizer:
    return load_tokenizer(embedded_gguf)


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """A tokenizer_svc process with two workers, which no test may harm."""
    with Service("--tokenizer-workers", "2") as running:
        yield running
