"""Quantized weights as GGUF stores them, and what they mean.

Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A row is cut
into blocks of 32 or 256 features, each with its own scale; dequantize() is the
definition that backends which compute with the codes are held against.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.ops import LinearWeight

_log = logging.getLogger(__name__)

_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    name: str
    block: int
    """Features in a block."""
    block_bytes: int
    decode: Callable[[torch.Tensor], torch.Tensor]
    """blocks [N, block_bytes] uint8 -> [N, block] float32."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A weight [out, in], one of FORMATS, in's blocks side by side."""

    format: str
    shape: tuple[int, int]
    data: torch.Tensor  # [out, in / block * block_bytes] uint8

    def __post_init__(self) -> None:
        kind = FORMATS[self.format]
        out_features, in_features = self.shape
        wanted = (out_features, in_features // kind.block * kind.block_bytes)
        if in_features % kind.block or self.data.shape != wanted or self.data.dtype != torch.uint8:
            raise ValueError(
                f"{self.format} weight of shape {list(self.shape)} has {self.data.dtype} data of "
                f"shape {list(self.data.shape)}"
            )


def dequantize(weight: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[out, in], where the data is."""
    kind = FORMATS[weight.format]
    out = torch.empty(weight.shape, dtype=dtype, device=weight.data.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        rows = weight.data[start : start + step]
        blocks = rows.reshape(-1, kind.block_bytes)
        out[start : start + step] = kind.decode(blocks).view(rows.shape[0], -1)
    return out


def quantize_q8_0(weight: torch.Tensor) -> QuantizedTensor:
    """weight [out, in], in a multiple of 32, to bytes with a half float for every 32.

    The codes are made with the scale as rounded to a half float, which halves the
    worst error.
    """
    kind = FORMATS["Q8_0"]
    out_features, in_features = weight.shape
    blocks_per_row = in_features // kind.block
    data = torch.empty(
        (out_features, blocks_per_row, kind.block_bytes), dtype=torch.uint8, device=weight.device
    )
    step = max(1, _CHUNK_ELEMENTS // max(1, in_features))
    for start in range(0, out_features, step):
        blocks = weight[start : start + step].float().view(-1, blocks_per_row, kind.block)
        scale = (blocks.abs().amax(dim=-1, keepdim=True) / 127).half()
        wide = scale.float()
        inverse = torch.where(wide > 0, 1 / wide, torch.zeros_like(wide))
        codes = (blocks * inverse).round_().clamp_(-127, 127).to(torch.int8)
        target = data[start : start + step]
        target[..., :2] = scale.contiguous().view(torch.uint8)
        target[..., 2:] = codes.view(torch.uint8)
    return QuantizedTensor("Q8_0", (out_features, in_features), data.flatten(1))


class DequantizedLinears:
    """prepare_quantized_linear and packed_embedding of a backend whose products are of
    floats. prepare_linear's weights must have a tensor called weight."""

    computes_quantized = False
    _has_warned = False

    def prepare_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> LinearWeight:
        raise NotImplementedError

    def prepare_quantized_linear(
        self,
        parts: Sequence[QuantizedTensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> LinearWeight:
        if not self._has_warned:
            self._has_warned = True
            packed = sum(part.data.numel() for part in parts)
            floats = sum(part.shape[0] * part.shape[1] for part in parts) * dtype.itemsize
            _log.warning(
                "these ops multiply floats: quantized weights (%s) are dequantized to %s and take "
                "%.1f times their size",
                ", ".join(sorted({part.format for part in parts})),
                str(dtype).removeprefix("torch."),
                floats / packed,
            )
        return self.prepare_linear(torch.cat([dequantize(part, dtype) for part in parts]), bias)

    def packed_embedding(
        self, input_ids: torch.Tensor, table: LinearWeight, dtype: torch.dtype
    ) -> torch.Tensor:
        weight: torch.Tensor = table.weight  # type: ignore[attr-defined]
        return torch.nn.functional.embedding(input_ids, weight).to(dtype)


def _halves(blocks: torch.Tensor) -> torch.Tensor:
    """[N, 2 n] uint8 -> [N, n] float32."""
    return blocks.contiguous().view(torch.float16).float()


def _nibbles(blocks: torch.Tensor) -> torch.Tensor:
    """[N, 16] -> [N, 32]: the low halves, then the high ones."""
    return torch.cat((blocks & 15, blocks >> 4), dim=-1)


def _fifth_bits(blocks: torch.Tensor) -> torch.Tensor:
    """[N, 4] -> [N, 32], 0 or 16: bit i of the little-endian word."""
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks.unsqueeze(-1) >> bits) & 1).flatten(1) << 4


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks[:, :2]) * _nibbles(blocks[:, 4:]).float() + _halves(blocks[:, 2:4])


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _halves(blocks[:, :2]) * (codes.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _halves(blocks[:, :2]) * codes.float() + _halves(blocks[:, 2:4])


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks[:, :2]) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, 12] -> scales and mins [N, 8, 1] of six bits, float32."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1)
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    return scales.float().unsqueeze(-1), mins.float().unsqueeze(-1)


def _k_blocks(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """codes [N, 8, 32] with the scales at the head of Q4_K's and Q5_K's blocks."""
    scales, mins = _k_scales(blocks[:, 4:16])
    scale = _halves(blocks[:, :2]).unsqueeze(-1) * scales
    least = _halves(blocks[:, 2:4]).unsqueeze(-1) * mins
    return (scale * codes.float() - least).flatten(1)


def _k_nibbles(blocks: torch.Tensor) -> torch.Tensor:
    """[N, 128] -> [N, 8, 32]: of every 32 bytes the low halves, then the high ones."""
    pairs = blocks.view(-1, 4, 1, 32)
    return torch.cat((pairs & 15, pairs >> 4), dim=2).view(-1, 8, 32)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _k_blocks(blocks, _k_nibbles(blocks[:, 16:].contiguous()))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(8, 1)
    fifth = ((blocks[:, 16:48].unsqueeze(1) >> bits) & 1) << 4
    return _k_blocks(blocks, _k_nibbles(blocks[:, 48:].contiguous()) | fifth)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = blocks[:, :128].contiguous().view(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).view(-1, 8, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(4, 1)
    high = blocks[:, 128:192].contiguous().view(-1, 2, 1, 32)
    high = ((high >> shifts) & 3).view(-1, 8, 32) << 4
    codes = ((low | high).float() - 32).view(-1, 16, 16)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float().unsqueeze(-1)
    return (_halves(blocks[:, 208:210]).unsqueeze(-1) * scales * codes).flatten(1)


FORMATS: dict[str, QuantizedFormat] = {
    kind.name: kind
    for kind in (
        QuantizedFormat("Q4_0", 32, 18, _q4_0),
        QuantizedFormat("Q4_1", 32, 20, _q4_1),
        QuantizedFormat("Q5_0", 32, 22, _q5_0),
        QuantizedFormat("Q5_1", 32, 24, _q5_1),
        QuantizedFormat("Q8_0", 32, 34, _q8_0),
        QuantizedFormat("Q4_K", 256, 144, _q4_k),
        QuantizedFormat("Q5_K", 256, 176, _q5_k),
        QuantizedFormat("Q6_K", 256, 210, _q6_k),
    )
}
