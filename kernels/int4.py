"""Weights of 4-bit codes with a scale for each group of features.

What AWQ (Lin et al., 2023, arXiv:2306.00978) and GPTQ (Frantar et al., 2022,
arXiv:2210.17323) checkpoints hold, each in layouts of its own; at load they are
repacked to this one. Int4Tensor.dequantize() is the definition that backends which
compute with the codes are held against.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.ops import LinearWeight

_log = logging.getLogger(__name__)

BLOCK = 32
"""Features whose codes lie together: in is a multiple of it, and so is each group."""
IMPLIED_ZERO = 8
"""The zero of weights that store none."""
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Int4Tensor:
    """A weight [out, in]: w = scale * (code - zero).

    Columns are cut into groups of group_size neighbours that share a scale and a zero.
    Of every 32 columns, byte j of their 16 holds column j in its low half and column
    16 + j in its high half, as GGUF's Q4_0 does it.

    perm is for GPTQ's act-order, where the features of a group are not neighbours:
    column c belongs to feature perm[c], so that y = x[:, perm] @ columns.T. It is a
    permutation of all features, and None where columns are features.
    """

    shape: tuple[int, int]
    codes: torch.Tensor  # [out, in / 2] uint8
    scales: torch.Tensor  # [out, in / group_size] float16, bfloat16 or float32
    zeros: torch.Tensor | None  # [out, in / group_size] uint8; None: all 8
    group_size: int  # a multiple of 32 that divides in; in itself for one group a row
    perm: torch.Tensor | None = None  # [in] int64

    def __post_init__(self) -> None:
        out_features, in_features = self.shape
        if (
            self.group_size <= 0
            or self.group_size % BLOCK
            or in_features <= 0
            or in_features % self.group_size
        ):
            raise ValueError(
                f"int4 weight of shape {list(self.shape)} has groups of {self.group_size}; want a "
                f"multiple of {BLOCK} that divides {in_features}"
            )
        groups = (out_features, in_features // self.group_size)
        _check("codes", self.codes, (out_features, in_features // 2), (torch.uint8,))
        _check("scales", self.scales, groups, (torch.float16, torch.bfloat16, torch.float32))
        if self.zeros is not None:
            _check("zeros", self.zeros, groups, (torch.uint8,))
        if self.perm is not None:
            _check("perm", self.perm, (in_features,), (torch.int64,))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[out, in], features in their own order, where the codes are. Rounded once, from
        float32, or not at all for float64."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        step = max(1, _CHUNK_ELEMENTS // self.shape[1])
        for start in range(0, self.shape[0], step):
            rows = slice(start, start + step)
            zeros = IMPLIED_ZERO if self.zeros is None else self.zeros[rows].to(compute)[..., None]
            codes = unpack_codes(self.codes[rows]).to(compute)
            grouped = codes.view(codes.shape[0], -1, self.group_size)
            columns = (self.scales[rows].to(compute)[..., None] * (grouped - zeros)).flatten(1)
            if self.perm is None:
                out[rows] = columns
            else:
                out[rows, self.perm] = columns.to(dtype)
        return out

    def to(self, device: torch.device | str) -> Int4Tensor:
        return Int4Tensor(
            self.shape,
            self.codes.to(device),
            self.scales.to(device),
            None if self.zeros is None else self.zeros.to(device),
            self.group_size,
            None if self.perm is None else self.perm.to(device),
        )

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.perm)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def _check(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    if tensor.shape != shape or tensor.dtype not in dtypes:
        raise ValueError(
            f"int4 weight: {name} is {tensor.dtype} {list(tensor.shape)}; want "
            f"{' or '.join(map(str, dtypes))} {list(shape)}"
        )


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """codes [out, in] of any integer type, 0 to 15 -> [out, in / 2] uint8 in our layout."""
    blocks = codes.to(torch.uint8).view(codes.shape[0], -1, 2, BLOCK // 2)
    return (blocks[:, :, 0] | (blocks[:, :, 1] << 4)).flatten(1)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """[out, in / 2] uint8 -> [out, in] uint8."""
    blocks = packed.reshape(packed.shape[0], -1, BLOCK // 2)
    return torch.stack((blocks & 15, blocks >> 4), dim=2).flatten(1)


def quantize_int4(
    weight: torch.Tensor,
    group_size: int,
    *,
    symmetric: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> Int4Tensor:
    """weight [out, in] by rounding to the nearest code; codes are made with the scale as it
    is stored. symmetric: codes around 8, no zeros."""
    out_features, in_features = weight.shape
    groups = weight.float().view(out_features, -1, group_size)
    if symmetric:
        scale = groups.abs().amax(dim=-1) / 7
    else:
        # 0 is representable, as the zero has to be a code.
        low, high = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
        scale = (high - low) / 15
    scale = torch.where(scale > 0, scale, 1.0).to(scale_dtype)
    wide = scale.float().unsqueeze(-1)
    zero: torch.Tensor | None = None
    offset: torch.Tensor | int = IMPLIED_ZERO
    if not symmetric:
        zero = (-low / wide.squeeze(-1)).round().clamp(0, 15).to(torch.uint8)
        offset = zero.float().unsqueeze(-1)
    codes = ((groups / wide).round() + offset).clamp(0, 15).view(out_features, in_features)
    return Int4Tensor((out_features, in_features), pack_codes(codes), scale, zero, group_size)


def merge_rows(parts: Sequence[Int4Tensor]) -> list[Int4Tensor]:
    """The same rows, in as few weights as have one group size, scale type and perm.
    Raises ValueError for parts that multiply different numbers of features."""
    in_features = {part.shape[1] for part in parts}
    if len(in_features) != 1:
        raise ValueError(f"int4 linear: parts of shapes {[list(p.shape) for p in parts]}")
    runs: list[list[Int4Tensor]] = []
    for part in parts:
        if runs and _have_one_layout(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_join(run) for run in runs]


def _have_one_layout(first: Int4Tensor, second: Int4Tensor) -> bool:
    if first.group_size != second.group_size or first.scales.dtype != second.scales.dtype:
        return False
    if first.perm is None or second.perm is None:
        return first.perm is second.perm
    return torch.equal(first.perm, second.perm)


def _join(run: list[Int4Tensor]) -> Int4Tensor:
    if len(run) == 1:
        return run[0]
    zeros = None
    if any(part.zeros is not None for part in run):
        zeros = torch.cat(
            [
                torch.full_like(part.scales, IMPLIED_ZERO, dtype=torch.uint8)
                if part.zeros is None
                else part.zeros
                for part in run
            ]
        )
    return Int4Tensor(
        (sum(part.shape[0] for part in run), run[0].shape[1]),
        torch.cat([part.codes for part in run]),
        torch.cat([part.scales for part in run]),
        zeros,
        run[0].group_size,
        run[0].perm,
    )


class DequantizedInt4Linears:
    """prepare_int4_linear of a backend whose products are of floats."""

    computes_int4 = False
    _has_warned_of_int4 = False

    def prepare_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> LinearWeight:
        raise NotImplementedError

    def prepare_int4_linear(
        self, parts: Sequence[Int4Tensor], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> LinearWeight:
        merged = merge_rows(parts)
        if not self._has_warned_of_int4:
            self._has_warned_of_int4 = True
            packed = sum(part.num_bytes for part in parts)
            floats = sum(part.shape[0] * part.shape[1] for part in parts) * dtype.itemsize
            _log.warning(
                "these ops multiply floats: int4 weights are dequantized to %s and take %.1f "
                "times their size",
                str(dtype).removeprefix("torch."),
                floats / packed,
            )
        return self.prepare_linear(torch.cat([part.dequantize(dtype) for part in merged]), bias)
