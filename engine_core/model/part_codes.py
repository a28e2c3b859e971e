"""Quantized weights cut to the part that one rank holds: the same numbers, or an error."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from engine_core.model.quantized.codes import IntegerCodes
from kernels.fp8 import Fp8Tensor
from kernels.int4 import Int4Tensor
from kernels.quantized import FORMATS, QuantizedTensor
from pagewire.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.model.part import Part

Codes = QuantizedTensor | IntegerCodes | Fp8Tensor | Int4Tensor
_C = TypeVar("_C", bound=Codes)


def take_part(codes: _C, part: Part, name: str) -> _C:
    """Raises ConfigError naming the tensor where a rank's features would begin or end within
    a block that shares a scale."""
    taken: Codes
    if isinstance(codes, QuantizedTensor):
        taken = _take_blocks(codes, part, name)
    elif isinstance(codes, IntegerCodes):
        taken = _take_integers(codes, part)
    elif isinstance(codes, Int4Tensor):
        taken = _take_int4(codes, part, name)
    else:
        taken = _take_fp8(codes, part, name)
    assert isinstance(taken, type(codes))
    return taken


def _rows(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    pieces = [tensor[rows.start : rows.stop] for rows in part.rows]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _units(span: range, unit: int, total: int, name: str) -> slice:
    """The span in units, of which the last may be cut off by the end of all."""
    if span.start % unit or (span.stop % unit and span.stop != total):
        raise ConfigError(
            f"--tensor-parallel-size: {name} has a scale for each {unit} features, which a rank's "
            f"part, {span.start} to {span.stop} of {total}, would cut; use another number of "
            "ranks, or --quantization none"
        )
    return slice(span.start // unit, -(-span.stop // unit))


def _take_blocks(codes: QuantizedTensor, part: Part, name: str) -> QuantizedTensor:
    data, kind = _rows(codes.data, part), FORMATS[codes.format]
    if part.columns is not None:
        blocks = _units(part.columns, kind.block, codes.shape[1], name)
        size = kind.block_bytes
        data = data[:, blocks.start * size : blocks.stop * size].contiguous()
    rows, columns = part.shape(codes.shape)
    return QuantizedTensor(codes.format, (rows, columns), data)


def _take_integers(codes: IntegerCodes, part: Part) -> IntegerCodes:
    """Never cut: a column says itself which group it is of, where groups do not line up."""
    taken = replace(
        codes,
        codes=_rows(codes.codes, part),
        scales=_rows(codes.scales, part),
        zeros=_rows(codes.zeros, part),
    )
    columns = part.columns
    if columns is None:
        return taken
    span, size = slice(columns.start, columns.stop), codes.group_size
    features = taken.codes[:, span].contiguous()
    end = codes.shape[1]
    lines_up = columns.start % size == 0 and (columns.stop % size == 0 or columns.stop == end)
    if codes.group_of is None and (lines_up or size >= end):
        first, last = columns.start // size, -(-columns.stop // size)
        scales, zeros = taken.scales[:, first:last], taken.zeros[:, first:last]
        size = min(size, len(columns))
        return replace(
            taken,
            codes=features,
            scales=scales.contiguous(),
            zeros=zeros.contiguous(),
            group_size=size,
        )
    groups = codes.group_of
    if groups is None:
        groups = torch.arange(end, device=codes.codes.device) // size
    return replace(taken, codes=features, group_of=groups[span].contiguous())


def _take_int4(codes: Int4Tensor, part: Part, name: str) -> Int4Tensor:
    packed, scales = _rows(codes.codes, part), _rows(codes.scales, part)
    zeros = None if codes.zeros is None else _rows(codes.zeros, part)
    if part.columns is not None:
        assert codes.perm is None, "quantized at load, its columns are features"
        groups = _units(part.columns, codes.group_size, codes.shape[1], name)
        packed = packed[:, part.columns.start // 2 : part.columns.stop // 2].contiguous()
        scales = scales[:, groups].contiguous()
        zeros = None if zeros is None else zeros[:, groups].contiguous()
    rows, columns = part.shape(codes.shape)
    return Int4Tensor((rows, columns), packed, scales, zeros, codes.group_size, codes.perm)


def _take_fp8(codes: Fp8Tensor, part: Part, name: str) -> Fp8Tensor:
    # Taken as bytes: torch concatenates no float8 on every device.
    data = _rows(codes.data.view(torch.uint8), part).view(codes.data.dtype)
    scales, (tall, wide) = codes.scales, codes.block
    out_features, in_features = codes.shape
    if tall >= out_features:
        tall = part.num_rows
    elif any(rows.start % tall or len(rows) % tall for rows in part.rows):
        scales = _rows(scales.repeat_interleave(tall, 0)[:out_features], part)
        tall = 1
    else:
        scales = torch.cat([scales[it.start // tall : it.stop // tall] for it in part.rows])
    if part.columns is not None:
        data = data[:, part.columns.start : part.columns.stop].contiguous()
        if wide >= in_features:
            wide = len(part.columns)
        else:
            scales = scales[:, _units(part.columns, wide, in_features, name)]
    rows, columns = part.shape(codes.shape)
    return Fp8Tensor((rows, columns), data, scales.contiguous(), (tall, wide), codes.input_scale)
