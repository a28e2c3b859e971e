"""Weights of 8-bit floats (e4m3: Micikevicius et al., 2022, arXiv:2209.05433) with scales.

One layout for what checkpoints hold: a scale for all of a matrix, for each row
(compressed-tensors), or for each tile of 128 x 128 (DeepSeek-V3, arXiv:2412.19437).
Fp8Tensor.dequantize() and quantize_activations() are the definitions that backends
which compute with the codes are held against.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.ops import LinearWeight

_log = logging.getLogger(__name__)

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Tensor:
    """A weight [out, in]: w[o, i] = data[o, i] * scales[o // block[0], i // block[1]].

    block is (out, in) for one scale, (1, in) for one a row, (128, 128) for tiles; those
    at the lower and right edge may be cut off. The codes hold no NaN.

    input_scale, if there, is the scale of what the weight multiplies; otherwise each
    token gets one of its own, for each block[1] of its features.
    """

    shape: tuple[int, int]
    data: torch.Tensor  # [out, in] float8_e4m3fn
    scales: torch.Tensor  # [ceil(out / block[0]), ceil(in / block[1])] float32
    block: tuple[int, int]
    input_scale: torch.Tensor | None = None  # [] float32

    def __post_init__(self) -> None:
        if min(*self.shape, *self.block) <= 0:
            raise ValueError(
                f"fp8 weight of shape {list(self.shape)} has scales for {self.block} each"
            )
        grid = tuple(-(-n // b) for n, b in zip(self.shape, self.block, strict=True))
        _check("data", self.data, self.shape, E4M3)
        _check("scales", self.scales, grid, torch.float32)
        if self.input_scale is not None:
            _check("input_scale", self.input_scale, (), torch.float32)
            if self.block[1] < self.shape[1]:
                raise ValueError(
                    f"fp8 weight: one input_scale for all features, but weight scales for each "
                    f"{self.block[1]} of them"
                )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[out, in], where the data is. Rounded once, from float32, or for float64 not at all."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        out = torch.empty(self.shape, dtype=dtype, device=self.data.device)
        out_features, in_features = self.shape
        step = max(1, _CHUNK_ELEMENTS // in_features)
        columns = torch.arange(in_features, device=out.device) // self.block[1]
        for start in range(0, out_features, step):
            data = self.data[start : start + step].to(compute)
            rows = torch.arange(start, start + data.shape[0], device=out.device) // self.block[0]
            out[start : start + step] = data * self.scales.to(compute)[rows][:, columns]
        return out

    def to(self, device: torch.device | str) -> Fp8Tensor:
        return Fp8Tensor(
            self.shape,
            self.data.to(device),
            self.scales.to(device),
            self.block,
            None if self.input_scale is None else self.input_scale.to(device),
        )

    @property
    def num_bytes(self) -> int:
        return self.data.numel() + 4 * self.scales.numel()


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"fp8 weight: {name} is {tensor.dtype} {list(tensor.shape)}; want {dtype} {list(shape)}"
        )


def quantize_fp8(weight: torch.Tensor, block: tuple[int, int]) -> Fp8Tensor:
    """weight [out, in], to the nearest code; each block's greatest becomes 448. A size in
    block that is 0 means all of that dimension."""
    out_features, in_features = weight.shape
    rows, columns = block[0] or out_features, block[1] or in_features
    pad = (-in_features % columns, -out_features % rows)
    padded = torch.nn.functional.pad(weight.float(), (0, pad[0], 0, pad[1]))
    tiles = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scales = _scale_of(tiles.abs().amax(dim=(1, 3)))
    wide = scales.repeat_interleave(rows, 0)[:out_features]
    wide = wide.repeat_interleave(columns, 1)[:, :in_features]
    data = (weight.float() / wide).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return Fp8Tensor((out_features, in_features), data, scales, (rows, columns))


class QuantizedActivations(NamedTuple):
    codes: torch.Tensor
    """[T, in] float8_e4m3fn."""
    scales: torch.Tensor
    """[T, ceil(in / group)] float32."""

    def dequantize(self, group: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        wide = self.scales.to(dtype).repeat_interleave(group, 1)[:, : self.codes.shape[1]]
        return self.codes.to(dtype) * wide


def quantize_activations(
    x: torch.Tensor, group: int, input_scale: torch.Tensor | None = None
) -> QuantizedActivations:
    """x [T, in] to the nearest codes, with a scale for each group of a token's features:
    max |x| / 448 (1 where all are 0), or input_scale with what exceeds it clipped."""
    num_tokens, in_features = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -in_features % group))
    groups = padded.view(num_tokens, padded.shape[1] // group, group)
    if input_scale is None:
        scales = _scale_of(groups.abs().amax(dim=-1))
    else:
        scales = input_scale.float().expand(groups.shape[:2]).contiguous()
    codes = (groups / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return QuantizedActivations(codes.flatten(1)[:, :in_features].contiguous(), scales)


def _scale_of(largest: torch.Tensor) -> torch.Tensor:
    return torch.where(largest > 0, largest / E4M3_MAX, 1.0)


def merge_rows(parts: Sequence[Fp8Tensor]) -> Fp8Tensor:
    """The rows of all parts as one weight. Where their scales cannot be stacked, they become
    scales of single rows; of several input scales the greatest is taken, which clips
    nothing that its own would not. Raises ValueError for parts that cannot be one weight."""
    if len(parts) == 1:
        return parts[0]
    shapes = [list(part.shape) for part in parts]
    in_features = parts[0].shape[1]
    if any(part.shape[1] != in_features for part in parts):
        raise ValueError(f"fp8 linear: parts of shapes {shapes}")
    if len({min(part.block[1], in_features) for part in parts}) != 1:
        raise ValueError(f"fp8 linear: parts of blocks {[part.block for part in parts]}")
    inputs = [part.input_scale for part in parts if part.input_scale is not None]
    if inputs and len(inputs) != len(parts):
        raise ValueError("fp8 linear: some of the parts have an input_scale, others have none")
    rows = parts[0].block[0]
    stack = all(p.block[0] == rows for p in parts) and all(p.shape[0] % rows == 0 for p in parts)
    scales = [
        part.scales if stack else part.scales.repeat_interleave(part.block[0], 0)[: part.shape[0]]
        for part in parts
    ]
    # Codes are joined as bytes: torch concatenates no float8 on every device.
    data = torch.cat([part.data.view(torch.uint8) for part in parts]).view(E4M3)
    return Fp8Tensor(
        (data.shape[0], in_features),
        data,
        torch.cat(scales),
        (rows if stack else 1, parts[0].block[1]),
        torch.stack(inputs).amax() if inputs else None,
    )


class DequantizedFp8Linears:
    """prepare_fp8_linear of a backend whose products are of floats."""

    computes_fp8 = False
    _has_warned_of_fp8 = False

    def prepare_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> LinearWeight:
        raise NotImplementedError

    def prepare_fp8_linear(
        self, parts: Sequence[Fp8Tensor], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> LinearWeight:
        if not self._has_warned_of_fp8:
            self._has_warned_of_fp8 = True
            packed = sum(part.num_bytes for part in parts)
            floats = sum(part.shape[0] * part.shape[1] for part in parts) * dtype.itemsize
            _log.warning(
                "these ops multiply floats: fp8 weights are dequantized to %s and take %.1f "
                "times their size; what they multiply is not quantized",
                str(dtype).removeprefix("torch."),
                floats / packed,
            )
        return self.prepare_linear(torch.cat([part.dequantize(dtype) for part in parts]), bias)
