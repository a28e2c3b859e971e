"""The host's own processor."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine_core.device.memory import MemoryBudget, available_memory, parse_memory_size
from kernels.cpu.library import supported_variants
from kernels.cpu.memory import map_pages
from pagewire.cores import allowed_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_core.device.base import Graph
    from engine_core.model.config import CheckpointDtype

_DEFAULT_SHARE = 8
_DEFAULT_MOST = 4 << 30
_DEFAULT_TOKENS = 1 << 16
"""A small model's KV cache would go on taking memory for prompts that nobody asks again."""
# x86 and Arm names of instructions that multiply bfloat16.
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


class CpuDevice:
    """kv_cache_memory as EngineConfig has it; num_threads None takes all allowed cores.
    num_ranks: of this engine on this host, which share both."""

    def __init__(
        self, kv_cache_memory: str | None, num_threads: int | None, num_ranks: int = 1
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.name = "cpu"
        self.default_kernels = "cpu"
        self.default_max_num_batched_tokens = 512
        self.default_max_mixed_prefill_tokens = 96
        self.is_synchronous = True
        self.captures_graphs = False
        self.num_staging_sets = 1
        self.layers_share_blocks = True
        if kv_cache_memory is None:
            share = min(available_memory() // _DEFAULT_SHARE, _DEFAULT_MOST)
            self._budget = MemoryBudget(
                share // num_ranks,
                "--kv-cache-memory (default: an eighth of the free)",
                _DEFAULT_TOKENS,
            )
        else:
            size = parse_memory_size(kv_cache_memory, "--kv-cache-memory")
            self._budget = MemoryBudget(size // num_ranks, f"--kv-cache-memory {kv_cache_memory}")
        torch.set_num_threads(max(1, (num_threads or allowed_cores()) // num_ranks))

    def resolve_dtype(self, requested: str, stored: CheckpointDtype) -> torch.dtype:
        if requested == "auto":
            reads_halves = stored == "bfloat16" and widens_bfloat16()
            return torch.bfloat16 if multiplies_bfloat16() or reads_halves else torch.float32
        dtype = getattr(torch, requested)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def fixed_kv_budget(self) -> MemoryBudget:
        return self._budget

    def profiled_kv_budget(
        self, largest_step: Callable[[], None], graphs_bytes: Callable[[], int]
    ) -> MemoryBudget:
        return self._budget

    def used_memory(self) -> int:
        raise NotImplementedError("a CPU's KV cache has a size of its own")

    def capture(self, work: Callable[[], None], beside: Graph | None = None) -> Graph:
        raise NotImplementedError("a CPU has no launches to save")

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # The kernel supplies these pages on first use; torch.zeros writes them all.
        raw = map_pages(math.prod(shape) * dtype.itemsize)
        return torch.from_numpy(raw).view(dtype).view(*shape)

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def stage(self, host: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        return host

    def fence(self) -> _Passed:
        return _PASSED

    def timer(self) -> _Timer:
        return _Timer()

    def fetch(self, values: torch.Tensor) -> _Fetched:
        return _Fetched(values)


class _Passed:
    def wait(self) -> None:
        pass


_PASSED = _Passed()


class _Timer:
    def __init__(self) -> None:
        self._began_at = time.perf_counter()
        self._seconds = 0.0

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._began_at

    def seconds(self) -> float:
        return self._seconds


class _Fetched:
    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def wait(self) -> torch.Tensor:
        return self._values


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU has instructions for it."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = {
        flag
        for line in lines
        if line.lower().startswith(("flags", "features"))
        for flag in line.partition(":")[2].split()
    }
    return bool(flags & _BFLOAT16_FLAGS)


def widens_bfloat16() -> bool:
    """Whether products with bfloat16 weights are about as fast as with those of float32, and
    read half as much: in the C++ ops of every instruction set but the least."""
    return any(variant.name != "portable" for variant in supported_variants())
