"""Runs the interpreted parity tests in one process whose environment asks for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITES = (
    "tests/kernels/test_triton_parity.py",
    "tests/kernels/test_triton_features.py",
    "tests/kernels/test_triton_sampling.py",
    "tests/kernels/test_triton_products.py",
    "tests/kernels/test_triton_lora.py",
    "tests/kernels/test_triton_penalties.py",
    "tests/parity/test_interpreted_engine.py",
)
# The interpreter's products are NumPy's. Some of OpenBLAS's (that for AVX2) sum in another order at
# the edge of a matrix, so that no kernel could be batch-invariant; this one does not.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Prescott"}


def _release(distribution: str) -> tuple[int, int]:
    major, minor = version(distribution).split(".")[:2]
    return int(major), int(minor)


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    _release("triton") < (3, 7) and _release("numpy") >= (2, 4),
    reason="the interpreter of triton 3.6 takes int() of arrays, which numpy 2.4 refuses",
)
def test_kernels_match_the_reference_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", *SUITES, "-q"]
    command += ["-p", "no:cacheprovider"]
    if _release("triton") < (3, 7):
        command += ["-W", "ignore:Conversion of an array:DeprecationWarning"]
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=870,
    )
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}"
    summary = finished.stdout.strip().splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    assert passed is not None, finished.stdout
    assert int(passed[1]) > 0
    assert "skipped" not in summary, finished.stdout


def test_entering_the_package_is_cheap() -> None:
    """kernels.cuda itself imports neither torch nor triton."""
    probe = "import sys, kernels.cuda; print(sorted({'torch', 'triton'} & sys.modules.keys()))"
    finished = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert finished.stdout.strip() == "[]"
