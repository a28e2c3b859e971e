"""The CPU backends that this machine has, as tests name them."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kernels.cpu.batch_invariant import BatchInvariantCpuOps
from kernels.cpu.build import build, variants
from kernels.cpu.library import Library, supported_variants
from kernels.cpu.ops import CpuOps, TorchCpuOps
from kernels.reference.ops import ReferenceOps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.ops import Ops

# The system's words for what the CPU has: collecting tests should not have to build anything.
_AVX512 = {"avx2", "fma", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = {*_AVX512, "avx512_vnni"}
_DOTS = {*_VNNI, "avx512_bf16"}
NEEDS: dict[str, set[str]] = {
    "portable": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx_vnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "avx512": _AVX512,
    "avx512_vnni": _VNNI,
    "avx512_bf16": _DOTS,
    "amx": {*_DOTS, "amx_tile", "amx_bf16", "amx_int8"},
}


def _cpu_flags() -> set[str]:
    text = Path("/proc/cpuinfo").read_text()
    return set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())


VARIANTS = tuple(variant.name for variant in variants() if NEEDS[variant.name] <= _cpu_flags())
"""The C++ libraries that this CPU runs, best last; test_cpu.py checks this list."""
BACKENDS = ("torch", *VARIANTS)
REFERENCE = ReferenceOps()


@cache
def cpu_ops(name: str) -> Ops:
    """name is one of BACKENDS. Builds the libraries if they are missing or stale."""
    if name == "torch":
        return TorchCpuOps()
    build()
    (variant,) = (variant for variant in supported_variants() if variant.name == name)
    return CpuOps(Library(variant))


def batch_invariant_cpu_ops(name: str) -> BatchInvariantCpuOps:
    """name is one of VARIANTS."""
    cpu_ops(name)  # builds it
    (variant,) = (variant for variant in supported_variants() if variant.name == name)
    return BatchInvariantCpuOps(Library(variant))


def best_cpu_ops() -> Ops:
    return cpu_ops(VARIANTS[-1])


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many for torch and for the C++ ops, whose pool is their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
