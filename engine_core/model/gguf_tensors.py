"""Tensors of a GGUF file as torch tensors, dequantized a few rows at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kernels.quantized import QuantizedTensor
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from engine_core.model.part import Part
    from pagewire.gguf_file import GgufFile, GgufTensor

# Elements dequantized at once: 4 MiB of float32, so that the temporaries stay in cache.
_CHUNK_ELEMENTS = 1 << 20

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def type_name(type_id: int) -> str:
    try:
        return GGMLQuantizationType(type_id).name
    except ValueError:
        return f"type {type_id}"


@cache
def can_dequantize(type_id: int) -> bool:
    """Whether the gguf package turns this type into floats."""
    try:
        kind = GGMLQuantizationType(type_id)
        if kind in _PLAIN:
            return True
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return False
    return True


def check_tensor(file: GgufFile, tensor: GgufTensor) -> int:
    """Returns the tensor's size in bytes. Raises ModelLoadError naming file and tensor
    where its type is not dequantizable or its bytes are not all there."""
    if not can_dequantize(tensor.type_id):
        raise ModelLoadError(
            f"{file.path}: tensor {tensor.name} has {type_name(tensor.type_id)}, "
            "which cannot be dequantized"
        )
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)]
    if not tensor.shape or tensor.shape[-1] % block:
        raise ModelLoadError(
            f"{file.path}: tensor {tensor.name} of shape {list(tensor.shape)} does not divide into "
            f"{type_name(tensor.type_id)} blocks of {block}"
        )
    size = math.prod(tensor.shape) // block * block_bytes
    if tensor.offset + size > len(file.bytes):
        raise ModelLoadError(
            f"{file.path}: is cut off: tensor {tensor.name} ends at byte {tensor.offset + size} of "
            f"{len(file.bytes)}"
        )
    return size


def read_tensor_into(
    file: GgufFile, tensor: GgufTensor, out: torch.Tensor, interleaved_head_dim: int | None = None
) -> None:
    """Converts into out, contiguous and of the tensor's shape, of any float type.

    interleaved_head_dim undoes the row order of q and k in llama GGUFs: RoPE there
    pairs neighbours (2i, 2i + 1) within a head, ours pairs (i, i + head_dim / 2).
    """
    size = check_tensor(file, tensor)
    kind = GGMLQuantizationType(tensor.type_id)
    raw = np.frombuffer(file.bytes, np.uint8, size, tensor.offset).reshape(tensor.shape[0], -1)
    flat = out.view(tensor.shape[0], -1)
    step = max(1, _CHUNK_ELEMENTS // flat.shape[1])
    if interleaved_head_dim is not None:
        step = max(1, step // interleaved_head_dim) * interleaved_head_dim
    for start in range(0, len(raw), step):
        rows = _to_floats(raw[start : start + step], kind)
        target = flat[start : start + step]
        if interleaved_head_dim is not None:
            half = interleaved_head_dim // 2
            rows = rows.view(-1, half, 2, flat.shape[1]).transpose(1, 2)
            target = target.view(-1, 2, half, flat.shape[1])
        target.copy_(rows)


def read_part_into(
    file: GgufFile,
    tensor: GgufTensor,
    part: Part,
    out: torch.Tensor,
    interleaved_head_dim: int | None = None,
) -> None:
    """As read_tensor_into, of a part whose rows, where interleaved, are whole heads."""
    row_bytes = check_tensor(file, tensor) // tensor.shape[0]
    width = math.prod(tensor.shape[1:])
    # Columns are taken once all of a row is there, for a bounded number of rows.
    most = max(1, _CHUNK_ELEMENTS // width) if part.columns is not None else part.num_rows
    start = 0
    for rows in part.rows:
        for first in range(rows.start, rows.stop, most):
            count = min(most, rows.stop - first)
            piece = replace(
                tensor,
                shape=(count, *tensor.shape[1:]),
                offset=tensor.offset + first * row_bytes,
            )
            target = out[start : start + count]
            if part.columns is None:
                read_tensor_into(file, piece, target, interleaved_head_dim)
            else:
                whole = torch.empty(piece.shape, dtype=torch.float32)
                read_tensor_into(file, piece, whole, interleaved_head_dim)
                target.copy_(whole[:, part.columns.start : part.columns.stop])
            start += count


def read_quantized_tensor(
    file: GgufFile, tensor: GgufTensor, interleaved_head_dim: int | None = None
) -> QuantizedTensor:
    """The file's memory as it is; a copy where rows change places (see read_tensor_into)."""
    size = check_tensor(file, tensor)
    rows, columns = tensor.shape
    # A tensor over the mapping, which it keeps alive.
    raw = torch.frombuffer(file.bytes, dtype=torch.uint8, count=size, offset=tensor.offset)
    raw = raw.view(rows, -1)
    if interleaved_head_dim is not None:
        half = interleaved_head_dim // 2
        raw = raw.view(-1, half, 2, raw.shape[1]).transpose(1, 2).reshape(rows, -1)
    return QuantizedTensor(type_name(tensor.type_id), (rows, columns), raw)


def read_small_tensor(file: GgufFile, name: str) -> torch.Tensor:
    """A one-dimensional tensor as float32; for parameters that belong to the configuration."""
    tensor = file.tensors[name]
    out = torch.empty(tensor.shape, dtype=torch.float32)
    read_tensor_into(file, tensor, out)
    return out


def _to_floats(raw: np.ndarray, kind: GGMLQuantizationType) -> torch.Tensor:
    """raw [rows, bytes] uint8 -> [rows, elements]."""
    if kind in _PLAIN:
        return torch.from_numpy(raw).view(_PLAIN[kind])
    return torch.from_numpy(dequantize(raw, kind))
