"""Copies KV blocks between the device and the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_core.runner.per_row import upload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine_core.device.base import Device, Timer
    from engine_core.model.inputs import KVCaches
    from engine_core.sched.plan import BlockMoves

_STAGING_BYTES = 16 << 20
_WARM_UP_BLOCKS = 8
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class MoveTimes:
    """What the moves of a step took, to be read once the device is past them."""

    def __init__(self, offload: Timer | None, restore: Timer | None) -> None:
        self._offload = offload
        self._restore = restore

    @property
    def offload_s(self) -> float:
        return self._offload.seconds() if self._offload is not None else 0.0

    @property
    def restore_s(self) -> float:
        return self._restore.seconds() if self._restore is not None else 0.0


NO_TIMES = MoveTimes(None, None)


class HostKV:
    """The host's KV blocks, [num_host_blocks, words of a block in all layers], and the
    copies to and from them.

    A block lies in one piece on the host and in one piece per layer's keys and values
    on the device. So a copy goes through a staging buffer on the device: there it is
    gathered or scattered by one call a layer, whatever the number of blocks, and
    crosses the bus in one piece a block. All of it is queued on the device's own stream,
    between the steps before and the step that the plan is of, and the host waits for
    nothing.
    """

    def __init__(self, device: Device, kv_caches: KVCaches, num_host_blocks: int) -> None:
        self._device = device
        # [N, words of a block] each
        self._caches = _as_words([paged for cache in kv_caches for paged in cache.paged])
        word, sizes = self._caches[0].dtype, [cache.shape[1] for cache in self._caches]
        self.blocks = device.host_buffer((num_host_blocks, sum(sizes)), word)
        block_bytes = sum(sizes) * word.itemsize
        self._num_staged = max(1, min(num_host_blocks, _STAGING_BYTES // block_bytes))
        self._staging = torch.empty(
            (self._num_staged, sum(sizes)), dtype=word, device=device.torch_device
        )
        self._staged_caches = self._staging.split_with_sizes(sizes, dim=1)

    def move(self, moves: BlockMoves) -> MoveTimes:
        """Queues the offloads, then the restores."""
        offload = restore = None
        if moves.offload:
            offload = self._device.timer()
            self._offload(moves.offload)
            offload.stop()
        if moves.restore:
            restore = self._device.timer()
            self._restore(moves.restore)
            restore.stop()
        return MoveTimes(offload, restore)

    def measure_restore(self) -> float:
        """Seconds that a block takes, before anything is in either tier.

        Block 0 of the device, which nobody reads, is written.
        """
        num_blocks = min(_WARM_UP_BLOCKS, len(self.blocks))
        self.blocks[:num_blocks].zero_()
        seconds = []
        for _ in range(2):  # the first one pays for what first calls pay
            timer = self._device.timer()
            self._restore([(host_id, 0) for host_id in range(num_blocks)])
            timer.stop()
            self._device.fence().wait()
            seconds.append(timer.seconds())
        return seconds[-1] / num_blocks

    def _offload(self, pairs: Sequence[tuple[int, int]]) -> None:
        for block_ids, host_ids in self._batches(pairs):
            staged = self._staging[: len(host_ids)]
            index = upload(np.array(block_ids), self._device.torch_device)
            for part, cache in zip(self._staged_caches, self._caches, strict=True):
                part[: len(host_ids)] = cache.index_select(0, index)
            for at, host_id in enumerate(host_ids):
                self.blocks[host_id].copy_(staged[at], non_blocking=True)

    def _restore(self, pairs: Sequence[tuple[int, int]]) -> None:
        for host_ids, block_ids in self._batches(pairs):
            staged = self._staging[: len(host_ids)]
            for at, host_id in enumerate(host_ids):
                staged[at].copy_(self.blocks[host_id], non_blocking=True)
            index = upload(np.array(block_ids), self._device.torch_device)
            for part, cache in zip(self._staged_caches, self._caches, strict=True):
                cache.index_copy_(0, index, part[: len(host_ids)])

    def _batches(
        self, pairs: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(sources, targets), as many at a time as can be staged."""
        for start in range(0, len(pairs), self._num_staged):
            sources, targets = zip(*pairs[start : start + self._num_staged], strict=True)
            yield sources, targets


def _as_words(paged: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors [N, ...], dense but for the first dimension, as [N, words]: what is moved is
    bytes, whatever they are, in the widest integers that all of them are made of."""
    rows = [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in paged]

    def fits(row: torch.Tensor, word: torch.dtype) -> bool:
        sizes = (row.shape[1], row.stride(0), row.storage_offset())
        return not any(size % word.itemsize for size in sizes)

    word = next(word for word in _WORDS if all(fits(row, word) for row in rows))
    return [row.view(word) for row in rows]
