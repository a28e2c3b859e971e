"""What every test has: a clean environment, and loud skips of what this host lacks."""

from __future__ import annotations

import os

import hypothesis
import pytest

# OpenMP's teams spin for each other, and where cores are shared most of the time passes so.
# Tests that are about threads ask for them; so does the engine, by its flag.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says more of the machine's load than of our code.
hypothesis.settings.register_profile(
    "pagewire", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("pagewire")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("PAGEWIRE_"):
            monkeypatch.delenv(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or _has_cuda():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and this host has none")
    for item in gpu_items:
        item.add_marker(skip)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
