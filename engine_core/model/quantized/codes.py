"""Integers with a scale and a zero for each group of features: what a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.int4 import BLOCK, IMPLIED_ZERO, Int4Tensor, pack_codes
from kernels.quantized import QuantizedTensor

_CHUNK_ELEMENTS = 1 << 20
# Of the formats with a half float for every 32 features: what is subtracted from the code.
_OFFSETS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}
_HALF_ULP = 2.0**-11


class NoPackedForm(Exception):
    """Why a matrix cannot be computed by its codes here, for people."""


@dataclass(frozen=True, slots=True, eq=False)
class IntegerCodes:
    """A weight [out, in]: w[o, i] = scales[o, g] * (codes[o, i] - zeros[o, g]), g the group
    of feature i: i // group_size, or group_of[i] (GPTQ's act-order)."""

    codes: torch.Tensor  # [out, in] uint8
    scales: torch.Tensor  # [out, G], any float type
    zeros: torch.Tensor  # [out, G] int16
    group_size: int
    group_of: torch.Tensor | None = None  # [in] int64

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize_into(self, out: torch.Tensor) -> None:
        """out [out, in], of any float type: rounded once, from float32."""
        in_features = self.shape[1]
        step = max(1, _CHUNK_ELEMENTS // in_features)
        are_views = self.group_of is None and in_features % self.group_size == 0
        groups = None if are_views else self._groups()
        for start in range(0, self.shape[0], step):
            rows = slice(start, start + step)
            zeros, scales = self.zeros[rows].float(), self.scales[rows].float()
            values = self.codes[rows].float()
            if groups is None:
                grouped = values.view(values.shape[0], -1, self.group_size)
                grouped.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1))
            else:
                values.sub_(zeros[:, groups]).mul_(scales[:, groups])
            out[rows] = values

    def to_int4(self) -> Int4Tensor:
        """The same weights for kernels that multiply 4-bit codes. Raises NoPackedForm."""
        codes, zeros, perm = self.codes, self.zeros, self._permutation()
        if int(codes.max()) > 15 or int(zeros.min()) < 0:
            raise NoPackedForm("codes of more than 4 bits")
        self._check_groups(BLOCK)
        if perm is not None:
            codes = codes[:, perm]
        is_symmetric = bool((zeros == IMPLIED_ZERO).all())
        return Int4Tensor(
            self.shape,
            pack_codes(codes),
            self._float_scales(),
            None if is_symmetric else zeros.to(torch.uint8),
            self.group_size,
            perm,
        )

    def to_blocks(self) -> QuantizedTensor:
        """The same weights in the narrowest of Q4_0, Q5_0 and Q8_0 that has a code for each
        difference of code and zero. All keep the differences as they are; a scale that no
        half float holds is rounded to one. Raises NoPackedForm."""
        if self.group_of is not None:
            raise NoPackedForm("GPTQ's act-order")
        self._check_groups(32)
        out_features, in_features = self.shape
        groups = self.zeros.shape[1]
        differences = self.codes.view(out_features, groups, -1).to(torch.int16)
        differences -= self.zeros.unsqueeze(-1)
        low, high = int(differences.min()), int(differences.max())
        fitting = [name for name, offset in _OFFSETS.items() if -offset <= low and high < offset]
        if not fitting:
            raise NoPackedForm("8-bit codes with zeros")
        name = fitting[0]
        blocks = self.group_size // 32
        scales = self._half_scales().repeat_interleave(blocks, 1).unsqueeze(-1)
        codes = differences.add_(0 if name == "Q8_0" else _OFFSETS[name]).to(torch.uint8)
        codes = codes.view(out_features, -1, 32)
        parts = [scales.contiguous().view(torch.uint8)]
        if name == "Q5_0":
            bits = torch.arange(8, dtype=torch.uint8, device=codes.device)
            fifth = (codes >> 4).view(out_features, -1, 4, 8) << bits
            parts.append(fifth.sum(dim=-1, dtype=torch.uint8))
            codes &= 15
        if name != "Q8_0":
            codes = codes[..., :16] | (codes[..., 16:] << 4)
        data = torch.cat([*parts, codes], dim=-1).flatten(1)
        return QuantizedTensor(name, (out_features, in_features), data)

    def _groups(self) -> torch.Tensor:
        if self.group_of is not None:
            return self.group_of
        return torch.arange(self.shape[1], device=self.codes.device) // self.group_size

    def _permutation(self) -> torch.Tensor | None:
        if self.group_of is None:
            return None
        sizes = torch.bincount(self.group_of, minlength=self.zeros.shape[1])
        if bool((sizes != self.group_size).any()):
            raise NoPackedForm("act-order with groups of different sizes")
        return self.group_of.argsort(stable=True)

    def _check_groups(self, block: int) -> None:
        if self.group_size % block or self.shape[1] % self.group_size:
            raise NoPackedForm(
                f"groups of {self.group_size} in {self.shape[1]} input features; want a multiple "
                f"of {block} that divides them"
            )

    def _float_scales(self) -> torch.Tensor:
        known = (torch.float16, torch.bfloat16, torch.float32)
        return self.scales if self.scales.dtype in known else self.scales.float()

    def _half_scales(self) -> torch.Tensor:
        wide = self.scales.float()
        halves = wide.half()
        # Too great or too small for a half float.
        if bool(((halves.float() - wide).abs() > _HALF_ULP * wide.abs()).any()):
            raise NoPackedForm("scales outside of half floats")
        return halves
