"""Quantized weights as the C++ keeps them (csrc/quant.h): repacked once, never widened."""

from __future__ import annotations

import ctypes
import itertools
import logging
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.cpu.library import DTYPES, PackedWeight
from kernels.quantized import QuantizedTensor
from kernels.shapes import ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.cpu.library import Library

_log = logging.getLogger(__name__)

PACKED_QUANTIZED = 16
"""Of enum Format in csrc/weight.h."""
ROW_GROUP = 16
"""Rows that the C++ keeps together, all of one format."""
_CODES = {
    name: code
    for code, name in enumerate(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"))
}
"""Of with_format in csrc/quant.h."""


class _Part(ctypes.Structure):
    """struct QuantizedPart of csrc/quant.h."""

    _fields_ = (("first_row", c_int64), ("format", c_int64), ("packed", c_void_p))


@dataclass(frozen=True, slots=True, eq=False)
class CpuQuantizedLinear:
    packed: tuple[torch.Tensor, ...]  # a part each, one dimension
    bias: torch.Tensor | None  # [out] float32
    out_features: int
    in_features: int
    dtype: torch.dtype
    """Of what is multiplied with it."""
    parts: ctypes.Structure
    native: PackedWeight
    """Points into parts, which points into packed."""


def pack(
    lib: Library,
    parts: Sequence[QuantizedTensor],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> CpuQuantizedLinear | None:
    """The rows of all parts as one weight; None, with the reason in the log, where they
    cannot be computed together."""
    joined = _join(parts)
    starts = list(itertools.accumulate((part.shape[0] for part in joined), initial=0))
    in_features, out_features = joined[0].shape[1], starts.pop()
    if any(part.shape[1] != in_features for part in joined):
        raise ShapeError(f"quantized linear: parts of shapes {[part.shape for part in parts]}")
    if any(start % ROW_GROUP for start in starts):
        _log.warning(
            "%s rows meet at row %s, no multiple of %d: they are computed as floats",
            " and ".join(part.format for part in joined),
            next(start for start in starts if start % ROW_GROUP),
            ROW_GROUP,
        )
        return None
    packed = tuple(_pack_part(lib, part) for part in joined)

    class Parts(ctypes.Structure):
        """struct QuantizedParts of csrc/quant.h."""

        _fields_ = (("count", c_int64), ("parts", _Part * len(joined)))

    table = Parts(len(joined))
    for i, (part, start, memory) in enumerate(zip(joined, starts, packed, strict=True)):
        table.parts[i] = _Part(start, _CODES[part.format], memory.data_ptr())
    bias = None if bias is None else bias.float().contiguous()
    native = PackedWeight(
        PACKED_QUANTIZED,
        in_features,
        out_features,
        ctypes.addressof(table),
        None if bias is None else bias.data_ptr(),
    )
    return CpuQuantizedLinear(packed, bias, out_features, in_features, dtype, table, native)


def read_rows(
    lib: Library, weight: CpuQuantizedLinear, ids: torch.Tensor, out: torch.Tensor
) -> int:
    """out [T, in] = rows ids [T] int64 of a weight of one part. Returns the index of the first
    id out of range, in which case out is as it was; else -1."""
    assert len(weight.packed) == 1
    stray: int = lib.quant_rows(
        DTYPES[out.dtype],
        weight.parts.parts[0].format,
        weight.packed[0].data_ptr(),
        weight.out_features,
        weight.in_features,
        ids.data_ptr(),
        ids.shape[0],
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return stray


def _join(parts: Sequence[QuantizedTensor]) -> list[QuantizedTensor]:
    """Neighbours of one format become one."""
    joined = []
    for name, run in itertools.groupby(parts, key=lambda part: part.format):
        group = list(run)
        if len(group) == 1:
            joined += group
            continue
        rows = sum(part.shape[0] for part in group)
        data = torch.cat([part.data for part in group])
        joined.append(QuantizedTensor(name, (rows, group[0].shape[1]), data))
    return joined


def _pack_part(lib: Library, part: QuantizedTensor) -> torch.Tensor:
    data = part.data
    assert data.stride(1) == 1 and data.device.type == "cpu"
    code, (rows, in_features) = _CODES[part.format], part.shape
    packed = torch.empty(lib.quant_bytes(code, rows, in_features), dtype=torch.uint8)
    lib.quant_pack(
        code,
        data.data_ptr(),
        data.stride(0),
        rows,
        in_features,
        packed.data_ptr(),
        torch.get_num_threads(),
    )
    return packed
