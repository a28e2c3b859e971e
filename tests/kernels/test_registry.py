"""Choosing a backend: once, by name, with an answer that helps."""

from __future__ import annotations

import pytest
import torch

from kernels.registry import UnsupportedOps, load_ops
from tests.support.cpu_kernels import best_cpu_ops


def test_reference_and_cpu_load() -> None:
    best_cpu_ops()  # builds the library, so that nothing is logged
    for name in ("reference", "cpu"):
        assert load_ops(name).name == name


def test_unknown_name_lists_what_exists() -> None:
    with pytest.raises(
        UnsupportedOps, match=r"no ops backend 'tpu'; known: cpu \(runs here\), cuda"
    ):
        load_ops("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has CUDA")
def test_unsupported_backend_says_why() -> None:
    with pytest.raises(UnsupportedOps, match=r"'cuda' cannot run here: .*CUDA"):
        load_ops("cuda")
