"""Devices: types, threads, lazily committed memory, and flags that do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from engine_core.device.cpu import CpuDevice, multiplies_bfloat16
from engine_core.device.memory import MemoryBudget
from engine_core.device.select import select_device
from kernels.cpu.build import Variant
from pagewire.config import EngineConfig
from pagewire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine_core.model.config import CheckpointDtype


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("model name : x\nflags\t\t: fpu avx2 fma\n", False),
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu not_bf16\n", False),
    ],
)
def test_auto_dtype_follows_the_instructions(tmp_path: Path, cpuinfo: str, expected: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    assert multiplies_bfloat16(path) is expected


@pytest.mark.parametrize(
    ("multiplies", "variants", "stored", "expected"),
    [
        (True, ["portable", "avx512_bf16"], "float16", torch.bfloat16),
        (True, [], "float32", torch.bfloat16),
        (False, ["portable", "avx2"], "bfloat16", torch.bfloat16),
        (False, ["portable", "avx2"], "float16", torch.float32),
        (False, ["portable", "avx2"], "quantized", torch.float32),
        (False, ["portable"], "bfloat16", torch.float32),
        (False, [], "bfloat16", torch.float32),
    ],
)
def test_auto_dtype(
    monkeypatch: pytest.MonkeyPatch,
    multiplies: bool,
    variants: list[str],
    stored: CheckpointDtype,
    expected: torch.dtype,
) -> None:
    module = "engine_core.device.cpu"
    monkeypatch.setattr(f"{module}.multiplies_bfloat16", lambda: multiplies)
    monkeypatch.setattr(
        f"{module}.supported_variants", lambda: [Variant(name, ()) for name in variants]
    )
    assert CpuDevice("1MiB", 1).resolve_dtype("auto", stored) == expected


def test_asked_dtype() -> None:
    assert CpuDevice("1MiB", 1).resolve_dtype("float16", "float32") == torch.float16


def test_threads() -> None:
    CpuDevice("1MiB", 1)
    assert torch.get_num_threads() == 1


def test_default_budget_is_an_eighth_and_at_most_4_gib() -> None:
    budget = CpuDevice(None, 1).fixed_kv_budget()
    assert 0 < budget.num_bytes <= 4 << 30
    assert budget.num_bytes <= psutil.virtual_memory().total // 8
    assert "--kv-cache-memory" in budget.origin
    assert budget.enough_tokens == 1 << 16


def test_an_asked_budget_is_taken_whole() -> None:
    assert CpuDevice("8GiB", 1).fixed_kv_budget() == MemoryBudget(8 << 30, "--kv-cache-memory 8GiB")


def test_given_budget() -> None:
    assert CpuDevice("2MiB", 1).fixed_kv_budget().num_bytes == 2 << 20
    with pytest.raises(ConfigError, match="--kv-cache-memory 'lots'"):
        CpuDevice("lots", 1)


def test_zeros_are_committed_when_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = CpuDevice("1MiB", 1).zeros([1024, 1 << 20], torch.bfloat16)
    assert process.memory_info().rss - before < 64 << 20
    assert cache.shape == (1024, 1 << 20)
    assert cache.dtype == torch.bfloat16
    assert not cache[::100, ::4096].any()
    cache[5, 7] = 3
    assert cache[5, 7] == 3


def test_selects_the_cpu() -> None:
    config = EngineConfig(device="cpu", kv_cache_memory="1MiB", cpu_threads=1)
    assert select_device(config).name == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_a_device_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="--device cuda"):
        select_device(EngineConfig(device="cuda"))
