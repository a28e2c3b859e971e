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


class Graph(Protocol):
    """Work that was captured once."""

    def replay(self) -> None:
        """Queues it anew, on the same memory."""
        ...


class Device(Protocol):
    torch_device: torch.device
    name: str
    """As Ready and the log spell it."""
    default_kernels: str
    default_max_num_batched_tokens: int
    default_max_mixed_prefill_tokens: int
    """Until steps have been measured; 0: by default prompts are not limited beside decodes."""
    is_synchronous: bool
    """Whether work is done when the call that queues it returns."""
    captures_graphs: bool
    """Whether capture() is to be had."""
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

    def profiled_kv_budget(
        self, largest_step: Callable[[], None], graphs_bytes: Callable[[], int]
    ) -> MemoryBudget:
        """What is left beside the weights, the largest step and graphs_bytes, which is
        measured after the step. Raises ConfigError with figures where nothing is."""
        ...

    def used_memory(self) -> int:
        """Bytes of the device that are in use, by whomever; without what is only cached."""
        ...

    def capture(self, work: Callable[[], None], beside: Graph | None = None) -> Graph:
        """Records what work() queues, only where captures_graphs. It has run before, does not
        wait for the device, and but for what it makes itself works on memory that outlasts
        the graph. The graph shares its own memory with `beside`, so that they must run one
        after the other; the largest is best captured first."""
        ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """On the device; on a CPU the pages are not touched until written."""
        ...

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized host memory that stage() can read from fast."""
        ...

    def stage(self, host: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """The values on the device, in `into`, of the same shape and dtype. Where the device
        reads the host's memory, and captures no graphs, they may stay there. The host memory
        is free again after a later fence()."""
        ...

    def fence(self) -> Fence: ...

    def timer(self) -> Timer: ...

    def fetch(self, values: torch.Tensor) -> Fetch: ...
