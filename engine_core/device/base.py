"""What the engine needs of the machine it computes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from engine_core.device.memory import MemoryBudget
    from engine_core.model.config import CheckpointDtype


class Fetch(Protocol):
    """A copy to the host that may still be under way."""

    def wait(self) -> torch.Tensor:
        """The values, on the host. Raises what the device's work before them raised."""
        ...


class Fence(Protocol):
    """A point in the device's queue."""

    def wait(self) -> None:
        """Returns once the device has passed it."""
        ...


class Timer(Protocol):
    """Runs from its making, which is queued on the device like any work."""

    def stop(self) -> None: ...

    def seconds(self) -> float:
        """Between the two points of the device's queue; it must have passed both."""
        ...


class Device(Protocol):
    torch_device: torch.device
    name: str
    """As Ready and the log spell it."""
    default_kernels: str
    default_max_num_batched_tokens: int
    default_max_mixed_prefill_tokens: int
    is_synchronous: bool
    """Whether work is done when the call that queues it returns."""
    num_staging_sets: int
    """Host buffers that steps take in turn, so that filling one does not wait for the last."""
    layers_share_blocks: bool
    """Whether the KV of all layers of a block lies in one piece, rather than a layer's KV of all
    blocks."""

    def resolve_dtype(self, requested: str, stored: CheckpointDtype) -> torch.dtype:
        """requested as in EngineConfig.dtype. Raises ConfigError."""
        ...

    def fixed_kv_budget(self) -> MemoryBudget | None:
        """The KV cache's memory where it is known before the weights are loaded."""
        ...

    def profiled_kv_budget(self, largest_step: Callable[[], None]) -> MemoryBudget:
        """What is left beside the weights and the largest step. Raises ConfigError with
        figures where nothing is."""
        ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """On the device; on a CPU the pages are not touched until written."""
        ...

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized host memory that stage() can read from fast."""
        ...

    def stage(self, host: torch.Tensor) -> torch.Tensor:
        """The values on the device; the host memory is free again after a later fence()."""
        ...

    def fence(self) -> Fence: ...

    def timer(self) -> Timer: ...

    def fetch(self, values: torch.Tensor) -> Fetch: ...
