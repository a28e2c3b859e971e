"""A CPU that behaves as a GPU does: memory of its own, results that come late, and graphs.

A graph here is a tape of torch's own calls with the very tensors they had. So what runs in
Python when it is captured does not run when it is replayed, numbers that were read from the
host are as they were, and memory that has gone elsewhere meanwhile holds something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_core.device.cpu import CpuDevice
from engine_core.device.memory import DeviceMemory, MemoryBudget
from kernels.reference.ops import ReferenceOps
from kernels.reference.rope import rotate

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.ops import AttentionBatch

_WAITS = frozenset(("item", "__int__", "__float__", "__bool__", "__index__", "nonzero"))


class WaitsForDevice(AssertionError):
    """What a GPU would make the host wait for."""


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class NoWaiting(TorchFunctionMode):
    """Fails calls whose result the host cannot know without the device. At torch's own door,
    since in inference mode what is below does not pass dispatch modes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _WAITS:
            raise WaitsForDevice(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class TapeGraph:
    def __init__(self, work: Callable[[], None], device: GraphDevice) -> None:
        self._device = device
        with NoWaiting(), _Recorder() as recorder:
            work()
        self._calls = recorder.calls
        self.reads: set[int] = set()
        """Addresses of all memory that it reads or writes and has not made."""
        made: set[int] = set()
        self._made: list[torch.Tensor] = []
        for _, args, kwargs, out in self._calls:
            self.reads |= {_storage(it) for it in _tensors((args, kwargs))} - made
            for tensor in _tensors(out):
                if _storage(tensor) not in made | self.reads:
                    made.add(_storage(tensor))
                    self._made.append(tensor)
        self._poison()

    def replay(self) -> None:
        self._device.replays.append(self)
        with torch.inference_mode():
            for func, args, kwargs, out in self._calls:
                for old, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                    if _storage(old) != _storage(new):
                        old.copy_(new)
            self._poison()

    def _poison(self) -> None:
        """Its own memory is another's until the next replay."""
        with torch.inference_mode():
            for tensor in self._made:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                whole.fill_(0xFF)  # NaN, or -1


class _Fence:
    def __init__(self, device: GraphDevice) -> None:
        self._device = device
        self._at = device.num_queued

    def wait(self) -> None:
        if self._device.num_passed < self._at and self._device.forbids_waiting:
            raise WaitsForDevice("a fence that the device has not passed")


class _Fetch:
    def __init__(self, device: GraphDevice, values: torch.Tensor) -> None:
        self._device = device
        self._values = values.clone()
        device.num_queued += 1
        self._at = device.num_queued

    def wait(self) -> torch.Tensor:
        if self._device.num_passed < self._at and self._device.forbids_waiting:
            raise WaitsForDevice("a result that is not there")
        self._device.num_passed = max(self._device.num_passed, self._at)
        return self._values


class GraphDevice(CpuDevice):
    """forbids_waiting: set while nothing may wait. Memory is made up: of total bytes,
    graphs_bytes go to each set of graphs, and growth_bytes to each of its graphs."""

    def __init__(self, total: int = 1 << 30, graphs_bytes: int = 0, growth_bytes: int = 0) -> None:
        super().__init__("1GiB", 1)
        self.is_synchronous = False
        self.num_staging_sets = 2
        self.captures_graphs = True
        self.layers_share_blocks = False
        self.forbids_waiting = False
        self.num_queued = self.num_passed = 0
        self.replays: list[TapeGraph] = []
        self.graphs: list[TapeGraph] = []
        self.total = total
        self.held = 0
        self.utilization = 0.9
        self._graphs_bytes = graphs_bytes
        self._growth_bytes = growth_bytes

    def fixed_kv_budget(self) -> None:  # type: ignore[override]
        return None

    def profiled_kv_budget(
        self, largest_step: Callable[[], None], graphs_bytes: Callable[[], int]
    ) -> MemoryBudget:
        weights = self.held
        largest_step()
        step, self.held = self.held - weights, weights
        memory = DeviceMemory(self.total, weights, step, graphs_bytes(), elsewhere=0)
        return memory.kv_budget(self.utilization, "a made-up device")

    def used_memory(self) -> int:
        return self.held

    def capture(self, work: Callable[[], None], beside: Any = None) -> TapeGraph:
        graph = TapeGraph(work, self)
        self.graphs.append(graph)
        self.held += self._growth_bytes + (self._graphs_bytes if beside is None else 0)
        return graph

    def stage(self, host: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        return into.copy_(host)

    def fence(self) -> Any:
        return _Fence(self)

    def fetch(self, values: torch.Tensor) -> Any:
        return _Fetch(self, values)


class GraphOps(ReferenceOps):
    """The reference, except that a decode step reads no length or slot on the host."""

    name = "graph"

    def rope_and_cache(
        self, q: Any, k: Any, v: Any, positions: Any, cos_sin: Any, *rest: Any, **more: Any
    ) -> None:
        k_cache, v_cache, slots = rest[:3]
        q.copy_(rotate(q, positions, cos_sin))
        here = slots.clamp(min=0)
        writes = (slots >= 0).view(-1, 1, 1)
        for cache, values in ((k_cache, rotate(k, positions, cos_sin)), (v_cache, v)):
            flat = cache.view(-1, *cache.shape[2:])
            flat.index_put_((here,), torch.where(writes, values.to(cache.dtype), flat[here]))

    def attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        *rest: Any,
        **more: Any,
    ) -> torch.Tensor:
        num_seqs = batch.block_table.shape[0]
        if batch.num_decodes < num_seqs:
            return super().attention(q, k_cache, v_cache, batch, scale, *rest, **more)
        group = q.shape[1] // k_cache.shape[2]
        table = batch.block_table.long()
        # [R, max_blocks * B, Hq, D]
        keys, values = (
            cache[table].flatten(1, 2).repeat_interleave(group, dim=2)
            for cache in (k_cache, v_cache)
        )
        hidden = torch.arange(keys.shape[1]) >= batch.seq_lens.unsqueeze(1)
        scores = torch.einsum("rhd,rkhd->rhk", q, keys) * scale
        weights = scores.masked_fill(hidden.unsqueeze(1), float("-inf")).softmax(dim=-1)
        # Of a sequence without tokens.
        weights = weights.nan_to_num(0.0)
        # What a stale block holds may be no number.
        values = values.masked_fill(hidden.view(*hidden.shape, 1, 1), 0.0)
        return torch.einsum("rhk,rkhd->rhd", weights, values)
