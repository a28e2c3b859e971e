"""Which device a configuration means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.device.cpu import CpuDevice
from engine_core.device.cuda import CudaDevice, cuda_is_available

if TYPE_CHECKING:
    from engine_core.device.base import Device
    from pagewire.config import EngineConfig


def select_device(config: EngineConfig, rank: int = 0) -> Device:
    """rank: this process's among --tensor-parallel-size. Raises ConfigError naming the flag."""
    size = config.tensor_parallel_size
    if config.device == "cuda" or (config.device == "auto" and cuda_is_available()):
        index = rank if size > 1 else None
        return CudaDevice(config.kv_cache_memory, config.gpu_memory_utilization, index, size)
    return CpuDevice(config.kv_cache_memory, config.cpu_threads, size)
