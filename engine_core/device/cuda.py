"""One CUDA device. Besides kernels/cuda, the only place that touches torch.cuda."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine_core.device.memory import DeviceMemory, MemoryBudget, parse_memory_size
from pagewire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_core.device.base import Graph
    from engine_core.model.config import CheckpointDtype

_GIB = 1 << 30


def cuda_is_available() -> bool:
    return torch.cuda.is_available()


class CudaDevice:
    """The current CUDA device, or one of the first num_ranks. Raises ConfigError where there
    is none."""

    def __init__(
        self,
        kv_cache_memory: str | None,
        memory_utilization: float,
        rank: int | None = None,
        num_ranks: int = 1,
    ) -> None:
        if not cuda_is_available():
            raise ConfigError("--device cuda: torch finds no CUDA device")
        if num_ranks > torch.cuda.device_count():
            raise ConfigError(
                f"--tensor-parallel-size {num_ranks}: torch finds {torch.cuda.device_count()} "
                "CUDA devices, and each rank needs one of its own"
            )
        if rank is not None:
            torch.cuda.set_device(rank)
        index = torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index} {torch.cuda.get_device_name(index)}"
        self.default_kernels = "cuda"
        self.default_max_num_batched_tokens = 2048
        self.default_max_mixed_prefill_tokens = 0
        self.is_synchronous = False
        self.captures_graphs = True
        self.num_staging_sets = 2
        self.layers_share_blocks = False
        self._utilization = memory_utilization
        self._fixed: MemoryBudget | None = None
        if kv_cache_memory is not None:
            size = parse_memory_size(kv_cache_memory, "--kv-cache-memory")
            self._fixed = MemoryBudget(size, f"--kv-cache-memory {kv_cache_memory}")

    def resolve_dtype(self, requested: str, stored: CheckpointDtype) -> torch.dtype:
        name = requested
        if requested == "auto":
            name = "bfloat16" if stored == "quantized" else stored
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ConfigError(
                f"--dtype {requested}: {self.name} does not multiply bfloat16; use --dtype float16"
            )
        return dtype

    def fixed_kv_budget(self) -> MemoryBudget | None:
        return self._fixed

    def profiled_kv_budget(
        self, largest_step: Callable[[], None], graphs_bytes: Callable[[], int]
    ) -> MemoryBudget:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        try:
            largest_step()
            torch.cuda.synchronize(self.torch_device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            weights = torch.cuda.memory_allocated(self.torch_device)
            raise ConfigError(
                f"{self.name} with {total / _GIB:.2f} GiB has no room for the largest step "
                f"beside {weights / _GIB:.2f} GiB of weights ({free / _GIB:.2f} GiB are free): "
                "lower --max-num-batched-tokens or --max-num-seqs"
            ) from error
        # Reserved, not allocated: the gaps between tensors are taken too.
        peak = torch.cuda.max_memory_reserved(self.torch_device)
        torch.cuda.empty_cache()
        weights = torch.cuda.memory_reserved(self.torch_device)
        free, total = torch.cuda.mem_get_info(self.torch_device)
        memory = DeviceMemory(
            total=total,
            weights=weights,
            largest_step=peak - weights,
            graphs=graphs_bytes(),
            # In use, but not by torch's allocator.
            elsewhere=total - free - weights,
        )
        return memory.kv_budget(self._utilization, self.name)

    def used_memory(self) -> int:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free

    def capture(self, work: Callable[[], None], beside: Graph | None = None) -> Graph:
        graph = torch.cuda.CUDAGraph()
        pool = None
        if beside is not None:
            assert isinstance(beside, torch.cuda.CUDAGraph)
            pool = beside.pool()
        try:
            with torch.cuda.graph(graph, pool=pool):
                work()
        except RuntimeError as error:
            raise ConfigError(
                f"a decode step of this model cannot be captured, set --cuda-graphs off: {error}"
            ) from error
        return graph

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self.torch_device)

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def stage(self, host: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        return into.copy_(host, non_blocking=True)

    def fence(self) -> _CudaFence:
        return _CudaFence()

    def timer(self) -> _CudaTimer:
        return _CudaTimer()

    def fetch(self, values: torch.Tensor) -> _CudaFetch:
        return _CudaFetch(values)


class _CudaFence:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class _CudaTimer:
    def __init__(self) -> None:
        self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._began.record()

    def stop(self) -> None:
        self._ended.record()

    def seconds(self) -> float:
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1e3


class _CudaFetch:
    def __init__(self, values: torch.Tensor) -> None:
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> torch.Tensor:
        self._event.synchronize()
        return self._host
