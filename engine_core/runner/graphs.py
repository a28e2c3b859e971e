"""The decode step as CUDA graphs, one for each of a ladder of batch sizes.

A step of decodes is hundreds of kernels that are shorter than it takes to launch them. As
a graph it is one launch. A graph has its sizes and addresses for good: a batch is padded
to the next size of the ladder, and built in the buffers that the graph was captured on.

    1 2 4 8 16 24 32 .. 256 272 288 .. max_num_seqs

What is captured ends with the hidden states. Logits and sampling follow what the requests
ask for, and are a few kernels only. Mixed and prefill steps are not captured.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.device.base import Device, Graph
    from engine_core.model.decoder import DecoderModel
    from engine_core.model.inputs import KVCaches
    from engine_core.runner.batch import BatchBuilder

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_MOST_SEQS = 512
"""By default; beyond it a step's kernels are long enough."""
_FINE, _COARSE = 8, 16
_FINE_UP_TO = 256


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The default ladder, ascending. Its last size is max_num_seqs, or _MOST_SEQS."""
    most = min(max_num_seqs, _MOST_SEQS)
    ladder = [1, 2, 4, *range(_FINE, _FINE_UP_TO, _FINE), *range(_FINE_UP_TO, most, _COARSE)]
    return (*(size for size in ladder if size < most), most)


class DecodeGraphs:
    """Graphs of one model over one KV cache, captured at once."""

    def __init__(
        self,
        model: DecoderModel,
        device: Device,
        kv_caches: KVCaches,
        builder: BatchBuilder,
        sizes: Sequence[int],
    ) -> None:
        """sizes: ascending, none above the builder's max_num_seqs; none at all for no graphs.

        Raises what the capture raises.
        """
        self._model = model
        self._device = device
        self._kv_caches = kv_caches
        self._builder = builder
        self._sizes = tuple(sizes)
        self._graphs: dict[int, Graph] = {}
        if not sizes:
            return
        began_at, used_before = time.monotonic(), device.used_memory()
        self._hidden = torch.empty_like(self._compute(self._sizes[-1]))
        beside: Graph | None = None
        for size in reversed(self._sizes):
            beside = self._graphs[size] = self._capture(size, beside)
        self.num_bytes = device.used_memory() - used_before
        """Of the device, that the graphs hold."""
        logger.info(
            "captured %d graphs of decode steps, of 1 to %d sequences, in %.1f s and %.0f MiB",
            len(self._sizes),
            self._sizes[-1],
            time.monotonic() - began_at,
            self.num_bytes / _MIB,
        )

    def size_for(self, num_seqs: int) -> int:
        """The size that a batch of decodes is to be padded to; 0 if it is to be run as it is."""
        return next((size for size in self._sizes if size >= num_seqs), 0)

    def replay(self, size: int) -> torch.Tensor:
        """Queues the step that is in decode_inputs(size). Returns its hidden states [size, H],
        which the next replay overwrites."""
        self._graphs[size].replay()
        return self._hidden[:size]

    @torch.inference_mode()
    def _compute(self, size: int) -> torch.Tensor:
        inputs = self._builder.decode_inputs(size)
        return self._model.hidden_states(inputs, self._kv_caches)

    @torch.inference_mode()
    def _capture(self, size: int, beside: Graph | None) -> Graph:
        inputs, hidden = self._builder.decode_inputs(size), self._hidden[:size]

        def step() -> None:
            hidden.copy_(self._model.hidden_states(inputs, self._kv_caches))

        step()  # kernels are compiled and chosen by their first call, which no graph can hold
        return self._device.capture(step, beside)


def measure_graphs(
    model: DecoderModel,
    device: Device,
    kv_caches: KVCaches,
    builder: BatchBuilder,
    sizes: Sequence[int],
) -> int:
    """Bytes that DecodeGraphs of these sizes will take, estimated from the two largest, over
    any KV cache: they share what the largest works in, and each has kernels of its own."""
    if not sizes:
        return 0
    largest = DecodeGraphs(model, device, kv_caches, builder, sizes[-1:]).num_bytes
    if len(sizes) == 1:
        return largest
    both = DecodeGraphs(model, device, kv_caches, builder, sizes[-2:]).num_bytes
    return largest + (len(sizes) - 1) * max(0, both - largest)
