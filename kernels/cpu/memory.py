"""Memory for weights and the KV cache: in huge pages where the kernel has them, so that reading
them at the speed of memory does not stop at every 4 KiB for a page walk."""

from __future__ import annotations

import mmap

import numpy as np
import torch

_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20
_LINE = 64


class WeightMemory:
    """Hands out tensors of a few large mappings. A mapping lives as long as a tensor in it."""

    def __init__(self) -> None:
        self._chunk = np.empty(0, np.uint8)

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """One dimension, on a cache line. Pages are not touched until written."""
        num_bytes = num_elements * dtype.itemsize
        if num_bytes > len(self._chunk):
            self._chunk = map_pages(max(_CHUNK, num_bytes))
        taken = self._chunk[:num_bytes]
        self._chunk = self._chunk[-(-num_bytes // _LINE) * _LINE :]
        return torch.from_numpy(taken).view(dtype)


def map_pages(num_bytes: int) -> np.ndarray:
    """Zeros, as bytes, from the start of a page. A page is committed when it is written."""
    # Room to begin on a huge page; what is not touched costs nothing.
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    start = -memory.ctypes.data % _HUGE_PAGE
    return memory[start : start + num_bytes]
