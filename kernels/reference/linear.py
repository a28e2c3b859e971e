"""The matrix product of every projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    weight: torch.Tensor  # [out, in], already in the compute dtype
    bias: torch.Tensor | None  # [out], the same
    out_features: int
    in_features: int


def prepare_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, compute: torch.dtype = torch.float32
) -> ReferenceLinear:
    out_features, in_features = weight.shape
    wide_bias = None if bias is None else bias.to(compute)
    return ReferenceLinear(weight.to(compute), wide_bias, out_features, in_features)


def linear(x: torch.Tensor, weight: ReferenceLinear) -> torch.Tensor:
    """x [T, in] -> x @ weight.T + bias, [T, out] in x's dtype."""
    wide = x.to(weight.weight.dtype)
    return torch.nn.functional.linear(wide, weight.weight, weight.bias).to(x.dtype)
