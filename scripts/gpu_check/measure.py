"""Timing on a device: events on a GPU, the clock on a CPU."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_WARM_UP_CALLS = 3


@dataclass(frozen=True, slots=True)
class Bench:
    """What sections are run with."""

    device: str
    """cuda or cpu."""
    tiny: bool
    """Sizes that only show that everything runs."""

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """That timings are taken in."""
        return torch.bfloat16 if self.is_cuda else torch.float32

    def wait(self) -> None:
        """Until the device is done."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], *, calls: int = 20, samples: int = 5) -> float:
        """Of one call: the median of samples, each the mean of calls queued one after another.

        A call must take the device longer than it takes the host to queue it; shorter ones
        are for graph_seconds().
        """
        if self.tiny:
            calls, samples = 1, 2
        for _ in range(_WARM_UP_CALLS):
            call()

        def once() -> None:
            for _ in range(calls):
                call()

        return statistics.median(self._timed(once) for _ in range(samples)) / calls

    def graph_seconds(self, call: Callable[[], object], *, calls: int = 20) -> float:
        """As seconds(), of calls in one CUDA graph, so that the host has no part in it."""
        if not self.is_cuda:
            return self.seconds(call)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        graph.replay()
        return statistics.median(self._timed(graph.replay) for _ in range(5)) / calls

    def _timed(self, work: Callable[[], None]) -> float:
        self.wait()
        if not self.is_cuda:
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def copy_bandwidth(self) -> float:
        """Bytes a second of a device copy, those read and those written."""
        size = 1 << 20 if self.tiny else 2 << 30
        source = torch.randn(size // 4, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / self.seconds(lambda: target.copy_(source))
