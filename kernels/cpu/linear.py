"""A float weight as the C++ keeps it (csrc/weight.cpp)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.cpu.library import DTYPES

if TYPE_CHECKING:
    from kernels.cpu.library import Library, PackedWeight


@dataclass(frozen=True, slots=True)
class CpuLinear:
    packed: torch.Tensor  # one dimension; the layout is that of csrc/weight.cpp
    bias: torch.Tensor | None  # [out] float32
    out_features: int
    in_features: int
    native: PackedWeight
    """Points into the two tensors."""

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype


def read_rows(lib: Library, weight: CpuLinear, ids: torch.Tensor, out: torch.Tensor) -> int:
    """out [T, in], of the weight's dtype, = rows ids [T] int64 of what was packed. Returns the
    index of the first id out of range, in which case out is as it was; else -1."""
    stray: int = lib.packed_rows(
        DTYPES[out.dtype],
        weight.packed.data_ptr(),
        weight.out_features,
        weight.in_features,
        ids.data_ptr(),
        ids.shape[0],
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return stray
