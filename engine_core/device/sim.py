"""A GPU that only takes its time: it has memory, a queue of work and a clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from engine_core.device.memory import DeviceMemory, MemoryBudget, parse_memory_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_core.device.base import Graph
    from engine_core.device.roofline import Gpu
    from engine_core.model.config import CheckpointDtype


class SimDevice:
    """Queues work as CUDA does: launching returns at once, and whoever needs the result
    waits until the device would have it.

    Tensors live in host memory. The clock's seconds are real ones unless a test brings
    its own.
    """

    def __init__(
        self,
        name: str,
        gpu: Gpu,
        kv_cache_memory: str | None,
        memory_utilization: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.name = name
        self.default_kernels = "none"
        self.default_max_num_batched_tokens = 2048
        self.default_max_mixed_prefill_tokens = 0
        self.is_synchronous = False
        self.captures_graphs = False
        self.num_staging_sets = 2
        self.layers_share_blocks = False
        self._gpu = gpu
        self._utilization = memory_utilization
        self._fixed: MemoryBudget | None = None
        if kv_cache_memory is not None:
            size = parse_memory_size(kv_cache_memory, "--kv-cache-memory")
            self._fixed = MemoryBudget(size, f"--kv-cache-memory {kv_cache_memory}")
        self._held = 0
        self._clock = clock
        self._sleep = sleep
        self._done_at = clock()
        """When all work queued so far is done."""

    def run(self, seconds: float) -> None:
        """Queues work."""
        self._done_at = max(self._done_at, self._clock()) + seconds

    def hold(self, num_bytes: int) -> None:
        """Takes memory for as long as the process lives."""
        self._held += num_bytes

    def resolve_dtype(self, requested: str, stored: CheckpointDtype) -> torch.dtype:
        name = requested
        if requested == "auto":
            name = "bfloat16" if stored == "quantized" else stored
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def fixed_kv_budget(self) -> MemoryBudget | None:
        return self._fixed

    def profiled_kv_budget(
        self, largest_step: Callable[[], None], graphs_bytes: Callable[[], int]
    ) -> MemoryBudget:
        weights = self._held
        largest_step()
        memory = DeviceMemory(
            total=self._gpu.memory_bytes,
            weights=weights,
            largest_step=self._held - weights,
            graphs=graphs_bytes(),
            elsewhere=0,
        )
        return memory.kv_budget(self._utilization, f"--device {self.name}")

    def used_memory(self) -> int:
        return self._held

    def capture(self, work: Callable[[], None], beside: Graph | None = None) -> Graph:
        raise NotImplementedError("a simulated device runs no kernels")

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def stage(self, host: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        return host

    def fence(self) -> _Point:
        return _Point(self)

    def timer(self) -> _Timer:
        return _Timer(self)

    def fetch(self, values: torch.Tensor) -> _Fetch:
        return _Fetch(self, values)

    def done_at(self) -> float:
        """When the device passes the end of its queue as it is now, by the clock."""
        return max(self._done_at, self._clock())

    def wait_until(self, moment: float) -> None:
        while (left := moment - self._clock()) > 0:
            self._sleep(left)


class _Point:
    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self._at = device.done_at()

    def wait(self) -> None:
        self._device.wait_until(self._at)


class _Timer:
    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self._began_at = self._ended_at = device.done_at()

    def stop(self) -> None:
        self._ended_at = self._device.done_at()

    def seconds(self) -> float:
        return self._ended_at - self._began_at


class _Fetch:
    def __init__(self, device: SimDevice, values: torch.Tensor) -> None:
        self._point = _Point(device)
        self._values = values

    def wait(self) -> torch.Tensor:
        self._point.wait()
        return self._values
