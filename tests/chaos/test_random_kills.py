"""bench/chaos.py in small: each process is killed under load, and every request accounted for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "bench" / "chaos.py"
SIZE = ("--kills=4", "--clients=6", "--requests=12", "--max-tokens=300")
SEED = 1
"""With which each of the processes is among them."""


def test_kills_under_load() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *SIZE, f"--seed={SEED}"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("engine_core", "tokenizer worker", "tokenizer_svc"):
        assert f"| {name} |" in done.stdout
    assert "| ok |" in done.stdout
